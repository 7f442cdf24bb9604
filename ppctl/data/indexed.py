"""Megatron's .bin and .idx: the .bin has the tokens, the .idx the places of documents.

Read by mapping, never loaded; written byte for byte as Megatron does for the same tokens, whole or not at all.

    PREFIX.idx   "MMIDIDX\\0\\0", version 1 (uint64), type code (uint8), S sequences (uint64), D boundaries (uint64);
                 lengths int32[S], first bytes int64[S], and int64[D]: document d is the sequences from D[d] to D[d + 1]
    PREFIX.bin   the tokens of all sequences, one after the other

All numbers are little-endian. A document is one sequence, or several, or none if its text was empty.
"""

from __future__ import annotations

import os
import secrets
import struct
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ppctl.data.text import unreadable
from ppctl.data.tokenizer import Tokens
from ppctl.errors import DataError, Problem, pasted

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, type code, sequences, document boundaries."""
CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Type code -> numpy type. 6 and 7 are floating-point types, which no token has."""

Integers = npt.NDArray[np.integer[Any]]


def bin_path(prefix: str | Path) -> Path:
    """The file with the tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """The file with the lengths and places of sequences and documents."""
    return Path(f"{prefix}.idx")


def as_prefix(path: str) -> str | None:
    """The prefix that `path` is, or that it becomes without .bin or .idx; None if neither file is there."""
    expanded = os.path.expanduser(path)
    bare = expanded[:-4] if expanded.endswith((".bin", ".idx")) else expanded
    return bare if bin_path(bare).exists() or idx_path(bare).exists() else None


@dataclass(frozen=True, eq=False)
class Indexed:
    """One .bin and .idx, mapped. Construct it with `open_indexed`, which checks that both are whole."""

    prefix: str
    tokens: Tokens
    """All sequences, in order."""
    lengths: Integers
    """Tokens of each sequence, int32."""
    boundaries: Integers
    """int64: the first sequence of each document, and at the end the number of sequences."""

    @property
    def num_documents(self) -> int:
        """Documents, empty ones too."""
        return max(len(self.boundaries) - 1, 0)

    def document(self, number: int) -> Tokens:
        """The tokens of a document, of all its sequences."""
        ends = np.cumsum(self.lengths[: int(self.boundaries[number + 1])], dtype=np.int64)
        first = int(self.boundaries[number])
        begin = int(ends[first - 1]) if first else 0
        return self.tokens[begin : int(ends[-1]) if len(ends) else 0]

    def document_at(self, position: int) -> str:
        """The document of the token at `position`, in words."""
        sequence = int(np.searchsorted(np.cumsum(self.lengths, dtype=np.int64), position, side="right"))
        document = int(np.searchsorted(self.boundaries, sequence, side="right")) - 1
        return f"{bin_path(self.prefix)}: document {document}"


def open_indexed(prefix: str) -> Indexed:
    """Map both files of `prefix`. Raises DataError naming the file if one is damaged."""
    idx, bin_ = idx_path(prefix), bin_path(prefix)
    for file, other in ((idx, bin_), (bin_, idx)):
        if not file.exists():
            message = f"{file} is missing, and {other.name} alone cannot be read"
            raise DataError(Problem("PP-E412", message, f"ls -l {pasted(prefix)}.*", place=f"data.path={prefix}"))
    try:
        return _read(prefix, idx, bin_)
    except OSError as error:
        raise DataError(unreadable(error.filename or idx, error)) from error


def _read(prefix: str, idx: Path, bin_: Path) -> Indexed:
    """Map the files as the header describes them. Raises DataError if the header or the size of a file is wrong."""
    size = idx.stat().st_size
    with open(idx, "rb") as stream:
        head = stream.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise _broken(idx, "it does not begin with MMIDIDX, as an index does")
    _, version, code, sequences, boundaries = HEADER.unpack(head)
    if version != VERSION:
        raise _broken(idx, f"it has version {version}, but only {VERSION} is supported")
    if code not in CODES:
        raise _broken(idx, f"its type code {code} is not a token type; these are: {', '.join(map(str, CODES))}")
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if size != expected:
        also = "; multimodal data, with a mode for each sequence, is not read" if size == expected + sequences else ""
        what = f"{sequences:,} sequences and {boundaries:,} boundaries"
        raise _broken(idx, f"it has {size:,} bytes, but {what} make {expected:,}{also}")
    dtype = np.dtype(CODES[code])
    at = HEADER.size
    lengths = _map(idx, "<i4", at, sequences)
    ends = np.cumsum(lengths, dtype=np.int64)
    if sequences and int(lengths.min()) < 0:
        raise _broken(idx, f"sequence {int(np.argmax(lengths < 0))} has {int(lengths.min())} tokens")
    pointers = _map(idx, "<i8", at + 4 * sequences, sequences)
    wrong = pointers != (ends - lengths) * dtype.itemsize
    if wrong.any():
        raise _broken(idx, f"sequence {int(np.argmax(wrong))} does not begin where the one before it ends")
    documents = _map(idx, "<i8", at + 12 * sequences, boundaries)
    if not boundaries or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise _broken(idx, f"its documents do not lead from sequence 0 to the end of its {sequences:,} sequences")
    size, total = bin_.stat().st_size, int(ends[-1]) * dtype.itemsize if sequences else 0
    if size != total:
        raise _broken(bin_, f"it has {size:,} bytes, but {idx.name} says {total:,}")
    return Indexed(prefix, _map(bin_, dtype, 0, size // dtype.itemsize), lengths, documents)


def _map(file: Path, dtype: Any, offset: int, count: int) -> Integers:
    """`count` numbers of a file from byte `offset`; an empty file cannot be mapped."""
    if not count:
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=(count,))


def _broken(file: Path, fault: str) -> DataError:
    place = f"data.path={file}"[:-4]
    return DataError(Problem("PP-E412", f"{file} is damaged: {fault}", f"ls -l {pasted(file)}", place))


# Writing


_LONGEST = 2**31 - 1
"""The most tokens of one document: lengths are written as int32."""


class IndexedWriter:
    """Takes documents in order; both files get their names when the `with` block ends, the .idx last, since a .bin
    without an .idx is not read. Until then they are `.PREFIX.<random>.bin.tmp` and `.idx.tmp`; an exception removes
    them. Raises DataError (PP-E413) if one of the files exists already, unless `overwrite`."""

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
        """Directories that did not exist before, the innermost first."""
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
        """Append a document and its end marks as one sequence, none without a token. Raises DataError if too long."""
        size = len(tokens) + len(end)
        if size > _LONGEST:
            message = f"a document has {size:,} tokens, but a .idx can say {_LONGEST:,} at most"
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
            with suppress(OSError):  # a full disk refuses the last bytes again
                self._stream.close()
            self._remove_drafts()

    def _remove_drafts(self) -> None:
        for draft in self._drafts:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        for folder in self._made:
            with suppress(OSError):  # a directory with published files stays
                folder.rmdir()

    def _publish(self) -> None:
        """Sync both files, then rename .bin before .idx: a reader never sees an index of other tokens."""
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
        final[1].unlink(missing_ok=True)  # an old index must not stand beside new tokens
        for draft, path in zip(self._drafts, final, strict=True):
            draft.replace(path)


def _sync(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _refuse_existing(prefix: Path) -> None:
    if prefix.is_file():
        message = f"the last word must be OUT, for OUT.bin and OUT.idx to be written, but {prefix} is an existing file"
        raise DataError(Problem("PP-E413", message, place="command line"))
    files = [str(path) for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]
    if files:
        message = f"{' and '.join(files)} {'is' if len(files) == 1 else 'are'} there already; --overwrite replaces them"
        raise DataError(Problem("PP-E413", message, place="command line"))
