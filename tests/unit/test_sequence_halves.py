"""Who has which part of a sequence, and that every query sees each of its keys once, whoever has them."""

import random
from itertools import accumulate

import pytest

from ppctl.sequence_halves import Halves, chunk_owners, gathered_blocks, own_blocks, own_lengths, ring_blocks


def tokens(halves: Halves) -> list[int]:
    return [position for half in halves.positions for position in half]


def test_every_rank_has_an_early_and_a_late_chunk() -> None:
    assert [tokens(Halves(rank, 2, 8)) for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert chunk_owners(2) == [(0, 0), (1, 0), (1, 1), (0, 1)]
    order = [list(Halves(rank, 3, 12).positions[half]) for rank, half in chunk_owners(3)]
    assert [position for chunk in order for position in chunk] == list(range(12))


def drawn(rng: random.Random, length: int) -> tuple[int, ...]:
    """Documents of a row: sometimes one, sometimes many, often with ends at the ends of chunks."""
    ends = {length, *rng.sample(range(1, length), rng.choice([0, 1, 2, 5, length - 1]))}
    ends |= {end for end in range(4, length, 4) if rng.random() < rng.choice([0, 0.3])}
    ordered = sorted(ends)
    return tuple(end - begin for begin, end in zip([0, *ordered], ordered, strict=False))


def wanted(row: tuple[int, ...]) -> set[tuple[int, int]]:
    """All (query, key) within the documents of a row."""
    document = [number for number, count in enumerate(row) for _ in range(count)]
    return {(q, k) for q in range(len(document)) for k in range(q + 1) if document[q] == document[k]}


def pairs(blocks, rows: int, queries: list[int], keys: list[int]) -> list[tuple[int, int, int]]:
    """(row, query, key) of blocks over tokens with these positions."""
    found = []
    for block in blocks:
        assert block.rows.stop > block.rows.start and block.queries.stop > block.queries.start
        assert block.keys.stop > block.keys.start and block.queries.stop <= len(queries)
        for row in range(rows)[block.rows]:
            for number, query in enumerate(queries[block.queries]):
                seen = keys[block.keys]
                found += [(row, query, key) for key in (seen[: number + 1] if block.causal else seen)]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_query_sees_each_key_of_its_document_once(ranks: int) -> None:
    rng = random.Random(ranks)
    for _ in range(40):
        length = 8 * ranks
        lengths = tuple(drawn(rng, length) for _ in range(rng.choice([1, 2, 3])))
        if rng.random() < 0.3:
            lengths = lengths[:1] * len(lengths)
        everything = sorted((row, q, k) for row, documents in enumerate(lengths) for q, k in wanted(documents))
        halves = [Halves(rank, ranks, length) for rank in range(ranks)]
        rows, by_ring, by_gather = len(lengths), [], []
        for own in halves:
            mine = tokens(own)
            blocks = own_blocks(own_lengths(lengths, own))
            by_ring += pairs(blocks, rows, mine, mine)
            for source in range(ranks):
                if source != own.rank:
                    blocks = ring_blocks(lengths, own, source)
                    assert len(blocks) <= rows, "one call for a row at most"
                    by_ring += pairs(blocks, rows, mine, tokens(halves[source]))
            apart = own_lengths(lengths, own, apart=True)
            assert all(own.chunk in accumulate(row) for row in apart)
            by_gather += pairs(own_blocks(apart), rows, mine, mine)
            by_gather += pairs(gathered_blocks(lengths, own), rows, mine, list(range(length)))
        assert sorted(by_ring) == everything
        assert sorted(by_gather) == everything


def test_rows_without_documents_are_one_block() -> None:
    whole = ((16,),) * 3
    assert len(own_blocks(own_lengths(whole, Halves(1, 2, 16)))) == 1
    assert len(ring_blocks(whole, Halves(0, 2, 16), 1)) == len(ring_blocks(whole, Halves(1, 2, 16), 0)) == 1
    assert len(gathered_blocks(whole, Halves(0, 2, 16))) == 1  # before its first half is nothing
