"""A cache of the tokens of texts: .bin and .idx files in a directory named by a digest of what they depend on.

    CACHE/KEY/tokens/data.bin, data.idx, digest    KEY: of the files' bytes and suffixes, and `form`
    CACHE/KEY/<random>.tmp/                        being written, or left by a killed process: never read
    CACHE/seen/NAME                                the digest of files' bytes, by their paths, sizes and times

One process writes, under a lock of CACHE/KEY, and others wait for it. On a file system without locks several may write,
and the first to rename its directory to `tokens` wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from ppctl import __version__
from ppctl.data.indexed import IndexedWriter, open_indexed
from ppctl.data.text import each_read
from ppctl.data.tokenizer import Tokens
from ppctl.errors import DataError, Problem
from ppctl.host.files import TAKEN, expanded, lock, open_regular, read_text, release, write_atomically
from ppctl.runs.checkpoint_folder import sync

_RULE = 2
"""Raised when ppctl makes other tokens of the same text, or keeps them in another way."""
_FRESH_NS = 2_000_000_000
"""Nanoseconds within which a changed file may change again without a new modification time."""

Progress = Callable[[int], None]
"""A function that takes the number of bytes read since its last call."""
Make = Callable[[Progress], Iterator[tuple[Tokens, str]]]
"""A function that yields the tokens of every document in order, empty ones too, and its place for messages."""


def encoded_once(
    cache: Path | None, files: Sequence[Path], form: Mapping[str, Any], dtype: np.dtype[Any], make: Make
) -> tuple[Tokens, npt.NDArray[np.int64], str]:
    """(all tokens of `files`, the number of each document's tokens, the SHA-256 of all): made by `make` unless they are
    in `cache` (None: only in memory). `form` is all that tokens depend on besides the files' bytes and suffixes. Raises
    DataError (PP-E425) if they cannot be kept, PP-E402 if a file cannot be read, and the errors of `make`."""
    if cache is None:
        pieces = [own for own, _ in make(lambda size: None)]
        tokens = np.concatenate([np.zeros(0, dtype), *pieces]).astype(dtype, copy=False)
        return tokens, np.array([*map(len, pieces)], np.int64), hashlib.sha256(tokens.data).hexdigest()
    try:
        cache = expanded(cache)
        suffixes = [file.suffix for file in files]  # they choose how a file is read
        depends_on = {**form, "ppctl": __version__, "rule": _RULE, "suffixes": suffixes}
        what = json.dumps(depends_on, sort_keys=True) + _content(cache, files)
        home = cache / xxh3_128(what.encode()).hexdigest()
        digest = _kept(home) or _make(home, files, dtype, make)
        indexed = open_indexed(str(home / "tokens/data"))
    except OSError as error:
        message = f"tokens cannot be kept in {cache}: {error.filename or cache}: {error.strerror or error}"
        raise DataError(Problem("PP-E425", message, "data.cache=null", "data.cache")) from error
    ends = np.append(0, np.cumsum(indexed.lengths, dtype=np.int64))[indexed.boundaries]
    return indexed.tokens, np.diff(ends), digest


def _content(cache: Path, files: Sequence[Path]) -> str:
    """The digest of the bytes of `files`, which are read only if they have changed since their digest was noted. A note
    only saves reading: where it cannot be written (`seen` may be another user's) there is none."""
    before, digest = _times(files), xxh3_128()
    noted = cache / "seen" / xxh3_128(json.dumps(before).encode()).hexdigest()
    with suppress(OSError, UnicodeDecodeError):
        return read_text(noted)

    def add(file: Path) -> None:
        with open_regular(file) as stream:
            digest.update(hashlib.file_digest(stream, xxh3_128).digest())

    each_read(files, add)
    if _times(files) == before and max(changed for *_, changed in before) < time.time_ns() - _FRESH_NS:
        with suppress(OSError):
            noted.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(noted, digest.hexdigest())
    return digest.hexdigest()


def _kept(home: Path) -> str:
    """The digest of the tokens in an entry; empty if there is none, or if only a part has outlived a loss of power."""
    with suppress(FileNotFoundError, UnicodeDecodeError):
        digest = read_text(home / "tokens/digest")
        return digest if re.fullmatch("[0-9a-f]{64}", digest) else ""
    return ""


def _make(home: Path, files: Sequence[Path], dtype: np.dtype[Any], make: Make) -> str:
    """Write the tokens, or wait until another process has; returns their digest. Raises OSError, and DataError
    (PP-E402) if files change."""
    home.mkdir(parents=True, exist_ok=True)
    held = lock(home)
    if held == TAKEN:
        print("note: another process tokenizes this data: waiting for it", file=sys.stderr, flush=True)
        held = lock(home, float("inf"))
    final, draft = home / "tokens", home / f"{secrets.token_hex(4)}.tmp"
    try:
        damaged = [final] if final.exists() else []  # asked first: without locks another process may make it now
        if kept := _kept(home):
            return kept
        for left in (*damaged, *(home.glob("*.tmp") if held is not None else ())):
            shutil.rmtree(left, ignore_errors=True)
        before, digest = _times(files), hashlib.sha256()
        with IndexedWriter(draft / "data", dtype) as writer:
            for own, place in make(_told(sum(size for _, size, _ in before), home)):
                writer.add_document(own, place=place)
                digest.update(np.ascontiguousarray(own, dtype).data)
        if _times(files) != before:
            message, place = "files changed while they were tokenized", str(files[0].parent)
            raise DataError(Problem("PP-E402", message, "start again when the data are complete", place))
        write_atomically(draft / "digest", digest.hexdigest())
        sync(draft)
        try:
            os.rename(draft, final)
        except OSError:
            if kept := _kept(home):  # another process has made them, without locks
                return kept
            raise
        sync(home)
        return digest.hexdigest()
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        release(held)


def _times(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """(path, bytes, when it was last changed in ns) of each file. Raises DataError (PP-E402)."""

    def one(file: Path) -> tuple[str, int, int]:
        found = file.stat()
        return os.path.realpath(file), found.st_size, found.st_mtime_ns

    return each_read(files, one)


def _told(total: int, home: Path) -> Progress:
    """Say on stderr that tokenizing begins; returns a function that reports its progress, less and less often."""
    done, began = 0, time.monotonic()
    reported = began
    print(f"note: tokenizing {total:,} bytes once, into {home}", file=sys.stderr, flush=True)

    def read(size: int) -> None:
        nonlocal done, reported
        done, now = done + size, time.monotonic()
        if now - reported >= max(2.0, (now - began) / 20):
            reported = now
            print(f"note: tokenizing: {done / total:.0%} in {now - began:,.0f} s", file=sys.stderr, flush=True)

    return read
