"""What a search for a layout chooses from: decoder layers by stage, and the stage of the MTP layers.

E is in the first stage and L in the last; a stage may hold nothing else, or nothing at all. Knows which candidates are
legal, what a person would write, and what lies one move away. Must not know prices, schedules or memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ppctl.layout.rules import even_counts


class Candidate(NamedTuple):
    """A layout: decoder layers by stage, and the stage of the MTP layers (-1: the model has none)."""

    counts: tuple[int, ...]
    mtp_stage: int

    @property
    def legal(self) -> bool:
        """Whether no decoder layer stands behind the MTP layers."""
        return self.mtp_stage < 0 or not any(self.counts[self.mtp_stage + 1 :])

    def pushed_before(self) -> Candidate:
        """A legal one: what stands behind the MTP layers is spread over the stages before."""
        front, behind = self.counts[: self.mtp_stage + 1], self.counts[self.mtp_stage + 1 :]
        more = even_counts(sum(behind), len(front))
        return self._replace(counts=(*(a + b for a, b in zip(front, more, strict=True)), *(0 for _ in behind)))


@dataclass(frozen=True, slots=True)
class Space:
    """All candidates for a model and a pipeline."""

    num_layers: int
    num_stages: int
    homes: range
    """The stages that may hold the MTP layers: -1 alone where the model has none."""

    def even(self) -> Candidate:
        """As even as can be, MTP in the last stage."""
        return Candidate(even_counts(self.num_layers, self.num_stages), self.homes[-1])

    def plain(self) -> Iterator[Candidate]:
        """What a person would write: some layers beside E and at the end, even shares between, the last few empty."""
        most = min(self.num_layers, -(-self.num_layers // self.num_stages) + 1)
        for home, empty in product(self.homes[-2:], range(3)):
            for first, final in product(range(most + 1), repeat=2):
                middle = self.num_stages - 2 - empty
                if middle < 1 or first + final > self.num_layers:
                    continue
                between = even_counts(self.num_layers - first - final, middle)
                for inner in dict.fromkeys((between, between[::-1])):
                    candidate = Candidate((first, *inner, final, *[0] * empty), home)
                    if candidate.legal:
                        yield candidate

    def moves(self, candidate: Candidate, sources: Iterable[int] | None = None) -> Iterator[Candidate]:
        """One decoder layer from a stage (of `sources`; none: of all) to another, those between shifting; or the MTP
        layers to another stage."""
        counts, home = candidate
        for source in range(self.num_stages) if sources is None else sources:
            if counts[source] == 0:
                continue
            for target in range(self.num_stages):
                if target != source and not 0 <= home < target:
                    moved = list(counts)
                    moved[source] -= 1
                    moved[target] += 1
                    yield Candidate(tuple(moved), home)
        for other in self.homes:
            if other != home and (moved_home := Candidate(counts, other)).legal:
                yield moved_home
