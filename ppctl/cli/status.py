"""`ppctl status [RUN]`: how a run is doing, by its directory first and by its scheduler second.

Knows what a person wants to see. Must not change anything.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import suppress
from typing import Any

from ppctl.cli import jobs
from ppctl.cli.jobs import Submitted, meant, submitted, together
from ppctl.cli.runs import facts
from ppctl.cli.table import aligned
from ppctl.errors import PpctlError
from ppctl.hang.waits import published_states, root, waits
from ppctl.rundir import RunDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    jobs.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Show the run; 0 however it is doing."""
    one = meant(args)
    told = collect(one, submitted(one))
    print(json.dumps(told, indent=1) if args.json else "\n".join(_lines(told)))
    return 0


def collect(one: RunDir, job: Submitted | None) -> dict[str, Any]:
    """What is known: the run's facts, its job's, its errors (the first comes first), each rank's last heartbeat."""
    told = facts(one)
    told["start_up"] = one.result().get("start_up") or one.status().get("start_up")
    told["slowest_edge"] = _slowest_edge(one.edges())
    told["errors"] = [
        {key: getattr(error, key) for key in ("rank", "type", "message", "place")} for error in one.errors()
    ]
    hosts = [host for host in one.heartbeats().values() if "host" in host]
    told["ranks"] = sorted(
        ({"host": host["host"], "told": host["time"], **row} for host in hosts for row in host["ranks"]),
        key=lambda row: int(row["rank"]),
    )
    if told["state"] in ("starting", "running", "lost"):
        _add_waits(one, told["ranks"])
    if job is not None:
        told["job"] = {"job": job.job, "state": None, "reason": None, "nodes": None, "starts": None, "never": None}
        if job.state is not None:
            told["job"] |= {"state": job.state.state, "reason": job.state.reason, "nodes": job.state.nodes}
            told["job"] |= {"starts": job.state.start, "never": job.state.never}
            told["state"] = together(told["state"], job)
    return told


def _slowest_edge(edges: dict[str, Any]) -> dict[str, Any] | None:
    """Of the contacts before the first step, the edge whose best message took longest, and how many edges there are."""
    found = [one for one in edges.get("contacts", ()) if not one["name"].startswith("group")]
    if not found:
        return None
    slowest = max(found, key=lambda one: one["best_s"])
    hosts = [edges["hosts"][rank] for rank in slowest["ranks"]]
    return {"ranks": slowest["ranks"], "hosts": hosts, "seconds": slowest["best_s"], "edges": len(found)}


def _add_waits(one: RunDir, rows: list[dict[str, Any]]) -> None:
    """To each rank's row its last and its current action, whom it waits for, and whether all wait for it."""
    with suppress(PpctlError, OSError):  # a damaged plan is for others to tell
        found = waits(one.read_plan(), published_states(one.heartbeats(), time.time(), _SILENT))
        culprit = root(found) if any(wait.on is not None for wait in found) else None
        for row, wait in zip(rows, found, strict=True):
            row["done"] = None if wait.done is None else str(wait.done)
            row["current"] = None if wait.current is None else str(wait.current)
            row["waits_for"] = wait.on
            row["needs"] = None if wait.needs is None else str(wait.needs)
            row["sent"] = wait.sent
            row["gone"] = wait.state.stopped
            row["root"] = wait is culprit


def _lines(told: dict[str, Any]) -> list[str]:
    lines = [f"run {told['id']} ({told['name']}): {told['state']}, step {told['step']}"]
    job = told.get("job")
    if job and job["state"] is None:
        lines.append(f"job {job['job']}: SLURM does not know it (any more)")
    elif job:
        more = [f"({job['reason']})"] * bool(job["reason"]) + [f"on {job['nodes']}"] * bool(job["nodes"])
        if job["state"] == "PENDING" and job["starts"]:
            more.append(f"until {job['starts']} or later")
        lines.append(" ".join([f"job {job['job']}: {job['state']}", *more]))
        if job["never"]:
            lines.append(f"error PP-E627: it will never start: {job['never']}; ppctl cancel {told['path']}")
    if told["message"]:
        lines.append(told["message"])
    for error in told["errors"][:8]:
        lines.append(f"rank {error['rank']}: {error['type']}: {str(error['message']).partition(chr(10))[0]}")
    lines += _speeds(told)
    now = time.time()
    if told["state"] in ("starting", "running", "lost") and told["ranks"]:
        lines += ["", *_table(told["ranks"], now), *_ages(told["ranks"], now), ""]
    lines += [f"checkpoint {told['checkpoint']}"] * bool(told["checkpoint"])
    return [*lines, f"directory {told['path']}"]


def _speeds(told: dict[str, Any]) -> list[str]:
    """What is slowest, and how long the start took."""
    lines = []
    if told["slowest_stage"] is not None:
        lines.append(f"slowest stage of the last step: {told['slowest_stage']} (rank {told['slowest_rank']})")
    if told["start_up"]:
        lines.append("start-up: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in told["start_up"].items()))
    if told["slowest_edge"]:
        (source, target), hosts = told["slowest_edge"]["ranks"], told["slowest_edge"]["hosts"]
        ends = f"rank {source} on {hosts[0]} to rank {target} on {hosts[1]}"
        milliseconds = 1e3 * told["slowest_edge"]["seconds"]
        lines.append(
            f"edges: all {told['slowest_edge']['edges']} answered, the slowest ({ends}) in {milliseconds:.2f} ms"
        )
    return lines


_SILENT = 30.0
"""Seconds after which a node that publishes every ten has missed more than one turn."""
_STANDS = 3.0
"""Seconds after which a rank that others wait for is worth an arrow: in a pipeline some rank always waits."""


def _ages(rows: list[dict[str, Any]], now: float) -> list[str]:
    """How old the table is: nodes tell every ten seconds at most."""
    ages = {str(row["host"]): max(0.0, now - row["told"]) for row in rows}
    silent = [f"{host} has told nothing for {age:.0f} s" for host, age in ages.items() if age > _SILENT]
    return [f"as the nodes told it {min(ages.values()):.0f} s ago", *silent]


def _table(rows: list[dict[str, Any]], now: float) -> list[str]:
    """A row per rank: where it was when its host told it last, for how long, and whom it waited for.

    Of a host that has fallen silent, the time goes on.
    """
    table = [["rank", "host", "step", "last done", "now", "for", "waits for"]]
    for row in rows:
        waiting = "" if row.get("waits_for") is None else f"rank {row['waits_for']}"
        waiting += f" ({row['needs']}{', sent' if row.get('sent') else ''})" if row.get("needs") else ""
        mark = "stopped or silent " if row.get("gone") else ""
        stood = max(0.0, (now if now - row["told"] > _SILENT else row["told"]) - row["since"])
        mark += "<-- all wait for this one" if row.get("root") and stood >= _STANDS else ""
        table.append(
            [
                str(row["rank"]),
                str(row["host"]),
                str(row["step"] + 1),
                str(row.get("done") or ""),
                str(row.get("current") or row["state"]),
                f"{stood:.0f} s",
                f"{waiting} {mark}".strip(),
            ]
        )
    return aligned(table).splitlines()
