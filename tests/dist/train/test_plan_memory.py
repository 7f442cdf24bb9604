"""The plan's memory against live storages of ppctl's own runs: every rank, at the peak of a step, within 5 %."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_memory import live_and_planned
from own_worlds import in_own_worlds
from ranks import run_ranks

from ppctl.config.mapping import to_mapping
from ppctl.config.schema import DataConfig, LaunchConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig

DENSE = ModelConfig(
    num_layers=8, hidden_size=64, ffn_hidden_size=176, num_attention_heads=4, num_query_groups=2, vocab_size=320
)


def config_of(path: Path, model: ModelConfig, **parallel: object) -> RunConfig:
    return RunConfig(
        model=model,
        parallel=ParallelConfig(
            pipeline_model_parallel_size=4,
            virtual_pipeline_model_parallel_size=2,
            overlap_p2p_comm=True,
            batch_p2p_comm=False,
            batch_p2p_sync=False,
            deallocate_pipeline_outputs=True,
            **parallel,  # type: ignore[arg-type]
        ),
        data=DataConfig(path=str(path), seq_length=128),
        train=TrainConfig(global_batch_size=32, micro_batch_size=4),
        launch=LaunchConfig(device="cpu"),
    )


WIDTHS = [
    pytest.param({}, "adamw", id="fp32"),
    pytest.param({"bf16": True}, "adamw", id="bf16"),
    pytest.param({"params_dtype": "float64"}, "adamw", id="fp64"),
    pytest.param({"bf16": True}, "muon", id="bf16, Muon"),
]


@pytest.mark.parametrize(("more", "optimizer"), WIDTHS)
def test_live_storages_at_the_peak_are_the_planned_bytes_on_every_rank(text: Path, more: dict, optimizer: str) -> None:
    config = config_of(text, DENSE, **more)
    config.optim.name = optimizer
    found = run_ranks(live_and_planned, 4, to_mapping(config))
    for rank, (live, cost) in enumerate(found):
        assert cost.peak_bytes == pytest.approx(live, rel=0.05), f"rank {rank}: {cost}"


def test_live_storages_at_the_peak_are_the_planned_bytes_where_backwards_are_split(text: Path) -> None:
    config = config_of(text, DENSE)
    config.parallel.pipeline_model_parallel_size, config.pipeline.pp_schedule = 2, "zbv_zero_bubble"
    for rank, (live, cost) in enumerate(run_ranks(live_and_planned, 2, to_mapping(config))):
        assert cost.peak_bytes == pytest.approx(live, rel=0.05), f"rank {rank}: {cost}"


WIDE = ModelConfig(num_layers=4, hidden_size=96, ffn_hidden_size=288, num_attention_heads=4, vocab_size=260)
"""Of weights rather than activations, with short sequences."""


def live_and_planned_each(mappings):
    return in_own_worlds(live_and_planned, mappings)


def sharded(sharding: str, name: str, vpp: int | None, microbatches: int, **more: object) -> RunConfig:
    """On two pp_ranks of two replicas, in calls of so many microbatches."""
    config = config_of(Path(), WIDE, data_parallel_sharding=sharding, data_parallel_size=2, **more)
    config.parallel.pipeline_model_parallel_size, config.pipeline.pp_schedule = 2, name
    config.parallel.virtual_pipeline_model_parallel_size = vpp
    config.data.seq_length, config.train.micro_batch_size, config.train.global_batch_size = 16, 1, 2 * microbatches
    return config


@pytest.mark.timeout(300)
def test_weights_and_gradients_that_are_shared_live_when_the_plan_says_so(text: Path) -> None:
    """Also in a schedule that is through with one chunk's gradients before it makes the next one's, and of several
    calls, which give none back before the last one."""
    configs = [
        sharded("full", "interleaved_1f1b", 2, 4),
        sharded("full", "gpipe", 2, 4, bf16=True),
        sharded("full", "1f1b", None, 4, bf16=True),
        sharded("optimizer_gradients", "interleaved_1f1b", 2, 2),
        sharded("optimizer_gradients", "interleaved_1f1b", 2, 4, bf16=True),
    ]
    for sharding in ("full", "optimizer_gradients"):
        accumulating = sharded(sharding, "interleaved_1f1b", 2, 4)
        accumulating.pipeline.pp_batch_size = 2
        configs.append(accumulating)
    for config in configs:
        config.data.path = str(text)
    for rank, found in enumerate(run_ranks(live_and_planned_each, 4, [*map(to_mapping, configs)], timeout=280)):
        for number, (live, cost) in enumerate(found):
            assert cost.peak_bytes == pytest.approx(live, rel=0.05), f"case {number}, rank {rank}: {cost}"


@pytest.mark.timeout(300)
def test_state_of_which_muons_owners_have_whole_matrices_lives_as_the_plan_says(text: Path) -> None:
    ways = [("optimizer_gradients", "interleaved_1f1b", 2), ("full", "1f1b", None)]
    configs = [sharded(*way, 4, bf16=wide) for way in ways for wide in (False, True)]
    for config in configs:
        config.data.path, config.optim.name = str(text), "muon"
    for rank, found in enumerate(run_ranks(live_and_planned_each, 4, [*map(to_mapping, configs)], timeout=280)):
        for number, (live, cost) in enumerate(found):
            assert cost.peak_bytes == pytest.approx(live, rel=0.05), f"case {number}, rank {rank}: {cost}"


@pytest.mark.timeout(300)
def test_gradients_that_are_summed_whole_are_copied_as_the_plan_says(text: Path) -> None:
    configs = [
        sharded("none", "1f1b", None, 4),
        sharded("none", "1f1b", None, 4, bf16=True),
        sharded("none", "interleaved_1f1b", 2, 4),
        sharded("none", "zb_h1", None, 4),
    ]
    for config in configs:
        config.data.path = str(text)
    for rank, found in enumerate(run_ranks(live_and_planned_each, 4, [*map(to_mapping, configs)], timeout=280)):
        for number, (live, cost) in enumerate(found):
            assert cost.peak_bytes == pytest.approx(live, rel=0.05), f"case {number}, rank {rank}: {cost}"


@pytest.mark.whole
@pytest.mark.timeout(300)
def test_a_microbatch_that_is_computed_twice_lives_as_the_plan_says(text: Path) -> None:
    """Its gradients exist twice. The plan has all of them from the first, where its activations go as they come."""
    configs = [
        config_of(text, DENSE),
        config_of(text, DENSE, bf16=True),
        sharded("none", "1f1b", None, 4),
        sharded("none", "zb_h1", None, 4),
        sharded("full", "1f1b", None, 4, bf16=True),
        sharded("optimizer_gradients", "interleaved_1f1b", 2, 2),
    ]
    for config in configs:
        config.data.path, config.train.replay, config.parallel.deterministic_mode = str(text), 1, True
    for rank, found in enumerate(run_ranks(live_and_planned_each, 4, [*map(to_mapping, configs)], timeout=280)):
        for number, (live, cost) in enumerate(found):
            said = f"case {number}, rank {rank}: {live} live, {cost}"
            assert 0.95 * live <= cost.peak_bytes <= 1.05 * live + cost.gradient_bytes / 2, said
