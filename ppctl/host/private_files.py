"""Files that no other user of the machine can reach: in shared memory and in temporary directories.

Any user may take a name there: opening a FIFO hangs, a link leads to another file, a file may be forged. So all files
are in directories of this user alone (mode 0700), with random names unless a later start must find them; an opened file
must be this user's, regular, and no link.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ppctl.errors import ConfigError, Problem
from ppctl.host.processes import boot

NODE_DIRECTORY = "PPCTL_NODE_DIRECTORY"
"""The variable that tells ranks of ppctl's launcher the directory of their start."""
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def shared_memory() -> Path:
    """This machine's shared memory, or the temporary directory if there is none."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def is_own_name(name: str) -> bool:
    """Whether `own_directory` may have given this name on this machine, for this user."""
    return _names().fullmatch(name) is not None


def _prefix() -> str:
    """The prefix of the names. It has this boot's id: machines may share a temporary directory, but not its locks."""
    return f"ppctl-{os.geteuid()}-{boot()[:8]}-"


def _names() -> re.Pattern[str]:
    return re.compile(rf"{_prefix()}[0-9a-f]{{16}}")


@contextmanager
def own_directory(place: Path | None = None) -> Iterator[Path]:
    """A new directory with a random name in `place` (default: the temporary directory), removed at the end. First
    removes what killed processes of this user left in `place`, whose locks are free. Raises ConfigError (PP-E649)
    if the directory cannot be made."""
    try:
        place = place or Path(tempfile.gettempdir())
        _sweep(place)
        path, descriptor = _new(place)
    except OSError as error:
        message = f"a directory for the files of this start cannot be made: {error.strerror}"
        raise ConfigError(Problem("PP-E649", message, "df -hi /dev/shm /tmp", str(place or "TMPDIR"))) from error
    try:
        yield path
    finally:
        _remove(path, descriptor)
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make `path` with mode 0700, and its parent if that is missing. An existing `path` of this user gets mode 0700,
    too. Raises OSError if either is a link, no directory, or another user's; root may own the parent."""
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    above = path.parent.lstat()
    if not stat.S_ISDIR(above.st_mode) or above.st_uid not in (os.geteuid(), 0):
        raise _refused(path.parent)
    with suppress(FileExistsError):
        path.mkdir(0o700)
    os.close(_opened(path, tighten=True))


def open_file(path: Path, flags: int) -> int:
    """A descriptor of a regular file in a directory of this user alone, opened with `flags` as by os.open, without
    waiting. Raises OSError if the file or its directory is another user's, a link or of another type."""
    with _inside(path.parent) as directory:
        descriptor = os.open(path.name, flags | _SAFELY, 0o600, dir_fd=directory)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise _refused(path)


def read(path: Path, most: int) -> bytes:
    """All of the file, opened as `open_file` does. Raises OSError also if it has more than `most` bytes."""
    with open(open_file(path, os.O_RDONLY), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return data


def write(path: Path, data: bytes) -> None:
    """Replace the file atomically, through a file that ends in `.tmp`. Raises OSError."""
    draft = path.with_suffix(".tmp")
    with open(open_file(draft, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.truncate()
        file.write(data)
    with _inside(path.parent) as directory:
        os.replace(draft.name, path.name, src_dir_fd=directory, dst_dir_fd=directory)


def remove(path: Path) -> None:
    """Remove the file if it is there. Raises OSError if its directory is not this user's alone."""
    with suppress(FileNotFoundError), _inside(path.parent) as directory:
        os.unlink(path.name, dir_fd=directory)


def names(directory: Path) -> list[str]:
    """The names in a directory that is this user's alone, sorted. Raises OSError for any other."""
    with _inside(directory) as descriptor:
        return sorted(os.listdir(descriptor))


@contextmanager
def _inside(directory: Path) -> Iterator[int]:
    descriptor = _opened(directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _opened(directory: Path, *, tighten: bool = False) -> int:
    """A descriptor of a directory of this user alone; `tighten` first gives it mode 0700. Raises OSError for others."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | _SAFELY)
    except NotADirectoryError:
        raise _refused(directory) from None
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid():
        if tighten:
            os.fchmod(descriptor, 0o700)
        if tighten or not status.st_mode & 0o077:
            return descriptor
    os.close(descriptor)
    raise _refused(directory)


def _refused(path: Path) -> OSError:
    return PermissionError(errno.EPERM, "it is a link, of another type, or not this user's alone", str(path))


def _new(place: Path) -> tuple[Path, int]:
    """(a new directory in `place`, a descriptor that holds its lock); it is locked before it gets its final name."""
    path = place / f"{_prefix()}{secrets.token_hex(8)}"
    draft = path.with_name(f".{path.name}")
    draft.mkdir(0o700)
    descriptor = _opened(draft)
    _lock(descriptor)
    return draft.rename(path), descriptor


def _lock(descriptor: int) -> bool:
    """Take the directory's lock; False if another process has it, or the file system knows no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sweep(place: Path) -> None:
    with suppress(OSError):  # the place may be writable but not listable
        for path in (place / name for name in filter(_names().fullmatch, os.listdir(place))):
            with suppress(OSError), _inside(path) as descriptor:
                if _lock(descriptor):
                    _remove(path, descriptor)


def _remove(path: Path, descriptor: int) -> None:
    """Empty the open directory, whatever is at `path` by now, and remove `path` if it is an empty directory."""
    shutil.rmtree(".", ignore_errors=True, dir_fd=descriptor)
    with suppress(OSError):
        path.rmdir()
