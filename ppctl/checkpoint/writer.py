"""The writer of a node: a process without torch that hashes, writes and commits what its ranks have copied for it.

python -m ppctl.checkpoint.writer SOCKET PARENT started by the node's first rank, before it uses a GPU

A rank connects, and passes the memory in which its copies lie. Unless copies outlive their process (`local_copy`), it
is a file without a name: nothing is left in /dev/shm however the processes end. Then the rank asks for functions of
`disk`, one at a time; the writer has a thread for each rank. It ends with its last connection, or when the rank that
started it dies. If the writer dies, ranks do its work.
"""

from __future__ import annotations

import ctypes
import errno
import hmac
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
from threading import Lock, Thread
from typing import Any, NamedTuple, NoReturn, TypeVar, get_args, get_type_hints

from ppctl.checkpoint import disk
from ppctl.checkpoint.disk import file_name, problems_of
from ppctl.checkpoint.tensor_parts import Values, values_in
from ppctl.errors import CheckpointError, Problem
from ppctl.host.processes import python
from ppctl.records import wire
from ppctl.runs import fence

R = TypeVar("R")

_HELLO = struct.Struct("<qq")
"""A rank, and the bytes of its memory; the memory's descriptor is sent along."""
_LOOK = 5.0
"""Seconds between checks that the parent is alive, where the kernel does not report its death."""
_PATIENCE = 60.0
"""Seconds that the other end has to prove itself: a host may be busy when a run begins."""
_NICE = 5
_PR_SET_PDEATHSIG = 1
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask ranks to save and leave. Ignored here, because schedulers send them to all processes of a job."""


class WriterAddress(NamedTuple):
    """The name of a node's writer (empty: none), and the key by which writer and ranks recognise each other."""

    name: str = ""
    key: bytes = b""


NO_WRITER = WriterAddress()


class WriterProcess:
    """The writer's process, for the rank that starts it. Raises OSError if it cannot be started."""

    def __init__(self, key: bytes = b"") -> None:
        self.address = WriterAddress(f"ppctl-writer-{os.getpid()}-{secrets.token_hex(8)}", key)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"\0{self.address.name}")  # an abstract address, gone with the processes
            listening.listen(socket.SOMAXCONN)  # ranks can connect from now on
            command = [*python("ppctl.checkpoint.writer"), str(listening.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                command, pass_fds=[listening.fileno()], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
        assert self.process.stdin is not None
        with self.process.stdin as key_pipe, suppress(BrokenPipeError):  # ranks will notice that the writer has gone
            key_pipe.write(key)


class NodeWriter:
    """A rank's connection to the writer at `address`, with the shared memory `descriptor` of `size` bytes.

    If the writer is lost, or is another user's, `warn` gets a problem (PP-E510) once, and this process does the work
    itself, beginning with the call in which the writer was lost.
    """

    def __init__(
        self, address: WriterAddress, rank: int, descriptor: int, size: int, warn: Callable[[Problem], None]
    ) -> None:
        self.rank, self._warn = rank, warn
        self._connection: Connection | None = None
        if not address.name:
            return
        try:
            with socket.socket(socket.AF_UNIX) as connected:
                connected.connect(f"\0{address.name}")
                _refuse_strangers(connected)
                prove(connected, address.key, b"rank", b"writer")
                socket.send_fds(connected, [_HELLO.pack(rank, size)], [descriptor])
                self._connection = Connection(connected.detach())
        except OSError as error:
            self._lose(error)

    def do(self, what: str, work: Callable[..., R], *arguments: Any) -> R:
        """Return the result of a function of `disk.WORK`; `what` names the work in messages, as an infinitive. Raises
        CheckpointError if the function fails in the writer, and the function's errors if this process calls it."""
        if self._connection is not None:
            number = disk.WORK.index(work.__name__)
            kinds = _CALLS[number]
            try:
                # `write` has one argument more, the values, for this process alone.
                call = wire.packed(kinds, (what, *arguments)[: len(get_args(kinds))])
                self._connection.send_bytes(bytes([number]) + call)
                failed, value = _receive(self._connection, (_RESULTS[number], _PROBLEMS))
            except (EOFError, OSError, wire.Malformed) as error:
                self._lose(error)
                if number == _WRITE:
                    (arguments[1] / file_name(self.rank)).unlink(missing_ok=True)
            else:
                if failed:
                    raise CheckpointError(value)
                result: R = value
                return result
        return work(*arguments)

    def close(self) -> None:
        """Close the connection to the writer; no call may follow."""
        if self._connection is not None:
            with suppress(OSError):  # unsent messages are lost with the writer
                self._connection.close()
            self._connection = None

    def _lose(self, cause: Exception) -> None:
        self.close()
        why = f"{cause.strerror}" if isinstance(cause, OSError) and cause.strerror else "its connection was closed"
        message = f"rank {self.rank} has lost the checkpoint writer of {socket.gethostname()}: {why}"
        see = "see whether the host ran out of memory (`dmesg`)"
        if isinstance(cause, _Stranger):
            see = f"ask the host's administrator about that user (`getent passwd {cause.user}`)"
        self._warn(Problem("PP-E510", message, f"{see}; the run goes on, and the rank writes by itself"))


# Messages of both sides: a byte with the number of the value's kind, then the value


_MOST = 2**31
"""The most bytes of a message: 2 GiB. The longest has all ranks' parts and reports, about 30 MiB for 2,048 ranks."""
_PROBLEMS = tuple[Problem, ...]


def _kinds_of(name: str) -> tuple[Any, Any]:
    """Return the annotations of the arguments that a call sends, `what` first, and of its result."""
    hints = get_type_hints(getattr(disk, name))
    result = hints.pop("return")
    return tuple.__class_getitem__((str, *(kind for kind in hints.values() if kind != Values))), result


_CALLS, _RESULTS = zip(*map(_kinds_of, disk.WORK), strict=True)
_WRITE = disk.WORK.index("write")


class _Stranger(PermissionError):
    def __init__(self, user: int) -> None:
        self.user = user
        super().__init__(errno.EPERM, f"a process of user {user} was at its address, and got nothing")


def _refuse_strangers(connected: socket.socket) -> None:
    """Close, and raise _Stranger, if the other end is another user's: an abstract address has no permissions."""
    _, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.geteuid():
        connected.close()
        raise _Stranger(user)


def prove(connected: socket.socket, key: bytes, own: bytes, other: bytes) -> None:
    """Show that this end (`own`) knows the key; raise PermissionError unless `other` does, OSError if it is silent. The
    user's number is not enough: in containers that share a network, all users may have the same."""
    drawn = secrets.token_bytes(32)
    connected.settimeout(_PATIENCE)
    connected.sendall(drawn)
    asked = connected.recv(32, socket.MSG_WAITALL)
    connected.sendall(hmac.digest(key, own + asked, "sha256"))
    answer = connected.recv(32, socket.MSG_WAITALL)
    if not hmac.compare_digest(answer, hmac.digest(key, other + drawn, "sha256")):
        raise PermissionError(errno.EPERM, "a process without this start's key was at its address, and got nothing")
    connected.settimeout(None)


def _receive(connection: Connection, kinds: Sequence[Any]) -> tuple[int, Any]:
    """Wait for a message; returns the number of its kind, and its value. Raises EOFError, OSError and Malformed."""
    message = connection.recv_bytes(_MOST)
    if not message or message[0] >= len(kinds):
        raise wire.Malformed(f"a message of kind {message[:1]!r}")
    return message[0], wire.unpacked(kinds[message[0]], message[1:])


# The writer's own side


class _Connections:
    """The number of open connections. The process ends when a rank has been served and the last connection closes."""

    def __init__(self) -> None:
        self._lock, self._count, self.has_served = Lock(), 0, False

    def begin(self) -> None:
        """Count a new connection."""
        with self._lock:
            self._count += 1

    def end(self) -> None:
        """Count a closed connection; the last one ends the process if a rank has been served."""
        with self._lock:
            self._count -= 1
            if self._count == 0 and self.has_served:
                os._exit(0)


def main() -> NoReturn:
    """Serve the ranks of this node until they have gone."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    descriptor, parent = map(int, sys.argv[1:3])
    key = sys.stdin.buffer.read()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # else the next look finds out
    with suppress(OSError):
        os.nice(_NICE)  # training goes first, if there is no core for both
    listening, connections = socket.socket(fileno=descriptor), _Connections()
    listening.settimeout(_LOOK)
    while os.getppid() == parent:
        with suppress(TimeoutError, _Stranger):
            connected, _ = listening.accept()
            _refuse_strangers(connected)
            connections.begin()
            Thread(target=_serve, args=(connected, connections, key), daemon=True).start()
    os._exit(1)


def _serve(connected: socket.socket, connections: _Connections, key: bytes) -> None:
    """Make the calls that a rank sends, until the rank disconnects or sends something else than a call."""
    try:
        with connected, suppress(EOFError, OSError, ValueError, IndexError, struct.error):
            prove(connected, key, b"writer", b"rank")
            connections.has_served = True
            hello, descriptors, *_ = socket.recv_fds(connected, _HELLO.size, 1)
            try:
                rank, size = _HELLO.unpack(hello)
                memory = mmap(descriptors[0], size, prot=PROT_READ)
            finally:
                for each in descriptors:
                    os.close(each)
            with Connection(connected.detach()) as asking:
                _answer(asking, rank, memoryview(memory))
    finally:
        connections.end()


def _answer(asking: Connection, rank: int, memory: memoryview) -> NoReturn:
    """Serve one rank: receive a call of `disk`, send its result (0) or its problems (1), and so on. Ends only by an
    exception of the connection."""
    while True:
        number, (what, *arguments) = _receive(asking, _CALLS)
        try:
            fence.check(at_once=True)
            if number == _WRITE:
                arguments.append(values_in(memory, arguments[2]))
            value = getattr(disk, disk.WORK[number])(*arguments)
            answer = b"\0" + wire.packed(_RESULTS[number], value)
        except Exception as error:
            answer = b"\1" + wire.packed(_PROBLEMS, problems_of(error, what, rank))
        asking.send_bytes(answer)


if __name__ == "__main__":
    main()
