"""Every recipe that trains, rehearsed at full size, and held against its plan.

    python benchmarks/rehearsal.py        (make bench-plan)

Prints the tables of a results page, and on stderr a line for each recipe while it runs (about 10 minutes). Exit code 1
where state differs by a byte, or what a microbatch keeps or a peak by more than 1 %, the memory does not fit, or a host
waits more often than once for the exchange of each MoE layer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from ppctl.config.resources import recipes

MIB, GIB = 2**20, 2**30
CLOSE = 0.01
STATE = ("weight_bytes", "gradient_bytes", "optimizer_bytes")
NOT_TRAINED = ("gpt3_175b", "llama3_405b")
"""Their axes and blocks are planned only."""


def rehearse(recipe: str) -> tuple[dict[str, Any], float]:
    """What `ppctl rehearse --json` says, and how many seconds it took. Raises SystemExit(1) where it says nothing."""
    started = time.monotonic()
    command = [sys.executable, "-m", "ppctl", "rehearse", f"+recipe={recipe}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout), time.monotonic() - started


def off(planned: float, measured: float) -> float:
    """By how much what was measured is more than planned."""
    return measured / planned - 1 if planned else 0.0


def waits_text(rank: dict[str, Any]) -> str:
    """Waits in forwards and backwards, by place."""
    rows = [wait for wait in rank["host_waits"] if wait["during"] in ("forward", "backward")]
    return ", ".join(f"{row['file']}:{row['line']} {row['count']:,} ({row['during']})" for row in rows) or "none"


def waits_too_often(rank: dict[str, Any], during: str) -> bool:
    """Whether forwards (or backwards) wait elsewhere, or more often than once for every three exchanges.

    A MoE layer exchanges numbers of rows, rows and results, each time that its forward is computed.
    """
    waits = [wait for wait in rank["host_waits"] if wait["during"] == during]
    exchanges = sum(m["count"] for m in rank["messages"] if m["kind"] == "alltoall_base" and m["during"] == during)
    elsewhere = any(wait["file"] != "ppctl/parallel/dispatch.py" for wait in waits)
    return elsewhere or 3 * sum(wait["count"] for wait in waits) > exchanges


def main() -> int:
    """Rehearse all recipes and print."""
    wrong = []
    columns = ("recipe", "microbatches", "rank", "same", "state", "kept, MiB planned and measured", "waits in F and B")
    print(f"| {' | '.join(columns)} | operations | launches |")
    print("|---|--:|--:|--:|---|---|---|--:|--:|")
    peaks = [
        "| recipe | pp_ranks | highest peak, planned GiB | measured | worst difference of a pp_rank | seconds |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    chosen = [recipe for recipe in sorted(recipes()) if recipe not in NOT_TRAINED]
    for number, recipe in enumerate(chosen, 1):
        print(f"rehearsing {recipe} ({number} of {len(chosen)})", file=sys.stderr, flush=True)
        found, seconds = rehearse(recipe)
        for rank in found["ranks"]:
            planned, measured = rank["planned"], rank["measured"]
            equal = all(planned[name] == measured[name] for name in STATE)
            pairs = [
                (planned["kept_bytes_per_microbatch"][s], k) for s, k in measured["kept_bytes_per_microbatch"].items()
            ]
            kept = ", ".join(f"{a / MIB:.1f} {b / MIB:.1f}" for a, b in pairs)
            wrong += [f"{recipe}: state of rank {rank['rank']}"] * (not equal)
            often = [during for during in ("forward", "backward") if waits_too_often(rank, during)]
            wrong += [f"{recipe}: waits in {during}s of rank {rank['rank']}" for during in often]
            wrong += [f"{recipe}: kept on rank {rank['rank']}" for a, b in pairs if abs(off(a, b)) > CLOSE]
            print(
                f"| {recipe} | {found['microbatches_rehearsed']} of {found['microbatches']} | {rank['rank']} | "
                f"{len(rank['same_as'])} | {'equal' if equal else 'DIFFERS'} | {kept} | {waits_text(rank)} | "
                f"{rank['operations']:,} | {rank['launches']:,} |",
                flush=True,
            )
        wrong += [f"{recipe}: {problem['message']}" for problem in found["problems"]]
        rows = found["pp_ranks"]
        differences = [off(row["planned_peak_bytes"], row["measured_peak_bytes"]) for row in rows]
        worst = max(differences, key=abs)
        wrong += [f"{recipe}: peak {worst:+.2%}"] * (abs(worst) > CLOSE)
        top = max(rows, key=lambda row: row["planned_peak_bytes"])["planned_peak_bytes"]
        most = max(row["measured_peak_bytes"] for row in rows)
        peaks.append(f"| {recipe} | {len(rows)} | {top / GIB:.2f} | {most / GIB:.2f} | {worst:+.2%} | {seconds:.0f} |")
    print("\n" + "\n".join(peaks))
    print("\n" + ("; ".join(wrong) or f"all within {CLOSE:.0%}, state to the byte"))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
