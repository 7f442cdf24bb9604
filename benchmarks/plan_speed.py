"""How long `ppctl plan +recipe=deepseek_v3 --json` takes, against a bare Hydra compose of the same config tree.

    python benchmarks/plan_speed.py [pairs]

Whole processes, start to exit, in alternating pairs; the ratio is taken within each pair, so that a noisy machine hits
both. Bare Hydra: import hydra, initialize on conf/, compose config.yaml with a model, print the result.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

BARE = """
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
with initialize_config_module("ppctl._conf", version_base=None):
    print(OmegaConf.to_yaml(compose("config", ["model=deepseek_v3"])))
"""
PLAN = [sys.executable, "-m", "ppctl", "plan", "+recipe=deepseek_v3", "--json"]
FLOOR = 2.0


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> int:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    rows = [(seconds([sys.executable, "-c", BARE]), seconds(PLAN)) for _ in range(pairs + 1)][1:]
    bare, plan = (statistics.median(column) for column in zip(*rows, strict=True))
    ratio = statistics.median(b / a for a, b in rows)
    print(f"bare Hydra compose {bare:.3f} s, ppctl plan {plan:.3f} s: medians of {pairs}")
    print(f"median ratio of a pair {ratio:.2f}; the floor is {FLOOR}")
    return 0 if ratio <= FLOOR else 1


if __name__ == "__main__":
    raise SystemExit(main())
