"""What each rank is doing right now: one fixed record per rank in this node's shared memory.

Knows the record's bytes and where the file lies. Must not know schedules or paths of a run: an action is an index into
the rank's own list, and what is published goes to a function that the caller gives. No system call per action.

The record lies outside the run directory and outlives its rank, so that the launcher can say what a rank was doing when
it was killed. Who made it removes it; `sweep` removes what a killed launcher left.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppctl.processes import is_stopped

STATES = ("starting", "warming up", "training", "evaluating", "generating", "saving", "done", "updating", "loading")
NO_ACTION = -1

# mark, owner's pid, own pid, rank, state, step, action index, whether it works on it, monotonic seconds
_RECORD = struct.Struct("=8sqqqqqqqd")
_STATE = struct.Struct("=qqqqd")
_MOVE = struct.Struct("=qqqd")
_OWNER_AT, _PID_AT, _STATE_AT, _STEP_AT = 8, 16, 32, 40
_MARK = b"ppctl-2\0"
_monotonic = time.monotonic


@dataclass(frozen=True, slots=True)
class Beat:
    """One rank's record, read from outside."""

    rank: int
    pid: int
    """0 until the rank has opened its record."""
    state: str
    """One of STATES."""
    step: int
    index: int
    """Index of the action in the rank's list; -1 outside the list."""
    working: bool
    """Whether the action has what it needs; until then it waits for a message."""
    since: float
    """When it began, on this machine's monotonic clock (one for all its processes)."""


class Heartbeat:
    """A rank's own record. `enter` is called before every action: it only writes memory."""

    __slots__ = ("_map", "_path", "step")

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self._path = path
        self._map = memory
        self.step = 0
        """The step that the next `enter` belongs to."""

    @classmethod
    def open(cls, run_id: str, rank: int) -> Heartbeat:
        """Open the record of global `rank`, which the launcher has made; make it where no launcher did."""
        path = create(run_id, rank, owner=os.getpid())
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), _RECORD.size)
        beat = cls(path, memory)
        struct.pack_into("=q", memory, _PID_AT, os.getpid())
        beat.set_state("starting")
        return beat

    def enter(self, index: int) -> None:
        """The action with this index in the rank's list begins, now, and may have to wait for a message.

        The list's length: all is done, and what was sent is waited for.
        """
        _MOVE.pack_into(self._map, _STEP_AT, self.step, index, 0, _monotonic())

    def work(self, index: int) -> None:
        """The action has what it needs: from now on it computes."""
        _MOVE.pack_into(self._map, _STEP_AT, self.step, index, 1, _monotonic())

    def set_state(self, state: str) -> None:
        """The rank is in this one of STATES from now on, and in no action."""
        _STATE.pack_into(self._map, _STATE_AT, STATES.index(state), self.step, NO_ACTION, 0, _monotonic())

    def close(self) -> None:
        """Let go of the record. It is removed here only if no launcher made it."""
        (owner,) = struct.unpack_from("=q", self._map, _OWNER_AT)
        self._map.close()
        if owner == os.getpid():
            self._path.unlink(missing_ok=True)


def directory() -> Path:
    """Where this machine's records lie: shared memory, or the temporary directory where there is none."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _path(run_id: str, rank: int) -> Path:
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", run_id)
    return directory() / f"ppctl-{os.getuid()}-{safe}-{rank}.beat"


def create(run_id: str, rank: int, owner: int) -> Path:
    """Make the record of `rank`, unless it exists, to be removed by process `owner`; returns its path."""
    path = _path(run_id, rank)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(_RECORD.pack(_MARK, owner, 0, rank, 0, 0, NO_ACTION, 0, _monotonic()))
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
    return path


def read(run_id: str, rank: int) -> Beat | None:
    """The record of `rank`, or None where there is none."""
    try:
        data = _path(run_id, rank).read_bytes()
        mark, _, pid, own, state, step, index, working, since = _RECORD.unpack(data)
    except (OSError, struct.error):
        return None
    return Beat(own, pid, STATES[state], step, index, bool(working), since) if mark == _MARK else None


def read_all(run_id: str, ranks: Iterable[int]) -> list[Beat]:
    """The records of `ranks`, those that exist."""
    return [beat for beat in (read(run_id, rank) for rank in ranks) if beat is not None]


def remove(run_id: str, ranks: Iterable[int]) -> None:
    """Remove the records of `ranks`."""
    for rank in ranks:
        _path(run_id, rank).unlink(missing_ok=True)


def leave_word(run_id: str, rank: int, word: Mapping[str, Any]) -> None:
    """Tell the launcher of a failure that could not be written to the run directory: its disk may be full."""
    path = _path(run_id, rank).with_suffix(".word")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(word), encoding="utf-8")
    draft.replace(path)


def words(run_id: str, ranks: Iterable[int]) -> list[dict[str, Any]]:
    """What ranks left with `leave_word`; removed by being read."""
    found = []
    for path in (_path(run_id, rank).with_suffix(".word") for rank in ranks):
        with suppress(OSError, ValueError):
            found.append(json.loads(path.read_text(encoding="utf-8")))
        path.unlink(missing_ok=True)
    return found


def sweep() -> None:
    """Remove this user's records whose owner no longer lives: their launcher was killed."""
    for path in directory().glob(f"ppctl-{os.getuid()}-*.beat"):
        try:
            owner = _RECORD.unpack(path.read_bytes())[1]
        except (OSError, struct.error):
            continue
        if not _lives(owner):
            path.unlink(missing_ok=True)
            path.with_suffix(".word").unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def host_name() -> str:
    """This node's name: SLURM's where it runs us (several of its nodes may share one machine), else the machine's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


Write = Callable[[str, Mapping[str, Any]], None]
"""(host, record) -> nothing: takes what a node publishes. OSError is no reason to end a run."""


class Publisher:
    """One thread that hands all of a node's records to `write(host, record)`: every ten seconds, and when asked."""

    def __init__(self, run_id: str, ranks: Iterable[int], write: Write, every: float = 10.0) -> None:
        self.run_id = run_id
        self.ranks = tuple(ranks)
        self.write = write
        self.every = every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Begin, with a first publication at once."""
        self._thread.start()

    def stop(self) -> None:
        """Publish a last time and end the thread."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self.publish()

    def publish(self) -> None:
        """Publish now. A disk that cannot be written is no reason to end a run: the next one may succeed."""
        now, clock = time.time(), time.monotonic()
        rows = [
            {
                "rank": beat.rank,
                "pid": beat.pid,
                "state": beat.state,
                "step": beat.step,
                "index": beat.index,
                "working": beat.working,
                "since": now - (clock - beat.since),
                "stopped": is_stopped(beat.pid),
            }
            for beat in read_all(self.run_id, self.ranks)
        ]
        with suppress(OSError):
            self.write(host_name(), {"host": host_name(), "time": now, "ranks": rows})

    def _run(self) -> None:
        while True:
            self.publish()
            if self._over.wait(self.every):
                return
