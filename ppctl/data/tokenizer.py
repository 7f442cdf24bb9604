"""Tokenizers: the protocol of all, and the byte-level one, which encodes any text of any language.

Knows ids and bytes. Must not know corpora or the model's (padded) vocabulary size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ppctl.errors import DataError, Problem

Tokens = npt.NDArray[np.integer[Any]]
"""Token ids as they are kept: in memory as `token_dtype` says, in a mapped file as it was written."""

_SMALL_VOCABULARY = 65500


class Document(NamedTuple):
    """One text, as bytes, and its place for messages."""

    text: bytes
    place: str


class Pieces(NamedTuple):
    """A text's tokens, and where they stand in it."""

    ids: Tokens
    begins: npt.NDArray[np.int64]
    """Position of each token's first character."""
    ends: npt.NDArray[np.int64]
    """The character behind its last; a mark that the text does not hold ends where it begins."""


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def eos(self) -> int | None:
        """The id that ends a document; none where the tokenizer names none."""

    @property
    def marks(self) -> Sequence[str]:
        """Its special tokens as text, those first that usually end a document."""

    def encode_documents(self, documents: Sequence[Document]) -> list[Tokens]:
        """The ids of each document. Raises DataError naming those that it cannot read."""

    def encode_pieces(self, texts: Sequence[str], *, around: bool) -> list[Pieces]:
        """The ids of each text with their places in it; `around`: with the marks that it puts around every text."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, as far as they have one; marks vanish."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type that ids of such a vocabulary are kept in, in memory and in files: Megatron's rule."""
    return np.dtype("<u2" if vocab_size < _SMALL_VOCABULARY else "<i4")


def end_mark(tokenizer: Tokenizer, needed_by: str) -> int:
    """The token that ends a document; DataError where the tokenizer names none."""
    if tokenizer.eos is None:
        message = f"{needed_by} needs a token that ends a document, and the tokenizer names none"
        remedy = f'name it in its tokenizer_config.json, as "eos_token": {json.dumps(next(iter(tokenizer.marks), ""))}'
        if not tokenizer.marks:
            message += ", nor has it a special token that could be named"
            remedy = 'train it again with one: its trainer takes special_tokens=["<|endoftext|>"]'
        raise DataError(Problem("PP-E410", message, remedy, "data.tokenizer"))
    return tokenizer.eos


def tokenizer_path(name: str) -> str | None:
    """Return where the files of `data.tokenizer` are, as a checkpoint remembers them; None for `byte`."""
    return None if name == "byte" else str(Path(name).expanduser().absolute())


class ByteTokenizer:
    """Ids 0..255 are the bytes themselves; three ids beyond them mark documents and padding.

    A model's `vocab_size` must be at least `vocab_size`; the ids between the two are never produced.
    """

    bos = 256
    eos = 257
    pad = 258
    vocab_size = 259
    marks = ()

    def encode(self, text: str) -> list[int]:
        """The ids of `text`'s UTF-8 bytes; a lone surrogate (JSON allows it) keeps its three bytes."""
        return list(text.encode("utf-8", "surrogatepass"))

    def encode_bytes(self, data: bytes) -> Tokens:
        """The ids of raw bytes, one each; not decoded, hence never invalid."""
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def encode_documents(self, documents: Sequence[Document]) -> list[Tokens]:
        """The ids of each document's bytes."""
        return [self.encode_bytes(document.text) for document in documents]

    def encode_pieces(self, texts: Sequence[str], *, around: bool) -> list[Pieces]:
        """The ids of each text's UTF-8 bytes; a character of several bytes is the place of each. No mark is put
        around a text."""
        found = []
        for text in texts:
            ids = self.encode_bytes(text.encode("utf-8", "surrogatepass"))
            begins = np.cumsum((ids & 0xC0) != 0x80, dtype=np.int64) - 1  # bytes that go on with a character: 10xxxxxx
            found.append(Pieces(ids, begins, begins + 1))
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Marks (bos, eos, pad) vanish; invalid UTF-8 and ids without a meaning become U+FFFD."""
        pieces = (self._piece(int(token)) for token in ids)
        return b"".join(pieces).decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        if 0 <= token < 256:
            return bytes((token,))
        return b"" if token in (self.bos, self.eos, self.pad) else "\ufffd".encode()
