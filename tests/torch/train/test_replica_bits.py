"""A fault while a rank reads the bits of what it holds is the rank's own, and no disagreement between ranks."""

from types import SimpleNamespace

import pytest
import torch

from ppctl.train import replica_check
from ppctl.train.replica_check import HeldTensor, ReplicaCheck


def check_of(monkeypatch, held):
    monkeypatch.setattr(replica_check, "copies", lambda _: held())
    config = SimpleNamespace(train=SimpleNamespace(check_replicas=1))
    return ReplicaCheck(SimpleNamespace(config=config, replica=SimpleNamespace(weights=None)))


def test_a_fault_of_the_device_stays_what_it_is(monkeypatch):
    def held():
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        check_of(monkeypatch, held).compare(3)


def test_a_rank_alone_has_no_copies_to_compare(monkeypatch):
    assert check_of(monkeypatch, lambda: [HeldTensor("a.weight", 0, 0, torch.ones(3))]).compare(3) == 0
