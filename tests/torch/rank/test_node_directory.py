"""Ranks that others than ppctl start have one directory on each node, and believe nobody about which."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from ppctl.host.private_files import NODE_DIRECTORY, is_own_name, own_directory
from ppctl.rank import rendezvous
from ppctl.rank.rendezvous import OwnRank, node_directory
from ppctl.reach.store import SealedStore


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
    store = SealedStore(HashStore(), None, "1")
    with ExitStack() as at_end:
        found = [node_directory(rank(number), store, at_end) for number in range(4)]
        assert found[0] == found[1] != found[2] == found[3] and sorted({*found}) == sorted(place.iterdir())
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("how", ["never made", "removed", "open to others", "a link", "a file", "of another name"])
def test_a_rank_does_not_wait_for_ever_or_take_a_directory_that_is_not_its_users_alone(place: Path, how: str) -> None:
    """As in a container with shared memory of its own, or where somebody else can rename what is there."""
    store = SealedStore(HashStore(), None, "1")
    with own_directory(place) as other, ExitStack() as at_end, pytest.MonkeyPatch.context() as patch:
        if how == "of another name":
            patch.setattr(rendezvous, "own_directory", lambda _: nullcontext(other.rename(place / "other")))
        first = other if how == "never made" else node_directory(rank(0), store, at_end)
        patch.undo()
        if how == "open to others":
            first.chmod(0o755)
        elif how in ("removed", "a link", "a file"):
            first.rmdir()
        if how == "a link":
            first.symlink_to(other)
        elif how == "a file":
            first.touch()
        found = node_directory(rank(1), store, at_end)
        assert found not in (first, other) and found.parent == place and is_own_name(found.name)
