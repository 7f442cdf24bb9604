"""Does a plan with measured costs tell step times on this machine: one profiled run at pp=2, three other layouts.

`python benchmarks/plan_on_cpu.py`: two ranks, one thread each, as many as cores (a plan gives every rank a core of its
own); about nine minutes on two idle cores. Prints each layout's predicted and measured step (medians without the first
steps), the error, whether the order is right, and what other processes took of the cores meanwhile: more than a few
percent, and the row says nothing. Exit code 1 where the floor is missed or the machine was not quiet.

A virtual machine's cores are not always whole ones: the same layout takes 1.51 s in one minute and 1.85 s in the next,
with nothing else running on it. That only ever adds time, so the layouts take turns for a few rounds and the fastest
run of each counts, the profiled one's as well.
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
from typing import NamedTuple

PROFILED = "Et*4|t*4L"
OTHERS = ("Et*6|ttL", "Et*2|t*6L", "Ett|tt|tt|ttL")
ROUNDS, STEPS, SKIPPED = 6, 8, 2
MODEL = (
    "+recipe=quickstart", "model.hidden_size=256", "model.ffn_hidden_size=704", "model.num_attention_heads=8",
    "model.num_query_groups=null", "gbs=16", "mbs=2", "seq=256", "pp=2", f"steps={STEPS}", "launch.device=cpu",
)  # fmt: skip
FLOOR, QUIET = 0.10, 0.05
CORES = os.cpu_count() or 1
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def ppctl(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ppctl", *words], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


class Measurement(NamedTuple):
    seconds: float
    """Median of the steps."""
    others: float
    """The share of all cores that other processes had."""
    run: Path


def busy() -> tuple[float, float]:
    """Seconds that all cores, and that this process's children, have computed so far."""
    ticks = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    idle = int(ticks[3]) + int(ticks[4])
    children = os.times()
    return (sum(map(int, ticks[:8])) - idle) / os.sysconf(
        "SC_CLK_TCK"
    ), children.children_user + children.children_system


def measured(layout: str, cwd: Path) -> Measurement:
    """Train with a layout, and look on."""
    before, begin = busy(), time.monotonic()
    ppctl("train", *MODEL, f"layout={layout}", *_chunks(layout), "--json", cwd=cwd)
    (everybody, own), seconds = (now - then for now, then in zip(busy(), before, strict=True)), time.monotonic() - begin
    newest = max(cwd.glob("runs/*/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    steps = [json.loads(line)["step_time_s"] for line in newest.read_text().splitlines()]
    others = max(0.0, everybody - own) / seconds / CORES
    return Measurement(statistics.median(steps[SKIPPED:]), others, newest.parent)


def predicted(layout: str, run: Path, cwd: Path) -> float:
    words = (*MODEL, f"layout={layout}", *_chunks(layout), f"cost.profile=@{run / 'profile.json'}", "--json")
    return float(json.loads(ppctl("plan", *words, cwd=cwd))["schedule"]["step_time_s"])


def _chunks(layout: str) -> tuple[str, str]:
    chunks = (layout.count("|") + 1) // 2
    return f"vpp={chunks}", f"pipeline.pp_schedule={'1f1b' if chunks == 1 else 'interleaved1f1b'}"


def main() -> int:
    print(f"{time.strftime('%Y-%m-%d %H:%M')}, {platform.processor() or platform.machine()}, {CORES} cores, "
          f"load {os.getloadavg()[0]:.1f}; python benchmarks/plan_on_cpu.py")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        runs: dict[str, list[Measurement]] = {layout: [] for layout in (PROFILED, *OTHERS)}
        for _ in range(ROUNDS):
            for layout, found in runs.items():
                found.append(measured(layout, where))
        fastest = {layout: min(found) for layout, found in runs.items()}
        rows = [(layout, predicted(layout, fastest[PROFILED].run, where), real) for layout, real in fastest.items()]
    print("| layout | predicted | measured | error | others | its runs |\n|---|--:|--:|--:|--:|--:|")
    for layout, plan, real in rows:
        note = " (profiled)" if layout == PROFILED else ""
        error = f"{plan / real.seconds - 1:+.1%}"
        each = " ".join(f"{run.seconds:.2f}" for run in runs[layout])
        print(f"| `{layout}`{note} | {plan:.3f} s | {real.seconds:.3f} s | {error} | {real.others:.0%} | {each} |")
    right = sorted(rows, key=lambda row: row[1]) == sorted(rows, key=lambda row: row[2].seconds)
    worst = max(abs(plan / real.seconds - 1) for _, plan, real in rows[1:])
    quiet = max(real.others for _, _, real in rows) <= QUIET
    print(f"order {'right' if right else 'WRONG'}; worst error of the others {worst:.1%} (floor {FLOOR:.0%})")
    if not quiet:
        print(f"the machine was not quiet (others above {QUIET:.0%} of the cores): measure again")
    return 0 if right and worst <= FLOOR and quiet else 1


if __name__ == "__main__":
    raise SystemExit(main())
