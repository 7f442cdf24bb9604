"""Directories that are this user's alone: made, found unharmed by what strangers put beside them, and swept."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ppctl
from ppctl.errors import ConfigError
from ppctl.host import private_files
from ppctl.host.private_files import make_directory, own_directory
from ppctl.host.processes import boot

PACKAGE = Path(ppctl.__file__).parent
ELSEWHERE = {
    "/dev/shm": {
        "cli/doctor.py": "asks how much room is there",
        "launch/kubernetes_objects.py": "mounts memory there in a pod of its own",
    },
    "tempfile": {},
}
"""What only `private_files` may name, and other files that do, with the reason."""
STRANGER = 65534
PREFIX = f"ppctl-{os.geteuid()}-{boot()[:8]}-"


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """A call that waits for a FIFO's other end fails the test instead of hanging it."""

    def over(number: int, frame: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put(kind: str, path: Path) -> None:
    """Put an entry of this kind at `path`."""
    target = path.with_name(f"target of {path.name}")
    if kind == "fifo":
        os.mkfifo(path, 0o666)
    elif kind == "file":
        path.write_bytes(b"{}")
    elif kind == "link to a file":
        target.write_bytes(b"{}")
        path.symlink_to(target)
    elif kind == "link to a directory":
        target.mkdir(0o700)
        (target / "kept").touch()
        path.symlink_to(target)
    elif kind == "dangling link":
        path.symlink_to(target)
    elif kind == "hard link":
        target.write_bytes(b"{}")
        path.hardlink_to(target)
    elif kind == "directory":
        path.mkdir(0o700)
    elif kind == "open directory":
        path.mkdir()
        path.chmod(0o755)
    elif os.geteuid() == 0:
        (path.mkdir if "directory" in kind else path.touch)()
        path.chmod(0o777)
        os.chown(path, STRANGER, STRANGER)
    else:
        pytest.skip("only root can give a file to another user")


NO_FILES = ["fifo", "link to a file", "dangling link", "hard link", "directory", "another's file"]
NO_DIRECTORIES = ["fifo", "file", "link to a directory", "dangling link", "open directory", "another's directory"]


def test_a_directory_of_ones_own_has_a_name_that_nobody_guesses_and_goes(tmp_path: Path) -> None:
    with own_directory(tmp_path) as one, own_directory(tmp_path) as other:
        assert one != other and one.parent == tmp_path and private_files.is_own_name(one.name)
        assert one.stat().st_mode & 0o777 == 0o700
        (one / "deep" / "er").mkdir(parents=True)
        private_files.write(one / "a.json", b"long and")
        private_files.write(one / "a.json", b"short")
        assert private_files.read(one / "a.json", 5) == b"short" and private_files.names(one) == ["a.json", "deep"]
        with pytest.raises(OSError, match="more than 4 bytes"):
            private_files.read(one / "a.json", 4)
        private_files.remove(one / "a.json")
        private_files.remove(one / "a.json")
        with pytest.raises(FileNotFoundError):
            private_files.read(one / "a.json", 5)
    assert list(tmp_path.iterdir()) == []


def test_the_next_start_sweeps_what_a_killed_one_has_left_and_nothing_that_lives(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from ppctl.host.private_files import own_directory\n"
        "with own_directory(Path(sys.argv[1])) as own:\n"
        "    (own / 'deep').mkdir(); (own / 'deep' / 'file').touch(); print(own, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        with own_directory(tmp_path):
            assert (theirs / "deep" / "file").exists()
        process.kill()
    assert theirs.exists()
    with own_directory(tmp_path) as own:
        assert list(tmp_path.iterdir()) == [own]


def test_starts_that_sweep_at_the_same_time_take_nothing_from_each_other(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from ppctl.host.private_files import own_directory, write\n"
        "for _ in range(150):\n"
        "    with own_directory(Path(sys.argv[1])) as own: write(own / 'file', b'x'); assert own.exists()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    several = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait() for process in several] == [0] * 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [*NO_DIRECTORIES, "another's file"])
def test_what_others_put_under_such_a_name_is_neither_swept_nor_in_the_way(tmp_path: Path, kind: str) -> None:
    put(kind, tmp_path / f"{PREFIX}0123456789abcdef")
    before = sorted(tmp_path.rglob("*"))
    with own_directory(tmp_path):
        pass
    assert sorted(tmp_path.rglob("*")) == before


def test_ten_thousand_such_names_take_no_time(tmp_path: Path) -> None:
    for number in range(10_000):
        os.mkfifo(tmp_path / f"{PREFIX}{number:016x}")
    began = time.monotonic()
    with own_directory(tmp_path):
        pass
    assert time.monotonic() - began < 5.0


def test_a_name_that_only_resembles_one_is_not_swept(tmp_path: Path) -> None:
    others = PREFIX.replace(boot()[:8], "0" * 8)
    for name in (f"{PREFIX}results", f"{PREFIX}0123456789ABCDEF", f"{others}0123456789abcdef"):
        (tmp_path / name).mkdir(0o700)
    with own_directory(tmp_path):
        pass
    assert len(list(tmp_path.iterdir())) == 3


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PP-E649"), own_directory(tmp_path / "missing"):
        pass


@pytest.mark.parametrize("kind", NO_FILES)
def test_only_a_regular_file_of_ones_own_is_opened(tmp_path: Path, kind: str) -> None:
    put(kind, tmp_path / "name")
    for use in (
        lambda: private_files.read(tmp_path / "name", 100),
        lambda: private_files.open_file(tmp_path / "name", os.O_RDWR | os.O_CREAT),
    ):
        with pytest.raises(OSError):
            use()
    assert not (tmp_path / "target of name").exists() or kind != "dangling link"
    put(kind, tmp_path / "draft.tmp")
    with pytest.raises(OSError):
        private_files.write(tmp_path / "draft.json", b"written")
    assert not any(path.is_file() and path.read_bytes() == b"written" for path in tmp_path.iterdir())


@pytest.mark.parametrize("kind", NO_DIRECTORIES)
def test_nothing_is_opened_below_a_directory_that_others_may_enter(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "name"
    put(kind, place)
    before = sorted(tmp_path.rglob("*"))
    for use in (
        lambda: private_files.read(place / "kept", 100),
        lambda: private_files.write(place / "file", b""),
        lambda: private_files.open_file(place / "file", os.O_RDWR | os.O_CREAT),
        lambda: private_files.names(place),
        lambda: private_files.remove(place / "kept"),
    ):
        with pytest.raises(OSError):
            use()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", NO_DIRECTORIES)
@pytest.mark.parametrize("where", ["directory", "parent"])
def test_a_directory_for_later_starts_is_made_or_taken_only_as_ones_own(tmp_path: Path, kind: str, where: str) -> None:
    path = tmp_path / "parent" / "directory"
    if where == "directory":
        path.parent.mkdir()
    place = path if where == "directory" else path.parent
    put(kind, place)
    if kind == "open directory":  # made by an earlier version, perhaps
        make_directory(path)
        assert path.stat().st_mode & 0o777 == 0o700
        return
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError) as error:
        make_directory(path)
    assert str(place) in str(error.value) and sorted(tmp_path.rglob("*")) == before


def test_no_other_module_makes_temporary_files_or_names_shared_memory() -> None:
    found = {name: set() for name in ELSEWHERE}
    for path, text in ((path, path.read_text()) for path in PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(text)) if any(name in text for name in ELSEWHERE) else ():
            told = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            told += [node.module] if isinstance(node, ast.ImportFrom) else []
            told += [node.value] if isinstance(node, ast.Constant) else []
            for name in found.keys() & {each for each in told if isinstance(each, str)}:
                found[name].add(path.relative_to(PACKAGE).as_posix())
    assert found == {name: {"host/private_files.py", *others} for name, others in ELSEWHERE.items()}
