"""A blend: samples of one corpus, or of several in fixed proportions, each in an order of its own.

Slot k of quota n comes at (2k + 1) / 2n of the cycle (stride scheduling), so that every stretch of the cycle holds each
corpus in its proportion; the cycle repeats. So the sample at any position of the run takes a few integer operations, as
with one corpus, and every sample of a corpus comes once before any comes again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ppctl.data import sampler
from ppctl.data.conversation_rows import ConversationRows
from ppctl.data.corpus import Corpus, Details
from ppctl.data.sampler import Ids


@dataclass(frozen=True, eq=False)
class Blend:
    """`quotas[i]` of every sum(quotas) samples come from `corpora[i]`; without quotas samples are drawn as from one
    corpus. Sample ids count through all corpora in order."""

    corpora: tuple[Corpus | ConversationRows, ...]
    quotas: tuple[int, ...] | None = None

    @cached_property
    def digest(self) -> str:
        """A digest of the corpora, their order and quotas; for one corpus without a quota its own digest."""
        if len(self.corpora) == 1 and self.quotas is None:
            return self.corpora[0].digest
        parts = [corpus.digest for corpus in self.corpora]
        return hashlib.sha256(" ".join([*parts, str(self.quotas)]).encode()).hexdigest()

    @cached_property
    def description(self) -> str:
        """One line for people."""
        shares = self.quotas or [1] * len(self.corpora)
        total = sum(shares)
        parts = [f"{share / total:.1%} of " if self.quotas else "" for share in shares]
        return " and ".join(f"{part}{corpus.description}" for part, corpus in zip(parts, self.corpora, strict=True))

    def num_samples(self, seq_length: int) -> int:
        """The number of samples of all corpora. Raises DataError if a corpus has no sample."""
        return int(self._firsts(seq_length)[-1])

    def order(
        self, seed: int, first: int, count: int, seq_length: int, sample_order: int = sampler.SAMPLE_ORDER
    ) -> Ids:
        """Sample ids at positions first .. first + count - 1 of a run."""
        if self.quotas is None:
            return sampler.order(seed, first, count, self.num_samples(seq_length), sample_order)
        cycles, slots = np.divmod(np.arange(first, first + count, dtype=np.int64), sum(self.quotas))
        which, turn = self._cycle
        firsts = self._firsts(seq_length)
        ids = np.empty(count, dtype=np.int64)
        for number, quota in enumerate(self.quotas):
            own_slots = which[slots] == number
            positions = cycles[own_slots] * quota + turn[slots[own_slots]]
            size = int(firsts[number + 1] - firsts[number])
            ids[own_slots] = firsts[number] + sampler.draw(sampler.seed_of(seed, number), positions, size, sample_order)
        return ids

    def span(self, seq_length: int) -> int:
        """The number of positions after which every sample of every corpus has come."""
        if self.quotas is None:
            return self.num_samples(seq_length)
        sizes = [corpus.num_samples(seq_length) for corpus in self.corpora]
        return sum(self.quotas) * max(-(-size // quota) for size, quota in zip(sizes, self.quotas, strict=True))

    def samples(self, ids: Ids, seq_length: int) -> npt.NDArray[np.int64]:
        """The windows of samples `ids` (any shape), shape [*ids.shape, seq_length + 1], int64."""
        windows = np.empty((*ids.shape, seq_length + 1), dtype=np.int64)
        for corpus, here, own in self._by_corpus(ids, seq_length):
            windows[here] = corpus.samples(own, seq_length)
        return windows

    def details(self, ids: Ids, seq_length: int) -> Details | None:
        """Which labels of samples `ids` count, and where their documents begin, both [*ids.shape, seq_length]; None if
        marks in the tokens show this."""
        shape = (*ids.shape, seq_length)
        counts, places = np.ones(shape, dtype=np.bool_), np.zeros(shape, dtype=np.int64)
        for corpus, here, own in self._by_corpus(ids, seq_length):
            details = corpus.details(own, seq_length)
            if details is None:
                return None
            counts[here], places[here] = details
        return Details(counts, places)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check each corpus in turn. Raises DataError as `Corpus.check_vocabulary` does."""
        for corpus in self.corpora:
            corpus.check_vocabulary(vocab_size)

    def split(self, seq_length: int, fraction: float) -> tuple[Blend, Blend]:
        """(samples to train on, samples held out): the same share of each corpus. Raises DataError as `Corpus` does."""
        parts = [corpus.split(seq_length, fraction) for corpus in self.corpora]
        return Blend(tuple(p[0] for p in parts), self.quotas), Blend(tuple(p[1] for p in parts), self.quotas)

    def _by_corpus(
        self, ids: Ids, seq_length: int
    ) -> Sequence[tuple[Corpus | ConversationRows, npt.NDArray[np.bool_], Ids]]:
        """For each corpus: the positions of its samples in `ids`, and their ids in the corpus."""
        firsts = self._firsts(seq_length)
        number = np.searchsorted(firsts, ids, side="right") - 1
        samples = [(corpus, number == i, ids[number == i] - firsts[i]) for i, corpus in enumerate(self.corpora)]
        return [(corpus, here, own) for corpus, here, own in samples if len(own)]

    def _firsts(self, seq_length: int) -> Ids:
        return np.cumsum([0, *(corpus.num_samples(seq_length) for corpus in self.corpora)], dtype=np.int64)

    @cached_property
    def _cycle(self) -> tuple[Ids, Ids]:
        """For each slot of the cycle: its corpus, and how many earlier slots of the cycle that corpus has."""
        assert self.quotas is not None
        times = np.concatenate([(2 * np.arange(quota) + 1) / (2 * quota) for quota in self.quotas])
        which = np.repeat(np.arange(len(self.quotas)), self.quotas)
        turn = np.concatenate([np.arange(quota) for quota in self.quotas])
        by_time = np.argsort(times, kind="stable")  # equal quotients are equal floats: ties go to the earlier corpus
        return which[by_time], turn[by_time]
