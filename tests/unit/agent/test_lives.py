"""What a life of a run begins with, why it was needed, and when another one is not worth it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppctl.agent import lives
from ppctl.cli.runs import lives as told
from ppctl.config.schema import RunConfig
from ppctl.records.rank_records import RankFailure
from ppctl.runs.rundir import RunDir

NODES = ["node-0", "node-1"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.write_config(RunConfig())
    return run


def test_a_life_says_why_the_one_before_ended_and_who_takes_whose_place(run: RunDir) -> None:
    assert lives.begin(run, "j", 1, NODES, 3) == ""
    run.add_metrics({"step": 7})
    run.write_result({"state": "stopped"})
    run.write_error(RankFailure(3, "Connection closed by peer [127.0.0.1]", time=1.0))
    run.write_error(RankFailure(2, "killed by signal 9 (SIGKILL)", code="PP-E702", time=2.0))
    why = lives.begin(run, "j", 2, ["node-0", "node-2"], 3)
    assert why == "rank 2: killed by signal 9 (SIGKILL); node-1 has gone; node-2 takes its place"
    assert (run.errors(), run.result(), (run.path / "life").read_text()) == ([], {}, "j.2")
    assert sorted(path.name for path in (run.path / "errors-1").iterdir()) == ["rank-0002.json", "rank-0003.json"]
    first, second = run.environment()["starts"]
    assert (first["step"], first["nodes"], first["why"]) == (0, NODES, "")
    assert (second["step"], second["nodes"], second["why"]) == (7, ["node-0", "node-2"], why)
    assert told(run) == [f"start after step 7 on node-0, node-2: {why}"]


@pytest.mark.parametrize(
    ("steps", "begun"),
    [
        ([0, 0, 0, 0], 3),
        ([0, 9, 9, 9, 9], 4),
        ([0, 9, 5, 8, 9], 4),
        ([0, 9, 9, 10, 10, 10, 10], 6),
        (range(0, 90, 10), 9),
    ],
)
def test_only_lives_in_a_row_without_a_new_step_are_counted(run: RunDir, steps: list[int], begun: int) -> None:
    """After two such lives no other one begins."""
    for number, step in enumerate(steps, 1):
        run.add_metrics({"step": step})
        if lives.begin(run, "j", number, NODES, 2) is None:
            break
    assert len(run.environment()["starts"]) == begun
    assert (run.path / "life").read_text() == f"j.{begun}"


def test_a_requeue_without_a_failure_has_a_reason_too(run: RunDir) -> None:
    lives.begin(run, "j", 1, NODES, 3)
    assert lives.begin(run, "j", 2, NODES, 3) == "an agent met the others anew"


def test_a_job_that_is_requeued_counts_its_lives_anew(run: RunDir) -> None:
    assert lives.begin(run, "a", 1, NODES, 0) == ""
    assert lives.begin(run, "b", 1, NODES, 0) == "its job began once more"
    assert lives.begin(run, "b", 2, NODES, 0) is None
    assert len(run.environment()["starts"]) == 2
