"""Documents to tokens, many at a time, with every problem found on the way.

Knows text files and tokenizers. Must not know what the tokens are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ppctl.data.text import MOST_PROBLEMS, documents
from ppctl.data.tokenizer import Document, Tokenizer, Tokens
from ppctl.errors import DataError, Problem

_MANY = 1024
_MUCH = 4 * 1024 * 1024
"""Documents and bytes that are encoded together: a library may spread them over the processor's cores."""


class Encoded(NamedTuple):
    """A document's tokens, without a mark at its end, and where it stands."""

    tokens: Tokens
    place: str


def encode_files(
    files: list[Path], tokenizer: Tokenizer, progress: Callable[[int], None] = lambda size: None
) -> Iterator[Encoded]:
    """Every document of `files` in order, those without a token too.

    Raises DataError with the problems of all files, the first twenty; what was yielded before is to be thrown away.
    """
    problems: list[Problem] = []
    for batch in _batches(files, problems, progress):
        if not problems:
            try:
                tokens = tokenizer.encode_documents(batch)
            except DataError as error:
                problems += error.problems
                continue
            yield from (Encoded(ids, document.place) for ids, document in zip(tokens, batch, strict=True))
    if problems:
        raise DataError(problems[:MOST_PROBLEMS])


def _batches(
    files: list[Path], problems: list[Problem], progress: Callable[[int], None]
) -> Iterator[Sequence[Document]]:
    """The documents in handy numbers; problems go into `problems`, and twenty of them end it."""
    batch: list[Document] = []
    size = 0
    for document in documents(files, progress):
        if isinstance(document, Problem):
            problems.append(document)
        else:
            batch.append(document)
            size += len(document.text)
        if len(problems) >= MOST_PROBLEMS:
            return
        if len(batch) == _MANY or size >= _MUCH:
            yield batch
            batch, size = [], 0
    yield batch
