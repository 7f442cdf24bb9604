"""Does a plan with measured costs tell step times on this machine: one profiled run at pp=2, three other layouts.

`python benchmarks/plan_on_cpu.py`: two ranks, one thread each; about three minutes on two idle cores. Prints each
layout's predicted and measured step (medians without the first steps), the error, and whether the order is right.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROFILED = "Et*4|t*4L"
OTHERS = ("Et*6|ttL", "Et*2|t*6L", "Ett|tt|tt|ttL")
STEPS, SKIPPED = 14, 4
MODEL = (
    "+recipe=quickstart", "model.hidden_size=256", "model.ffn_hidden_size=704", "model.num_attention_heads=8",
    "model.num_query_groups=null", "gbs=16", "mbs=2", "seq=256", "pp=2", f"steps={STEPS}", "launch.device=cpu",
)  # fmt: skip
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def ppctl(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ppctl", *words], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def measured(layout: str, cwd: Path) -> tuple[float, Path]:
    """(median step time in seconds, run directory)."""
    ppctl("train", *MODEL, f"layout={layout}", *_chunks(layout), "--json", cwd=cwd)
    newest = max(cwd.glob("runs/*/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    steps = [json.loads(line)["step_time_s"] for line in newest.read_text().splitlines()]
    return statistics.median(steps[SKIPPED:]), newest.parent


def predicted(layout: str, run: Path, cwd: Path) -> float:
    words = (*MODEL, f"layout={layout}", *_chunks(layout), f"cost.profile=@{run / 'profile.json'}", "--json")
    return float(json.loads(ppctl("plan", *words, cwd=cwd))["schedule"]["step_time_s"])


def _chunks(layout: str) -> tuple[str, str]:
    chunks = (layout.count("|") + 1) // 2
    return f"vpp={chunks}", f"pipeline.pp_schedule={'1f1b' if chunks == 1 else 'interleaved1f1b'}"


def main() -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M')}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
          f"load {os.getloadavg()[0]:.1f}; python benchmarks/plan_on_cpu.py")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        seconds, run = measured(PROFILED, where)
        rows = [(PROFILED, predicted(PROFILED, run, where), seconds)]
        rows += [(layout, predicted(layout, run, where), measured(layout, where)[0]) for layout in OTHERS]
    print("| layout | predicted | measured | error |\n|---|--:|--:|--:|")
    for layout, plan, real in rows:
        note = " (profiled)" if layout == PROFILED else ""
        print(f"| `{layout}`{note} | {plan:.3f} s | {real:.3f} s | {plan / real - 1:+.1%} |")
    right = sorted(rows, key=lambda row: row[1]) == sorted(rows, key=lambda row: row[2])
    worst = max(abs(plan / real - 1) for _, plan, real in rows[1:])
    print(f"order {'right' if right else 'WRONG'}; worst error of the others {worst:.1%} (floor 10 %)")


if __name__ == "__main__":
    main()
