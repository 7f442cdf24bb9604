"""The state of a rank and the cause of a failure: records that ranks, launcher and commands exchange through files.

Later versions only add fields: records of older runs are read as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from ppctl.errors import visible
from ppctl.records.json_reader import Count, Line, read

STATES = (
    *("starting", "warming up", "training", "evaluating", "generating", "saving", "done", "updating", "loading"),
    *("loading kernels", "recording"),
)
"""The states. A state's place here is its number in shared memory, so new states come last."""
NO_ACTION = -1
EXCHANGING_AXES = ("tp", "cp", "ep", "etp")
"""The axes along which ranks exchange within an action."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class RankState:
    """The present work of one rank."""

    rank: Count
    state: Annotated[str, frozenset(STATES)]
    step: Count
    """The number of completed steps."""
    index: Annotated[int, range(-1, 2**31)]
    """Position of the current action in the rank's list; the list's length at its end, NO_ACTION outside the list."""
    since: float
    """When the action or state began, in seconds: monotonic in shared memory, since the epoch in a file."""
    working: bool = False
    """Whether the action has its message, and computes."""
    stopped: bool = False
    """Whether the process is stopped (SIGSTOP, a debugger), or its host does not publish any more."""
    host: str = ""
    pid: Count = 0
    """0 until the rank has opened its record."""
    exchanges: tuple[Count, Count, Count, Count] = (0, 0, 0, 0)
    """How many exchanges the rank has started along each of EXCHANGING_AXES."""

    def to_json(self) -> dict[str, Any]:
        """The rank's entry in the file of its host."""
        return {"version": _VERSION, **{name: value for name, value in asdict(self).items() if name != "host"}}

    @classmethod
    def from_json(cls, row: Mapping[str, Any], host: str) -> RankState:
        """Read an entry of the file of `host`. Raises ValueError if it is no entry of any version."""
        return read(cls, {**row, "host": host})


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a rank failed: errors/rank-NNNN.json."""

    rank: Count
    message: str = ""
    type: str = ""
    """The exception's name; `Hang` for a rank for which others have waited too long."""
    code: Line | None = None
    """PP-Exxx; None for an exception that is not ppctl's."""
    time: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    exit_code: int = 1
    stage: Count | None = None
    action: str | None = None
    """The action that failed, as the schedule's text has it; None outside the list."""
    place: str = ""
    remedy: str = ""
    others: tuple[str, ...] = ()
    """Further problems that the rank found, each as a text for a person."""
    ends: tuple[Count, ...] = ()
    """The global ranks between which a connection broke: sender, receiver."""
    traceback: str = ""
    host: str = ""

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON object, its texts as `visible`: what an exception says may hold any characters, also
        those that no reader of records takes."""
        texts = {name: visible(value) for name, value in asdict(self).items() if isinstance(value, str)}
        others = tuple(map(visible, self.others))
        return {"version": _VERSION, **asdict(self), **texts, "others": others, "ends": self.ends or None}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RankFailure:
        """Read a record; all but the rank may be missing. Raises ValueError if it is no record of any version."""
        return read(cls, {"time": 0.0, **record})
