"""How a job ended: its exit code, its state, and the report, whose first line names the rank that failed first.

A rank that loses its connection because another rank died also raises an error; these echoes never hide the cause.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ppctl.errors import PpctlError, remedy_lines, some
from ppctl.hang.verdict import schedule_of
from ppctl.host.files import open_regular
from ppctl.records.rank_records import RankFailure, RankState
from ppctl.runs.checkpoint_folder import find, step_of
from ppctl.runs.rundir import RunDir

DONE, STOPPED, GO_ON, RESTART, INTERRUPTED, TERMINATED = 0, 75, 76, 77, 130, 143
FINAL = (2, 3, 4)
"""Exit codes of failures that another start would repeat: config, checkpoint, memory."""
RAISED, KILLED, SILENT = "PP-E701", "PP-E702", "PP-E703"

_DEATHS = (KILLED, SILENT)
"""Codes of failures that the rank itself could not write."""
_ECHO_CODES = ("PP-E711", "PP-E709")
"""Codes of errors that another rank's failure causes: a broken channel; a rank that did not come."""
_ECHO = re.compile(
    r"closed by peer|reset by peer|broken pipe|socket closed|connection (was )?(likely )?(closed|refused|aborted|lost)|"
    r"closed the connection|"
    r"remote process (exited|has)|peer .*(died|exited|gone)|store.*(closed|shut ?down)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job ended."""

    exit_code: int
    """The exit code of the launcher."""
    state: str
    """The state of the run, one of the states in status.json."""
    report: str = ""
    """Text for stderr; empty if there is nothing to report."""

    def write(self, run: RunDir, states: Collection[RankState]) -> None:
        """Replace status.json unless it has this outcome already; `states` are the ranks' last states. Warns if it
        cannot be written."""
        try:
            try:
                self._write(run, states)
            except OSError:  # the disk is full, and the heartbeats are not needed any more
                run.forget_heartbeats()
                self._write(run, states)
        except OSError as error:
            print(f"warning: {run.path / 'status.json'} cannot be written: {error.strerror}", file=sys.stderr)

    def _write(self, run: RunDir, states: Collection[RankState]) -> None:
        status = run.status()
        if status["state"] != self.state or self.report:
            step = status.get("step")
            if status["state"] != self.state:  # else the ranks have written the last step themselves
                step = max((state.step for state in states), default=step)
            line = self.report.partition("\n")[0]
            run.write_status(self.state, step=step, exit_code=self.exit_code, message=line)


def terminated(run: RunDir, who: str) -> JobOutcome:
    """The outcome of a job that was ended from outside; its text says whether work since the last save is lost."""
    report = f"terminated: {who} before all had saved"
    with suppress(PpctlError, OSError):
        last = find(run.checkpoints)
        if last is not None and step_of(last.path) >= run.read_config().train.steps:
            report = f"terminated after the last save, {last.path.name}: only result.json and its samples are missing"
    return JobOutcome(TERMINATED, "interrupted", report)


@dataclass(frozen=True, slots=True)
class Exit:
    """How one rank's process ended."""

    rank: int
    returncode: int
    """Negative for a signal."""
    time: float
    """When the launcher noticed it, in seconds since the epoch."""
    ended: bool
    """Whether the launcher had begun to end the job: then the return code means nothing."""


def failures(exits: Sequence[Exit], errors: Sequence[RankFailure]) -> list[RankFailure]:
    """Every rank's failure, the first cause first: from error records, and from exits of ranks without a record."""
    recorded = {error.rank: error for error in errors}
    died = [_from_exit(e) for e in exits if e.returncode and not e.ended and e.rank not in recorded]
    # If there are only echoes, an echo that names the broken connection comes first.
    return sorted([*recorded.values(), *died], key=lambda f: (is_echo(f), is_echo(f) and not f.ends, f.time))


def is_echo(failure: RankFailure) -> bool:
    """Whether a failure looks like a consequence of another rank's."""
    return failure.code not in _DEATHS and (failure.code in _ECHO_CODES or bool(_ECHO.search(failure.message)))


def _from_exit(end: Exit) -> RankFailure:
    if end.returncode < 0:
        number = -end.returncode
        message = f"killed by signal {number} ({signal.Signals(number).name})"
        return RankFailure(end.rank, message, code=KILLED, time=end.time)
    message = f"the process left with exit code {end.returncode} and gave no reason"
    return RankFailure(end.rank, message, code=SILENT, time=end.time)


def _text(failure: RankFailure) -> str:
    """The text of a failure: the exception or the signal on the first line, perhaps more lines."""
    code = failure.code or RAISED
    message = failure.message.removeprefix(f"{code}: ")
    if code == RAISED:
        message = ": ".join(filter(None, [failure.type, message]))
    return "\n".join(filter(None, [message, failure.place]))


def place(run: RunDir, state: RankState | None) -> tuple[int | None, str | None]:
    """(stage, the rank's activity) from the rank's state and the run's plan; (None, None) without a state."""
    if state is None:
        return None, None
    if state.index < 0:
        return None, f"while {state.state}"
    with suppress(Exception):  # the plan may be damaged; the report is printed nevertheless
        plan = run.read_plan()
        row = schedule_of(plan, state).actions[plan.for_rank(state.rank).pp_rank]
        if state.index >= len(row):
            return row[-1].stage, f"after {row[-1]}"
        return row[state.index].stage, f"in {row[state.index]}"
    return None, f"in action {state.index}"


def report(run: RunDir, found: Sequence[RankFailure], states: Mapping[int, RankState], world_size: int) -> str:
    """The text for the terminal: the first failure, where its log is, and one line about the other ranks."""
    first = found[0]
    code, state = first.code or RAISED, states.get(first.rank)
    stage, doing = _where(run, first, state)
    what, *more = _text(first).splitlines() or [""]
    owner = f"rank {first.rank}" + (f" (stage {stage})" if stage is not None else "")
    failed = f"failed {doing}" if doing else "failed"
    lines = [f"error {code}: {owner} {failed}: {what}", *(f"  {line}" for line in more)]
    frames = [line.strip() for line in first.traceback.splitlines() if line.startswith("  File ")]
    lines += [f"  {frame}" for frame in frames[-1:] if code == RAISED]
    lines += remedy_lines(first.remedy)
    if first.ends:
        lines.append(f"  {_between(run, first.ends)}")
    lines += [f"error {problem}" for problem in first.others]
    stepping = state is not None and (state.index >= 0 or state.state == "updating")
    step = f"at step {state.step + 1}; " if state is not None and stepping else ""
    lines.append(f"  {step}its log: {run.log(first.rank)}")
    if run.flight_records():
        lines.append(f"  torch's flight records: {run.flight_records()[0].parent}/flight_recorder_*")
    if code == SILENT:
        lines += [f"  | {line}" for line in _last_lines(run, first.rank)]
    if code == KILLED:
        lines.append("  if nobody sent that signal: the kernel sends SIGKILL when memory is short (see dmesg)")
    if world_size > 1:
        lines.append(f"  {_other_ranks(found[1:], world_size)}")
    return "\n".join([*lines, f"  more: ppctl explain {code}"])


def _where(run: RunDir, first: RankFailure, state: RankState | None) -> tuple[int | None, str | None]:
    """(stage, activity) from a rank's error record, or from its state if the record has none."""
    if first.action is not None:
        return first.stage, f"in {first.action}"
    if first.code not in _DEATHS and state is not None and state.index >= 0:
        return first.stage, None  # it failed outside its list, although the state still shows the last action
    return place(run, state)


def _between(run: RunDir, ends: Sequence[int]) -> str:
    hosts = dict(enumerate(run.edges().get("hosts", ())))
    named = [f"rank {rank}" + (f" on {hosts[rank]}" if rank in hosts else "") for rank in ends]
    return f"the connection from {' to '.join(named)} broke before any rank had reported a failure"


def _other_ranks(later: Sequence[RankFailure], world_size: int) -> str:
    if not later:
        return f"the other {world_size - 1} ranks were ended" if world_size > 2 else "the other rank was ended"
    firsts = [(failure.rank, _text(failure).partition("\n")[0]) for failure in later]
    shown = [f"rank {rank} ({line if len(line) <= 80 else line[:77] + '...'})" for rank, line in firsts]
    return f"followed by {some(shown, 3)}"


def _last_lines(run: RunDir, rank: int) -> list[str]:
    try:
        with open_regular(run.log(rank), follow=False) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-3:]
