"""Each rank's current state, in a file of this machine's shared memory, and a node's publications of these states.

An action is written as an index into the rank's list, without a system call. The file outlives its rank, and shows the
launcher what a killed rank was doing. It is removed with the start's directory (`private_files.own_directory`).
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppctl.host import private_files
from ppctl.host.processes import is_stopped
from ppctl.records.rank_records import EXCHANGING_AXES, NO_ACTION, STATES, RankFailure, RankState

# mark, pid, rank, state, step, action index, whether it computes, monotonic seconds, exchanges by axis
_RECORD = struct.Struct(f"=8sqqqqqqd{len(EXCHANGING_AXES)}q")
_STATE = struct.Struct("=qqqqd")
_MOVE = struct.Struct("=qqqd")
_COUNT = struct.Struct("=q")
_TIME = struct.Struct("=d")
_PID_AT, _STATE_AT, _STEP_AT, _SINCE_AT, _EXCHANGES_AT = 8, 24, 32, 56, 64
_MARK = b"ppctl-4\0"
_NONE = (0,) * len(EXCHANGING_AXES)
_MOST_BYTES_OF_A_FAILURE = 2**24
_monotonic = time.monotonic


class HeartbeatFile:
    """A rank's own file, mapped into memory. `enter` and `work` are called for every action: they only write memory."""

    __slots__ = ("_exchanges", "_map", "step")

    def __init__(self, directory: Path, rank: int) -> None:
        """Make the file of global `rank` anew in the start's `directory` on this node. Raises OSError."""
        create(directory, rank)
        with open(private_files.open_file(_path(directory, rank), os.O_RDWR), "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        self.step = 0
        """The step that the next `enter` belongs to."""
        self._exchanges = [0] * len(EXCHANGING_AXES)
        struct.pack_into("=q", self._map, _PID_AT, os.getpid())
        self.set_state("starting")

    def enter(self, index: int) -> None:
        """Record that the action with this index in the rank's list begins; it may have to wait for a message. The
        list's length as index means that all actions are done, and the rank waits until its messages are received."""
        _MOVE.pack_into(self._map, _STEP_AT, self.step, index, 0, _monotonic())

    def work(self, index: int) -> None:
        """Record that the action has its message and begins to compute."""
        _MOVE.pack_into(self._map, _STEP_AT, self.step, index, 1, _monotonic())

    def set_state(self, state: str) -> None:
        """Record that the rank enters one of STATES, outside any action."""
        _STATE.pack_into(self._map, _STATE_AT, STATES.index(state), self.step, NO_ACTION, 0, _monotonic())

    def exchange(self, axis: str) -> None:
        """Record that the rank starts an exchange with others along one of EXCHANGING_AXES."""
        place = EXCHANGING_AXES.index(axis)
        self._exchanges[place] += 1
        _COUNT.pack_into(self._map, _EXCHANGES_AT + place * _COUNT.size, self._exchanges[place])

    def since(self) -> float:
        """When the rank entered its state or action, in monotonic seconds. Raises ValueError behind `close`."""
        return float(_TIME.unpack_from(self._map, _SINCE_AT)[0])

    def close(self) -> None:
        """Unmap the file, which stays for readers."""
        self._map.close()


def _path(directory: Path, rank: int, kind: str = "beat") -> Path:
    return directory / f"{rank}.{kind}"


def create(directory: Path, rank: int) -> None:
    """Make the file of `rank`, before its process begins."""
    record = _RECORD.pack(_MARK, 0, rank, 0, 0, NO_ACTION, 0, _monotonic(), *_NONE)
    private_files.write(_path(directory, rank), record)


def read(directory: Path, rank: int) -> RankState | None:
    """The state of `rank`, with monotonic times; None without a valid file."""
    try:
        data = private_files.read(_path(directory, rank), _RECORD.size)
        mark, pid, own, state, step, index, working, since, *exchanges = _RECORD.unpack(data)
    except (OSError, struct.error):
        return None
    if mark != _MARK or not 0 <= state < len(STATES):
        return None
    return RankState(
        own, STATES[state], step, index, since, bool(working), is_stopped(pid), host_name(), pid, tuple(exchanges)
    )


def read_all(directory: Path, ranks: Iterable[int]) -> list[RankState]:
    """The states of all `ranks` that have a valid file."""
    return [state for state in (read(directory, rank) for rank in ranks) if state is not None]


def leave_failure(directory: Path, failure: RankFailure) -> None:
    """Leave the launcher a failure that could not be written to the run directory, whose disk may be full."""
    private_files.write(_path(directory, failure.rank, "failure"), json.dumps(failure.to_json()).encode())


def take_failures(directory: Path, ranks: Iterable[int]) -> list[RankFailure]:
    """The failures that `ranks` left with `leave_failure`; their files are removed."""
    failures = []
    for path in (_path(directory, rank, "failure") for rank in ranks):
        with suppress(OSError, ValueError, LookupError, TypeError):
            failures.append(RankFailure.from_json(json.loads(private_files.read(path, _MOST_BYTES_OF_A_FAILURE))))
            private_files.remove(path)
    return failures


def host_name() -> str:
    """This node's name: SLURM's in a SLURM job (several of its nodes may be one machine), else the machine's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


Write = Callable[[str, Mapping[str, Any]], None]
"""Called with (host, record) for each publication. An OSError does not end the run."""


class Publisher:
    """One thread that publishes the states of a node's ranks by `write`: every ten seconds, and by `publish`."""

    def __init__(self, directory: Path, ranks: Iterable[int], write: Write, every: float = 10.0) -> None:
        self.directory = directory
        self.ranks = tuple(ranks)
        self.write = write
        self.every = every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Begin, with an immediate first publication."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, then publish for the last time."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self.publish()

    def publish(self) -> None:
        """Publish now. A disk that cannot be written does not end the run: the next publication may succeed."""
        now, clock = time.time(), time.monotonic()
        states = read_all(self.directory, self.ranks)
        rows = [replace(state, since=now - (clock - state.since)).to_json() for state in states]
        with suppress(OSError):
            self.write(host_name(), {"host": host_name(), "time": now, "ranks": rows})

    def _run(self) -> None:
        while True:
            self.publish()
            if self._over.wait(self.every):
                return
