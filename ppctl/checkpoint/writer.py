"""The writer of a node: a process without torch that hashes, writes and commits what its ranks have copied for it.

    python -m ppctl.checkpoint.writer SOCKET PARENT     started by the node's first rank, before it uses a GPU

A rank connects, and hands over the memory that its copies lie in: a file without a name, so that nothing is left in
/dev/shm however the processes end. Then it calls methods of a `Disk`, one at a time; each rank has a thread here. The
writer ends with its last connection, or when the rank that started it dies. If it dies itself, ranks do its work.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from mmap import PROT_READ, mmap
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NoReturn

from ppctl.checkpoint.disk import Disk, Values
from ppctl.checkpoint.shard_file import Part, file_name
from ppctl.errors import Problem

_HELLO = struct.Struct("<qq")
"""The rank, and the bytes of its memory, whose descriptor comes along."""
_LOOK = 5.0
"""Seconds between looks whether the parent is alive, where the kernel does not say it."""
_NICE = 5
_PR_SET_PDEATHSIG = 1
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""They ask ranks to save and leave: whoever sends them to all processes of a job means the ranks."""


class WriterProcess:
    """The writer of this node, as the rank that starts it sees it. Raises OSError where it cannot be started."""

    def __init__(self) -> None:
        self.address = f"ppctl-writer-{os.getpid()}-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"\0{self.address}")  # in no directory: gone with the processes
            listening.listen(socket.SOMAXCONN)  # ranks can connect from now on
            command = [sys.executable, "-m", "ppctl.checkpoint.writer", str(listening.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                command, pass_fds=[listening.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )


class RemoteDisk:
    """A `Disk` of the writer at `address` (empty: there is none), over the shared memory `descriptor` of `size` bytes.

    If the writer is lost, `warn` gets a problem (PP-E510) once, and from then on this process does the work itself,
    beginning with the call in which it was lost.
    """

    def __init__(self, address: str, rank: int, descriptor: int, size: int, warn: Callable[[Problem], None]) -> None:
        self._own, self._warn, self._rank = Disk(rank), warn, rank
        self._lasting: dict[str, Sequence[Any]] = {}
        """The last arguments of calls that later ones build on."""
        self._connection: Connection | None = None
        if not address:
            return
        try:
            with socket.socket(socket.AF_UNIX) as connected:
                connected.connect(f"\0{address}")
                socket.send_fds(connected, [_HELLO.pack(rank, size)], [descriptor])
                self._connection = Connection(connected.detach())
        except OSError as error:
            self._lose(error)

    def choose(self, all_parts: Sequence[bytes]) -> tuple[bytes, ...]:
        """As of a `Disk`."""
        self._lasting["choose"] = [all_parts]
        own: tuple[bytes, ...] = self._call("choose", all_parts)
        return own

    def hold(self, parts: Sequence[Part], own: bytes) -> None:
        """As of a `Disk`."""
        self._lasting["hold"] = [parts, own]
        self._call("hold", parts, own)

    def prepare(self, directory: Path, step: int) -> None:
        """As of a `Disk`."""
        self._call("prepare", directory, step)

    def write(self, directory: Path, values: Values) -> bytes:
        """`values` are for this process, where it does the work itself."""
        if self._connection is not None:
            try:
                written: bytes = self._ask("write", (directory,))
                return written
            except _Lost as lost:
                self._lose(lost.cause)
                (directory / file_name(self._rank)).unlink(missing_ok=True)
        return self._own.write(directory, values)

    def commit(self, directory: Path, step: int, written: Sequence[bytes], state: bytes) -> Path:
        """As of a `Disk`."""
        path: Path = self._call("commit", directory, step, written, state)
        return path

    def discard(self, path: Path) -> None:
        """As of a `Disk`."""
        self._call("discard", path)

    def retain(self, directory: Path, step: int, keep: int, keep_every: int) -> None:
        """As of a `Disk`."""
        self._call("retain", directory, step, keep, keep_every)

    def close(self) -> None:
        """Let the writer go: no call follows."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _call(self, what: str, *arguments: Any) -> Any:
        if self._connection is not None:
            try:
                return self._ask(what, arguments)
            except _Lost as lost:
                self._lose(lost.cause)
        return getattr(self._own, what)(*arguments)

    def _ask(self, what: str, arguments: Sequence[Any]) -> Any:
        assert self._connection is not None
        try:
            self._connection.send((what, tuple(arguments)))
            done, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise _Lost(error) from error
        if not done:
            raise value
        return value

    def _lose(self, cause: Exception) -> None:
        self.close()
        for what, arguments in self._lasting.items():
            getattr(self._own, what)(*arguments)
        why = f"{cause.strerror}" if isinstance(cause, OSError) and cause.strerror else "its connection was closed"
        message = f"rank {self._rank} has lost the checkpoint writer of {socket.gethostname()}: {why}"
        remedy = "see whether the host ran out of memory (`dmesg`); the run goes on, and the rank writes by itself"
        self._warn(Problem("PP-E510", message, remedy))


class _Lost(Exception):
    """The writer has gone in the middle of a call."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause
        super().__init__(str(cause))


# The writer's own side


class _Connections:
    """How many ranks are connected: the process ends with the last one."""

    def __init__(self) -> None:
        self._lock, self._count = Lock(), 0

    def begin(self) -> None:
        """One more."""
        with self._lock:
            self._count += 1

    def end(self) -> None:
        """One less."""
        with self._lock:
            self._count -= 1
            if self._count == 0:
                os._exit(0)


def main() -> NoReturn:
    """Serve the ranks of this node until they have gone."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    descriptor, parent = map(int, sys.argv[1:3])
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # else the next look finds out
    with suppress(OSError):
        os.nice(_NICE)  # training goes first, where there is no core for both
    listening, connections = socket.socket(fileno=descriptor), _Connections()
    listening.settimeout(_LOOK)
    while os.getppid() == parent:
        with suppress(TimeoutError):
            connected, _ = listening.accept()
            connected.setblocking(True)
            connections.begin()
            Thread(target=_serve, args=(connected, connections), daemon=True).start()
    os._exit(1)


def _serve(connected: socket.socket, connections: _Connections) -> None:
    try:
        with connected:
            if not _is_own(connected):
                return
            hello, descriptors, *_ = socket.recv_fds(connected, _HELLO.size, 1)
            rank, size = _HELLO.unpack(hello)
            memory = mmap(descriptors[0], size, prot=PROT_READ)
            os.close(descriptors[0])
            _answer(Connection(connected.detach()), Disk(rank), memoryview(memory))
    finally:
        connections.end()


def _is_own(connected: socket.socket) -> bool:
    """Whether a process of this user has connected: an abstract address has no permissions."""
    _, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


def _answer(connection: Connection, disk: Disk, memory: memoryview) -> None:
    """Do what the rank asks for until it has gone."""
    values: Values | None = None
    with suppress(EOFError, ConnectionError):
        while True:
            what, arguments = connection.recv()
            try:
                if what == "hold":
                    values = values_in(memory, arguments[0])
                more = (values,) if what == "write" else ()
                answer = True, getattr(disk, what)(*arguments, *more)
            except Exception as error:
                answer = False, error
            try:
                connection.send(answer)
            except (TypeError, AttributeError):  # an error that cannot be pickled
                connection.send((False, RuntimeError(repr(answer[1]))))


def places(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Where the bytes of each part lie in the memory of its rank: [begin, end)."""
    found, end = [], 0
    for part in parts:
        begin = -(-end // _ALIGNED) * _ALIGNED
        end = begin + part.bytes
        found.append((begin, end))
    return found


_ALIGNED = 64


def size_of(parts: Sequence[Part]) -> int:
    """The bytes of that memory; never none."""
    where = places(parts)
    return max(where[-1][1] if where else 0, 1)


def values_in(memory: memoryview, parts: Sequence[Part]) -> Values:
    """The values of parts that lie in `memory`."""
    where = places(parts)
    return lambda number: memory[slice(*where[number])]


if __name__ == "__main__":
    main()
