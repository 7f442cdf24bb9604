"""What a search for a schedule finds, beside named schedules, the lower bound and the zero-bubble paper; and its time.

    python benchmarks/schedule_search.py > benchmarks/results-schedule-search-DATE.md

Steps are simulated; seconds of a search are CPU seconds of one core. Memory counts whole activations from F to W.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ppctl.config.compose import compose
from ppctl.plan import Plan, build_plan
from ppctl.schedule.action import Placement
from ppctl.schedule.lane_orders import Task, placements, unit_of_memory
from ppctl.schedule.order_search import FoundSchedule, find_best, find_schedule
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.trace import longest_span

PAPER = ROOT / "tests" / "golden" / "zero_bubble_tables.json"


def costs(p: int, vpp: int, forward: list[float], inputs: list[float], weights: list[float], message: float) -> Costs:
    """Of `vpp` equal chunks per rank: a rank's times are divided among them."""
    f, i, w = ([each / vpp for each in times] * vpp for times in (forward, inputs, weights))
    return Costs(f, [a + b for a, b in zip(i, w, strict=True)], i, w, message=message)


def task(place: Placement, m: int, prices: Costs, memory: float) -> Task:
    sizes = [1.0] * place.num_stages
    return Task(place, m, prices, sizes, [memory * unit_of_memory(sizes, place.pp, m)] * place.pp)


def timed(search: Callable[[], FoundSchedule]) -> tuple[FoundSchedule, float]:
    began = time.process_time()
    found = search()
    return found, time.process_time() - began


def papers_rows() -> None:
    print("## The zero-bubble paper's table (arXiv 2401.10241), bubble rate\n")
    print("| model | p | m | ZB-1p | one chunk, 1 | one or two, 1 | ZB-2p | one chunk, 2 | one or two, 2 | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in json.loads(PAPER.read_text())["rows"]:
        p, m, cells, seconds = row["p"], row["m"], [], 0.0
        for memory in (1.0, 2.0):
            cells.append(f"{row['bubble'][f'ZB-{memory:.0f}p']:.4f}")
            for chunks in ((1,), (1, 2)):
                tasks = []
                for vpp in chunks:
                    one = [[row[name]] * p for name in ("TF", "TB", "TW")]
                    tasks.append(task(placements(p, vpp)[-1], m, costs(p, vpp, *one, row["Tcomm"]), memory))
                found, took = timed(lambda tasks=tasks: find_best(tasks))
                prices = next(each.costs for each in tasks if each.placement == found.schedule.placement)
                work = m * (row["TF"] + row["TB"] + row["TW"])
                rate = 1 - work / longest_span(simulate(found.schedule, prices))
                cells.append(f"{max(rate, 0):.4f}")
                seconds += took
        print(f"| {row['model']} | {p} | {m} | {' | '.join(cells)} | {seconds:.1f} |")


UNEVEN = {
    "even stages, 1F1B's memory": ([2.0] * 8, 1.0),
    "even stages, half of it": ([2.0] * 8, 0.5),
    "even stages, a third of it": ([2.0] * 8, 1 / 3),
    "last stage 1.5 times": ([2.0] * 7 + [3.0], 1.0),
    "last stage 1.5 times, half the memory": ([2.0] * 7 + [3.0], 0.5),
    "first stage half, last 1.5 times": ([1.0] + [2.0] * 6 + [3.0], 1.0),
    "middle stage 1.4 times": ([2.0] * 4 + [2.8] + [2.0] * 3, 1.0),
    "rising from 1 to 2": ([1.0 + s / 7 for s in range(8)], 1.0),
    "falling from 2 to 1": ([2.0 - s / 7 for s in range(8)], 1.0),
    "falling from 2 to 1, 1.5 times the memory": ([2.0 - s / 7 for s in range(8)], 1.5),
}


def uneven_rows() -> None:
    print("\n## Uneven stages and tight memory: p = 8, m = 24, I = W = F of a stage, messages 0.05\n")
    print("Steps over the lower bound of the placement; `-`: no named schedule fits the memory.\n")
    print("| stages' F | memory | one chunk: named | found | V of two: named | found |")
    print("|---|---|---|---|---|---|")
    for name, (forward, memory) in UNEVEN.items():
        cells = []
        for place in (placements(8, 1)[0], placements(8, 2)[1]):
            chunks = place.num_stages // 8
            ranks = [forward[place.rank_of(s)] / chunks for s in range(place.num_stages)]
            prices = Costs(ranks, [2 * each for each in ranks], ranks, ranks, message=0.05)
            found = find_schedule(task(place, 24, prices, memory))
            named = found.best_named
            best = "-" if named is None else f"{named.seconds / found.bound:.3f} ({named.schedule.name})"
            cells += [best, f"**{found.seconds / found.bound:.3f}**"]
        print(f"| {name} | {memory:.2f} | {' | '.join(cells)} |")


def planned(recipe: str, schedule: str) -> Plan:
    # A recipe's own limit of weights that wait is for its own schedule.
    made = compose([f"+recipe={recipe}", f"pipeline.pp_schedule={schedule}", "pipeline.put_off_limit=null"])
    return build_plan(made.config, made.provenance)


def recipe_rows() -> None:
    print("\n## Recipes in their own memory (80 GiB): seconds of a call, as planned\n")
    print("| recipe | interleaved 1F1B | interleaved zero-bubble | found | shorter than interleaved 1F1B | CPU s |")
    print("|---|---|---|---|---|---|")
    notes = []
    for recipe in ("deepseek_v3", "llama3_405b"):
        times = [planned(recipe, name).timing.pipeline_s for name in ("interleaved1f1b", "interleaved_zero_bubble")]
        began = time.process_time()
        plan = planned(recipe, "auto")
        took = time.process_time() - began
        found = plan.timing.pipeline_s
        notes += [each.equation for each in plan.derived if each.key == "schedule"]
        shorter = 1 - found / times[0]
        print(f"| {recipe} | {times[0]:.3f} | {times[1]:.3f} | {found:.3f} | {shorter:.1%} | {took:.1f} |")
    print("\n" + "\n".join(f"* {note}" for note in notes))


def speed_rows() -> None:
    print("\n## Seconds of a search, p = 16 and m = 64\n")
    print("| chunks | memory | orders | over the bound | CPU s |")
    print("|---|---|---|---|---|")
    ones = [[11.3] * 16, [11.2] * 16, [8.1] * 16]
    for vpp in (1, 2, 4):
        for place in placements(16, vpp):
            for memory in (1.0, 2.0):
                each = replace(task(place, 64, costs(16, vpp, *ones, 0.38), memory))
                found, took = timed(lambda each=each: find_schedule(each))
                over = found.seconds / found.bound
                print(f"| {vpp}, {place.kind} | {memory:g} | {found.tried} | {over:.4f} | {took:.1f} |")


if __name__ == "__main__":
    print(f"# Schedules found by search, {date.today()}\n")
    print("`python benchmarks/schedule_search.py`; CPU seconds of one core of a busy two-core machine.\n")
    papers_rows()
    uneven_rows()
    recipe_rows()
    speed_rows()
