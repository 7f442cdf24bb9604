"""What a rank is doing, and why one failed: the two records that ranks, launcher and commands exchange through files.

Knows their fields and their JSON, in which later versions only add fields: records of older runs are read as well.
Must not know where a record is stored, nor what is concluded from it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

STATES = ("starting", "warming up", "training", "evaluating", "generating", "saving", "done", "updating", "loading")
NO_ACTION = -1
_VERSION = 1


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank is doing."""

    rank: int
    state: str
    """One of STATES."""
    step: int
    """The number of completed steps."""
    index: int
    """Of the current action in the rank's list; the list's length at its end, NO_ACTION outside the list."""
    since: float
    """When this began, in seconds: on the machine's monotonic clock in shared memory, since the epoch in a file."""
    working: bool = False
    """Whether the action has the message that it needs, and computes."""
    stopped: bool = False
    """Whether the process is stopped (SIGSTOP, a debugger), or its host does not publish any more."""
    host: str = ""
    pid: int = 0
    """0 until the rank has opened its record."""

    def to_json(self) -> dict[str, Any]:
        """The rank's row in the file of its host."""
        return {"version": _VERSION, **{name: value for name, value in asdict(self).items() if name != "host"}}

    @classmethod
    def from_json(cls, row: Mapping[str, Any], host: str) -> RankState:
        """Read a row of the file of `host`. Raises KeyError and ValueError where it is not one."""
        return cls(
            rank=int(row["rank"]),
            state=str(row["state"]),
            step=int(row["step"]),
            index=int(row["index"]),
            since=float(row["since"]),
            working=bool(row.get("working")),
            stopped=bool(row.get("stopped")),
            host=host,
            pid=int(row.get("pid", 0)),
        )


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a rank failed: errors/rank-NNNN.json."""

    rank: int
    message: str = ""
    type: str = ""
    """The exception's name; `Hang` for a rank that others have waited for too long."""
    code: str | None = None
    """PP-Exxx; None for an exception that is not ppctl's."""
    time: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    exit_code: int = 1
    stage: int | None = None
    action: str | None = None
    """The action that failed, as the schedule's text has it; None outside the list."""
    place: str = ""
    remedy: str = ""
    others: tuple[str, ...] = ()
    """Further problems that the rank found, each as a text for a person."""
    ends: tuple[int, ...] = ()
    """The global ranks between which a connection broke: sender, receiver."""
    traceback: str = ""
    host: str = ""

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON object."""
        return {"version": _VERSION, **asdict(self), "ends": self.ends or None}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RankFailure:
        """Read a record. Raises KeyError where it names no rank; any other field may be missing."""
        stage, action, code = (record.get(name) for name in ("stage", "action", "code"))
        texts = {
            name: str(record.get(name) or "") for name in ("message", "type", "place", "remedy", "traceback", "host")
        }
        return cls(
            rank=int(record["rank"]),
            code=None if code is None else str(code),
            time=float(record.get("time") or 0.0),
            exit_code=int(record.get("exit_code") or 1),
            stage=None if stage is None else int(stage),
            action=None if action is None else str(action),
            others=tuple(map(str, record.get("others") or ())),
            ends=tuple(map(int, record.get("ends") or ())),
            **texts,
        )
