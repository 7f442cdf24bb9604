"""When an agent of SLURM's job has it start again, and when it leaves that to the script, to others or to nobody."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from lone_agents import Agent, agent_of, mark_of, store_of
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from ppctl.agent import job, lives, requeue
from ppctl.agent.node import NodeAgent
from ppctl.agent.rendezvous import CAME
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem, TrainingError
from ppctl.launch.outcome import GO_ON
from ppctl.launch.run_directory import with_value
from ppctl.runs import fence
from ppctl.runs.rundir import RunDir


def requeued(
    agent: Any, monkeypatch: pytest.MonkeyPatch, meanwhile: Any = lambda: None
) -> tuple[str | None, list[str]]:
    """The mark that is left, and the jobs that the agent itself has requeued, if `meanwhile` happens while it waits."""
    jobs: list[str] = []
    monkeypatch.setattr(job.time, "sleep", lambda seconds: meanwhile())
    monkeypatch.setattr(requeue.slurm, "requeue", lambda job, without: jobs.append(f"{job} without {without}"))
    requeue.requeue(agent.run_dir, agent, "a node is gone", ["node-1"])
    return mark_of(agent.run_dir), jobs


def test_before_the_first_life_and_without_a_script_the_agent_requeues(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requeued(agent_of(run), monkeypatch) == ("node-1\na node is gone\n", ["7 without node-1"])


def test_a_task_of_an_array_is_requeued_without_the_others(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them has the array's number for its job's."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert requeued(agent_of(run), monkeypatch) == ("node-1\na node is gone\n", ["7_2 without node-1"])
    assert run.requeue_mark("7.0") == "node-1", "the script has SLURM_JOB_ID in the name of its mark"


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
    agent = Agent(store=store, life=told, before=before, run_dir=run, job=job, launch=RunConfig().launch)
    agent._value = lambda store, key, *_, **__: said[key]
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
    assert begun(run, "mine", "", 1, before).startswith("mine.1-")
    (run.path / "life").write_text("7.1")  # the start of whoever went on meanwhile
    (run.path / "result.json").write_text("{}")
    with pytest.raises(job.RendezvousClosedError):
        begun(run, "mine", "", 1, before)
    assert (run.path / "life").read_text() == "7.1" and (run.path / "result.json").exists()


def test_a_count_that_a_stranger_takes_back_gives_no_life_the_name_of_an_earlier_one(run: RunDir) -> None:
    before = lives.before(run, submitted=True)
    first = begun(run, "j", "", 1, before)
    assert begun(run, "j", first, 1) != first


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
    assert begun(run, "j", f"{before}.1", 3).startswith("j.3-")


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
        requeue.requeue(run, None, "no answer", ["node-0"])
        assert signal.sigwait({signal.SIGUSR1}) == signal.SIGUSR1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (mark_of(run), jobs) == ("node-0\nno answer\n", [])


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
    assert requeue.absent(here.split())[0] == absent


@pytest.mark.parametrize("begun", [False, True])
def test_an_agent_that_blames_none_says_why(
    run: RunDir, jobs: list[str], begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPCTL_NODES", "node-0 node-1 node-2 node-3")
    monkeypatch.setattr(requeue, "host_name", lambda: "node-0")
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
    assert not requeue.requeue(run, agent, "a node is gone", ["node-1"])
    assert (mark_of(run), jobs) == (None, [])


@pytest.mark.parametrize(("shrink", "waits"), [("requeue", 45), ("smaller", 150)])
def test_others_have_time_to_plan_a_smaller_run_before_this_agent_requeues(
    run: RunDir, jobs: list[str], monkeypatch: pytest.MonkeyPatch, shrink: str, waits: int
) -> None:
    config, slept = RunConfig(), list[float]()
    run.write_config(with_value(config, "launch", shrink=shrink))
    for each in (job, requeue):  # threads of other tests sleep as well
        monkeypatch.setattr(each, "time", SimpleNamespace(sleep=slept.append))
    job._failed(TrainingError(Problem("PP-E656", "no answer")), str(run.path), "node-0", None)
    assert slept == [waits, 30] and jobs == ["7"]
