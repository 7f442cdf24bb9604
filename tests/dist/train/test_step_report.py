"""What the figures of metrics.jsonl mean, on reports written by hand and on a step of one rank."""

from __future__ import annotations

import io
import itertools
import math
import random
import re
import signal
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dense_runs import config_of
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from ppctl.comm.groups import make_group
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.engine.dry_pass import AllocatorFigures
from ppctl.errors import TrainingError
from ppctl.launch.planning import planned
from ppctl.plan.build import build_plan
from ppctl.topology import ParallelSizes, RankGrid
from ppctl.train import reports as figures_of_steps
from ppctl.train.reports import (
    NOTHING,
    RankReport,
    Reports,
    bubble_fraction,
    check_reports,
    gather_reports,
    retries_problem,
    slowest_stage,
    stop_reason,
)
from ppctl.train.session import build_session
from ppctl.train.step import Trainer


def reports_of(reports: list[RankReport]) -> Reports:
    return Reports(np.array([report.pack() for report in reports]), len(reports[0].stage_seconds))


def test_the_bubble_is_what_is_idle_between_the_first_start_and_the_last_end() -> None:
    # Two ranks over 10 s (from 2 to 12), busy for 6 s and 8 s: 6 of 20 rank-seconds are idle, waits included.
    reports = [RankReport(start=2.0, end=11.0, busy=6.0), RankReport(), RankReport(start=3.0, end=12.0, busy=8.0)]
    assert bubble_fraction(reports_of(reports), [0, 2]) == pytest.approx(0.3)
    assert math.isnan(bubble_fraction(reports_of(reports), [1]))


def test_the_slowest_stage_is_the_one_with_the_most_busy_seconds() -> None:
    reports = [RankReport(stage_seconds=[1.0, 4.0]), RankReport(stage_seconds=[3.0, 2.0])]
    stages = np.array([[0, 2], [1, 3]])
    assert slowest_stage(reports_of(reports), stages) == (2, 0)
    replicas = reports_of([*reports, RankReport(stage_seconds=[9.0, 4.0]), reports[1]])
    assert slowest_stage(replicas, np.concatenate([stages, stages])) == (0, 2)
    with pytest.raises(ValueError, match="stages are"):
        slowest_stage(replicas, stages)


def test_a_step_in_which_an_allocator_freed_memory_is_told_with_what_helps(monkeypatch) -> None:
    reports = reports_of([RankReport(), RankReport(alloc_retries=1.0), RankReport(alloc_retries=3.0), RankReport()])
    assert retries_problem(reports_of([RankReport(driver_allocations=9.0, unused_bytes=1e9)]), 7) is None
    for name, settings, remedy in (
        ("OTHER", "", "launch.env.PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64", "launch.env.PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "train.recompute_granularity=full"),
        ("PYTORCH_CUDA_ALLOC_CONF", "", "launch.env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "1", "train.recompute_granularity=full"),
    ):
        monkeypatch.setenv(name, settings)
        problem = retries_problem(reports, 7)
        assert problem is not None and problem.code == "PP-E822" and problem.remedy.startswith(remedy)
        assert "step 7: torch's allocator on rank 2 freed memory 3 times" in problem.message
        assert planned(["+recipe=quickstart", *problem.remedy.split()], for_training=True)[2] == [], "it can be pasted"


@pytest.mark.parametrize(
    ("reports", "says"),
    [
        ([RankReport(), RankReport(bad_microbatch=3.0)], "the loss of microbatch 3 is not finite on rank 1 (stage 5)"),
        ([RankReport(checksum=1.0), RankReport(), RankReport(checksum=2.0)], "different samples for step 4"),
    ],
)
def test_what_must_not_reach_a_weight_stops_the_step(reports: list[RankReport], says: str) -> None:
    with pytest.raises(TrainingError) as caught:
        check_reports(reports_of(reports), step=4, last_stage=5)
    assert says in str(caught.value)


def plainly(reports: list[RankReport], stages: list[list[int]], pipeline: list[int]) -> dict[str, object]:
    """The same figures by one Python statement for each rank, which is what they mean."""
    seconds = {
        (stage, rank): spent
        for rank, (report, own) in enumerate(zip(reports, stages, strict=True))
        for stage, spent in zip(own, report.stage_seconds, strict=True)
    }
    own = [reports[rank] for rank in pipeline]
    span = max(r.end for r in own) - min(r.start for r in own)
    return {
        "loss": sum(r.loss for r in reports),
        "mtp_loss": sum(r.mtp_loss for r in reports),
        "loss_tokens": sum(r.loss_tokens for r in reports),
        "aux": math.fsum(x for r in reports for x in r.auxiliary),
        "memory": max(r.memory_bytes for r in reports),
        "slowest": max(seconds, key=lambda which: seconds[which]),
        "bubble": 1.0 - sum(r.busy for r in own) / (len(own) * span) if span > 0 else "none",
        "checksums": {rank: int(r.checksum) for rank, r in enumerate(reports) if r.checksum != NOTHING},
        "bad": [(rank, int(r.bad_microbatch)) for rank, r in enumerate(reports) if r.bad_microbatch != NOTHING],
        "asked": {rank: int(r.stop) for rank, r in enumerate(reports) if r.stop},
    }


def drawn(draw: random.Random, world: int, chunks: int, routers: int) -> list[RankReport]:
    """Reports with ties, with ranks that tell nothing, and with sums whose bits depend on their order."""

    def some(few: list[float]) -> float:
        return draw.choice([*few, draw.uniform(0, 1) * 10.0 ** draw.randint(-9, 9)])

    return [
        RankReport(
            stop=draw.choice([0.0, 0.0, float(signal.SIGUSR1), float(signal.SIGTERM)]),
            loss=some([0.0]),
            bad_microbatch=draw.choice([NOTHING, NOTHING, 0.0, 3.0]),
            checksum=draw.choice([NOTHING, 0.0, 4294967295.0]),
            loss_tokens=float(draw.randint(0, 2**40)),
            start=some([0.0, 1.0]),
            end=some([1.0, 2.0]),
            busy=some([0.0]),
            memory_bytes=float(draw.randint(0, 2**40)),
            mtp_loss=some([0.0]),
            stage_seconds=[some([0.0, 1.0]) for _ in range(chunks)],
            auxiliary=[some([0.0]) for _ in range(routers)],
        )
        for _ in range(world)
    ]


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 8, 33]), st.integers(1, 3), st.integers(0, 2))
def test_figures_of_the_table_are_those_of_the_ranks_one_by_one(seed: int, world: int, chunks: int, n: int) -> None:
    """Bit by bit: the loss of a run does not change with how its shares are added up."""
    draw = random.Random(seed)
    reports = drawn(draw, world, chunks, n)
    stages = [[rank + world * chunk for chunk in range(chunks)] for rank in range(world)]
    pipeline = sorted(draw.sample(range(world), draw.randint(1, world)))
    wanted, table = plainly(reports, stages, pipeline), reports_of(reports)
    for field in ("loss", "mtp_loss", "loss_tokens"):
        assert table.total(field) == wanted[field]
    assert math.fsum(table.auxiliary.ravel().tolist()) == wanted["aux"]
    assert table.column("memory_bytes").max() == wanted["memory"]
    assert slowest_stage(table, np.array(stages)) == wanted["slowest"]
    bubble = bubble_fraction(table, pipeline)
    assert ("none" if math.isnan(bubble) else bubble) == wanted["bubble"]
    assert (stop_reason(table) is None) == (not wanted["asked"])
    try:
        check_reports(table, 1, 0)
        told = ""
    except TrainingError as error:
        told = str(error)
    if len(set(wanted["checksums"].values())) > 1:
        assert all(f"rank {rank}: {sum_:08x}" in told for rank, sum_ in wanted["checksums"].items())
    else:
        assert re.findall(r"microbatch (\d+) is not finite on rank (\d+)", told) == [
            (str(mb), str(rank)) for rank, mb in wanted["bad"]
        ]


class Collectives(TorchDispatchMode):
    """Notes the size of the group of every collective inside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            group = next(each for each in args if isinstance(each, torch.ScriptObject))
            self.sizes.append(dist.ProcessGroup.unbox(group).size())
        return func(*args, **(kwargs or {}))


def gathered(pp: int, dp: int, simulated: int | None = None) -> tuple[list[list[float]], list[int]]:
    """The table that a rank of pp x dp gets, and over groups of how many ranks. `simulated` is alone in its world."""
    if simulated is not None:
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=simulated, world_size=pp * dp, store=FakeStore())
    rank, grid = dist.get_rank(), RankGrid(ParallelSizes(world=pp * dp, pp=pp, dp=dp, edp=dp))
    groups = [make_group(grid.groups(axis)) for axis in ("pp", "dp")]
    with Collectives() as collectives:
        reports = gather_reports(RankReport(loss=1.5 + rank, stage_seconds=[float(rank), 7.0]), rank, groups)
    return reports.table.tolist(), collectives.sizes


@pytest.mark.parametrize(("pp", "dp"), [(2, 4), (4, 2), (8, 1), (1, 3), (1, 1)])
def test_all_ranks_get_the_same_table_in_the_order_of_ranks(pp: int, dp: int) -> None:
    wanted = [RankReport(loss=1.5 + rank, stage_seconds=[float(rank), 7.0]).pack() for rank in range(pp * dp)]
    for table, sizes in run_ranks(gathered, pp * dp, pp, dp):
        assert table == wanted
        assert sizes == [size for size in (pp, dp) if size > 1]


def test_a_report_of_2048_ranks_goes_round_rings_of_16_and_128() -> None:
    """A ring of the world would be 2,047 hops, one after the other, before the optimizer may start."""
    ((table, sizes),) = run_ranks(gathered, 1, 16, 128, 1234)
    assert (len(table), sizes) == (2048, [16, 128])


def told_in_steps(mapping) -> tuple[list[int], str]:
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), dist.get_rank(), torch.device("cpu"))
    trainer, said, calls = Trainer(session, session.data.batches()), io.StringIO(), itertools.count(1)
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said):
        patch.setattr(figures_of_steps, "AllocatorFigures", SimpleNamespace(of=lambda _: AllocatorFigures(next(calls))))
        found = [trainer.step(step).record["alloc_retries"] for step in range(2)]
    return found, said.getvalue()


def test_what_allocators_freed_is_a_figure_of_every_step_and_told_once(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("a stage and a rank and a layer " * 50)
    mapping = to_mapping(config_of(tmp_path / "corpus.txt", pp=1, vpp=1, m=2, dp=1))
    ((retries, said),) = run_ranks(told_in_steps, 1, mapping)
    assert retries == [1, 1]
    assert said.count("warning: PP-E822") == 1 and "step 1: torch's allocator on rank 0 freed memory 1 times" in said


def sizes_in_a_step(mapping) -> list[int]:
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), dist.get_rank(), torch.device("cpu"))
    trainer = Trainer(session, session.data.batches())
    with Collectives() as collectives:
        trainer.step(0)
    return collectives.sizes


def test_no_collective_of_a_step_spans_the_world(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("a stage and a rank and a layer " * 50)
    mapping = to_mapping(config_of(tmp_path / "corpus.txt", pp=2, vpp=1, m=2, dp=2))
    for sizes in run_ranks(sizes_in_a_step, 4, mapping):
        assert len(sizes) >= 3 and set(sizes) == {2}


def figures(mapping):
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), dist.get_rank(), torch.device("cpu"))
    trainer = Trainer(session, session.data.batches())
    mask = trainer.batches.step(0).loss_mask
    step = type(trainer.batches).step

    def masked(batches, number):
        batch = step(batches, number)
        batch.loss_mask[..., -5:] = 0
        return batch

    type(trainer.batches).step = masked
    return trainer.step(0).record, mask.numel()


def test_tokens_are_all_that_the_flops_are_for_and_loss_tokens_those_that_count(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("a stage and a rank and a layer " * 50)
    sizes = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 2, "num_query_groups": 1}
    config = RunConfig(model=ModelConfig(**sizes))
    config.parallel.deallocate_pipeline_outputs, config.launch.device = True, "cpu"
    config.parallel.pipeline_model_parallel_size, config.parallel.overlap_p2p_comm = 2, True
    config.parallel.batch_p2p_comm = config.parallel.batch_p2p_sync = False
    config.data.path, config.data.seq_length = str(tmp_path / "corpus.txt"), 16
    config.train.global_batch_size, config.train.micro_batch_size = 6, 2
    (record, tokens), _ = run_ranks(figures, 2, to_mapping(config))
    assert tokens == 6 * 16
    assert record["tokens"] == 6 * 16
    assert record["loss_tokens"] == 6 * (16 - 5)
    assert record["tokens_per_s"] == pytest.approx(record["tokens"] / record["step_time_s"])
    assert record["tokens_per_s_per_device"] == pytest.approx(record["tokens_per_s"] / 2)
    # Two operations per product. Each layer and token: projections 16 x (2 x 16 + 2 x 8), feed-forward 3 x 16 x 24;
    # once, the output. Scores and values of a row: 16 x 16 pairs, half of them masked, times twice the width 16.
    per_token = 2 * (2 * (16 * 48 + 3 * 16 * 24) + 16 * config.model.vocab_size)
    forward = 6 * (16 * per_token + 2 * 16 * 16 * 2 * 16)
    assert record["tflops_per_device"] * 1e12 * 2 * record["step_time_s"] == pytest.approx(3 * forward)
    assert record["mfu"] is None
