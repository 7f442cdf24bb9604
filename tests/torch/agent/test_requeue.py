"""When an agent of SLURM's job has it start again, and when it leaves that to the script, to others or to nobody."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from ppctl.agent import job, lives
from ppctl.agent.node import NodeAgent
from ppctl.agent.rendezvous import CAME
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem, TrainingError
from ppctl.launch.outcome import GO_ON
from ppctl.launch.run_directory import with_value
from ppctl.reach.store import SealedStore
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


class Agent(SimpleNamespace):
    """An agent without torch's loop."""

    start, follow = NodeAgent.start, NodeAgent.follow


def agent_of(run: RunDir, life: str = "") -> Any:
    told = fence.variables(life, run.path)[fence.LIFE] if life else ""
    before = lives.before(run, submitted=True)
    return Agent(run_dir=run, life=told, before=before, job="j", asked=0, in_slurm=True, in_pod=False)


def requeued(
    agent: Any, monkeypatch: pytest.MonkeyPatch, meanwhile: Any = lambda: None
) -> tuple[str | None, list[str]]:
    """The mark that is left, and the jobs that the agent itself has requeued, if `meanwhile` happens while it waits."""
    jobs: list[str] = []
    monkeypatch.setattr(job.time, "sleep", lambda seconds: meanwhile())
    monkeypatch.setattr(job.slurm, "requeue", lambda job, without: jobs.append(f"{job} without {without}"))
    job._requeue(agent.run_dir, agent, "a node is gone", ["node-1"])
    return mark_of(agent.run_dir), jobs


def mark_of(run: RunDir) -> str | None:
    mark = run.path / "requeue.7.0"
    return mark.read_text() if mark.exists() else None


def test_before_the_first_life_and_without_a_script_the_agent_requeues(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requeued(agent_of(run), monkeypatch) == ("node-1\na node is gone\n", ["7 without node-1"])


def test_a_mark_that_another_agent_has_left_counts(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write_requeue_mark("7.0", "ranks cannot be killed", ["node-0", "node-2"])
    mark = "node-0,node-2\nranks cannot be killed\n"
    assert requeued(agent_of(run), monkeypatch) == (mark, ["7 without node-0,node-2"])


def test_a_job_that_may_not_start_again_is_not_requeued(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(RunConfig().launch.max_requeues))
    assert requeued(agent_of(run), monkeypatch)[1] == []


def test_a_job_that_somebody_ends_meanwhile_is_not_requeued(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agent_of(run)
    assert requeued(agent, monkeypatch, lambda: setattr(agent, "asked", 15))[1] == []


def test_an_agent_without_ranks_that_was_asked_to_save_knows_when_its_job_is_ended(run: RunDir) -> None:
    agent = agent_of(run)
    agent._ranks, agent._submitted, agent._ask = [], True, lambda alive: None
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        NodeAgent._on_signal(agent, number, None)
    assert agent.asked == signal.SIGTERM


@pytest.mark.parametrize(("asked", "again"), [(signal.SIGTERM, []), (signal.SIGUSR1, ["7 without node-1"])])
def test_a_job_that_somebody_has_ended_before_is_not_requeued_and_one_that_was_to_save_is(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, asked: int, again: list[str]
) -> None:
    agent = agent_of(run)
    agent.asked = asked
    assert requeued(agent, monkeypatch)[1] == again


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
    assert (requeued(agent_of(run), monkeypatch)[1] == ["7 without node-1"]) == goes_on


def begun(run: RunDir, job: str, life: str, number: int, before: str = "") -> str:
    """The newest life once an agent that had ranks in `life`, if in any, comes first in a rendezvous of its job."""
    said: dict[str, Any] = {}
    store = SimpleNamespace(plain=SimpleNamespace(add=lambda name, more: number), set=said.__setitem__)
    told = fence.variables(life, run.path)[fence.LIFE] if life else ""
    agent = Agent(store=store, life=told, before=before, run_dir=run, job=job, _launch=RunConfig().launch)
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


@pytest.mark.parametrize("where", ["in SLURM's job", "in a new run", "in one that goes on"])
def test_an_agent_that_stood_still_before_its_first_life_takes_no_run_back(
    run: RunDir, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where != "in SLURM's job":
        monkeypatch.delenv("SLURM_JOB_ID")
    if where == "in a new run":
        (run.path / "life").unlink()
    before = lives.before(run, submitted=True)
    assert begun(run, "mine", "", 1, before) == "mine.1"
    (run.path / "life").write_text("7.1")  # the start of whoever went on meanwhile
    (run.path / "result.json").write_text("{}")
    with pytest.raises(job.RendezvousClosedError):
        begun(run, "mine", "", 1, before)
    assert (run.path / "life").read_text() == "7.1" and (run.path / "result.json").exists()


def test_an_agent_of_the_next_job_in_the_same_store_has_the_life_and_the_request_of_the_one_before(
    run: RunDir,
) -> None:
    """Also a spare's, that never had a life."""
    lives.begin(run, "j", 1, ["node-0"], 3)
    (run.path / "life").write_text("7.0")
    last, agent = agent_of(run), agent_of(run)
    last.asked = signal.SIGUSR1
    lives.begin(run, "j", 1, ["node-0"], 3)
    agent.rendezvous = SimpleNamespace(follow=lambda: None)
    agent.follow(last)
    assert fence.older(agent.start) is None and fence.older(last.start) is not None
    assert agent.asked == signal.SIGUSR1


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
    agent.rendezvous, agent.store = SimpleNamespace(shrink="wait", shutdown=lambda: None), store_of()

    def end() -> None:
        raise job.RendezvousClosedError

    agent.run = end
    job._to_the_end(agent, "host", "1", [], serves=False)
    assert fence.older(agent.life) is not None
    job._to_the_end(agent, "host", "1", [], serves=True)
    assert fence.older(agent.life) is None


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that agents requeue; nobody waits."""
    jobs: list[str] = []
    monkeypatch.setattr(job.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(job.slurm, "requeue", lambda job, without: jobs.append(job))
    return jobs


@pytest.mark.parametrize("code", ["PP-E656", "PP-E708"])
def test_a_first_host_that_is_lost_before_this_one_has_an_agent_is_left_out(
    run: RunDir, jobs: list[str], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = TrainingError(Problem(code, "no answer"))
    assert job._failed(error, str(run.path), "node-0", None).exit_code == 1
    assert (mark_of(run), jobs) == ("node-0\nno answer\n", ["7"])
    monkeypatch.delenv("SLURM_JOB_ID")
    assert job._failed(error, str(run.path), "node-0", None).exit_code == GO_ON  # in a pod


def test_other_errors_and_hosts_by_hand_requeue_nothing(run: RunDir, jobs: list[str]) -> None:
    job._failed(ConfigError(Problem("PP-E605", "the port is taken")), str(run.path), "node-0", None)
    job._failed(TrainingError(Problem("PP-E708", "no answer")), "", "node-0", None)
    assert (mark_of(run), jobs) == (None, [])


def test_a_signal_that_waits_for_an_agent_says_that_somebody_ends_the_job(run: RunDir, jobs: list[str]) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, job.ASKS)
    try:
        signal.raise_signal(signal.SIGUSR1)
        job._requeue(run, None, "no answer", ["node-0"])
        assert signal.sigwait({signal.SIGUSR1}) == signal.SIGUSR1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (mark_of(run), jobs) == ("node-0\nno answer\n", [])


def store_of(*hosts: str) -> SealedStore:
    """The store of a job to which these hosts have come."""
    store = SealedStore(HashStore(), b"secret", "start")
    for number, name in enumerate(hosts, 1):
        store.plain.add(CAME, 1)
        store.set(f"{CAME}/{number}", name)
    return store


def no_meeting(agent: Any, begun: bool, here: list[str]) -> Any:
    def run() -> None:
        raise RendezvousTimeoutError

    agent.run, agent.store = run, store_of("node-0", "node-2")
    agent.rendezvous = SimpleNamespace(has_begun=begun, shrink="requeue", here=lambda: here)
    return agent


@pytest.mark.parametrize("begun", [False, True])
def test_nodes_that_do_not_come_and_nodes_that_are_lost_are_left_out(
    run: RunDir, jobs: list[str], begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first life those that have never come: the others may have given up a moment before. Some die before
    they have written their names."""
    monkeypatch.setenv("PPCTL_NODES", "node-0 node-1 node-2")
    agent = no_meeting(agent_of(run), begun, ["node-0", "node-2"] if begun else [])
    agent.store.plain.add(CAME, 1)
    outcome = job._to_the_end(agent, "node-0", "29500", [], serves=True)
    assert outcome is not None and outcome.state == "stopped"
    told = "node-1 has gone" if begun else "not all hosts of the run came in time"
    assert (mark_of(run), jobs) == (f"node-1\n{told}\n", ["7"])


def test_nodes_that_never_come_end_a_job_that_goes_on_elsewhere(run: RunDir, jobs: list[str]) -> None:
    (run.path / "life").write_text("7.1")
    with pytest.raises(TrainingError, match="PP-E709"):
        job._to_the_end(no_meeting(agent_of(run), False, []), "node-0", "29500", [], serves=True)
    assert (mark_of(run), jobs) == (None, [])


@pytest.mark.parametrize(
    ("nodes", "here", "absent"),
    [("a b", "a", ["b"]), ("a b c d", "a b", []), ("a b c d", "a b c", ["d"]), ("a b c", "a", [])],
)
def test_an_agent_that_misses_half_of_the_nodes_blames_none(
    nodes: str, here: str, absent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPCTL_NODES", nodes)
    assert job._absent(here.split())[0] == absent


@pytest.mark.parametrize("begun", [False, True])
def test_an_agent_that_blames_none_says_why(
    run: RunDir, jobs: list[str], begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPCTL_NODES", "node-0 node-1 node-2 node-3")
    monkeypatch.setattr(job, "host_name", lambda: "node-0")
    agent = no_meeting(agent_of(run), begun, ["node-0", "node-2"] if begun else [])
    job._to_the_end(agent, "node-0", "29500", [], serves=True)
    came = "not all hosts of the run came in time" + " (launch.shrink=requeue)" * begun
    doubt = "whether they or node-0 stood still cannot be told, so that none is left out"
    assert (mark_of(run), jobs) == (f"\n{came}; 2 of 4 nodes are missing: {doubt}\n", ["7"])


def test_an_agent_without_a_life_that_stood_still_leaves_the_next_start_alone(run: RunDir, jobs: list[str]) -> None:
    """SLURM has requeued the job meanwhile, and its new start has the run."""
    agent = agent_of(run)
    (run.path / "life").write_text("7.1")
    agent.run = lambda: None
    job._live(agent, serves=True)
    assert agent.life == "" and fence.older(agent.start) is not None
    assert not job._requeue(run, agent, "a node is gone", ["node-1"])
    assert (mark_of(run), jobs) == (None, [])


@pytest.mark.parametrize(("shrink", "waits"), [("requeue", 45), ("smaller", 150)])
def test_others_have_time_to_plan_a_smaller_run_before_this_agent_requeues(
    run: RunDir, jobs: list[str], monkeypatch: pytest.MonkeyPatch, shrink: str, waits: int
) -> None:
    config, slept = RunConfig(), list[float]()
    run.write_config(with_value(config, "launch", shrink=shrink))
    monkeypatch.setattr(job.time, "sleep", slept.append)
    job._failed(TrainingError(Problem("PP-E656", "no answer")), str(run.path), "node-0", None)
    assert slept == [waits, 30] and jobs == ["7"]


def begins(run: RunDir, monkeypatch: pytest.MonkeyPatch, index: int = 1) -> None:
    """Prepare this process for `main` on the node `index` of two."""
    for name in ("TORCH_ELASTIC_WORKER_IDENTICAL", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "")
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "PPCTL_START"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(job.signal, "signal", lambda *_: None)
    monkeypatch.setattr(job.sys, "argv", ["job", "--submitted", str(run.path)])
    place = f"{index:05}", str(run.path), "node-0", "1", "", *[str(run.path), "3"][: 0 if index else 2]
    monkeypatch.setattr(job, "_of_job", lambda path: place)


@pytest.mark.parametrize(("newest", "state"), [("7.0", "failed"), ("7.1", "running")])
def test_an_agent_that_fails_before_it_has_the_store_ends_its_own_start_alone(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, newest: str, state: str
) -> None:
    def fails(*_: Any) -> None:
        raise ConfigError(Problem("PP-E559", "the plan is no file"))

    begins(run, monkeypatch, index=0)
    monkeypatch.setattr(job, "_serve", fails)
    run.write_status("running")
    (run.path / "life").write_text(newest)
    assert job.main() == 2
    assert run.status()["state"] == state


@pytest.mark.parametrize("where", ["in SLURM's job", "in a pod"])
@pytest.mark.parametrize("served", [True, False])
def test_a_run_directory_that_cannot_be_written_is_a_problem_and_no_traceback(
    run: RunDir,
    where: str,
    served: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Pods meet anew, and the outcome that cannot be written either does not hide why."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", str(run.path / "life"))

    begins(run, monkeypatch, index=0 if served else 1)
    if where == "in a pod":
        monkeypatch.delenv("SLURM_JOB_ID")
    agent = agent_of(run)
    agent.rendezvous = SimpleNamespace(shutdown=lambda: None, farewell=lambda: None)
    for name in ("_serve", "_join"):
        monkeypatch.setattr(job, name, lambda *_: (None, None, ["a"]))
    monkeypatch.setattr(job, "_agent", lambda *_, **__: agent)
    monkeypatch.setattr(job, "_to_the_end", full)
    monkeypatch.setattr(RunDir, "write_status", full)
    assert job.main() == (GO_ON if where == "in a pod" else 2)
    said = capsys.readouterr().err
    assert "No space left on device" in said and ("PP-E610" in said) == (where != "in a pod")


def test_an_agent_of_the_next_job_has_the_life_of_the_one_before_until_it_begins_its_own(
    run: RunDir, jobs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host is lost between two jobs of `launch.shrink=smaller`: the run's newest life is not `enter`'s."""
    lives.begin(run, "j", 1, ["node-0", "node-1"], 3)
    first, second = agent_of(run, "j.1"), agent_of(run)
    second.rendezvous = SimpleNamespace(follow=lambda: None)
    agents = iter([first, second])

    def ends(agent: Any, *_: Any, **__: Any) -> None:
        if agent is second:
            raise TrainingError(Problem("PP-E656", "no answer"))

    begins(run, monkeypatch)
    monkeypatch.setattr(job, "_join", lambda *_: (None, None, ["a"]))
    monkeypatch.setattr(job, "_agent", lambda *_, **__: next(agents))
    monkeypatch.setattr(job, "_anew", lambda *_, **__: (None, ["b"]))
    monkeypatch.setattr(job, "_to_the_end", ends)
    assert job.main() == 1
    assert (mark_of(run), jobs) == ("node-0\nno answer\n", ["7"])
