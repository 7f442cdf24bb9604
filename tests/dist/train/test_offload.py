"""Activations that wait in host memory: no bit changes in any cut; what is moved, and what lives, are as planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from axis_runs import config_of as axes_config
from axis_runs import train_all, world_of
from dense_runs import CPU, trainer_of
from live_memory import live_and_planned
from ranks import run_ranks
from torch.utils._python_dispatch import _disable_current_modes

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import DataConfig, LaunchConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from ppctl.model.offload import HostBuffers, LayerStorages, rounded_size
from ppctl.plan.build import build_plan
from ppctl.train.session import build_session

FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
PIPELINE = dict(pp=2, virtual_pipeline_model_parallel_size=2)
CUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    # model, layers that move, the cut
    "one rank": ("grouped", 3, {}),
    "pp and vpp": ("grouped", 1, PIPELINE | dict(layout="Et|t|t|tL")),
    "all layers of two stages": ("grouped", 2, dict(pp=2, layout="Et*2|t*2L")),
    "tied, biases": ("biases", 1, dict(pp=2, layout="Et*2|t*2L")),
    "full": ("grouped", 1, dict(pp=2, layout="Et*2|t*2L", **FULL)),
    "full, two layers a run": (
        "grouped", 3, FULL | dict(recompute_method="uniform", recompute_num_layers=2),
    ),
    "full, some spared": (
        "grouped", 2, dict(pp=2, layout="Et*2|t*2L", num_microbatches_with_partial_activation_checkpoints=1, **FULL),
    ),
    "attention and norms": (
        "grouped", 2, SELECTIVE | dict(pp=2, layout="Et*2|t*2L", recompute_modules=["core_attn", "layernorm"]),
    ),
    "dropout": ("gpt3", 2, dict(pp=2, layout="Et*2|t*2L")),
    "experts, latent, mtp": ("deepseek", 2, dict(pp=2, layout="Et*2|t*2mL")),
    "experts and up-projections again": (
        "deepseek", 3, SELECTIVE | dict(recompute_modules=["moe_act", "layernorm", "mla_up_proj"]),
    ),
    "documents": ("packed", 2, dict(pp=2, layout="Et*2|t*2mL")),
    "split": ("experts", 2, dict(pp=2, layout="Et*2|t*2L", pp_schedule="zb_h1")),
    "split in a V": ("grouped", 1, PIPELINE | dict(layout="Et|t|t|tL", pp_schedule="zbv_zero_bubble")),
    "split, again": (
        "grouped", 1, PIPELINE | dict(layout="Et|t|t|tL", pp_schedule="dualpipev", **FULL),
    ),
    "tp and sp": ("grouped", 2, dict(tp=2, sp=True)),
    "tp, split": ("latent", 1, dict(tp=2, pp=2, layout="Et*2|t*2mmL", pp_schedule="zb_h1")),
    "cp": ("grouped", 2, dict(cp=2)),
    "pairs over ep": (
        "experts", 1, PIPELINE | dict(
            ep=2, dp=2, layout="Et|t|t|tL", overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True,
        ),
    ),
    "full sharding": ("grouped", 2, dict(dp=2, data_parallel_sharding="full")),
}  # fmt: skip


@contextmanager
def noting(moved: list[int], fetched: list[int]) -> Iterator[None]:
    """Note the bytes of every layer's storages when they leave, and when they are fetched."""
    leave, fetch = LayerStorages.leave, LayerStorages.fetch

    def noted_leave(self: LayerStorages) -> None:
        moved.append(self.size)
        leave(self)

    def noted_fetch(self: LayerStorages) -> None:
        if self.size:
            fetched.append(self.size)
        fetch(self)

    with patch.object(LayerStorages, "leave", noted_leave), patch.object(LayerStorages, "fetch", noted_fetch):
        yield


def both_ways(mapping: dict[str, Any], layers: int) -> tuple[Any, Any, list[int], list[int]]:
    """Runs in a rank: the run, the run with offloading, and what that moved."""
    (plain,) = train_all([mapping])
    mapping["parallel"] |= {"cpu_offloading": True, "cpu_offloading_num_layers": layers}
    moved: list[int] = []
    fetched: list[int] = []
    with noting(moved, fetched):
        (offloaded,) = train_all([mapping])
    return plain, offloaded, moved, fetched


@pytest.mark.shows(
    "parallel.cpu_offloading", "parallel.cpu_offloading_num_layers", "parallel.cpu_offloading_activations"
)
@pytest.mark.parametrize("cut", CUTS)
def test_offloading_changes_no_bit_in_any_cut(cut: str) -> None:
    kind, layers, axes = CUTS[cut]
    config = axes_config(kind, **axes)
    found = run_ranks(both_ways, world_of(config), to_mapping(config), layers, timeout=300)
    assert sum(sum(moved) for *_, moved, _ in found) > 0
    for plain, offloaded, moved, fetched in found:
        for one, other in zip(offloaded["records"], plain["records"], strict=True):
            for figure in ("loss", "grad_norm", "mtp_loss", "aux_loss"):
                assert one.get(figure) == other.get(figure), figure
        for what in ("gradients", "weights"):
            assert offloaded[what].keys() == plain[what].keys()
            for name, tensor in plain[what].items():
                np.testing.assert_array_equal(offloaded[what][name], tensor, err_msg=name)
        assert sum(moved) == sum(fetched), "all that leaves comes back"


DENSE = ModelConfig(
    num_layers=8, hidden_size=64, ffn_hidden_size=176, num_attention_heads=4, num_query_groups=2, vocab_size=320
)
GPT3 = ModelConfig(
    num_layers=8, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=320, normalization="LayerNorm",
    add_bias_linear=True, gated_linear_unit=False, position_embedding_type="learned_absolute",
    max_position_embeddings=128,
)  # fmt: skip


def config_of(path: Path, model: ModelConfig, layers: int, *, vpp: int = 1, **more: Any) -> RunConfig:
    config = RunConfig(
        model=model,
        parallel=ParallelConfig(
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=vpp,
            overlap_p2p_comm=True,
            batch_p2p_comm=False,
            batch_p2p_sync=False,
            deallocate_pipeline_outputs=True,
            cpu_offloading=layers > 0,
            cpu_offloading_num_layers=layers,
        ),
        data=DataConfig(path=str(path), seq_length=128),
        train=TrainConfig(global_batch_size=32, micro_batch_size=4),
        launch=LaunchConfig(device="cpu"),
    )
    for key, value in more.items():
        setattr(config.pipeline if key.startswith("pp_") else config.train, key, value)
    return config


def counted(mapping: dict[str, Any]) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Runs in a rank: of its stages (layers that move, planned bytes of a microbatch); bytes out and back of a step."""
    config = from_mapping(mapping)
    plan = build_plan(config, {})
    assert not plan.problems, plan.problems
    session = build_session(config, plan, dist.get_rank(), CPU)
    moved: list[int] = []
    fetched: list[int] = []
    with noting(moved, fetched):
        trainer_of(session).step(0)
    layers = config.parallel.cpu_offloading_num_layers
    return [(layers, plan.timing.stages[own.stage].offloaded_bytes) for own in session.own.stages], moved, fetched


@pytest.mark.parametrize("model", [DENSE, GPT3], ids=["dense", "gpt3"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        FULL,
        SELECTIVE | {"recompute_modules": ["layernorm", "mlp"]},
        {"pp_schedule": "zbv_zero_bubble"},
    ],
    ids=["nothing again", "layers again", "modules again", "split"],
)
def test_what_is_moved_and_fetched_are_the_planned_bytes(text: Path, model: ModelConfig, more: dict[str, Any]) -> None:
    config = config_of(text, model, 2, vpp=2, **more)
    microbatches = config.train.global_batch_size // config.train.micro_batch_size
    for stages, moved, fetched in run_ranks(counted, 2, to_mapping(config)):
        assert len(moved) == microbatches * sum(layers for layers, _ in stages)
        assert sum(moved) == microbatches * sum(size for _, size in stages)
        assert sorted(fetched) == sorted(size for size in moved if size)


@contextmanager
def apart(lent: list[int]) -> Iterator[None]:
    """Keep buffers on the host out of what is counted on the device, and note their bytes as they are taken."""
    make, take, give = HostBuffers._make, HostBuffers.take, HostBuffers.give_back
    held = 0

    def made(self: HostBuffers, size: int) -> torch.Tensor:
        with _disable_current_modes():
            return make(self, size)

    def taken(self: HostBuffers, size: int) -> Any:
        nonlocal held
        held += rounded_size(size)
        lent.append(held)
        return take(self, size)

    def given(self: HostBuffers, buffer: torch.Tensor, read: Any) -> None:
        nonlocal held
        held -= buffer.numel()
        give(self, buffer, read)

    with patch.multiple(HostBuffers, _make=made, take=taken, give_back=given):
        yield


def both_memories(mapping: dict[str, Any]) -> tuple[int, int, int, int]:
    """Runs in a rank: bytes on the device at the peak of the second step, planned; the same of the host."""
    lent: list[int] = []
    with apart(lent):
        live, cost = live_and_planned(mapping)
    return live, cost.peak_bytes, max(lent), cost.host_bytes


@pytest.mark.parametrize(
    ("layers", "vpp", "more"),
    [
        (2, 1, {}),
        (4, 1, {}),
        (1, 2, {}),
        (2, 2, {}),
        (2, 1, SELECTIVE | {"recompute_modules": ["layernorm", "mlp"]}),
        (3, 1, FULL),
        (2, 1, {"pp_schedule": "zb_h1"}),
    ],
)
def test_live_storages_at_the_peak_are_the_planned_bytes(
    text: Path, layers: int, vpp: int, more: dict[str, Any]
) -> None:
    found = run_ranks(both_memories, 2, to_mapping(config_of(text, DENSE, layers, vpp=vpp, **more)))
    for rank, (live, planned, lent, host) in enumerate(found):
        assert planned == pytest.approx(live, rel=0.03), f"rank {rank}, on the device"
        assert host <= lent <= 1.125 * host, f"rank {rank}, on the host: buffers come in eight sizes for a power of two"


def test_more_layers_that_move_leave_less_on_the_device(text: Path) -> None:
    plans = [build_plan(config_of(text, DENSE, layers), {}) for layers in (0, 1, 2, 3, 4)]
    peaks = [plan.pp_ranks[0].peak_bytes for plan in plans]
    assert peaks[0] > peaks[1] > peaks[2] > peaks[3]
    hosts = [plan.pp_ranks[0].host_bytes for plan in plans]
    assert hosts[0] == 0 and hosts == sorted(hosts)
