"""Rows of whole conversations, of which some tokens are trained on.

A row is a sample: one conversation or several, one after the other, then padding that is not trained on.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ppctl.config.schema import DataConfig
from ppctl.config.training_config import LEAVE_OUT, REFUSE
from ppctl.data.conversations import Learned
from ppctl.data.corpus import Corpus, Details, held_out_samples
from ppctl.data.sampler import Ids
from ppctl.data.tokenizer import Tokenizer, Tokens, token_dtype
from ppctl.errors import DataError, Problem


@dataclass(frozen=True, eq=False)
class ConversationRows:
    """Samples of `seq_length` tokens and their labels, each of whole conversations. `digest` (of tokens, learned flags
    and rows) and `description` as in Corpus."""

    conversations: Corpus
    """The tokens of all conversations, one conversation after the other."""
    learned: npt.NDArray[np.bool_]
    """For each token of `conversations`, whether it is trained on."""
    firsts: npt.NDArray[np.int64]
    """[conversations + 1]: the position of each conversation's first token, and the end."""
    rows: Sequence[Sequence[int]]
    """The conversations of each row."""
    seq_length: int
    filling: int
    """The token with which a row is padded."""
    digest: str
    description: str

    @property
    def tokens(self) -> Tokens:
        """All tokens of all conversations."""
        return self.conversations.tokens

    def opening(self) -> Tokens:
        """The tokens of the middle conversation up to its first learned token: a turn to answer."""
        begin, end = self.firsts[(len(self.firsts) - 1) // 2 :][:2]
        return self.tokens[begin : begin + int(self.learned[begin:end].argmax())]

    def num_samples(self, seq_length: int) -> int:
        """The number of rows, which were made for `seq_length`."""
        assert seq_length == self.seq_length
        return len(self.rows)

    def samples(self, ids: Ids, seq_length: int) -> npt.NDArray[np.int64]:
        """The tokens of rows `ids` (any shape), shape [*ids.shape, seq_length + 1], int64."""
        windows = np.full((ids.size, seq_length + 1), self.filling, dtype=np.int64)
        for window, row in zip(windows, ids.flat, strict=True):
            for begin, here in self._parts(int(row)):
                window[begin : begin + here.stop - here.start] = self.tokens[here]
        return windows.reshape(*ids.shape, seq_length + 1)

    def details(self, ids: Ids, seq_length: int) -> Details:
        """Which labels of these rows count, and how far each token is from the first of its conversation."""
        counts = np.zeros((ids.size, seq_length + 1), dtype=np.bool_)
        begins = np.zeros((ids.size, seq_length + 1), dtype=np.int64)
        for counted, begun, row in zip(counts, begins, ids.flat, strict=True):
            end = 0
            for begin, here in self._parts(int(row)):
                end = begin + here.stop - here.start
                counted[begin:end] = self.learned[here]
                begun[begin] = begin
            begun[end : end + 1] = end  # the padding is a document of its own
        places = np.arange(seq_length) - np.maximum.accumulate(begins[:, :-1], axis=-1)
        shape = (*ids.shape, seq_length)
        return Details(counts[:, 1:].reshape(shape), places.reshape(shape))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise DataError (PP-E406) naming the conversation of the first token that the vocabulary lacks."""
        self.conversations.check_vocabulary(vocab_size)

    def split(self, seq_length: int, fraction: float) -> tuple[ConversationRows, ConversationRows]:
        """(rows to train on; rows held out, the last ones). Raises DataError if none is left to train on."""
        number = self.num_samples(seq_length)
        kept = number - held_out_samples(number, fraction, self.description)
        return self._part(0, kept, "trained on"), self._part(kept, number, "held out")

    def _part(self, begin: int, end: int, what: str) -> ConversationRows:
        digest = hashlib.sha256(f"{self.digest} {begin} {end}".encode()).hexdigest()
        description = f"{self.description}, {what}: rows {begin:,} to {end:,}"
        return replace(self, rows=self.rows[begin:end], digest=digest, description=description)

    def _parts(self, row: int) -> list[tuple[int, slice]]:
        """For each conversation in a row: where it begins, and its tokens."""
        parts, begin = [], 0
        for number in self.rows[row]:
            here = slice(int(self.firsts[number]), int(self.firsts[number + 1]))
            parts.append((begin, here))
            begin += here.stop - here.start
        return parts


def make_rows(encoded: Sequence[Learned], description: str, data: DataConfig, tokenizer: Tokenizer) -> ConversationRows:
    """Rows of the conversations `encoded`, several to a row if `data.pack`; leaves out those without a learned token.
    Raises DataError: PP-E421 naming those longer than a row if they are refused, PP-E422 if nothing is learned."""
    seq_length, filling = data.seq_length, tokenizer.eos or 0
    longest = seq_length + 1
    if data.too_long == REFUSE:
        _refuse_long(encoded, longest, seq_length)
    fitting = [one for one in encoded if len(one.tokens) <= longest or data.too_long != LEAVE_OUT]
    kept = [one for one in fitting if one.learned[:longest].any()]
    lost = len(encoded) - len(kept)
    if not kept:
        message = (
            f"there is nothing to train on in {description}: no token of an answer is in a row of {seq_length} tokens"
        )
        raise DataError(Problem("PP-E422", message, f"data.seq_length={2 * seq_length}", description))
    lengths = [min(len(one.tokens), longest) for one in kept]
    dtype = token_dtype(tokenizer.vocab_size)
    tokens = np.concatenate([one.tokens[:longest] for one in kept]).astype(dtype, copy=False)
    learned = np.concatenate([one.learned[:longest] for one in kept])
    firsts = np.array([0, *accumulate(lengths)], dtype=np.int64)
    rows = packed(lengths, longest) if data.pack else [[number] for number in range(len(kept))]
    digest = hashlib.sha256(tokens.tobytes())
    for numbers in (learned, firsts, np.array([*map(len, rows)]), np.array([n for row in rows for n in row])):
        digest.update(numbers.astype("<i8").tobytes())
    digest.update(f"{seq_length} {filling}".encode())
    lines = [
        f"{description}: {len(kept):,} conversations",
        f"{lost:,} left out" if lost else "",
        f"{len(tokens):,} tokens of which {int(learned.sum()):,} are learned",
        f"{len(rows):,} rows of {seq_length} tokens, {len(tokens) / (len(rows) * longest):.0%} full",
    ]
    places = [one.place for one in kept]
    corpus = Corpus(
        tokens, "", description, lambda position: places[int(np.searchsorted(firsts, position, side="right")) - 1]
    )
    text = ", ".join(filter(None, lines))
    return ConversationRows(corpus, learned, firsts, rows, seq_length, filling, digest.hexdigest(), text)


def packed(lengths: Sequence[int], room: int) -> list[list[int]]:
    """The numbers of the conversations in each row of at most `room` tokens: best fit, the longest first, of equal
    lengths the earlier. Each row has its conversations in order; rows are in the order of their first conversations."""
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (room left, row), in order
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        at = bisect_left(left, (lengths[number], 0))
        if at < len(left):
            rest, row = left.pop(at)
        else:
            rest, row = room, len(rows)
            rows.append([])
        rows[row].append(number)
        insort(left, (rest - lengths[number], row))
    return sorted(sorted(row) for row in rows)


def _refuse_long(encoded: Sequence[Learned], longest: int, seq_length: int) -> None:
    """Raise DataError (PP-E421) if a conversation is longer than a row takes."""
    long = [one for one in encoded if len(one.tokens) > longest]
    if not long:
        return
    most = max(len(one.tokens) for one in long)
    message = (
        f"{len(long):,} of {len(encoded):,} conversations are longer than a row of data.seq_length={seq_length}; the "
        f"longest has {most:,} tokens, but a row takes {longest:,} with its last label. data.too_long=cut keeps their "
        "beginnings, data.too_long=leave_out leaves them out"
    )
    places = "\n".join([one.place for one in long[:5]] + ([f"and {len(long) - 5:,} more"] if len(long) > 5 else []))
    raise DataError(Problem("PP-E421", message, f"data.seq_length={most - 1}", places))
