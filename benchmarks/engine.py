"""ppctl's engine against torch.distributed.pipelining and against the bound without communication.

    python benchmarks/engine.py [--launches 5] [--repeats 5] [--only NAME ...] [--out benchmarks] [--megatron DIR]
    python benchmarks/engine.py --only zbv interleaved_zero dualpipev --launches 3 --repeats 3 --minutes 12

Contenders of one cell run inside the same processes and alternate step by step, so that a noisy neighbour hits all of
them: figures are compared inside one launch, and medians taken over launches, with a bootstrap interval. Every cell's
losses and gradients are checked. Needs a quiet machine; it is no test. Exit code 1 where a floor is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import socket
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from engine_megatron import HOW, VERSION, takes_part
from engine_workloads import Cell

from ppctl.launch.environment import rank_environment

HERE = Path(__file__).resolve().parent

PAIR = ("ppctl", "torch")
SPLIT = ("ppctl", "ppctl_1f1b", "torch")

CELLS = [
    Cell("1f1b 1 MiB", "sleep", 4, 1, 16, 1),
    Cell("1f1b 16 MiB", "sleep", 4, 1, 8, 16),
    Cell("interleaved 1 MiB", "sleep", 4, 2, 16, 1),
    Cell("interleaved 16 MiB", "sleep", 4, 2, 8, 16),
    Cell("empty", "empty", 2, 1, 64, contenders=("ppctl", "ppctl_batched", "torch")),
    Cell("empty interleaved", "empty", 2, 2, 32, contenders=("ppctl", "ppctl_batched", "torch")),
    Cell("gpt", "gpt", 2, 1, 8, contenders=("ppctl", "ppctl_auto", "torch")),
    Cell("gpt interleaved", "gpt", 2, 2, 8, contenders=("ppctl", "torch")),
    *(
        Cell(f"{policy} {size} MiB m={m}", "split", 4, 2, m, size, contenders=of, policy=policy)
        for policy, of in (("zbv_zero_bubble", SPLIT), ("interleaved_zero_bubble", PAIR), ("dualpipev", PAIR))
        for size in (1, 16)
        for m in (8, 16)
    ),
    Cell("gpt zbv", "gpt", 2, 2, 8, contenders=SPLIT, policy="zbv_zero_bubble"),
    *(
        Cell(f"memory m={m} {name}", "sleep", 4, 1, m, 16, 0.002, (name,), memory=True)
        for name in ("ppctl", "torch")
        for m in (8, 32)
    ),
]

FLOORS = {
    ("1f1b 1 MiB", "ppctl"): 1.00,
    ("1f1b 1 MiB", "ppctl_auto"): 1.04,
    ("1f1b 16 MiB", "ppctl_auto"): 1.20,
    ("interleaved 1 MiB", "ppctl"): 1.03,
    ("interleaved 16 MiB", "ppctl"): 1.20,
    ("empty", "ppctl"): 1 / 0.95,
    **{(cell.name, "ppctl"): 1.05 for cell in CELLS if cell.policy},
}
"""Speed against torch: torch's time divided by the contender's."""

OVER_1F1B = 1.10
"""Where simulation gives ZBV 1.15 of 1F1B's speed or more, it must have this much."""

BUBBLE = 0.03
"""How far a split schedule's bubble may be from the simulated one."""


def free_port() -> int:
    """A port that is free, below the range that the kernel hands out: nobody takes it before rank 0 listens."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def launch(cell: Cell, repeats: int, megatron: Path | None) -> dict:
    """One set of processes, in the environment that `ppctl train` gives its ranks; rank 0's report."""
    port = free_port()
    repeats *= 4 if cell.kind == "empty" else 1
    command = [sys.executable, str(HERE / "engine_rank.py"), json.dumps({"cell": asdict(cell), "repeats": repeats})]
    found = {} if megatron is None else {"PYTHONPATH": str(megatron.resolve())}
    ranks = [
        subprocess.Popen(
            command, env=rank_environment(rank, cell.pp, port, found), stdout=subprocess.PIPE if rank == 0 else None
        )
        for rank in range(cell.pp)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=900)
    finally:
        for process in ranks:
            if process.poll() is None and ranks[0].returncode != 0:
                process.kill()
    if any(process.wait() for process in ranks):
        raise SystemExit(f"{cell.name}: a rank failed")
    return json.loads(output)


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median over launches."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def rows(cell: Cell, reports: list[dict]) -> list[str]:
    """The table lines of one cell."""
    lines = []
    bound = [statistics.median(report["alone"]["times"]) for report in reports]
    peer = [statistics.median(report["torch"]["times"]) for report in reports]
    for name in cell.contenders:
        mine = [statistics.median(report[name]["times"]) for report in reports]
        cpu = statistics.median(statistics.median(report[name]["cpu"]) for report in reports)
        ratios = [t / m for t, m in zip(peer, mine, strict=True)]
        low, high = interval(ratios)
        wrong = next((report[name]["wrong"] for report in reports if report[name]["wrong"]), "")
        extra = sorted({report[name]["extra"] for report in reports} - {None})
        floor = FLOORS.get((cell.name, name))
        held = "" if floor is None else f"{floor:.2f} {'held' if low >= 0.98 * floor else 'MISSED'}"
        actions = 2 * cell.microbatches * cell.vpp
        speed = 1e6 * statistics.median(mine) / actions if cell.kind == "empty" else 1e3 * statistics.median(mine)
        unit = "us/action" if cell.kind == "empty" else "ms"
        efficiency = statistics.median(b / m for b, m in zip(bound, mine, strict=True))
        named = f"{name} (extra {', '.join(map(str, extra))})" if name == "ppctl_auto" else name
        lines.append(
            f"| {cell.name} | {named} | {speed:.1f} {unit} | {1e3 * cpu:.0f} ms | {efficiency:.3f} "
            f"| {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}] | {held} | {wrong or 'ok'} |"
        )
    return lines


def split_rows(cell: Cell, reports: list[dict]) -> list[str]:
    """Of a cell with split backwards: its bubble as measured and as simulated, and its speed against our own 1F1B."""
    lines = []
    bubble = {
        name: {
            kind: statistics.median(step[kind] for report in reports for step in report[name]["bubbles"])
            for kind in ("measured", "simulated", "replayed")
        }
        for name in cell.contenders
        if "bubbles" in reports[0][name]
    }
    for name, of in bubble.items():
        apart = of["measured"] - of["simulated"]
        held = "held" if apart <= BUBBLE else "MISSED"
        beside = _beside_1f1b(reports, bubble) if name == "ppctl" and "ppctl_1f1b" in bubble else " | | "
        lines.append(
            f"| {cell.name} | {name} | {of['simulated']:.3f} | {of['replayed']:.3f} | {of['measured']:.3f} "
            f"| {100 * apart:+.1f} points {held} | {100 * (of['measured'] - of['replayed']):+.1f} points | {beside} |"
        )
    return lines


def _beside_1f1b(reports: list[dict], bubble: dict[str, dict[str, float]]) -> str:
    """Speed against our own 1F1B, as measured and as simulated, and its floor."""
    mine, usual = ([statistics.median(report[each]["times"]) for report in reports] for each in ("ppctl", "ppctl_1f1b"))
    ratios = [u / m for u, m in zip(usual, mine, strict=True)]
    low, high = interval(ratios)
    theory = (1 - bubble["ppctl"]["simulated"]) / (1 - bubble["ppctl_1f1b"]["simulated"])
    held = f"{OVER_1F1B:.2f} {'held' if low >= 0.98 * OVER_1F1B else 'MISSED'}" if theory >= 1.15 else ""
    return f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}] | {theory:.3f} | {held}"


def memory_rows(peaks: dict[tuple[str, int], float]) -> list[str]:
    """Growth of the middle rank's peak from m = 8 to m = 32."""
    lines = []
    for name in sorted({name for name, _ in peaks}):
        if (name, 8) in peaks and (name, 32) in peaks:
            small, large = peaks[name, 8], peaks[name, 32]
            held = "1.05 " + ("held" if large <= 1.05 * small else "MISSED") if name == "ppctl" else ""
            lines.append(
                f"| {name} | {small / 2**20:.0f} MiB | {large / 2**20:.0f} MiB | {large / small:.2f} | {held} |"
            )
    return lines


def hardware() -> str:
    import torch

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = found[0] if found else model
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} x {model}, Python {platform.python_version()}, torch {torch.__version__}, load {load}"


def launched(cells: list[Cell], options: argparse.Namespace) -> list[tuple[Cell, list[dict]]]:
    """The reports of every cell: a launch of each, then a second one of each, until there are enough or time is up."""
    reports: dict[str, list[dict]] = {cell.name: [] for cell in cells}
    seconds = dict.fromkeys(reports, 0.0)
    begun = time.monotonic()
    for number in range(options.launches):
        for cell in cells if number < 3 else [cell for cell in cells if not cell.memory]:
            spent = time.monotonic() - begun
            if number and options.minutes is not None and spent + seconds[cell.name] > 60 * options.minutes:
                continue
            reports[cell.name].append(launch(cell, options.repeats, options.megatron))
            seconds[cell.name] = time.monotonic() - begun - spent
            print(f"launch {number + 1} of {cell.name}: {seconds[cell.name]:.0f} s, at {spent:.0f} s", flush=True)
    return [(cell, reports[cell.name]) for cell in cells]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="steps of a launch; of empty ones four times as many")
    parser.add_argument("--minutes", type=float, help="begin no launch, but each cell's first, that would end later")
    parser.add_argument("--only", nargs="*", help="cells whose names begin so")
    parser.add_argument("--out", type=Path, default=HERE, help="directory of the results file")
    parser.add_argument("--megatron", type=Path, help=f"directory that holds megatron-core: {HOW}")
    options = parser.parse_args()
    cells = [cell for cell in CELLS if not options.only or any(cell.name.startswith(name) for name in options.only)]
    if options.megatron is not None:
        cells = [replace(c, contenders=(*c.contenders, "megatron")) if takes_part(c) else c for c in cells]
    before = hardware()
    table, split, peaks = [], [], {}
    for cell, reports in launched(cells, options):
        if cell.memory:
            name = cell.contenders[0]
            peaks[name, cell.microbatches] = statistics.median(r[name]["peaks"][cell.pp // 2] for r in reports)
            continue
        new, halves = rows(cell, reports), split_rows(cell, reports) if cell.kind == "split" else []
        print("\n".join((*new, *halves)), flush=True)
        table += new
        split += halves
    lines = [
        f"# The engine against its peers, {time.strftime('%Y-%m-%d')}",
        "",
        f"Hardware: {before}.",
        f"Command: `{shlex.join(['python', 'benchmarks/engine.py', *sys.argv[1:]])}`",
        f"At most {options.launches} launches of {options.repeats} steps each, one of every cell in turn; medians over",
        f"launches of medians over steps. Load at the end: {os.getloadavg()[0]:.1f}.",
        "Speed is torch's time divided by the contender's, with a bootstrap interval over launches; a floor is held",
        "where the interval's lower end is within 2 % of it. Efficiency is the bound without communication divided by",
        "the time. The bound is the formula (m + (p - 1) / v) (tf + tb) where stages sleep, where their backwards are",
        "split m (tf + tb) + (p - 1) / v tf, and else it follows from ranks that compute one at a time on data made",
        "before. extra is what auto chose from the times of three steps.",
        f"megatron-core {VERSION}, its own functions on the CPU, is a contender with: {HOW}.",
        "",
        "| cell | contender | time | CPU, all ranks | efficiency | speed against torch | floor | correct |",
        "|---|---|---|---|---|---|---|---|",
        *table,
    ]
    if split:
        lines += [
            "",
            "Bubbles of stages whose F, I and W each take a stated time, equally long: what they do not compute of it,",
            "they sleep. `simulated` knows the stated times and how long messages took; `replayed` how long actions,",
            "what hosts do between two of them, and messages took.",
            "",
            "| cell | contender | simulated | replayed | measured | to simulated | to replayed "
            "| speed against our 1F1B | simulated | floor |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *split,
        ]
    if grown := memory_rows(peaks):
        print("\n".join(grown))
        head = "| peak memory above set-up, a middle rank, 16 MiB | m = 8 | m = 32 | growth | limit |"
        lines += ["", head, "|---|---|---|---|---|", *grown]
    path = options.out / f"results-engine-{time.strftime('%Y-%m-%d')}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    print(f"wrote {path}")
    return int(any("MISSED" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
