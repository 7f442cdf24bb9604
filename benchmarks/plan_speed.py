"""How long `ppctl plan +recipe=deepseek_v3 --json` takes, against a bare Hydra compose of the same config tree.

    python benchmarks/plan_speed.py [pairs]

Whole processes, start to exit, in alternating pairs; the ratio is taken within each pair, so that a noisy machine hits
both. Bare Hydra: import hydra, initialize on conf/, compose the same recipe; once silent, once printed as YAML.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

CONF = Path(__file__).parents[1] / "conf"
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
PLAN = [sys.executable, "-m", "ppctl", "plan", "+recipe=deepseek_v3", "--json"]
FLOOR = 2.0


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> int:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    columns = [*CONTENDERS.values(), PLAN]
    rows = [[seconds(command) for command in columns] for _ in range(pairs + 1)][1:]
    plan = statistics.median(row[-1] for row in rows)
    print(f"ppctl plan {plan:.3f} s, median of {pairs}; the floor is {FLOOR} times the silent compose")
    ratios = [statistics.median(row[-1] / row[index] for row in rows) for index in range(len(CONTENDERS))]
    for index, (name, ratio) in enumerate(zip(CONTENDERS, ratios, strict=True)):
        print(f"{name}: {statistics.median(row[index] for row in rows):.3f} s, median ratio of a pair {ratio:.2f}")
    return 0 if ratios[0] <= FLOOR else 1


if __name__ == "__main__":
    raise SystemExit(main())
