"""How long `ppctl plan +recipe=deepseek_v3 --json` takes, against a bare Hydra compose, and schedules themselves.

    python benchmarks/plan_speed.py [pairs]

Whole processes, start to exit, in alternating pairs; the ratio is taken within each pair, so that a noisy machine hits
both. Bare Hydra: import hydra, initialize on conf/, compose the same recipe; once silent, once printed as YAML.
Schedules in CPU time, the best of three, without Python's search for garbage, as `ppctl plan` runs: 64 ranks x 512
microbatches x 2 chunks made, and simulated with memory per rank.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ppctl.cost.state import peaks
from ppctl.schedule.action import Schedule
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import Costs, simulate

CONF = ROOT / "conf"
BARE = f"""
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
with initialize_config_dir({str(CONF)!r}, version_base="1.3"):
    config = compose("config", ["+recipe=deepseek_v3"])
"""
CONTENDERS = {
    "bare Hydra, silent": [sys.executable, "-c", BARE],
    "bare Hydra, printed": [sys.executable, "-c", BARE + "print(OmegaConf.to_yaml(config))"],
}
MADE_SECONDS, ACTIONS_PER_SECOND = 0.1, 500_000
PLAN = [sys.executable, "-m", "ppctl", "plan", "+recipe=deepseek_v3", "--json"]
FLOOR = 2.0


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def cpu_seconds(work: Callable[[], object]) -> float:
    def once() -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    return min(once() for _ in range(3))


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


def main() -> int:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    columns = [*CONTENDERS.values(), PLAN]
    rows = [[seconds(command) for command in columns] for _ in range(pairs + 1)][1:]
    plan = statistics.median(row[-1] for row in rows)
    print(f"ppctl plan {plan:.3f} s, median of {pairs}; the floor is {FLOOR} times the silent compose")
    ratios = [statistics.median(row[-1] / row[index] for row in rows) for index in range(len(CONTENDERS))]
    for index, (name, ratio) in enumerate(zip(CONTENDERS, ratios, strict=True)):
        print(f"{name}: {statistics.median(row[index] for row in rows):.3f} s, median ratio of a pair {ratio:.2f}")
    return 0 if schedules() and ratios[0] <= FLOOR else 1


if __name__ == "__main__":
    raise SystemExit(main())
