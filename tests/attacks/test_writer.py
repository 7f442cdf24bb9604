"""The checkpoint writer and its ranks believe nothing of strangers, and no bytes of anybody run a program."""

from __future__ import annotations

import array  # noqa: F401  descriptors are sent with it, and a stranger may not import
import os
import pickle
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

from ppctl.checkpoint.disk import WORK, prepare
from ppctl.checkpoint.writer import NodeWriter, WriterAddress, WriterProcess, prove
from ppctl.errors import Problem

STRANGER, SIZE = 65534, 4096
HELLO = struct.pack("<qq", 0, SIZE)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


class Harm:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)


def pickled(path: Path) -> bytes:
    """As `multiprocessing.connection` sends it."""
    data = pickle.dumps(Harm(path))
    return struct.pack("!i", len(data)) + data


KEY = bytes(range(32))


def memory() -> int:
    descriptor = os.memfd_create("ppctl-test")
    os.ftruncate(descriptor, SIZE)
    return descriptor


def connected(address: WriterAddress, hello: bytes = HELLO, *, proof: bool = True) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.settimeout(20)
    found.connect(f"\0{address.name}")
    if proof:
        prove(found, address.key, b"rank", b"writer")
        found.settimeout(20)
    if hello:
        descriptor = memory()
        socket.send_fds(found, [hello], [descriptor])
        os.close(descriptor)
    return found


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end answers with nothing, and closes."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def as_stranger(work: Callable[[], bool]) -> int:
    """The process of another user that does `work`; it ends with 0 where that is true."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            os._exit(int(not work()))
        os._exit(2)
    return child


def succeeded(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def writer() -> Iterator[WriterProcess]:
    found = WriterProcess(KEY)
    yield found
    found.process.kill()
    found.process.wait()


def writer_at(address: WriterAddress, warnings: list[Problem]) -> NodeWriter:
    return NodeWriter(address, 0, memory(), SIZE, warnings.append)


def asks(writer: NodeWriter, place: Path, step: int = 1) -> None:
    """The rank asks for a directory to save into."""
    writer.do("write", prepare, place, step)


def works(writer: NodeWriter, place: Path, warnings: list[Problem]) -> bool:
    """Whether the writer does what the rank asks for."""
    asks(writer, place)
    return warnings == [] and [path.name for path in place.iterdir()] == ["step-1.tmp"]


FRAMES = {
    "nothing": b"",
    "garbage": b"GET / HTTP/1.1\r\n\r\n" * 100,
    "a long frame": struct.pack("<BQ", 0, 2**63) + b"x" * 1000,
    "a call that there is not": struct.pack("<BQ", 99, 1) + b"x",
    "a wrong type": struct.pack("<BQQ", 1, 13, 5) + b"[1,2]",
    "half a frame": struct.pack("<BQ", 1, 100) + b"x",
}


@needs_root
@pytest.mark.parametrize("frame", [*FRAMES, "a pickle"])
def test_a_stranger_is_not_listened_to_and_ends_no_writer(frame: str, writer: WriterProcess, tmp_path: Path) -> None:
    """He comes before the first rank."""
    harm = tmp_path / "harm"
    sent = FRAMES.get(frame, pickled(harm))

    def attack() -> bool:
        connection = connected(writer.address, b"", proof=False)
        with suppress(ConnectionError):
            socket.send_fds(connection, [HELLO], [memory()])
            connection.sendall(sent)
        return is_closed(connection)

    assert succeeded(as_stranger(attack))
    warnings: list[Problem] = []
    assert works(writer_at(writer.address, warnings), tmp_path / "c", warnings), warnings
    assert not harm.exists()


@needs_root
def test_a_rank_gives_nothing_to_a_strangers_writer(tmp_path: Path) -> None:
    address, ready = WriterAddress(f"ppctl-test-{os.urandom(8).hex()}", KEY), os.pipe()

    def lie_in_wait() -> bool:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"\0{address.name}")
            listening.listen()
            os.write(ready[1], b"x")
            caught, _ = listening.accept()
            return socket.recv_fds(caught, 1000, 9)[:2] == (b"", [])

    child = as_stranger(lie_in_wait)
    os.read(ready[0], 1)
    warnings: list[Problem] = []
    asking = writer_at(address, warnings)
    assert succeeded(child)
    (warning,) = warnings
    assert warning.code == "PP-E510" and f"user {STRANGER}" in warning.message
    asks(asking, tmp_path)
    assert (tmp_path / "step-1.tmp").is_dir()


def test_no_bytes_of_a_rank_do_more_than_close_its_connection(writer, tmp_path, capfd) -> None:
    warnings: list[Problem] = []
    asking, draw, harm = writer_at(writer.address, warnings), random.Random(4), tmp_path / "harm"
    frames = [*FRAMES.values(), pickled(harm)]
    frames += [draw.randbytes(draw.randrange(1, 40)) for _ in range(30)]
    for number in range(len(WORK)):
        begun = struct.pack("<BQQ", number, 28, 20)
        frames += [begun + b'["%s",%d]' % (b"a\\u0000b" * 2, draw.randrange(9)) + draw.randbytes(3), begun]
    for frame in frames:
        connection = connected(writer.address)
        with suppress(ConnectionError):
            connection.sendall(frame)
            connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)
        connection.close()
    hellos = [HELLO[:5], struct.pack("<qq", 0, -1), struct.pack("<qq", 0, 2**62), struct.pack("<qq", -1, SIZE + 1)]
    for hello in hellos:
        assert is_closed(connected(writer.address, hello))
    without = connected(writer.address, b"")
    without.sendall(HELLO)
    assert is_closed(without)
    assert works(asking, tmp_path / "c", warnings) and not harm.exists()
    asking.close()
    writer.process.wait(20)
    assert capfd.readouterr().err == ""


def answering(answer: bytes, key: bytes = KEY) -> WriterAddress:
    """The address of a writer of this user that answers a call so, and closes."""
    listening = socket.socket(socket.AF_UNIX)
    address = WriterAddress(f"ppctl-test-{os.urandom(8).hex()}", KEY)
    listening.bind(f"\0{address.name}")
    listening.listen()

    def answer_once() -> None:
        with listening, listening.accept()[0] as rank, suppress(OSError):
            prove(rank, key, b"writer", b"rank")
            rank.recv(1000)
            rank.recv(1000)
            rank.sendall(answer)

    Thread(target=answer_once, daemon=True).start()
    return address


@pytest.mark.parametrize("answer", [*FRAMES, "a pickle", "another failure"])
def test_a_rank_works_by_itself_where_the_answer_is_none(answer: str, tmp_path: Path) -> None:
    harm, warnings = tmp_path / "harm", list[Problem]()
    failure = b'["SystemExit",[],[[1]]]'
    sent = struct.pack("<BQQ", 1, 8 + len(failure), len(failure)) + failure
    sent = sent if answer == "another failure" else FRAMES.get(answer, pickled(harm))
    asking = writer_at(answering(sent), warnings)
    asks(asking, tmp_path / "c", 1)
    asks(asking, tmp_path / "c", 2)
    assert [problem.code for problem in warnings] == ["PP-E510"]
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"step-2.tmp"}
    assert not harm.exists()


@pytest.mark.parametrize("own", [b"", b"x" * 32, KEY[:-1]])
def test_processes_of_one_user_who_do_not_share_a_key_give_each_other_nothing(writer, tmp_path, own) -> None:
    """As in two containers on one network, in which everybody is root."""
    with pytest.raises(PermissionError):
        connected(writer.address._replace(key=own))
    warnings: list[Problem] = []
    asks(writer_at(answering(b"", own), warnings), tmp_path / "c")
    assert [problem.code for problem in warnings] == ["PP-E510"] and "key" in warnings[0].message
    reflected = socket.socket(socket.AF_UNIX)
    reflected.connect(f"\0{writer.address.name}")
    for _ in range(2):  # whatever the writer says is said to it
        reflected.sendall(reflected.recv(32))
    assert is_closed(reflected)
    assert works(writer_at(writer.address, warnings), tmp_path / "d", list[Problem]())
