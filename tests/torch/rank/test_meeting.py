"""What the ranks of a start find in a store that ranks of an earlier start have used."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from ppctl.rank.rendezvous import OwnRank, meet

FAILED = "exception_dump"
"""ProcessGroupNCCL.cpp of torch 2.13: `kStoreDumpKey`, set in the store below all prefixes (`globalStore_`)."""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """An agent's store, in which a rank of an earlier start said that NCCL has failed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**variables, "PPCTL_START": "2", "TORCHELASTIC_RUN_ID": "run"}.items():
        monkeypatch.setenv(name, value)
    store.set(FAILED, b"\0\0\0\0")
    return store


def test_ranks_do_not_end_for_what_failed_in_an_earlier_start(served: TCPStore) -> None:
    meet(OwnRank(0, 0, 2, 2)).set("key", "value")
    assert not served.check([FAILED])
    assert served.check(["ppctl/start/2//key"]), "what this start writes is below its number"


def test_a_failure_of_this_start_stays_for_all_its_ranks(served: TCPStore) -> None:
    """Ranks that come after rank 0 delete nothing."""
    meet(OwnRank(1, 1, 2, 2))
    assert served.check([FAILED])
