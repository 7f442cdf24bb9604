"""Keeps a process of an older start from writing: a host that stood still may wake while its run goes on elsewhere.

The file `life` of a run has the name of its newest start. A starter of ranks passes them their start's name and this
file's path.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ppctl.errors import Problem, TrainingError
from ppctl.host.files import read_text

LIFE = "PPCTL_LIFE"
"""The variable with the name of a rank's start, a blank, and the path of `life`."""
_LEASE, _ARRIVAL = 5.0, 60.0
"""Seconds for which a check holds (no start begins sooner after another's ranks were last seen alive), and within which
a name written on another host is seen here."""
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that goes on while the machine is suspended."""
_NONE = "none"
"""Stands for the newest start of a run that has begun none."""
_looked = -_LEASE


def variables(name: str, run: Path) -> Mapping[str, str]:
    """The environment variable that tells a rank its start `name`, with its value."""
    return {LIFE: f"{name} {run / 'life'}"}


def older(told: str | None = None) -> Problem | None:
    """The problem (PP-E779) if the run has begun a later start than `told`, by default this process's; else None."""
    name, _, file = (told or os.environ.get(LIFE, "")).partition(" ")
    try:
        newest = read_text(file) if name else ""
    except FileNotFoundError:
        newest = _NONE if name == _NONE else "another launcher's"
    except (OSError, UnicodeDecodeError):
        return None  # the write that follows reports why
    if newest == name:
        return None
    message = f"start {name} is over, and this process stood still meanwhile: the run's newest is {newest}"
    return Problem("PP-E779", message, "ppctl explain PP-E779", file)


def newest(run: Path) -> str:
    """The newest start of the run, as LIFE has it: from it a process without a start of its own sees that another one
    has begun. Empty if it cannot be read."""
    try:
        return variables(read_text(run / "life"), run)[LIFE]
    except FileNotFoundError:
        return variables(_NONE, run)[LIFE]
    except (OSError, UnicodeDecodeError):
        return ""


def latest(told: str, job: str, run: Path) -> str:
    """The run's newest start if its job is `job` or that of `told`: an agent may have stood by in it. Else `told`."""
    with suppress(OSError, UnicodeDecodeError):
        newest = read_text(run / "life")
        if newest.rpartition(".")[0] in {job, told.partition(" ")[0].rpartition(".")[0]} - {""}:
            return variables(newest, run)[LIFE]
    return told


def check(*, at_once: bool = False) -> None:
    """Raise TrainingError (PP-E779) in a process of an older start. Reads the file `at_once`, else every `_LEASE` s."""
    global _looked
    now = time.clock_gettime(_CLOCK)
    if at_once or now - _looked >= _LEASE:
        if (problem := older()) is not None:
            raise TrainingError(problem)
        _looked = now


def arrive() -> None:
    """Wait until this host sees that this process's start is the newest. Raises TrainingError (PP-E779) if not."""
    until = time.monotonic() + _ARRIVAL
    while older() is not None and time.monotonic() < until:
        time.sleep(0.5)  # every rank polls one file
    check(at_once=True)
