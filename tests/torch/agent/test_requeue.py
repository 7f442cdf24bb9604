"""When an agent of SLURM's job has it start again, and when it leaves that to the script, to others or to nobody."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ppctl.agent import job, lives
from ppctl.agent.node import NodeAgent
from ppctl.config.schema import RunConfig
from ppctl.runs import fence
from ppctl.runs.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run in the job 7, whose present start is its first."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    run = RunDir(tmp_path)
    run.write_config(RunConfig())
    (tmp_path / "life").write_text("7.0")
    return run


def agent_of(run: RunDir, life: str = "") -> Any:
    told = fence.variables(life, run.path)[fence.LIFE] if life else ""
    group = SimpleNamespace(group_rank=0)
    return SimpleNamespace(run_dir=run, life=told, asked=0, get_worker_group=lambda: group)


def requeued(
    agent: Any, monkeypatch: pytest.MonkeyPatch, meanwhile: Any = lambda: None
) -> tuple[str | None, list[str]]:
    """The mark that is left, and the jobs that the agent itself has requeued, if `meanwhile` happens while it waits."""
    jobs: list[str] = []
    monkeypatch.setattr(job.time, "sleep", lambda seconds: meanwhile())
    monkeypatch.setattr(job.slurm, "requeue", jobs.append)
    job._requeue(agent, "a node is gone", ["node-1"])
    mark = agent.run_dir.path / "requeue.7.0"
    return (mark.read_text() if mark.exists() else None), jobs


def test_before_the_first_life_and_without_a_script_the_agent_requeues(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requeued(agent_of(run), monkeypatch) == ("node-1\na node is gone\n", ["7"])


def test_a_mark_that_another_agent_has_left_stays(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write_requeue_mark("7.0", "ranks cannot be killed", ["node-0"])
    assert requeued(agent_of(run), monkeypatch)[0] == "node-0\nranks cannot be killed\n"


def test_a_job_that_may_not_start_again_is_not_requeued(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(RunConfig().launch.max_requeues))
    assert requeued(agent_of(run), monkeypatch)[1] == []


def test_a_job_that_somebody_ends_meanwhile_is_not_requeued(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agent_of(run)
    assert requeued(agent, monkeypatch, lambda: setattr(agent, "asked", 15))[1] == []


@pytest.mark.parametrize("begun", ["before", "meanwhile"])
def test_an_agent_that_the_others_go_on_without_requeues_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, begun: str
) -> None:
    lives.begin(run, "j", 1, ["node-0"], 3)

    def begin() -> None:
        lives.begin(run, "j", 2, ["node-2"], 3)

    if begun == "before":
        begin()
    mark, jobs = requeued(agent_of(run, "j.1"), monkeypatch, begin if begun == "meanwhile" else lambda: None)
    assert (mark is None, jobs) == (begun == "before", [])


@pytest.mark.parametrize(
    ("state", "message", "goes_on"),
    [("finished", None, False), ("stopped", job.ASKED_WORDS, False), ("stopped", "TERM on rank 0", True)],
)
def test_a_run_that_has_ended_stays_so_and_one_that_was_stopped_goes_on(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, state: str, message: str | None, goes_on: bool
) -> None:
    run.write_result({"state": state})
    run.write_status(state, message=message)
    assert (requeued(agent_of(run), monkeypatch)[1] == ["7"]) == goes_on


def test_agents_of_an_older_start_do_not_take_the_run_back(run: RunDir) -> None:
    """Theirs stood still, and another job has begun the run meanwhile."""
    lives.begin(run, "old", 1, ["node-0"], 3)
    old = fence.variables("old.1", run.path)[fence.LIFE]
    lives.begin(run, "new", 1, ["node-5"], 3)
    said: dict[str, Any] = {}
    store = SimpleNamespace(plain=SimpleNamespace(add=lambda name, more: 2), set=said.__setitem__)
    agent = SimpleNamespace(store=store, life=old, run_dir=run, _job="old", _launch=RunConfig().launch)
    agent._value = lambda store, key: said[key]
    group: Any = SimpleNamespace(group_rank=0, group_world_size=1, store=store.plain)
    with pytest.raises(job.RendezvousClosedError):
        NodeAgent._begin(agent, group)  # type: ignore[arg-type]
    assert (run.path / "life").read_text() == "new.1"
