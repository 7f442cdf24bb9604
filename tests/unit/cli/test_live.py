"""The block at the foot of the terminal, drawn from a run's files."""

import io
import math

import pytest
from rich.console import Console

from ppctl.cli.live import LiveBlock, curve, live_block
from ppctl.runs import heartbeat
from ppctl.runs.rundir import RunDir


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, "job", lambda draft: None)


def record(step, loss=2.0, **more):
    figures = {"tokens_per_s": 3201.4, "step_time_s": 1.5, "bubble_fraction": 0.21, "slowest_stage": 3, "mfu": None}
    return {"step": step, "loss": loss} | figures | more


def drawn(block, columns=80):
    screen = Console(width=columns, record=True, file=io.StringIO(), legacy_windows=False)
    screen.print(block.draw(columns))
    return screen.export_text().splitlines()


def test_until_the_first_step_it_says_what_the_ranks_do(run, tmp_path):
    block = LiveBlock(run, tmp_path, 2, 500)
    assert drawn(block) == ["0:00  starting ranks"]
    for rank in range(2):
        heartbeat.create(tmp_path, rank)
    assert drawn(block) == ["0:00  importing torch (2 of 2 ranks)"]
    with_torch = heartbeat.HeartbeatFile(tmp_path, 1)
    assert drawn(block, 120)[0].count("(1 of 2 ranks)") == 2
    with_torch.set_state("warming up")
    assert "first messages on every connection (1 of 2 ranks)" in drawn(block, 120)[0]
    with_torch.close()


@pytest.mark.parametrize("columns", [80, 120])
def test_it_shows_how_far_the_run_is_and_what_a_crash_would_cost(run, columns, tmp_path):
    run.add_metrics(record(100, 5.0))
    block = LiveBlock(run, tmp_path, 2, 500)  # of an earlier start
    assert drawn(block) == ["0:00  starting ranks"]
    for step in range(101, 157):
        run.add_metrics(record(step, 4.0 - step / 100, mfu=0.412))
    bar, loss, facts = drawn(block, columns)
    assert bar.strip(" ━╸╺").startswith("step 156 of 500, 31%  ETA 8:36")
    assert loss == "loss 2.4400  ████▇▇▆▆▅▅▅▅▄▄▃▃▃▃▂▂▁▁▁▁" or loss.startswith("loss 2.4400  █")
    assert facts == "3,201 tokens/s  MFU 41.2%  bubble 21%  slowest stage 3  no checkpoint yet"


def test_its_bar_moves_where_only_every_tenth_step_has_a_record(run, tmp_path):
    block = LiveBlock(run, tmp_path, 2, 500)
    run.add_metrics(record(150))
    ranks = [heartbeat.HeartbeatFile(tmp_path, rank) for rank in range(2)]
    for rank, done in zip(ranks, (157, 156), strict=True):
        rank.step = done
        rank.set_state("training")
    assert drawn(block)[0].strip(" ━╸╺").startswith("step 156 of 500, 31%")
    run.add_metrics(record(160))
    assert "step 160 of 500" in drawn(block)[0], "a record is newer than what a rank has published"
    for rank in ranks:
        rank.close()


def test_a_resumed_run_that_drops_steps_is_read_on(run, tmp_path):
    for step in range(1, 6):
        run.add_metrics(record(step))
    block = LiveBlock(run, tmp_path, 1, 10)
    run.drop_metrics_from(3)
    assert drawn(block) == ["0:00  starting ranks"]
    run.add_metrics(record(3, 1.25))
    with open(run.metrics_path, "a") as file:
        file.write('{"step": 4, "lo')
    assert [drawn(block)[1], drawn(block)[1]] == ["loss 1.2500  ▁"] * 2


def test_the_curve_has_the_means_and_marks_what_is_not_finite():
    assert curve([1.0, 1.0], 8) == "▁▁"
    assert curve([float(n) for n in range(16)], 8) == "▁▂▃▄▅▆▇█"
    assert curve([1.0, math.nan, 2.0], 3) == "▁!█"
    assert curve([], 3) == ""


def test_lines_are_printed_whole(run, capsys, tmp_path):
    with live_block(run, tmp_path, 1, 10) as show:
        show("[1/2] loss 3 [bold]\n")
    assert "[1/2] loss 3 [bold]\n" in capsys.readouterr().out
