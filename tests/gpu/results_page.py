"""The page of a first run on a GPU: `results_page.py LOGS PAGE`.

Knows the logs of `first_run.sh`: `steps.tsv`, and in each step's log one JSON object as its last line. Every number on
the page was measured in this run; a step that failed, was skipped or never ran says so and has no row.
"""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

ENDS = {"0": "done", "77": "skipped", "124": "ran past its limit", "137": "ran past its limit"}


def main() -> int:
    """Write the page."""
    logs, path = map(Path, sys.argv[1:])
    steps = [line.split("\t") for line in (logs / "steps.tsv").read_text().splitlines()]
    texts = {name: (logs / f"{name}.log").read_text(errors="replace") for name, *_ in steps}
    path.write_text("\n".join(page(steps, texts)) + "\n")
    print(path)
    return 0


def _result(log: str) -> dict[str, Any]:
    """The last line of a log that is an object; empty where there is none."""
    for line in reversed(log.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            return found if isinstance(found, dict) else {}
    return {}


def _last_words(log: str) -> str:
    """What a program without a result said last."""
    said = [line.strip() for line in log.splitlines() if line.strip()]
    return said[-1][:160].replace("|", "/") if said else "no output"


def page(steps: list[list[str]], logs: dict[str, str]) -> list[str]:
    """Its lines, from steps as (name, limit, seconds, exit code) and the text of each step's log."""
    found = {name: _result(text) for name, text in logs.items()}
    facts = found.get("facts", {})
    lines = [f"# First run on {facts.get('device', 'an unknown device')}, {date.today()}", ""]
    if facts.get("device") == "CPU":
        lines += [
            "**A rehearsal of the script on a CPU with tiny sizes: none of these numbers says anything of a GPU.**",
            "",
        ]
    lines += [f"* {key}: {value}" for key, value in facts.items() if key not in ("step", "name")]
    lines += ["", "`tests/gpu/first_run.sh` ran these steps, each within its limit:", ""]
    rows = []
    for name, limit, seconds, code in steps:
        own = found[name]
        why = own.get("skipped") or own.get("failed") or ("" if own else _last_words(logs[name]))
        rows.append([name, f"{limit} s", f"{seconds} s", ENDS.get(code, f"failed ({code})"), why])
    lines += _table(["step", "limit", "took", "end", "said"], rows)

    def of_kind(*kinds: str) -> list[dict[str, Any]]:
        return [row for row in found.values() if row.get("step") in kinds and "skipped" not in row]

    lines += _section("Rates and peaks against the plan", _rates(of_kind("train", "fp8")))
    for row in of_kind("memory"):
        lines += _section(f"Memory by action, {row['name']}", _actions(row))
    lines += _section("Ranks that share the device", _losses(of_kind("same", "nccl")))
    lines += _section("First launches beside a busy device (finding 2)", _launches(of_kind("launches")))
    lines += _section("Hardware queues (finding 3)", _queues(of_kind("queues")))
    return lines


def _section(title: str, table: list[str]) -> list[str]:
    return ["", f"## {title}", "", *(table or ["Nothing was measured: the table of steps says why."])]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _rates(rows: list[dict[str, Any]]) -> list[str]:
    cells = [
        [
            *(row["name"], _share(row["mfu"]), _share(row["planned_mfu"]), _share(row["floor"]), _share(row["goal"])),
            *(f"{row['tokens_per_s']:,.0f}", _mib(row["measured_bytes"]), _mib(row["planned_bytes"])),
        ]
        for row in rows
    ]
    return _table(["model", "mfu", "planned", "floor", "goal", "tokens/s", "peak MiB", "planned MiB"], cells)


def _actions(row: dict[str, Any]) -> list[str]:
    """The first and the last actions: in between a step repeats itself."""
    shown = row["actions"] if len(row["actions"]) <= 16 else [*row["actions"][:8], *row["actions"][-8:]]
    cells = [[each["action"], _mib(each["measured_bytes"]), _mib(each["planned_bytes"])] for each in shown]
    return _table(["after", "allocated MiB", "planned MiB"], cells)


def _losses(rows: list[dict[str, Any]]) -> list[str]:
    cells = [[row["name"], row["step"], f"{row['losses'][-1]:.5f}", f"{row['apart']:.1e}"] for row in rows]
    return _table(["ranks", "how", "last loss", "largest relative difference from one rank"], cells)


def _launches(rows: list[dict[str, Any]]) -> list[str]:
    cells = [
        [row["loading"], name, f"{1e3 * kernel['seconds']:.1f} ms", "yes" if kernel["spin_was_over"] else "no"]
        for row in rows
        for name, kernel in row["kernels"].items()
    ]
    return _table(["CUDA_MODULE_LOADING", "kernel", "host took", "returned only after the busy kernel"], cells)


def _queues(rows: list[dict[str, Any]]) -> list[str]:
    cells = [[str(row["queues"]), f"{row['spins']:.2f}"] for row in rows]
    return _table(["CUDA_DEVICE_MAX_CONNECTIONS", "time in spins (2.0: no stream waits for another)"], cells)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _mib(value: int | None) -> str:
    return "not measured" if value is None else f"{value / 2**20:,.1f}"


if __name__ == "__main__":
    sys.exit(main())
