"""How long `ppctl plan --json` of two recipes takes, against a bare Hydra compose, whole plans in one process, and
schedules themselves.

    python benchmarks/plan_speed.py [pairs]

Whole processes, start to exit, in alternating pairs; the ratio is taken within each pair, so that a noisy machine hits
both; CPU seconds are printed beside, for a machine on which others work. Bare Hydra: import hydra, initialize on conf/,
compose the same recipe; once silent, once printed as YAML.
Plans in one process: `plan_checked` of a composed config, in CPU time, the best of seven, each without the schedules
that earlier ones have left; and once more with them, as a search plans.
Schedules in CPU time, the best of three, without Python's search for garbage, as `ppctl plan` runs: 64 ranks x 512
microbatches x 2 chunks made, and simulated with memory per rank.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ppctl.config.compose import compose
from ppctl.cost.state import peaks
from ppctl.plan.build import plan_checked
from ppctl.schedule import batching
from ppctl.schedule.action import Schedule
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import Costs, simulate

CONF = ROOT / "conf"
BARE = f"""
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
with initialize_config_dir({str(CONF)!r}, version_base="1.3"):
    config = compose("config", ["+recipe=RECIPE"])
"""
CONTENDERS = {"bare Hydra, silent": BARE, "bare Hydra, printed": BARE + "print(OmegaConf.to_yaml(config))"}
MADE_SECONDS, ACTIONS_PER_SECOND = 0.1, 500_000
FLOORS = {"deepseek_v3": 2.5, "llama3_405b": 2.0}
"""Recipe -> the most times the silent compose that its plan may take."""
IN_PROCESS = {"llama3_70b": 0.04, "deepseek_v3": 0.25}
"""Recipe -> CPU seconds that its plan may take in a process that has imported everything."""


def seconds(command: list[str]) -> tuple[float, float]:
    """Of a whole process: seconds on the clock, and CPU seconds."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - begin, used.ru_utime + used.ru_stime


def cpu_seconds(work: Callable[[], object], times: int = 3) -> float:
    def once() -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    return min(once() for _ in range(times))


def schedules() -> bool:
    """Making and simulating a long schedule; whether both floors are kept."""

    gc.disable()

    def make() -> Schedule:
        return make_schedule("interleaved_1f1b", pp=64, vpp=2, num_microbatches=512)

    schedule, costs, held = make(), Costs.uniform(128, message=0.1), [1] * 128

    def simulated() -> None:
        simulate(schedule, costs)
        for row in schedule.actions:
            peaks(row, held)

    actions = sum(map(len, schedule.actions))
    made, rate = cpu_seconds(make), actions / cpu_seconds(simulated)
    print(f"64 x 512 x 2 made in {made:.3f} s (<= {MADE_SECONDS}); simulated with memory, {actions:,} actions: "
          f"{rate:,.0f} a second (>= {ACTIONS_PER_SECOND:,}), CPU time")  # fmt: skip
    return made <= MADE_SECONDS and rate >= ACTIONS_PER_SECOND


def in_process(recipe: str, most: float) -> bool:
    """Whole plans in this process; whether the floor is kept."""
    gc.disable()
    composed = compose([f"+recipe={recipe}"])

    def plan() -> None:
        plan_checked(composed.config, composed.provenance, [])

    def anew() -> None:
        batching.forget()
        plan()

    took, again = cpu_seconds(anew, 7), cpu_seconds(plan, 7)
    print(
        f"plan_checked {recipe}: {1e3 * took:.0f} ms (<= {1e3 * most:.0f}), with its schedule known {1e3 * again:.0f}"
    )
    return took <= most


def against_hydra(recipe: str, floor: float, pairs: int) -> bool:
    """Whole processes, in CPU time and on the clock; whether the floor is kept on the clock."""
    columns = [[sys.executable, "-c", text.replace("RECIPE", recipe)] for text in CONTENDERS.values()]
    columns.append([sys.executable, "-m", "ppctl", "plan", f"+recipe={recipe}", "--json"])
    rows = [[seconds(command) for command in columns] for _ in range(pairs + 1)][1:]
    kept = False
    for clock, unit in reversed(list(enumerate(("s", "s of CPU")))):
        plan = statistics.median(row[-1][clock] for row in rows)
        print(
            f"ppctl plan {recipe} {plan:.3f} {unit}, median of {pairs}; the floor is {floor} times the silent compose"
        )
        ratios = [statistics.median(row[-1][clock] / row[at][clock] for row in rows) for at in range(len(CONTENDERS))]
        for at, (name, ratio) in enumerate(zip(CONTENDERS, ratios, strict=True)):
            alone = statistics.median(row[at][clock] for row in rows)
            print(f"{name}: {alone:.3f} {unit}, median ratio of a pair {ratio:.2f}")
        kept = ratios[0] <= floor
    return kept


def main() -> int:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    kept = [against_hydra(recipe, floor, pairs) for recipe, floor in FLOORS.items()]
    kept += [in_process(recipe, most) for recipe, most in IN_PROCESS.items()]
    return 0 if all([*kept, schedules()]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
