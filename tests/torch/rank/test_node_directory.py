"""Ranks that others than ppctl start have one directory on each node, and believe nobody about which."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from ppctl.private_files import NODE_DIRECTORY, is_own_name, own_directory
from ppctl.rank import rendezvous
from ppctl.rank.rendezvous import OwnRank, node_directory


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory."""
    monkeypatch.setattr(rendezvous, "shared_memory", lambda: tmp_path)
    monkeypatch.setattr(rendezvous, "_FIRST_RANK", timedelta(seconds=0.2))
    monkeypatch.delenv(NODE_DIRECTORY, raising=False)
    return tmp_path


def rank(number: int) -> OwnRank:
    """Of two nodes with two ranks each."""
    return OwnRank(number, number % 2, 4, 2)


def test_the_first_rank_of_a_node_makes_the_directory_of_all_its_ranks(place: Path) -> None:
    store = HashStore()
    with ExitStack() as at_end:
        found = [node_directory(rank(number), store, at_end) for number in range(4)]
        assert found[0] == found[1] != found[2] == found[3] and sorted({*found}) == sorted(place.iterdir())
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("told", [None, "", "..", "\xff", "/etc", "missing", "open", "link"])
def test_a_rank_that_is_told_of_no_directory_of_its_users_makes_its_own(place: Path, told: str | None) -> None:
    store = HashStore()
    with own_directory(place) as other, ExitStack() as at_end:
        name = other.name[:-4]
        if told == "open":
            (place / f"{name}0000").mkdir(0o755)
        elif told == "link":
            (place / f"{name}0000").symlink_to(other)
        if told is not None:
            store.set("node directory 0", f"{name}0000" if told in ("missing", "open", "link") else told)
        found = node_directory(rank(1), store, at_end)
        assert found.parent == place and is_own_name(found.name) and found not in (other, place / f"{name}0000")
