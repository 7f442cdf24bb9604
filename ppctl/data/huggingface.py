"""Tokenizers of a Hugging Face directory: its tokenizer.json, read by the `tokenizers` library.

Knows the files of such a directory. Must not know corpora. The library is an extra, imported here alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppctl.data.tokenizer import Document, Pieces, Tokens, token_dtype
from ppctl.errors import ConfigError, DataError, Problem
from ppctl.files import MOST_READ_OF_A_MODEL, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class HuggingFaceTokenizer:
    """Encodes as the directory's own pipeline does: the tokens that it puts around every text (a bos, say) included.

    `eos` is the `eos_token` of tokenizer_config.json or special_tokens_map.json; where neither names one, the only
    special token that is usual for it.
    """

    def __init__(self, library: Library, eos: int | None) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self.eos = eos
        self.vocab_size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._dtype = token_dtype(self.vocab_size)

    @classmethod
    def open(cls, path: Path) -> HuggingFaceTokenizer:
        """Read `path`, a directory or a tokenizer.json."""
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as missing:
            install = f"{sys.executable} -m pip install tokenizers"
            message = f"data.tokenizer={path} needs the library tokenizers, which is not installed"
            raise ConfigError(Problem("PP-E410", message, install, "data.tokenizer")) from missing
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            library = Library.from_str(read_text(file, MOST_READ_OF_A_MODEL))
        except OSError as error:
            message = f"data.tokenizer={path}: {error.strerror or error}; it is `byte`, or a directory with a file"
            raise DataError(
                Problem("PP-E410", f"{message} tokenizer.json", "data.tokenizer=byte", place=str(file))
            ) from None
        except Exception as error:  # the library raises Exception itself
            message = f"data.tokenizer={path}: it is no tokenizer.json: {_first_line(error)}"
            raise DataError(Problem("PP-E410", message, "data.tokenizer=byte", place=str(file))) from None
        return cls(library, _find_eos(library, file.parent))

    @property
    def marks(self) -> list[str]:
        """The texts of its special tokens, those first that usually end a document."""
        special = _special(self._library)
        return [token for token in _USUAL_ENDS if token in special] + sorted(special - {*_USUAL_ENDS})

    @property
    def end_token(self) -> str | None:
        """The text of `eos`, as the tokenizer's files write it."""
        text: str | None = None if self.eos is None else self._library.id_to_token(self.eos)
        return text

    def encode_documents(self, documents: Sequence[Document]) -> list[Tokens]:
        """The ids of each document, many at a time. Raises DataError naming those that are not UTF-8."""
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
        """The ids of each text, with their characters as the library says them."""
        encoded = self._library.encode_batch(list(texts), add_special_tokens=around)
        found = []
        for one in encoded:
            begins, ends = np.array(one.offsets, dtype=np.int64).reshape(-1, 2).T
            found.append(Pieces(np.array(one.ids, dtype=self._dtype), begins, ends))
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens; ids beyond the vocabulary have none."""
        known = [int(token) for token in ids if 0 <= token < self.vocab_size]
        text: str = self._library.decode(known, skip_special_tokens=True)
        return text


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _find_eos(library: Library, directory: Path) -> int | None:
    for name in _SETTINGS:
        token = _eos_token(directory / name)
        if token is not None:
            number: int | None = library.token_to_id(token)
            return number
    special = _special(library)
    usual = [token for token in _USUAL_ENDS if token in special]
    end: int | None = library.token_to_id(usual[0]) if len(usual) == 1 else None
    return end


def _special(library: Library) -> set[str]:
    return {token.content for token in library.get_added_tokens_decoder().values() if token.special}


def _eos_token(file: Path) -> str | None:
    """What the file names as `eos_token`, a text or an object with the text as its content."""
    try:
        settings: Any = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError):
        return None
    token = settings.get("eos_token") if isinstance(settings, Mapping) else None
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None
