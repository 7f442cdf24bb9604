"""`ppctl simulate`: simulate and draw a schedule, or all of them, from the times of operations in milliseconds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ppctl.cli.console import aligned, folded, prose, width
from ppctl.cli.simulate_checks import SCHEDULES, TIMES, memory, schedule_of_file, wrong
from ppctl.cli.timeline import add_timeline_argument, write_timeline
from ppctl.errors import ConfigError, ScheduleError
from ppctl.schedule.action import INPUT_GRADIENTS, Placement, Schedule
from ppctl.schedule.compare import PolicyFigures, compare
from ppctl.schedule.lane_orders import Task, placements, unit_of_memory
from ppctl.schedule.order_search import FoundSchedule, find_best
from ppctl.schedule.picture import Picture, StageNote
from ppctl.schedule.policies import AUTO, make_schedule, schedule_policy
from ppctl.schedule.simulate import Costs, in_flight, simulate
from ppctl.schedule.text_timeline import timeline_text
from ppctl.schedule.trace import Trace, bubble_fraction, bubble_rate, step_time

_MS = 1e-3
_MORE = {
    "tb": "; a backward takes tb + tw: with --tw 0 (default) tb is the whole backward",
    "tw": "; schedules that split backwards move it away from tb",
}
MOST_ROWS = 32
"""The most stages that are drawn on a screen."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    one_or_all = parser.add_mutually_exclusive_group(required=True)
    words = f"one of {', '.join(SCHEDULES)}, {AUTO}; or FILE.csv, a schedule of your own (ppctl explain PP-E216)"
    one_or_all.add_argument("--schedule", metavar="NAME", help=words)
    one_or_all.add_argument("--compare", action="store_true", help="all schedules that fit, in one table")
    parser.add_argument("--pp", type=int, metavar="P", help="number of pipeline ranks")
    chunks = f"chunks per rank (default: 1, or 2 for schedules that need several; {AUTO}: 1 and, on a V, 2)"
    parser.add_argument("--vpp", type=int, metavar="V", help=chunks)
    parser.add_argument("--microbatches", type=int, metavar="M", help="microbatches per step")
    for name, what in TIMES.items():
        needed, more = name in ("tf", "tb"), _MORE.get(name, "")
        words = f"{what}, in ms{more}"
        parser.add_argument(f"--{name}", type=float, required=needed, default=0.0, metavar="MS", help=words)
    more = "forwards beyond the usual warm-up"
    parser.add_argument("--extra-warmup", type=int, default=0, metavar="N", help=more)
    memory = f"for {AUTO}: activations that a rank may hold, in units of what 1F1B holds on its first rank (default: 1)"
    parser.add_argument("--memory", type=float, metavar="N", help=memory)
    add_timeline_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Simulate and print. Raises ConfigError with all problems."""
    given = schedule_of_file(args) if str(args.schedule).lower().endswith(".csv") else None
    if given is None:
        args.schedule = schedule_policy(args.schedule) or args.schedule
        problems = list(wrong(args))
        if problems:
            raise ConfigError(problems)
    if args.compare:
        _compare(args)
        return 0
    searched = _searched(args) if args.schedule == AUTO else None
    schedule = given or (_named(args) if searched is None else searched.schedule)
    stages = schedule.placement.num_stages
    trace = simulate(schedule, costs(args, stages, stages // args.pp))
    if args.timeline is not None:
        write_timeline(_picture(args, schedule, trace), Path(args.timeline))
    figures = figured(schedule, trace)
    if searched is not None:
        figures["search"] = _search_figures(args, searched)
    print(json.dumps(figures, indent=2) if args.json else _text(figures, schedule, trace))
    return 0


def _named(args: argparse.Namespace) -> Schedule:
    vpp = args.vpp or SCHEDULES[args.schedule].chunks
    warmup, microbatches = args.extra_warmup, args.microbatches
    return make_schedule(args.schedule, pp=args.pp, vpp=vpp, num_microbatches=microbatches, extra_warmup=warmup)


def _searched(args: argparse.Namespace) -> FoundSchedule:
    """The best schedule with `--vpp` chunks per rank (default: one, or two on a V). ScheduleError if none fits."""
    places = placements(args.pp, args.vpp) if args.vpp else [*placements(args.pp, 1), placements(args.pp, 2)[-1]]
    tasks = []
    for place in places:
        stages = place.num_stages
        # sizes in units of --memory
        sizes = [1.0 / unit_of_memory([1.0] * stages, args.pp, args.microbatches)] * stages
        prices = costs(args, stages, stages // args.pp)
        tasks.append(Task(place, args.microbatches, prices, sizes, [memory(args)] * args.pp))
    try:
        return find_best(tasks)
    except ScheduleError as error:
        least = -(-1000 // min(args.pp, args.microbatches)) / 1000
        raise ScheduleError([replace(error.problems[0], remedy=f"--memory {least:g}", place="--memory")]) from error


def _search_figures(args: argparse.Namespace, searched: FoundSchedule) -> dict[str, Any]:
    named = searched.best_named
    return {
        "memory": memory(args),
        "placement": searched.schedule.placement.kind,
        "lower_bound_ms": searched.bound / _MS,
        "best_named": None if named is None else named.schedule.name,
        "best_named_ms": None if named is None else named.seconds / _MS,
        "orders": searched.tried,
    }


def costs(args: argparse.Namespace, num_stages: int, vpp: int) -> Costs:
    """Seconds per stage: each stage takes an equal share of its rank's milliseconds."""
    forward, gradient, weights = (_MS * ms / vpp for ms in (args.tf, args.tb, args.tw))
    return Costs(
        forward=[forward] * num_stages,
        backward=[gradient + weights] * num_stages,
        input_gradient=[gradient] * num_stages,
        weight_gradient=[weights] * num_stages,
        message=_MS * args.tcomm,
    )


def figured(schedule: Schedule, trace: Trace) -> dict[str, Any]:
    """The fields of `--json`."""
    return {
        "schedule": schedule.name,
        "pp": schedule.placement.pp,
        "vpp": schedule.placement.num_stages // schedule.placement.pp,
        "microbatches": schedule.num_microbatches,
        "step_time_ms": step_time(trace) / _MS,
        "bubble_fraction": bubble_fraction(trace),
        "bubble_rate": bubble_rate(trace),
        "in_flight": list(in_flight(schedule, until=INPUT_GRADIENTS)),
        "in_flight_until_weight_gradient": list(in_flight(schedule)),
    }


def _picture(args: argparse.Namespace, schedule: Schedule, trace: Trace) -> Picture:
    place = schedule.placement
    times = f"tf {args.tf:g}, tb {args.tb:g}, tw {args.tw:g}, tcomm {args.tcomm:g} ms"
    return Picture(
        f"{schedule.name}, pp {place.pp}, {schedule.num_microbatches} microbatches", times, trace, _notes(place)
    )


def _notes(place: Placement) -> tuple[StageNote, ...]:
    return tuple(StageNote(s, place.rank_of(s), place.chunk_of(s)) for s in range(place.num_stages))


def _text(figures: dict[str, Any], schedule: Schedule, trace: Trace) -> str:
    lines = [
        f"{schedule.name}: pp {figures['pp']} x vpp {figures['vpp']}, {figures['microbatches']} microbatches",
        f"step time        {figures['step_time_ms']:.6g} ms",
        f"bubble fraction  {figures['bubble_fraction']:.4f}  (idle share of pp x step time)",
        f"bubble rate      {figures['bubble_rate']:.4f}  (over the busiest rank's own span)",
        f"in flight        {_counts(figures['in_flight'])}  (chunks per rank, until the input gradient)",
    ]
    until_weights = figures["in_flight_until_weight_gradient"]
    if until_weights != figures["in_flight"]:
        lines.append(f"                 {_counts(until_weights)}  (until the weight gradient)")
    if search := figures.get("search"):
        lines += _search_lines(search)
    lines = [prose(lines, width())]
    if schedule.placement.num_stages <= MOST_ROWS:
        lines += ["", timeline_text(trace, width()).rstrip()]
    return "\n".join(lines)


def _search_lines(search: dict[str, Any]) -> list[str]:
    best = "none fits the memory"
    if search["best_named"] is not None:
        best = f"{search['best_named']}, {search['best_named_ms']:.6g} ms"
    return [
        f"memory           {search['memory']:g} x what 1F1B holds on its first rank, activations whole until W",
        f"lower bound      {search['lower_bound_ms']:.6g} ms  (stages placed as a {search['placement']})",
        f"best named       {best}  ({search['orders']} orders tried)",
    ]


def _counts(values: list[int]) -> str:
    return " ".join(map(str, values)) if len(values) <= MOST_ROWS else f"{max(values)} at most, {min(values)} at least"


# --compare: all schedules that fit, in one table


_LEGEND = (
    ("step", "of 1F1B's"),
    ("bubble", "idle share of pp x step time"),
    ("rate", "the papers' count: idle share of the longest span of a rank, without filling and draining"),
    ("activations", "at most on any rank, whole until the weight gradient; 1 is what 1F1B's first rank holds"),
    ("messages", "that all ranks send in a step"),
)


def _compare(args: argparse.Namespace) -> None:
    compared, left_out = compare(args.pp, args.microbatches, args.vpp, partial(costs, args))
    if args.json:
        report = {"pp": args.pp, "microbatches": args.microbatches, "schedules": [_fields(each) for each in compared]}
        print(json.dumps(report | {"left_out": left_out}, indent=2))
        return
    legend = aligned(folded(_LEGEND, width(), " "))
    print(f"pp {args.pp}, {args.microbatches} microbatches\n\n{_table(compared)}\n\n{legend}")
    if left_out:
        print(prose((f"without {name}: {reason}" for name, reason in left_out.items()), width()))


def _fields(each: PolicyFigures) -> dict[str, Any]:
    return {
        "schedule": each.policy.name,
        "vpp": each.vpp,
        "placement": each.policy.placement,
        "step_time_ms": 1e3 * step_time(each.trace),
        "step_of_1f1b": each.step,
        "bubble_fraction": each.bubble_fraction,
        "bubble_rate": each.bubble_rate,
        "activations_of_1f1b": each.activations,
        "messages": each.messages,
    }


def _table(compared: Sequence[PolicyFigures]) -> str:
    head = ("schedule", "chunks", "step", "bubble", "rate", "activations", "messages")
    rows = [
        (
            each.policy.name,
            f"{each.vpp}{' in a V' * (each.policy.placement == 'v')}",
            f"{each.step:.3f}",
            f"{each.bubble_fraction:.4f}",
            f"{each.bubble_rate:.4f}",
            f"{each.activations:.2f}",
            str(each.messages),
        )
        for each in compared
    ]
    return aligned([head, *rows], right=len(head))
