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

from ppctl.hang.waits import schedule_of
from ppctl.rank_records import RankFailure, RankState
from ppctl.rundir import RunDir

RAISED, KILLED, SILENT = "PP-E701", "PP-E702", "PP-E703"

_DEATHS = (KILLED, SILENT)
"""Codes of failures that the rank itself could not write."""
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


def failures(exits: Sequence[Exit], errors: Sequence[RankFailure]) -> list[RankFailure]:
    """Every rank's failure, the culprit first: what ranks have written, and the deaths of ranks that wrote nothing."""
    written = {error.rank: error for error in errors}
    died = [_died(e) for e in exits if e.returncode and not e.ended and e.rank not in written]
    # Of echoes alone, one that says which connection broke tells most.
    return sorted([*written.values(), *died], key=lambda f: (_is_echo(f), _is_echo(f) and not f.ends, f.time))


def _is_echo(failure: RankFailure) -> bool:
    """Whether it looks like the consequence of another rank's death."""
    return failure.code not in _DEATHS and (failure.code in _FOLLOW or bool(_ECHO.search(failure.message)))


def _died(end: Exit) -> RankFailure:
    if end.returncode < 0:
        number = -end.returncode
        message = f"killed by signal {number} ({signal.Signals(number).name})"
        return RankFailure(end.rank, message, code=KILLED, time=end.time)
    message = f"the process left with exit code {end.returncode} and told no reason"
    return RankFailure(end.rank, message, code=SILENT, time=end.time)


def _text(failure: RankFailure) -> str:
    """First line: the exception, or the signal. More lines may follow."""
    code = failure.code or RAISED
    message = failure.message.removeprefix(f"{code}: ")
    if code == RAISED:
        message = ": ".join(filter(None, [failure.type, message]))
    return "\n".join(filter(None, [message, failure.place]))


def place(run: RunDir, state: RankState | None) -> tuple[int | None, str | None]:
    """(stage, what the rank was doing) by its state and the run's plan; (None, None) where they do not say."""
    if state is None:
        return None, None
    if state.index < 0:
        return None, f"while {state.state}"
    with suppress(Exception):  # the plan may be what is broken; the report must come out all the same
        plan = run.read_plan()
        row = schedule_of(plan, state.state).actions[plan.for_rank(state.rank).pp_rank]
        if state.index >= len(row):
            return row[-1].stage, f"after {row[-1]}"
        return row[state.index].stage, f"in {row[state.index]}"
    return None, f"in action {state.index}"


def report(run: RunDir, found: Sequence[RankFailure], states: Mapping[int, RankState], world_size: int) -> str:
    """The text for the terminal: the culprit, where its log is, and one line about the others."""
    first = found[0]
    code, state = first.code or RAISED, states.get(first.rank)
    stage, doing = _where(run, first, state)
    what, *more = _text(first).splitlines() or [""]
    owner = f"rank {first.rank}" + (f" (stage {stage})" if stage is not None else "")
    failed = f"failed {doing}" if doing else "failed"
    lines = [f"error {code}: {owner} {failed}: {what}", *(f"  {line}" for line in more)]
    frames = [line.strip() for line in first.traceback.splitlines() if line.startswith("  File ")]
    lines += [f"  {frame}" for frame in frames[-1:] if code == RAISED]
    if first.remedy:
        remedy, *further = first.remedy.splitlines()
        lines += [f"  try: {remedy}", *(f"       {line}" for line in further)]
    if first.ends:
        lines.append(f"  {_between(run, first.ends)}")
    lines += [f"error {other}" for other in first.others]
    stepping = state is not None and (state.index >= 0 or state.state == "updating")
    step = f"at step {state.step + 1}; " if state is not None and stepping else ""
    lines.append(f"  {step}its log: {run.log(first.rank)}")
    if run.flight_records():
        lines.append(f"  torch's flight records: {run.flight_records()[0].parent}/flight_recorder_*")
    if code == SILENT:
        lines += [f"  | {line}" for line in _tail(run, first.rank)]
    if code == KILLED:
        lines.append("  if nobody sent that signal: SIGKILL is often the kernel short of memory (see dmesg)")
    if world_size > 1:
        lines.append(f"  {_others(found[1:], world_size)}")
    return "\n".join([*lines, f"  more: ppctl explain {code}"])


def _where(run: RunDir, first: RankFailure, state: RankState | None) -> tuple[int | None, str | None]:
    """(stage, what it was doing): as the rank told; of a rank that could not tell, as its heartbeat says."""
    if first.action is not None:
        return first.stage, f"in {first.action}"
    if first.code not in _DEATHS and state is not None and state.index >= 0:
        return first.stage, None  # it failed outside the list, and the record still shows the last action
    return place(run, state)


def _between(run: RunDir, ends: Sequence[int]) -> str:
    """Which connection broke, with the hosts that the ranks met on."""
    hosts = dict(enumerate(run.edges().get("hosts", ())))
    named = [f"rank {rank}" + (f" on {hosts[rank]}" if rank in hosts else "") for rank in ends]
    return f"the connection from {' to '.join(named)} broke, and no rank had told of a failure before"


def _others(others: Sequence[RankFailure], world_size: int) -> str:
    if not others:
        return f"the other {world_size - 1} ranks were ended" if world_size > 2 else "the other rank was ended"
    shown = [f"rank {other.rank} ({_short(_text(other))})" for other in others[:3]]
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
