"""Tokenizers: bytes, which encode any text, or a Hugging Face directory's, with the optional package `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from ppctl.errors import ConfigError, DataError, Problem, pip_install
from ppctl.host.files import MOST_READ_OF_A_MODEL, expanded, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

Tokens = npt.NDArray[np.integer[Any]]
"""Token ids in memory, of `token_dtype`, or in a mapped file, of the file's type."""

_SMALL_VOCABULARY = 65500


class Document(NamedTuple):
    """One text, as bytes, and its place for messages."""

    text: bytes
    place: str


class Pieces(NamedTuple):
    """A text's tokens, and their positions in it."""

    ids: Tokens
    begins: npt.NDArray[np.int64]
    """Position of each token's first character."""
    ends: npt.NDArray[np.int64]
    """Position after each token's last character."""
    added: npt.NDArray[np.bool_]
    """Whether each token is a mark that the tokenizer adds to a text."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type of a vocabulary's ids in memory and in files, by Megatron's rule."""
    return np.dtype("<u2" if vocab_size < _SMALL_VOCABULARY else "<i4")


def end_mark(tokenizer: Tokenizer, needed_by: str) -> int:
    """The token that ends a document. Raises DataError if the tokenizer names none."""
    if tokenizer.eos is None:
        message = f"{needed_by} needs a token that ends a document, but the tokenizer names none"
        remedy = f'name it in its tokenizer_config.json, as "eos_token": {json.dumps(next(iter(tokenizer.marks), ""))}'
        if not tokenizer.marks:
            message += " and has no special token that could be named"
            remedy = 'train it again with one: its trainer takes special_tokens=["<|endoftext|>"]'
        raise DataError(Problem("PP-E410", message, remedy, "data.tokenizer"))
    return tokenizer.eos


def tokenizer_path(name: str) -> str | None:
    """Return the absolute path of `data.tokenizer`, for checkpoints; None for `byte`."""
    return None if name == "byte" else str(expanded(name).absolute())


class ByteTokenizer:
    """Ids 0..255 are the bytes themselves; three ids beyond them mark documents and padding. A model may have more
    rows: their ids are never produced."""

    bos = 256
    eos: int | None = 257
    """The id that ends a document; None if a tokenizer names none."""
    pad = 258
    vocab_size = 259
    """One more than the largest id."""
    identity = "byte"
    marks: Sequence[str] = ()
    """Special tokens as text; first the tokens that usually end a document."""

    def encode_bytes(self, data: bytes) -> Tokens:
        """The ids of raw bytes, one each; not decoded, hence never invalid."""
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def encode_documents(self, documents: Sequence[Document]) -> list[Tokens]:
        """The ids of each document's bytes."""
        return [self.encode_bytes(document.text) for document in documents]

    def encode_pieces(self, texts: Sequence[str], *, around: bool) -> list[Pieces]:
        """The ids of each text's UTF-8 bytes, each at its character's place. `around` asks for the marks that a
        tokenizer puts around every text; this one has none."""
        encoded = []
        for text in texts:
            ids = self.encode_bytes(text.encode("utf-8", "surrogatepass"))
            begins = np.cumsum((ids & 0xC0) != 0x80, dtype=np.int64) - 1  # 10xxxxxx: further bytes of a character
            encoded.append(Pieces(ids, begins, begins + 1, np.zeros(len(ids), np.bool_)))
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Marks (bos, eos, pad) vanish; invalid UTF-8 and ids without a meaning become U+FFFD."""
        pieces = (self._piece(int(token)) for token in ids)
        return b"".join(pieces).decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        if 0 <= token < 256:
            return bytes((token,))
        return b"" if token in (self.bos, self.eos, self.pad) else "\ufffd".encode()


_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class HuggingFaceTokenizer:
    """Encodes as the directory's own pipeline does, with the tokens that it puts around every text, such as a bos.
    `eos` is the `eos_token` of its settings; without one, the only special token with a usual name for an end."""

    def __init__(self, library: Library, eos: int | None) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self.eos = eos
        self.vocab_size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._dtype = token_dtype(self.vocab_size)

    @classmethod
    def open(cls, path: Path) -> HuggingFaceTokenizer:
        """Read `path`, a directory or a tokenizer.json. Raises DataError, and ConfigError without the library."""
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as missing:
            message = f"data.tokenizer={path} needs the library tokenizers, which is not installed"
            raise ConfigError(Problem("PP-E410", message, pip_install("tokenizers"), "data.tokenizer")) from missing
        file = path
        try:
            file = expanded(path)
            file = file / "tokenizer.json" if file.is_dir() else file
            library = Library.from_str(read_text(file, MOST_READ_OF_A_MODEL))
        except OSError as error:
            message = f"data.tokenizer={path}: {error.strerror or error}; it must be `byte` or a directory with a file"
            raise DataError(
                Problem("PP-E410", f"{message} tokenizer.json", "data.tokenizer=byte", place=str(file))
            ) from None
        except Exception as error:  # the library raises Exception itself
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            message = f"data.tokenizer={path}: it is no tokenizer.json: {reason}"
            raise DataError(Problem("PP-E410", message, "data.tokenizer=byte", place=str(file))) from None
        return cls(library, _find_eos(library, file.parent))

    @property
    def identity(self) -> str:
        """A text that identifies everything that the tokens depend on."""
        import tokenizers

        return xxh3_128(f"{tokenizers.__version__} {self.eos} {self._library.to_str()}".encode()).hexdigest()

    @property
    def marks(self) -> list[str]:
        """The texts of the tokenizer's special tokens; first the tokens that usually end a document."""
        special = _special(self._library)
        return [token for token in _USUAL_ENDS if token in special] + sorted(special - {*_USUAL_ENDS})

    @property
    def end_token(self) -> str | None:
        """The text of `eos`, as the tokenizer's files write it."""
        text: str | None = None if self.eos is None else self._library.id_to_token(self.eos)
        return text

    def encode_documents(self, documents: Sequence[Document]) -> list[Tokens]:
        """The ids of each document, many at a time. Raises DataError naming the documents that are not UTF-8."""
        texts, problems = [], []
        for document in documents:
            try:
                texts.append(document.text.decode("utf-8"))
            except UnicodeDecodeError as error:
                message = f"not UTF-8 text: {error.reason} at byte {error.start}; only data.tokenizer=byte reads any"
                problems.append(Problem("PP-E411", message, "data.tokenizer=byte", place=document.place))
        if problems:
            raise DataError(problems)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in self._library.encode_batch(texts)]

    def encode_pieces(self, texts: Sequence[str], *, around: bool) -> list[Pieces]:
        """The ids of each text, with the positions that the library gives. `around` asks for the marks that the
        tokenizer puts around every text; a final `eos` among them is left out. The library gives no character to an
        added mark, nor to spaces that it trims: such a token reaches from the end of those before it to its own end."""
        encoded = self._library.encode_batch(list(texts), add_special_tokens=around)
        pieces = []
        for one in encoded:
            begins, ends = np.array(one.offsets, dtype=np.int64).reshape(-1, 2).T
            before = np.append(0, np.maximum.accumulate(ends))[:-1]
            begins, ends = np.where(begins == ends, (before, np.maximum(before, ends)), (begins, ends))
            added = np.array(one.special_tokens_mask, dtype=np.bool_)
            ids = np.array(one.ids, dtype=self._dtype)
            kept = len(ids) - int(len(ids) and added[-1] and ids[-1] == self.eos)
            pieces.append(Pieces(ids[:kept], begins[:kept], ends[:kept], added[:kept]))
        return pieces

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens and ids beyond the vocabulary."""
        known = [int(token) for token in ids if 0 <= token < self.vocab_size]
        text: str = self._library.decode(known, skip_special_tokens=True)
        return text


Tokenizer = ByteTokenizer | HuggingFaceTokenizer
"""Text to ids and back."""


def _find_eos(library: Library, directory: Path) -> int | None:
    for name in _SETTINGS:
        token = named_marks(read_settings(directory / name)).get("eos_token")
        if token is not None:
            number: int | None = library.token_to_id(token)
            return number
    special = _special(library)
    usual = [token for token in _USUAL_ENDS if token in special]
    end: int | None = library.token_to_id(usual[0]) if len(usual) == 1 else None
    return end


def _special(library: Library) -> set[str]:
    return {token.content for token in library.get_added_tokens_decoder().values() if token.special}


def read_settings(file: Path) -> Mapping[str, Any]:
    """The object in a JSON file of a tokenizer's directory; empty if there is none."""
    try:
        settings: Any = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def named_marks(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by their names in files and templates: `bos_token`, `eos_token`, …"""
    marks = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            marks[name] = text
    return marks
