"""Atomic replacement, size-limited reads and locks of files; output streams whose reader has closed them."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from contextlib import suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import TextIO, TypeVar

from ppctl.errors import Problem, pasted
from ppctl.records.json_reader import parse, read

T = TypeVar("T")

MOST_READ = 2**24
"""The most bytes of a file that is read whole: 16 MiB, far above any layout, schedule, recipe or profile."""

MOST_READ_OF_A_MODEL = 2**28
"""The most bytes of a tokenizer, or of the index of a model's files: 256 MiB."""
ODD = (errno.EINVAL, errno.ELOOP, errno.EFBIG, errno.EISDIR, errno.ENXIO)
"""Numbers of the errors of `read_whole` for a path that is no readable file; a fault of the disk has others."""


def is_file(path: Path | str) -> bool:
    """Whether there is a file at `path`, in which `~` is a home directory; False for an impossible name."""
    try:
        return expanded(path).is_file()
    except OSError:  # the name is too long
        return False


def cache_directory() -> Path:
    """This user's cache directory; it need not exist."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "ppctl"


def nearest_there(path: Path) -> Path:
    """`path`, or the nearest existing directory above it, for `ls` in remedies."""
    return next((each for each in (path, *path.absolute().parents) if os.path.exists(each)), Path("/"))


def unused(path: Path) -> Path:
    """`path` if it does not exist, else the first of `stem-2` to `stem-999` that does not; `path` if all exist."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in range(2, 1000))
    return next((each for each in (path, *numbered) if not os.path.lexists(each)), path)


def expanded(path: Path | str) -> Path:
    """`path` with `~` as a home directory; unchanged, as in bash, if there is no such user."""
    return Path(os.path.expanduser(path))


def read_whole(path: Path | str, most: int = MOST_READ, *, follow: bool = True) -> bytes:
    """All bytes of a regular file (`~`: home). Raises OSError as `open_regular`, and for more than `most` bytes."""
    with open_regular(expanded(path), follow=follow) as file:
        if os.fstat(file.fileno()).st_size <= most and len(data := file.read(most + 1)) <= most:
            return data
    raise OSError(errno.EFBIG, f"it has more than {most} bytes, the most that is read", str(path))


def open_regular(path: Path, *, follow: bool = True) -> BufferedReader:
    """Open a regular file for reading; without `follow` the file must not be a link. Raises OSError with the reason in
    `strerror`; never waits, so that a pipe or a device is refused at once."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "it is a link, not a file", str(path)) from None
        raise
    except ValueError:  # a zero byte, or half of a surrogate pair
        raise OSError(errno.EINVAL, "no file has such a name", str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is no regular file but a device or a pipe", str(path))
    return open(descriptor, "rb")


def read_json(path: Path, kind: type[T], most: int = MOST_READ) -> T:
    """The value of type `kind` in a file of a run or a checkpoint. Raises OSError, and ValueError as `json_reader`."""
    return read(kind, parse(read_whole(path, most, follow=False)))


def read_text(path: Path | str, most: int = MOST_READ) -> str:
    """The text of a regular file in UTF-8, with plain line ends. Raises OSError and UnicodeDecodeError."""
    return read_whole(path, most).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def write_atomically(path: Path, text: str | bytes, *, durable: bool = True, private: bool = False) -> None:
    """Replace the file: write a new one beside it, sync it if `durable`, rename it. After an OSError the old file is
    unchanged. A `private` file can be read by this user alone."""
    # Processes of several hosts, or pods, may write here with one pid.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "xb", opener=partial(os.open, mode=0o600 if private else 0o666)) as file:
            file.write(text if isinstance(text, bytes) else text.encode())
            file.flush()
            if durable:
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def append(path: Path, line: str) -> None:
    """Append `line` in a single write: lines of two writers never mix, and after an OSError no part of it is left."""
    data = line.encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        written = os.write(descriptor, data)
        if written < len(data):
            os.ftruncate(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR) - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


TAKEN = -1


def lock(path: Path, patience: float = 0.0) -> int | None:
    """A descriptor that holds the directory's lock; TAKEN if another process has it; None on file systems without
    locks. Tries again for `patience` seconds: processes that test the lock also hold it for a moment."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return TAKEN
            time.sleep(0.02)
        except OSError:
            os.close(descriptor)
            return None


def release(descriptor: int | None) -> None:
    """Release what `lock` returned."""
    if descriptor not in (None, TAKEN):
        os.close(descriptor)


def refused(error: OSError) -> Problem | None:
    """The problem of a file that the system refuses, or of output that it does not take; None for any other error."""
    if error.filename is not None and error.strerror:
        message = f"{error.filename} cannot be used: {error.strerror}"
        return Problem("PP-E505", message, f"ls -ld {pasted(error.filename)}", str(error.filename))
    if error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG):
        return Problem("PP-E127", f"the output cannot be written: {error.strerror}", "df -h", "stdout")
    return None


def silence(out: TextIO) -> None:
    """Discard further output to `out`, whose reader has closed it, instead of failing at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
