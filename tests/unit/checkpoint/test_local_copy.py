"""Copies in hosts' memory: which are used at a start, who keeps whose, and that nothing else is ever deleted."""

import itertools

import pytest

from ppctl.checkpoint.local_copy import (
    CHANGED,
    Chosen,
    HostCopy,
    LocalCopy,
    LocalRecord,
    Seen,
    choose,
    directory_of,
    hosts_of,
    keepers,
    record_text,
    remove_all,
    see,
    sweep,
    why_none,
)
from ppctl.errors import CheckpointError


def test_the_end_deletes_the_copies_of_ranks_that_an_earlier_start_had(tmp_path):
    directory = tmp_path / "id"
    directory.mkdir(0o700)
    for name in ("rank-00000.values", "rank-00000.json", "rank-00003.kept.values", "rank-00003.json", "rank-00003.tmp"):
        (directory / name).touch()
    remove_all(directory)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(tmp_path):
    for name in ("config.yaml", "rank-00001.values", "rank-1.kept", "rank-00001.kept.json.bak"):
        (tmp_path / name).touch()
    remove_all(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.yaml",
        "rank-00001.kept.json.bak",
        "rank-1.kept",
    ]


def test_copies_of_no_use_give_their_memory_back(tmp_path):
    directory = directory_of(tmp_path, tmp_path / "job")
    assert directory != directory_of(tmp_path, tmp_path / "other" / "job"), "an id that a user chose twice"
    directory.mkdir(0o700)
    for rank in (6, 8, 12345):
        LocalCopy(directory, rank).keep(b"{}")
        LocalCopy(directory, rank, kept=True).values.touch()
    sweep(directory, {"rank-00008.json", "rank-00006.kept.values"})
    assert sorted(path.name for path in directory.iterdir()) == ["rank-00006.kept.values", "rank-00008.json"]


# Which copies a start uses. A row for each host: its name, its ranks, and what lies there as "rank step start".


def seen(*hosts: tuple[str, list[int], str]) -> list[Seen]:
    """What ranks see; `k` behind a rank: kept for a neighbour."""
    found = {}
    for name, ranks, lying in hosts:
        copies = [
            HostCopy(int(rank.rstrip("k")), rank.endswith("k"), int(step), start, f"parts {rank.rstrip('k')}")
            for rank, step, start in (each.split() for each in lying.split(",") if each)
        ]
        found |= {rank: Seen(name, f"parts {rank}", 1, copies, False) for rank in ranks}
    return [found[rank] for rank in range(len(found))]


BOTH = "0 6 a, 1 6 a, 2k 6 a, 3k 6 a"
AFTER = {
    "nobody was lost": ((BOTH, "2 6 a, 3 6 a, 0k 6 a, 1k 6 a"), (6, [(0, False), (1, False), (2, False), (3, False)])),
    "a host was lost": ((BOTH, ""), (6, [(0, False), (1, False), (0, True), (1, True)])),
    "a host was lost, and ranks changed places": (("", BOTH), (6, [(2, False), (3, False), (2, True), (3, True)])),
    "both were lost": (("", ""), None),
    "no neighbour had it": (("0 6 a, 1 6 a", ""), None),
    "between two copies": (
        ("2k 5 a, 3k 5 a, 0 6 a, 1 6 a", "0k 5 a, 1k 5 a"),
        (5, [(2, True), (3, True), (0, True), (1, True)]),
    ),
    "lost between two copies": (("2k 5 a, 3k 5 a, 0 6 a, 1 6 a", ""), None),
    "one neighbour was done": (
        ("0 6 a, 1 6 a, 2k 6 a, 3k 5 a", "2 6 a, 3 6 a, 0k 5 a, 1k 5 a"),
        (6, [(0, False), (1, False), (2, False), (3, False)]),
    ),
    "of two starts": (("0 6 a, 1 6 a, 2k 6 b, 3k 6 b", ""), None),
    "the later of two steps": (
        ("0 6 a, 1 6 a, 2 6 a, 3 6 a, 0 8 b", "1 8 b, 2 8 b, 3 8 b"),
        (8, [(0, False), (3, False), (2, False), (3, False)]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AFTER)
def test_a_start_uses_the_latest_step_of_which_every_rank_has_a_copy_somewhere(case):
    (one, other), expected = AFTER[case]
    chosen = choose(seen(("one", [0, 1], one), ("other", [2, 3], other)))
    assert (None if chosen is None else (chosen.step, chosen.sources)) == expected


def test_a_copy_of_other_parts_or_of_a_rank_that_is_no_more_is_none():
    ranks = seen(("one", [0], "0 6 a, 1 6 a, 2 6 a"), ("other", [1], ""))
    assert choose(ranks) == Chosen(6, "a", [(0, False), (0, False)])
    ranks[1] = ranks[1]._replace(parts="others")
    assert choose(ranks) is None and "(steps 6) are not whole" in why_none(ranks)


def test_a_copy_that_has_changed_is_replaced_by_the_neighbours(tmp_path):
    memory = bytearray(b"values of rank 0")
    for directory, kept in ((tmp_path / "one", False), (tmp_path / "other", True)):
        directory.mkdir(0o700)
        copy = LocalCopy(directory, 0, kept=kept)
        copy.values.write_bytes(memory)
        copy.keep(record_text(6, 2, "a", [], b"{}", memoryview(memory)))
    own = LocalCopy(tmp_path / "one", 0)
    assert own.is_intact() and LocalRecord.of(own.text()).step == 6

    def look() -> list[Seen]:
        return [see(tmp_path / name, rank, 2, [], 16) for rank, name in enumerate(("one", "other"))]

    ranks = look()
    assert [each.changed for each in ranks] == [False, False] and ranks[0].place != ranks[1].place
    assert [each.copies for each in ranks] == [[HostCopy(0, kept, 6, "a", ranks[0].parts)] for kept in (False, True)]
    memory[3] ^= 1
    own.values.write_bytes(memory)
    ranks = look()
    assert ranks[0].changed and why_none(ranks) == CHANGED
    ranks[1].copies.append(HostCopy(1, False, 6, "a", ranks[1].parts))
    assert choose(ranks).sources == [(1, True), (1, False)]


# Who keeps whose


@pytest.mark.parametrize("count", range(2, 12))
def test_every_copy_goes_to_another_host_and_only_one_to_each_rank(count):
    hosts = [[2 * host, 2 * host + 1] for host in range(count)]
    of = keepers(hosts)
    assert sorted(of) == list(range(2 * count))
    assert all(keeper // 2 != rank // 2 and keeper % 2 == rank % 2 for rank, keeper in enumerate(of))
    fatal = [
        pair
        for pair in itertools.combinations(range(count), 2)
        if any((a // 2, b // 2) in (pair, pair[::-1]) for a, b in enumerate(of))
    ]
    assert len(fatal) == (count // 2 if count % 2 == 0 else count // 2 - 1 + 3)


def test_ranks_of_a_host_need_not_follow_each_other():
    assert hosts_of(["a", "b", "a", "b"]) == [[0, 2], [1, 3]] and keepers([[0, 2], [1, 3]]) == [1, 0, 3, 2]


@pytest.mark.parametrize(("places", "said"), [(["a", "a"], "on one host"), (["a", "b", "b"], "2 hosts with 1 or 2")])
def test_copies_without_a_neighbour_are_refused(places, said):
    with pytest.raises(CheckpointError, match=f"PP-E544: copies on a neighbour's host need two hosts .*{said}"):
        keepers(hosts_of(places))
