"""The corpus: all documents as one array of tokens, in memory or mapped, with the digest that names it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ppctl.data.indexed import as_prefix, bin_path, idx_path, open_indexed
from ppctl.data.sampler import Ids
from ppctl.data.text import READ_LIBRARY, documents, encode_files, matching, names, standard_library
from ppctl.data.token_cache import Progress, encoded_once
from ppctl.data.tokenizer import Tokenizer, Tokens, end_mark, token_dtype
from ppctl.errors import DataError, Problem

WHOLE = 256 * 1024 * 1024
"""Bytes of tokens up to which a mapped file is read through before training, for its digest and its largest token."""
_PAGES, _PAGE = 256, 4096
"""Of a larger file the digest takes this many pages of this many bytes, evenly spread."""


class Details(NamedTuple):
    """Which labels of samples count, and each token's place in its document, if no marks in the tokens show this."""

    counts: npt.NDArray[np.bool_]
    """[..., s]: which labels count."""
    places: npt.NDArray[np.int64]
    """[..., s]: the distance of each token from its document's first token."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of all documents in order; documents of text files have an eos at their end.

    `digest` is the SHA-256 of the ids as little-endian integers of their type's width (of a mapped file larger than
    WHOLE: of its index, its size and pages of it); `description` is one line for people, `place_of` names the document
    that the token at a position belongs to.
    """

    tokens: Tokens
    digest: str
    description: str
    place_of: Callable[[int], str] = str

    def num_samples(self, seq_length: int) -> int:
        """The number of samples of seq_length tokens and their labels. Raises DataError if there is none. Sample i is
        tokens[i * seq_length : (i + 1) * seq_length + 1], whose last token is the next sample's first; a shorter tail
        is left out."""
        number = (len(self.tokens) - 1) // seq_length
        if number < 1:
            tokens, needed = len(self.tokens), f"{seq_length + 1} (its inputs and the label of the last)"
            message = (
                f"the data is too short: {tokens} tokens, but a sample of data.seq_length={seq_length} needs {needed}"
            )
            remedy = f"data.seq_length={tokens - 1}" if tokens > 1 else READ_LIBRARY
            raise DataError(Problem("PP-E404", message, remedy, self.description))
        return number

    def samples(self, ids: Ids, seq_length: int) -> npt.NDArray[np.int64]:
        """The windows of samples `ids` (any shape), shape [*ids.shape, seq_length + 1], int64."""
        window = np.arange(seq_length + 1, dtype=np.int64)
        windows: npt.NDArray[np.int64] = self.tokens[ids[..., None] * seq_length + window].astype(np.int64)
        return windows

    def details(self, ids: Ids, seq_length: int) -> Details | None:
        """None: in text, marks show everything."""
        return None

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise DataError naming the document of the first token that the vocabulary lacks in the first WHOLE bytes."""
        tokens = self.tokens[: WHOLE // self.tokens.dtype.itemsize]
        refuse_beyond(tokens, vocab_size, lambda at: f"{self.place_of(at)} (token {at:,} of its data)")

    def holds(self, token: int) -> bool:
        """Whether `token` is among the tokens of the first WHOLE bytes."""
        return bool((self.tokens[: WHOLE // self.tokens.dtype.itemsize] == token).any())

    def split(self, seq_length: int, fraction: float) -> tuple[Corpus, Corpus]:
        """(samples to train on, at least one held out from the end). Raises DataError if none is left to train on."""
        number = self.num_samples(seq_length)
        first = (number - held_out_samples(number, fraction, self.description)) * seq_length
        return self._part(0, first + 1, "trained on"), self._part(first, number * seq_length + 1, "held out")

    def _part(self, begin: int, end: int, what: str) -> Corpus:
        digest = hashlib.sha256(f"{self.digest} {begin} {end}".encode()).hexdigest()
        description = f"{self.description}, {what}: tokens {begin:,} to {end:,}"
        return replace(
            self,
            tokens=self.tokens[begin:end],
            digest=digest,
            description=description,
            place_of=lambda position: self.place_of(begin + position),
        )


def held_out_samples(number: int, fraction: float, description: str) -> int:
    """How many of `number` samples `fraction` holds out, at least one. Raises DataError if none is left to train on."""
    held_out = max(1, round(number * fraction))
    if held_out >= number:
        message = f"data.validation_split={fraction:g} holds out {held_out} of {number} samples: none is left"
        raise DataError(Problem("PP-E414", message, "data.validation_split=0", place=description))
    return held_out


def load_corpus(path: str | None, tokenizer: Tokenizer, text_key: str = "text", cache: Path | None = None) -> Corpus:
    """Read the documents of one path of `data.path`, or the interpreter's own library for None.

    `path` is the prefix of a .bin and an .idx, or else a glob (`**` recurses) of .txt files, each a document, and of
    .jsonl files and tables, each line or row an object whose `text_key` is a document. Files are read in the order of
    their names; their tokens are kept in `cache`, if there is one. Raises DataError naming each file that is at fault.
    """
    prefix = None if path is None else as_prefix(path)
    if prefix is not None:
        return _mapped(prefix)
    files, description = standard_library() if path is None else matching(path)
    return _encoded(files, tokenizer, description, text_key, cache)


def _encoded(files: list[Path], tokenizer: Tokenizer, description: str, text_key: str, cache: Path | None) -> Corpus:
    """All documents as one array of tokens, each with its end mark. A document's place is looked up in the files when
    needed. Raises DataError (PP-E404) if there is no text."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([end_mark(tokenizer, "text")], dtype=dtype)

    def make(progress: Progress) -> Iterator[tuple[Tokens, str]]:
        for own, place in encode_files(files, tokenizer, progress, text_key):
            yield np.append(own, end).astype(dtype, copy=False) if len(own) else own, place

    form = {"text": text_key, "tokenizer": tokenizer.identity}
    tokens, lengths, digest = encoded_once(cache, files, form, dtype, make)
    if not len(tokens):
        raise DataError(
            Problem("PP-E404", f"there is no text in {description}", remedy=READ_LIBRARY, place=names(files))
        )
    ends = np.cumsum(lengths)

    def place_of(position: int) -> str:
        number = int(np.searchsorted(ends, position, side="right"))
        return next(islice(documents(files, text_key=text_key), number, None)).place

    counts = f"{np.count_nonzero(lengths):,} documents, {len(tokens):,} tokens"
    return Corpus(tokens, digest, f"{description}: {counts}", place_of)


def _mapped(prefix: str) -> Corpus:
    """The corpus of PREFIX.bin and PREFIX.idx, as a memory map. Raises DataError (PP-E404 if it has no token)."""
    indexed = open_indexed(prefix)
    tokens = indexed.tokens
    if not len(tokens):
        message = f"there is no text in {bin_path(prefix)}: {indexed.num_documents:,} documents without a token"
        raise DataError(Problem("PP-E404", message, remedy=READ_LIBRARY, place=str(bin_path(prefix))))
    description = f"{prefix}.bin: {indexed.num_documents:,} documents, {len(tokens):,} tokens"
    return Corpus(tokens, _digest(prefix, tokens), description, indexed.document_at)


def _digest(prefix: str, tokens: Tokens) -> str:
    """Return the digest of a mapped file's tokens, or beyond WHOLE bytes of its index, its size and some pages."""
    if tokens.nbytes <= WHOLE:
        return hashlib.sha256(tokens.data).hexdigest()
    with open(idx_path(prefix), "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    digest.update(str(tokens.nbytes).encode())
    raw = tokens.view(np.uint8)
    for begin in np.linspace(0, len(raw) - _PAGE, _PAGES, dtype=np.int64):
        digest.update(raw[begin : begin + _PAGE].tobytes())
    return digest.hexdigest()


def refuse_beyond(tokens: Tokens, vocab_size: int, place_of: Callable[[int], str]) -> None:
    """Raise DataError (PP-E406) for the first of `tokens` that is negative or not below `vocab_size`; `place_of` names
    its place."""
    if not len(tokens) or (int(tokens.max()) < vocab_size and int(tokens.min()) >= 0):
        return
    at = int(np.argmax((tokens >= vocab_size) | (tokens < 0)))
    largest = int(tokens.max())
    remedy = f"model.vocab_size={-(-(largest + 1) // 64) * 64}" if largest >= vocab_size else READ_LIBRARY
    message = f"the data holds token {int(tokens[at])}, but model.vocab_size={vocab_size} ends at {vocab_size - 1}"
    raise DataError(Problem("PP-E406", message, remedy, place=place_of(at)))
