"""Which device a rank takes: its own GPU, or one that it shares; no GPU is needed to decide."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError
from ppctl.rank import worker
from ppctl.rank.rendezvous import OwnRank


def device(config: RunConfig, rank: int, ranks: int) -> torch.device:
    """Of one of `ranks` of a machine, in a pipeline of all of them."""
    plan = SimpleNamespace(sizes=SimpleNamespace(pp=ranks), routed=False)
    shared = SimpleNamespace(config=config, plan=plan)
    return worker._device(shared, OwnRank(rank, rank, ranks, ranks))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that ranks have set, on a machine with two."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(worker.os, "environ", {"PATH": ""})
    return taken


@pytest.mark.parametrize(
    ("asked", "share", "devices"),
    [
        ("cuda", True, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        ("any", True, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        ("any", False, ["cpu"] * 4),
        ("cuda", False, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("cpu", False, ["cpu"] * 4),
    ],
)
def test_four_ranks_on_two_gpus(two_gpus: list[torch.device], asked: str, share: bool, devices: list[str]) -> None:
    config = RunConfig()
    config.launch.device, config.launch.share_gpu = asked, share
    assert [str(device(config, rank, 4)) for rank in range(4)] == devices
    assert [str(taken) for taken in two_gpus] == [name for name in devices if name != "cpu"]


@pytest.mark.usefixtures("two_gpus")
def test_a_rank_that_shares_refuses_nccl_in_the_environment_that_it_finds() -> None:
    config = RunConfig()
    config.launch.device, config.launch.share_gpu = "cuda", True
    config.parallel.pipeline_model_parallel_comm_backend = "nccl"
    with pytest.raises(ConfigError, match="PP-E642"):
        device(config, 0, 4)
