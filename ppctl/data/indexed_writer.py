"""Writes Megatron's .bin and .idx, byte for byte as Megatron does for the same tokens; whole, or not at all.

Knows the format's other half (`indexed` reads it) and the order of renames. Must not know text or tokenizers.
"""

from __future__ import annotations

import os
import secrets
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ppctl.data.indexed import CODES, HEADER, MAGIC, VERSION, bin_path, idx_path
from ppctl.data.tokenizer import Tokens
from ppctl.errors import DataError, Problem

_LONGEST = 2**31 - 1
"""Tokens of one document: lengths are written as int32."""


class IndexedWriter:
    """Takes documents in order; both files get their names when the `with` block ends without an exception.

    Until then they are `PREFIX.<random>.tmp` beside them, which an exception removes. The .idx comes last: a .bin
    without one is not read. Raises DataError (PP-E413) where a file of that name is there, unless `overwrite`.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any], *, overwrite: bool = False) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self.code = next(code for code, name in CODES.items() if np.dtype(name) == self.dtype)
        self.tokens = 0
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        if not overwrite:
            _refuse_existing(prefix)
        self._made: list[Path] = []
        """Directories that were not there before, the innermost first."""
        draft = prefix.with_name(f".{prefix.name}.{secrets.token_hex(4)}")
        self._drafts = Path(f"{draft}.bin.tmp"), Path(f"{draft}.idx.tmp")

    @property
    def documents(self) -> int:
        """Documents so far, empty ones too."""
        return len(self._boundaries) - 1

    def __enter__(self) -> IndexedWriter:
        home = self.prefix.parent
        self._made = [folder for folder in (home, *home.parents) if not folder.exists()]
        try:
            home.mkdir(parents=True, exist_ok=True)
            self._stream = open(self._drafts[0], "xb")
        except BaseException:  # a signal may come once the file exists, and __exit__ is not called then
            self._remove_drafts()
            raise
        return self

    def add_document(self, tokens: Tokens, end: Sequence[int] = (), place: str = "") -> None:
        """Append a document and the marks at its end: one sequence, or none where it has no token.

        `place` names it where it is too long for the format (DataError).
        """
        size = len(tokens) + len(end)
        if size > _LONGEST:
            message = f"a document has {size:,} tokens, and a .idx can say {_LONGEST:,} at most"
            raise DataError(Problem("PP-E413", message, place=place))
        if size:
            for piece in (tokens, end):
                self._stream.write(np.ascontiguousarray(piece, dtype=self.dtype).tobytes())
            self._lengths.append(size)
            self.tokens += size
        self._boundaries.append(len(self._lengths))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            with suppress(OSError):  # a full disk refuses the last bytes once more
                self._stream.close()
            self._remove_drafts()

    def _remove_drafts(self) -> None:
        for draft in self._drafts:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        for folder in self._made:
            with suppress(OSError):  # it holds what was published
                folder.rmdir()

    def _publish(self) -> None:
        _sync(self._stream)
        self._stream.close()
        with open(self._drafts[1], "xb") as stream:
            lengths = np.array(self._lengths, dtype="<i4")
            sizes = lengths.astype("<i8") * self.dtype.itemsize
            stream.write(HEADER.pack(MAGIC, VERSION, self.code, len(lengths), len(self._boundaries)))
            stream.write(lengths.tobytes())
            stream.write((np.cumsum(sizes) - sizes).astype("<i8").tobytes())
            stream.write(np.array(self._boundaries, dtype="<i8").tobytes())
            _sync(stream)
        final = bin_path(self.prefix), idx_path(self.prefix)
        final[1].unlink(missing_ok=True)  # there must be no old index beside new tokens
        for draft, path in zip(self._drafts, final, strict=True):
            draft.replace(path)


def _sync(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _refuse_existing(prefix: Path) -> None:
    if prefix.is_file():
        message = f"OUT is the last word, and {prefix} is a file that is there: what is written is OUT.bin and OUT.idx"
        raise DataError(Problem("PP-E413", message, place="command line"))
    there = [str(path) for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]
    if there:
        message = f"{' and '.join(there)} {'is' if len(there) == 1 else 'are'} there already; --overwrite replaces them"
        raise DataError(Problem("PP-E413", message, place="command line"))
