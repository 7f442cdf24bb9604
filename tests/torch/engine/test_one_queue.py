"""CUDA_DEVICE_MAX_CONNECTIONS where no launcher of ppctl's has looked at it: scripts, and Megatron's functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ppctl.comm import communicator
from ppctl.comm.modes import Modes
from ppctl.errors import ConfigError
from ppctl.host.devices import MOST_QUEUES, QUEUES
from ppctl.megatron.p2p_communication import P2PCommunicator
from ppctl.modules.pipeline_parts import device_of


def connected(
    monkeypatch: pytest.MonkeyPatch, size: int, modes: Modes | None = None, transport: str = "channels"
) -> communicator.Communicator:
    """A communicator of a GPU's messages, whose channels are not made."""
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: size)
    wires = SimpleNamespace(enter=lambda: None)
    monkeypatch.setattr(communicator, "connections_of", lambda _: wires)
    monkeypatch.setattr(communicator, "moves_on_device", lambda _: True)
    monkeypatch.setattr(communicator, "make_ends", lambda *_, **__: {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return communicator.Communicator(group, modes or Modes(), device=torch.device("cuda", 0), transport=transport)


def test_channels_beside_kernels_in_one_queue_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's instructions set it: a receive that is posted ahead would never let the send behind it run."""
    monkeypatch.setenv(QUEUES, "1")
    with pytest.raises(ConfigError, match="one queue") as caught:
        connected(monkeypatch, 2)
    assert [problem.code for problem in caught.value.problems] == ["PP-E608"]
    connected(monkeypatch, 1)
    connected(monkeypatch, 2, Modes(batched=True))  # a batch is waited for before anything follows it
    for transport in ("auto", "plain"):
        assert connected(monkeypatch, 2, transport=transport).batched
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


def test_megatrons_communicator_is_plain_there_and_has_no_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's overlap of tensor and sequence parallelism needs the one queue, and keeps it."""
    config = SimpleNamespace(overlap_p2p_comm=True)
    monkeypatch.setattr(communicator, "make_ends", lambda *_, **__: {})
    monkeypatch.setattr(communicator, "connections_of", lambda _: SimpleNamespace(enter=lambda: None))
    monkeypatch.setattr(communicator, "moves_on_device", lambda _: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv(QUEUES, "1")

    def make(**more: str) -> P2PCommunicator:
        return P2PCommunicator(dist.ProcessGroup(0, 2), config, device=torch.device("cuda", 0), **more)

    made = make()
    assert made.batched and made.fused
    with pytest.raises(ConfigError, match="PP-E608"):
        make(transport="channels")
