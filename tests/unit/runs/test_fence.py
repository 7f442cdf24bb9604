"""A process of an older start writes nothing into a run that has begun a later one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ppctl.checkpoint import disk
from ppctl.checkpoint.boxes import Box
from ppctl.checkpoint.tensor_parts import TensorPart, packed_parts
from ppctl.errors import PpctlError, TrainingError
from ppctl.runs import checkpoint_folder, fence
from ppctl.runs.checkpoint_folder import StepBack
from ppctl.runs.run_starts import begin_start
from ppctl.runs.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run whose start `job.1` is this process's own."""
    run = RunDir(tmp_path)
    begin_start(run, "job.1")
    for name, value in fence.variables("job.1", run.path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fence, "_looked", -fence._LEASE)
    return run


WRITES: dict[str, Callable[[RunDir], object]] = {
    "metrics": lambda run: run.add_metrics({"step": 3}),
    "status": lambda run: run.write_status("running"),
    "result": lambda run: run.write_result({"state": "finished"}),
    "heartbeats": lambda run: run.write_heartbeats("node-1", {"host": "node-1", "time": 0.0, "ranks": []}),
    "earlier metrics": lambda run: run.drop_metrics_from(1),
    "a flight record": lambda run: run.write_flight_record("gloo", 0, b""),
    "a step back": lambda run: checkpoint_folder.add_step_back(run.checkpoints, StepBack(7, 4, 32, 56)),
}


def files(run: RunDir) -> dict[str, bytes]:
    return {str(path.relative_to(run.path)): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("later", ["by an agent", "by another launcher"])
def test_it_is_refused_once_a_later_start_has_begun(run: RunDir, what: str, later: str) -> None:
    for name in ("heartbeats", "errors", "checkpoints"):
        (run.path / name).mkdir(exist_ok=True)
    run.add_metrics({"step": 1})
    if later == "by an agent":
        begin_start(run, "job.2")
    else:
        (run.path / "life").write_text("launcher-1234abcd")  # as `launch.run_directory.go_on` does
    fence._looked -= fence._LEASE  # it stood still meanwhile
    before = files(run)
    with pytest.raises(TrainingError, match=r"start job\.1 is over") as refused:
        WRITES[what](run)
    assert refused.value.problems[0].code == "PP-E779"
    assert files(run) == before


def test_a_look_is_good_for_less_than_it_takes_to_be_lost(run: RunDir) -> None:
    run.add_metrics({"step": 1})
    (run.path / "life").unlink()
    run.add_metrics({"step": 2})
    fence._looked -= fence._LEASE
    with pytest.raises(TrainingError):
        run.add_metrics({"step": 3})
    assert [record["step"] for record in run.metrics()] == [1, 2]


def test_a_checkpoint_that_is_whole_gets_no_name_in_an_older_start(run: RunDir) -> None:
    part = TensorPart("w", (1,), "float32", Box((0,), (1,)))
    all_parts = [packed_parts([part])]
    temporary = checkpoint_folder.prepare(run.checkpoints, 4)
    (own,) = disk.choose(all_parts)
    report = disk.write(0, temporary, [part], own, lambda _: memoryview(bytes(4)))
    run.write_status("running")
    begin_start(run, "job.2")
    with pytest.raises(PpctlError, match=r"start job\.1 is over"):
        disk.commit(run.checkpoints, 4, all_parts, [report], b"{}")
    assert checkpoint_folder.find(run.checkpoints) is None


def test_who_was_told_no_start_writes_as_ever(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fence.LIFE)
    begin_start(run, "job.2")
    run.write_status("running")
    fence.arrive()


def test_a_rank_whose_start_is_over_before_it_arrives_is_told(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    fence.arrive()
    begin_start(run, "job.2")
    monkeypatch.setattr(fence, "_ARRIVAL", 0.2)
    with pytest.raises(TrainingError, match=r"the run's newest is job\.2"):
        fence.arrive()
