"""Who broke the job, in one line: the first failure, not its echoes.

Knows how ranks end and what they leave: an error record, an exit code or signal, a heartbeat, a log. Must not know
processes. A rank that loses its connection because another one died raises too; such echoes never hide the culprit.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ppctl.heartbeat import Beat
from ppctl.rundir import RunDir

RAISED, KILLED, SILENT = "PP-E701", "PP-E702", "PP-E703"

_FOLLOW = ("PP-E711", "PP-E709")
"""Codes of what other ranks' failures cause: a broken channel; a rank that did not come."""
_ECHO = re.compile(
    r"closed by peer|reset by peer|broken pipe|socket closed|connection (was )?(likely )?(closed|refused|aborted|lost)|"
    r"closed the connection|"
    r"remote process (exited|has)|peer .*(died|exited|gone)|store.*(closed|shut ?down)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Exit:
    """How one rank's process ended."""

    rank: int
    returncode: int
    """Negative for a signal."""
    time: float
    """Seconds since the epoch, when the launcher saw it."""
    ended: bool
    """Whether the launcher had begun to end the job: then the code says nothing."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's failure."""

    rank: int
    time: float
    code: str
    what: str
    """First line: the exception, or the signal. More lines may follow."""
    echo: bool
    """Whether it looks like the consequence of another rank's death."""
    exit_code: int = 1
    stage: int | None = None
    action: str | None = None
    told: bool = False
    """Whether the rank itself said so."""
    remedy: str = ""
    frame: str = ""
    """Where in the code, as a traceback says it."""
    ends: tuple[int, ...] = ()
    """The ranks between which a connection broke."""
    others: tuple[str, ...] = ()
    """What else the rank found wrong, each as a person reads it."""


def failures(exits: Sequence[Exit], errors: Sequence[Mapping[str, Any]]) -> list[Failure]:
    """Every rank's failure, the culprit first: what ranks told of themselves, and deaths that nobody told of."""
    told = {int(error["rank"]): _told(error) for error in errors}
    died = [_died(e) for e in exits if e.returncode and not e.ended and e.rank not in told]
    # Of echoes alone, one that says which connection broke tells most.
    return sorted([*told.values(), *died], key=lambda f: (f.echo, f.echo and not f.ends, f.time))


def _told(error: Mapping[str, Any]) -> Failure:
    kind, message = str(error.get("type") or ""), str(error.get("message") or "")
    code = str(error.get("code") or RAISED)
    message = message.removeprefix(f"{code}: ")
    said = message if code != RAISED else f"{kind}: {message}" if message else kind
    frames = [line.strip() for line in str(error.get("traceback") or "").splitlines() if line.startswith("  File ")]
    return Failure(
        rank=int(error["rank"]),
        time=float(error["time"]),
        code=code,
        what="\n".join(filter(None, [said, str(error.get("place") or "")])),
        echo=code in _FOLLOW or bool(_ECHO.search(message)),
        exit_code=int(error.get("exit_code") or 1),
        stage=error.get("stage"),
        action=error.get("action"),
        told=True,
        remedy=str(error.get("remedy") or ""),
        frame=frames[-1] if frames and code == RAISED else "",
        ends=tuple(map(int, error.get("ends") or ())),
        others=tuple(map(str, error.get("others") or ())),
    )


def _died(end: Exit) -> Failure:
    if end.returncode < 0:
        number = -end.returncode
        what = f"killed by signal {number} ({signal.Signals(number).name})"
        return Failure(end.rank, end.time, KILLED, what, echo=False)
    what = f"the process left with exit code {end.returncode} and told no reason"
    return Failure(end.rank, end.time, SILENT, what, echo=False)


def place(run: RunDir, beat: Beat | None) -> tuple[int | None, str | None]:
    """(stage, what the rank was doing) by its heartbeat and the run's plan; (None, None) where they do not say."""
    if beat is None:
        return None, None
    if beat.index < 0:
        return None, f"while {beat.state}"
    with suppress(Exception):  # the plan may be what is broken; the report must come out all the same
        plan = run.read_plan()
        schedule = plan.forward_schedule if beat.state in ("evaluating", "generating") else plan.schedule
        row = schedule.actions[plan.for_rank(beat.rank).pp_rank]
        if beat.index >= len(row):
            return row[-1].stage, f"after {row[-1]}"
        return row[beat.index].stage, f"in {row[beat.index]}"
    return None, f"in action {beat.index}"


def report(run: RunDir, found: Sequence[Failure], beats: Mapping[int, Beat], world_size: int) -> str:
    """The text for the terminal: the culprit, where its log is, and one line about the others."""
    first = found[0]
    beat = beats.get(first.rank)
    stage, doing = _where(run, first, beat)
    what, *more = first.what.splitlines() or [""]
    owner = f"rank {first.rank}" + (f" (stage {stage})" if stage is not None else "")
    failed = f"failed {doing}" if doing else "failed"
    lines = [f"error {first.code}: {owner} {failed}: {what}", *(f"  {line}" for line in more)]
    lines += [f"  {first.frame}"] * bool(first.frame)
    if first.remedy:
        remedy, *further = first.remedy.splitlines()
        lines += [f"  try: {remedy}", *(f"       {line}" for line in further)]
    if first.ends:
        lines.append(f"  {_between(run, first.ends)}")
    lines += [f"error {other}" for other in first.others]
    stepping = beat is not None and (beat.index >= 0 or beat.state == "updating")
    step = f"at step {beat.step + 1}; " if beat is not None and stepping else ""
    lines.append(f"  {step}its log: {run.log(first.rank)}")
    if run.flight_records():
        lines.append(f"  torch's flight records: {run.flight_records()[0].parent}/flight_recorder_*")
    if first.code == SILENT:
        lines += [f"  | {line}" for line in _tail(run, first.rank)]
    if first.code == KILLED:
        lines.append("  if nobody sent that signal: SIGKILL is often the kernel short of memory (see dmesg)")
    if world_size > 1:
        lines.append(f"  {_others(found[1:], world_size)}")
    return "\n".join([*lines, f"  more: ppctl explain {first.code}"])


def _where(run: RunDir, first: Failure, beat: Beat | None) -> tuple[int | None, str | None]:
    """(stage, what it was doing): as the rank told; of a rank that could not tell, as its heartbeat says."""
    if first.action is not None:
        return first.stage, f"in {first.action}"
    if first.told and beat is not None and beat.index >= 0:
        return first.stage, None  # it failed outside the list, and the record still shows the last action
    return place(run, beat)


def _between(run: RunDir, ends: Sequence[int]) -> str:
    """Which connection broke, with the hosts that the ranks met on."""
    hosts = dict(enumerate(run.edges().get("hosts", ())))
    named = [f"rank {rank}" + (f" on {hosts[rank]}" if rank in hosts else "") for rank in ends]
    return f"the connection from {' to '.join(named)} broke, and no rank had told of a failure before"


def _others(others: Sequence[Failure], world_size: int) -> str:
    if not others:
        return f"the other {world_size - 1} ranks were ended" if world_size > 2 else "the other rank was ended"
    shown = [f"rank {other.rank} ({_short(other.what)})" for other in others[:3]]
    rest = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"followed by {', '.join(shown)}{rest}"


def _short(text: str) -> str:
    line = next(iter(text.splitlines()), "")
    return line if len(line) <= 80 else line[:77] + "..."


def _tail(run: RunDir, rank: int, lines: int = 3) -> list[str]:
    try:
        text = run.log(rank).read_bytes()[-4096:].decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]
