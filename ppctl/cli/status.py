"""`ppctl status [RUN]`: the state of a run, from its directory and, if it was submitted, from its scheduler."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import suppress
from typing import Any

from ppctl.cli.console import UNFOLDED, aligned, folded, prose, width
from ppctl.cli.jobs import combined_state, job_to_show
from ppctl.cli.longer import longer
from ppctl.cli.runs import LOST, STARTED, add_run_arguments, facts, named_run, program, readable
from ppctl.errors import PpctlError, pasted
from ppctl.hang.verdict import published_states, root, waits
from ppctl.launch.outcome import is_echo
from ppctl.launch.slurm import JobState
from ppctl.records.step_lines import clock_text, mean_step_time
from ppctl.runs.rundir import RunDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Show the run. The exit code is 0 whatever its state."""
    run_dir = named_run(args)
    report = collect(run_dir, job_to_show(run_dir))
    print(json.dumps(report, indent=1) if args.json else _text(report, width(UNFOLDED)))
    return 0


def collect(run: RunDir, job: JobState | None) -> dict[str, Any]:
    """The run's facts, its errors (earliest first), each rank's last heartbeat, the job's state, the next command."""
    report = facts(run) | _progress(run)
    report["start_up"] = run.result().get("start_up") or run.status().get("start_up")
    report["slowest_edge"] = _slowest_edge(run.edges())
    errors = [error for error in run.errors() if report["state"] != "interrupted" or not is_echo(error)]
    report["errors"] = [{key: getattr(each, key) for key in ("rank", "type", "message", "place")} for each in errors]
    hosts = [host for host in run.heartbeats().values() if host]
    report["ranks"] = sorted(
        ({"host": host["host"], "told": host["time"], **row} for host in hosts for row in host["ranks"]),
        key=lambda row: int(row["rank"]),
    )
    if report["state"] in (*STARTED, LOST):
        _add_waits(run, report["ranks"])
    if job is not None:
        known = {"state": job.state, "reason": job.reason, "nodes": job.nodes, "starts": job.start, "never": job.never}
        report["job"] = {"job": job.job, **(known if job.state else dict.fromkeys(known))}
        report["state"] = combined_state(report["state"], job)
    return report | {"next": _next(run, report)}


def _progress(run: RunDir) -> dict[str, Any]:
    """The total of steps, the speed of the last twenty, and the seconds left at that speed; None where unknown."""
    records = run.metrics_file(last=20).read()
    config = readable(run.read_config)
    total = None if config is None else config.train.steps
    step = mean_step_time(records)
    tokens = records[-1].get("tokens") if records else None
    left = None if total is None or not records else max(total - records[-1]["step"], 0)
    return {
        "total": total,
        "tokens_per_s": tokens / step if tokens and step else None,
        "eta_s": None if left is None or step is None else left * step,
    }


def _next(run: RunDir, report: dict[str, Any]) -> str | None:
    where, state = pasted(report["path"]), report["state"]
    if state in STARTED:
        return f"{program()} logs {where} -f"
    if state == "finished":
        with suppress(PpctlError, OSError):
            return longer(report["path"], run.read_config())
    if state in ("failed", "stopped", "interrupted", LOST):
        command: str | None = report["command"]
        if report["checkpoint"] is None:
            return command
        by_agents = (readable(run.environment) or {}).get("starts")
        return f"{program()} {'node --rendezvous HOST:29500 --resume' if by_agents else 'resume'} {where}"
    return None


def _slowest_edge(edges: dict[str, Any]) -> dict[str, Any] | None:
    """The edge whose best message before the first step took longest, and the number of edges; None without edges."""
    contacts = [one for one in edges.get("contacts", ()) if not one["name"].startswith("group")]
    if not contacts:
        return None
    slowest = max(contacts, key=lambda one: one["best_s"])
    hosts = [edges["hosts"][rank] for rank in slowest["ranks"]]
    return {"ranks": slowest["ranks"], "hosts": hosts, "seconds": slowest["best_s"], "edges": len(contacts)}


def _add_waits(run: RunDir, rows: list[dict[str, Any]]) -> None:
    """Add to each rank's row its last and current action, its wait, and whether it is the rank for which all wait."""
    if (plan := readable(run.read_plan)) is None:
        return
    waiting = waits(plan, published_states(run.heartbeats(), time.time(), _SILENT))
    culprit = root(waiting) if any(wait.on is not None for wait in waiting) else None
    of_rank = {wait.state.rank: wait for wait in waiting}
    for row, wait in ((row, of_rank[row["rank"]]) for row in rows if row["rank"] in of_rank):
        row["done"] = None if wait.done is None else str(wait.done)
        row["current"] = None if wait.current is None else str(wait.current)
        row["waits_for"] = wait.on
        row["needs"] = None if wait.needs is None else str(wait.needs)
        row["sent"] = wait.sent
        row["gone"] = wait.state.stopped
        row["root"] = wait is culprit


def _text(report: dict[str, Any], columns: int) -> str:
    """The run in lines of at most `columns` columns, except for the ranks' table, paths, and text to paste."""
    parts = [prose(_said(report), columns)]
    now = time.time()
    if _tells(report):
        parts += ["", _table(report["ranks"], now, columns), prose(_ages(report, now), columns), ""]
    parts += [f"checkpoint {report['checkpoint']}"] * bool(report["checkpoint"])
    parts.append(f"directory {report['path']}")
    return "\n".join([*parts, "", f"next: {report['next']}"] if report["next"] else parts)


def _tells(report: dict[str, Any]) -> bool:
    """Whether the ranks' last heartbeats are newer than the recorded steps; a lost run's may be older."""
    lost, rows = report["state"] == LOST, report["ranks"]
    return bool(rows) and (report["state"] in STARTED or (lost and max(r["step"] for r in rows) >= report["step"]))


def _said(report: dict[str, Any]) -> list[str]:
    total = f" of {report['total']:,}" if report["total"] else ""
    lines = [f"run {report['id']} ({report['name']}): {report['state']}, step {report['step']:,}{total}"]
    if report["loss"] is not None:
        lines.append(", ".join(_figures(report)))
    if report["steps_back"]:
        lines.append(f"went back behind bad steps: from {report['steps_back']}")
    job = report.get("job")
    if job and job["state"] is None:
        lines.append(f"job {job['job']}: its scheduler does not show it")
    elif job:
        more = [f"({job['reason']})"] * bool(job["reason"]) + [f"on {job['nodes']}"] * bool(job["nodes"])
        if job["state"] == "PENDING" and job["starts"]:
            more.append(f"until {job['starts']} or later")
        lines.append(" ".join([f"job {job['job']}: {job['state']}", *more]))
        if job["never"]:
            lines.append(f"error PP-E627: it will never start: {job['never']}; ppctl cancel {report['path']}")
    if report["message"]:
        lines.append(report["message"])
    for error in report["errors"][:8]:
        lines.append(f"rank {error['rank']}: {error['type']}: {str(error['message']).partition(chr(10))[0]}")
    return [*lines, *filter(None, [report["starts"]]), *_times(report)]


def _figures(report: dict[str, Any]) -> list[str]:
    figures = [f"loss {report['loss']:.4f}"]
    if report["tokens_per_s"] is not None:
        figures.append(f"{report['tokens_per_s']:,.0f} tokens/s")
    if report["eta_s"] is not None and report["state"] in STARTED:
        figures.append(f"ETA {clock_text(report['eta_s'])}")
    return figures


def _times(report: dict[str, Any]) -> list[str]:
    lines = []
    if report["slowest_stage"] is not None:
        lines.append(f"slowest stage of the last step: {report['slowest_stage']} (rank {report['slowest_rank']})")
    if report["start_up"]:
        lines.append("start-up: " + ", ".join(f"{name} {value:.1f} s" for name, value in report["start_up"].items()))
    edge = report["slowest_edge"]
    if edge:
        ends = " to ".join(f"rank {rank} on {host}" for rank, host in zip(edge["ranks"], edge["hosts"], strict=True))
        lines.append(f"edges: all {edge['edges']} answered, the slowest ({ends}) in {1e3 * edge['seconds']:.2f} ms")
    return lines


_SILENT = 30.0
"""Seconds without a publication after which a node counts as silent: it publishes every ten seconds."""
_LONG = 3.0
"""Seconds after which a rank that all others wait for is marked: in a pipeline some rank always waits."""


def _ages(report: dict[str, Any], now: float) -> list[str]:
    rows = report["ranks"]
    ages = {str(row["host"]): max(0.0, now - row["told"]) for row in rows}
    silent = [f"{host} has sent no heartbeat for {age:.0f} s" for host, age in ages.items() if age > _SILENT]
    before = f", before step {report['step']} was done" if max(row["step"] for row in rows) < report["step"] else ""
    return [f"as the nodes published it {min(ages.values()):.0f} s ago{before}", *silent]


def _table(rows: list[dict[str, Any]], now: float, columns: int) -> str:
    """A row per rank, as its host last published it: steps done, last and present action, how long, and its wait."""
    table = [["rank", "host", "done", "last action", "now", "for", "waits for"]]
    for row in rows:
        waiting = "" if row.get("waits_for") is None else f"rank {row['waits_for']}"
        waiting += f" ({row['needs']}{', sent' if row.get('sent') else ''})" if row.get("needs") else ""
        mark = "stopped or silent " * bool(row.get("gone"))
        stood = max(0.0, (now if now - row["told"] > _SILENT else row["told"]) - row["since"])
        mark += "<-- all wait for this one" if row.get("root") and stood >= _LONG else ""
        actions = [str(row.get("done") or ""), str(row.get("current") or row["state"])]
        place = [str(row["rank"]), str(row["host"]), str(row["step"])]
        table.append([*place, *actions, f"{stood:.0f} s", f"{waiting} {mark}".strip()])
    return aligned(folded(table, columns, " "))
