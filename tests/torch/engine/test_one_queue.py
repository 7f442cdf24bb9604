"""CUDA_DEVICE_MAX_CONNECTIONS where no launcher of ppctl's has looked at it: scripts, and Megatron's functions."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ppctl.comm import communicator
from ppctl.comm.modes import Modes
from ppctl.errors import ConfigError
from ppctl.host.devices import MOST_QUEUES, QUEUES
from ppctl.megatron import p2p_communication
from ppctl.modules.pipeline_parts import device_of


def connected(monkeypatch: pytest.MonkeyPatch, size: int, modes: Modes | None = None) -> communicator.Communicator:
    """A communicator of a GPU's messages, whose channels are not made."""
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: size)
    wires = SimpleNamespace(enter=lambda: None)
    monkeypatch.setattr(communicator, "connections_of", lambda _: wires)
    monkeypatch.setattr(communicator, "moves_on_device", lambda _: True)
    monkeypatch.setattr(communicator, "make_ends", lambda *_, **__: {})
    monkeypatch.setattr(communicator, "meet_once", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return communicator.Communicator(group, modes or Modes(), device=torch.device("cuda", 0))


def test_channels_beside_kernels_in_one_queue_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's instructions set it: a receive that is posted ahead would never let the send behind it run."""
    monkeypatch.setenv(QUEUES, "1")
    with pytest.raises(ConfigError, match="one queue") as caught:
        connected(monkeypatch, 2)
    assert [problem.code for problem in caught.value.problems] == ["PP-E608"]
    connected(monkeypatch, 1)
    connected(monkeypatch, 2, Modes(batched=True))  # a batch is waited for before anything follows it
    monkeypatch.setenv(QUEUES, "8")
    connected(monkeypatch, 2)


@pytest.mark.parametrize(
    ("asked", "before", "then"), [("cuda:1", None, MOST_QUEUES), ("cuda:1", "8", "8"), ("cpu", None, None)]
)
def test_a_pipeline_of_a_script_gets_all_queues(
    asked: str, before: str | None, then: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {} if before is None else {QUEUES: before}
    monkeypatch.setattr("os.environ", environ)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device_of(asked)
    assert environ.get(QUEUES) == then


def test_megatrons_communicator_batches_there_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's overlap of tensor and sequence parallelism needs the one queue, and keeps it."""
    made = p2p_communication._one_queue_batches
    monkeypatch.setattr(p2p_communication, "moves_on_device", lambda _: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    config = SimpleNamespace(overlap_p2p_comm=True)
    monkeypatch.setattr(communicator, "make_ends", lambda *_, **__: {})
    monkeypatch.setattr(communicator, "connections_of", lambda _: SimpleNamespace(enter=lambda: None))
    monkeypatch.setattr(communicator, "moves_on_device", lambda _: True)
    monkeypatch.setattr(communicator, "meet_once", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def make(size: int = 2) -> p2p_communication.P2PCommunicator:
        group = dist.ProcessGroup(0, size)
        return p2p_communication.P2PCommunicator(group, config, device=torch.device("cuda", 0))

    made.cache_clear()
    monkeypatch.setenv(QUEUES, "1")
    with pytest.warns(UserWarning, match="one queue.* batched instead"):
        assert make().batched
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = make()
        assert again.batched and again.fused
        assert not make(1).batched
    config.variable_seq_lengths = True
    with pytest.raises(ConfigError, match="PP-E608"):
        make()
    del config.variable_seq_lengths
    made.cache_clear()
    monkeypatch.setenv(QUEUES, "8")
    assert not make().batched
    made.cache_clear()
