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


def begun(run: RunDir, job: str, life: str, number: int) -> str:
    """The newest life once an agent that had ranks in `life` comes first in a rendezvous of its job."""
    said: dict[str, Any] = {}
    store = SimpleNamespace(plain=SimpleNamespace(add=lambda name, more: number), set=said.__setitem__)
    told = fence.variables(life, run.path)[fence.LIFE]
    agent = SimpleNamespace(store=store, life=told, run_dir=run, job=job, _launch=RunConfig().launch)
    agent._value = lambda store, key: said[key]
    group: Any = SimpleNamespace(group_rank=0, group_world_size=1, store=store.plain)
    said["node/0"] = "node-0"
    NodeAgent._begin(agent, group)  # type: ignore[arg-type]
    return (run.path / "life").read_text()


def test_agents_of_an_older_start_do_not_take_the_run_back(run: RunDir) -> None:
    """Theirs stood still, and another job has begun the run meanwhile."""
    lives.begin(run, "old", 1, ["node-0"], 3)
    lives.begin(run, "new", 1, ["node-5"], 3)
    with pytest.raises(job.RendezvousClosedError):
        begun(run, "old", "old.1", 2)
    assert (run.path / "life").read_text() == "new.1"


@pytest.mark.parametrize("before", ["j", "i"], ids=["of its job", "of the one before in the same store"])
def test_an_agent_that_stood_by_in_a_life_of_its_job_begins_the_next_one(run: RunDir, before: str) -> None:
    """A spare had taken its place, and dies in turn."""
    lives.begin(run, before, 1, ["node-0"], 3)
    lives.begin(run, "j", 2, ["node-1"], 3)
    assert begun(run, "j", f"{before}.1", 3) == "j.3"


def test_the_agent_that_has_the_store_ends_the_job_also_of_a_life_in_which_it_stood_by(run: RunDir) -> None:
    lives.begin(run, "j", 1, ["node-0"], 3)
    lives.begin(run, "j", 2, ["node-1"], 3)
    agent = agent_of(run, "j.1")
    agent.job, agent.asked, agent.in_pod, agent.in_slurm = "j", 15, False, False
    agent.rendezvous = SimpleNamespace(shrink="wait", shutdown=lambda: None)

    def end() -> None:
        raise job.RendezvousClosedError

    agent.run = end
    job._to_the_end(agent, "host", "1", [], serves=False)
    assert fence.older(agent.life) is not None
    job._to_the_end(agent, "host", "1", [], serves=True)
    assert fence.older(agent.life) is None
