"""Text that a tokenizer has read is kept: tokens in a .bin and .idx, in a directory that is named by what they are.

    CACHE/KEY/tokens/data.bin, data.idx, digest    KEY: of the files' bytes, the tokenizer and the form of the data
    CACHE/KEY/<random>.tmp/                        being written, or left by a killed process: never read
    CACHE/seen/NAME                                the digest of files' bytes, by their paths, sizes and times

One process writes, under a lock of CACHE/KEY, and others wait for it. Where a file system has no locks several may
write, and the first to rename its directory to `tokens` has made them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_128

from ppctl import __version__
from ppctl.data.indexed import Indexed, IndexedWriter, open_indexed
from ppctl.errors import DataError, Problem
from ppctl.host.files import TAKEN, cache_directory, lock, open_regular, read_text, write_atomically

AUTO = "auto"
_RULE = 1
"""Raised when ppctl makes other tokens of the same text, or keeps them in another way."""
_PIECE = 2**24
_FRESH_S = 2.0
"""A file that was changed so shortly ago may be changed again without another time."""

Write = Callable[[IndexedWriter, Callable[[int], None]], str]
"""Writes all documents, tells how many bytes it has read since it last did, and returns the tokens' digest."""


class NotKept(Exception):
    """The tokens are not there, and making them takes longer than the caller waits."""


class Cache(NamedTuple):
    """Where tokens are kept."""

    directory: Path | None
    """None: nowhere."""
    most: float = float("inf")
    """Bytes of files that are tokenized if their tokens are not kept."""

    @classmethod
    def of(cls, value: str | None, most: float = float("inf")) -> Cache:
        """Read `data.cache`."""
        own = cache_directory() / "tokens" if value == AUTO else None if value is None else Path(value).expanduser()
        return cls(own, most)

    def check_size(self, files: Sequence[Path]) -> None:
        """Raise NotKept if there is more to tokenize than the caller waits for."""
        if sum(file.stat().st_size for file in files if file.exists()) > self.most:
            raise NotKept

    def tokens(self, files: Sequence[Path], form: Mapping[str, Any], dtype: np.dtype[Any], write: Write) -> Kept:
        """The tokens of `files` in a form, made by `write` unless they are there. `form` is all that they depend on
        besides the files' bytes. Raises DataError: PP-E425 if they cannot be kept, and what `write` raises."""
        assert self.directory is not None
        try:
            what = json.dumps({**form, "ppctl": __version__, "rule": _RULE}, sort_keys=True)
            home = self.directory / xxh3_128(f"{what}\n{self._content(self.directory, files)}".encode()).hexdigest()
            if not (home / "tokens").is_dir():
                self.check_size(files)
                _make(home, files, dtype, write)
            digest = read_text(home / "tokens" / "digest")
        except OSError as error:
            message = f"tokens cannot be kept in {self.directory}: {error.filename}: {error.strerror or error}"
            raise DataError(Problem("PP-E425", message, "data.cache=null", "data.cache")) from error
        return Kept(open_indexed(str(home / "tokens" / "data")), digest)

    def _content(self, directory: Path, files: Sequence[Path]) -> str:
        """The digest of the bytes of `files`, which are read only if none was noted since they have changed."""
        before = _times(files)
        noted = directory / "seen" / xxh3_128("\n".join(before).encode()).hexdigest()
        with suppress(OSError, UnicodeDecodeError):
            if re.fullmatch("[0-9a-f]{32}", text := read_text(noted)):
                return text
        self.check_size(files)
        digest = xxh3_128()
        for file in files:
            with open_regular(file) as stream:
                while piece := stream.read(_PIECE):
                    digest.update(piece)
            digest.update(f"\n{file.stat().st_size}\n".encode())
        if _times(files) == before and max(file.stat().st_mtime for file in files) < time.time() - _FRESH_S:
            noted.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(noted, digest.hexdigest(), durable=False)
        return digest.hexdigest()


NOWHERE = Cache(None)


class Kept(NamedTuple):
    """Tokens that are kept, and their digest."""

    indexed: Indexed
    digest: str


def _make(home: Path, files: Sequence[Path], dtype: np.dtype[Any], write: Write) -> None:
    """Write the tokens, unless another process has. Raises OSError, and DataError (PP-E402) if files change."""
    home.mkdir(parents=True, exist_ok=True)
    held = lock(home)
    if held == TAKEN:
        print("note: another process tokenizes this data: waiting for it", file=sys.stderr, flush=True)
        held = lock(home, float("inf"))
    final, draft = home / "tokens", home / f"{secrets.token_hex(4)}.tmp"
    try:
        for left in home.glob("*.tmp") if held is not None else ():
            shutil.rmtree(left, ignore_errors=True)
        if final.is_dir():
            return
        before = _times(files)
        with IndexedWriter(draft / "data", dtype) as writer:
            told = _Told(files, home)
            digest = write(writer, told)
        if _times(files) != before:
            message = "files changed while they were tokenized"
            raise DataError(Problem("PP-E402", message, "start again when the data are complete", str(files[0].parent)))
        (draft / "digest").write_text(digest)
        with suppress(FileExistsError):
            os.rename(draft, final)
        told.end(writer.tokens)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if held is not None:
            os.close(held)


def _times(files: Sequence[Path]) -> list[str]:
    return [f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]


class _Told:
    """Says on stderr how far tokenizing is: on a terminal every second in one line, else every half minute."""

    def __init__(self, files: Sequence[Path], home: Path) -> None:
        self.total, self.done, self.began = sum(file.stat().st_size for file in files), 0, time.monotonic()
        self._live = sys.stderr.isatty()
        self._every, self._said = 1.0 if self._live else 30.0, self.began
        self._say(f"note: tokenizing {self.total / 1e6:,.1f} MB in {len(files):,} files once, into {home}", "\n")

    def __call__(self, size: int) -> None:
        """Count bytes that were read."""
        self.done += size
        now = time.monotonic()
        if now - self._said >= self._every and self.done:
            self._said, share = now, min(self.done / max(self.total, 1), 1.0)
            left = (now - self.began) * (1 / share - 1)
            self._say(f"note: tokenizing: {share:4.0%}, about {left:,.0f} s left ", "\r" if self._live else "\n")

    def end(self, tokens: int) -> None:
        """Say that the tokens are there."""
        self._say(f"note: {tokens:,} tokens in {time.monotonic() - self.began:.1f} s", "\n")

    def _say(self, text: str, end: str) -> None:
        print(text, end=end, file=sys.stderr, flush=True)
