"""What the figures of metrics.jsonl mean, on reports written by hand and on a step of one rank."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.errors import TrainingError
from ppctl.plan.build import build_plan
from ppctl.train.report import RankReport, bubble_fraction, check_reports, slowest_stage


def test_the_bubble_is_what_is_idle_between_the_first_start_and_the_last_end() -> None:
    # Two ranks over 10 s (from 2 to 12), busy for 6 s and 8 s: 6 of 20 rank-seconds are idle, waits included.
    reports = [RankReport(start=2.0, end=11.0, busy=6.0), RankReport(start=3.0, end=12.0, busy=8.0)]
    assert bubble_fraction(reports) == pytest.approx(0.3)
    assert math.isnan(bubble_fraction([RankReport()]))


def test_the_slowest_stage_is_the_one_with_the_most_busy_seconds() -> None:
    reports = [RankReport(stage_seconds=[1.0, 4.0]), RankReport(stage_seconds=[3.0, 2.0])]
    assert slowest_stage(reports, [[0, 2], [1, 3]]) == (2, 0)
    replicas = [*reports, RankReport(stage_seconds=[9.0, 4.0]), reports[1]]
    assert slowest_stage(replicas, [[0, 2], [1, 3]] * 2) == (0, 2)


def test_a_report_survives_its_vector() -> None:
    report = RankReport(1.0, 0.5, 3.0, 4294967295.0, 7.0, 1.0, 2.0, 0.5, 1e9, 2.5, 4.0, [1.0, 2.0, 3.0], [0.1])
    assert report.unpack(report.pack().tolist()) == report


@pytest.mark.parametrize(
    ("reports", "says"),
    [
        ([RankReport(), RankReport(bad_microbatch=3.0)], "the loss of microbatch 3 is not finite on rank 1 (stage 5)"),
        ([RankReport(checksum=1.0), RankReport(), RankReport(checksum=2.0)], "different samples for step 4"),
    ],
)
def test_what_must_not_reach_a_weight_stops_the_step(reports: list[RankReport], says: str) -> None:
    with pytest.raises(TrainingError) as caught:
        check_reports(reports, step=4, last_stage=5)
    assert says in str(caught.value)


def figures(mapping):
    import torch
    import torch.distributed as dist

    from ppctl.train.session import build_session
    from ppctl.train.step import Trainer

    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), dist.get_rank(), torch.device("cpu"))
    trainer = Trainer(session, session.batches(), lambda: False)
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
