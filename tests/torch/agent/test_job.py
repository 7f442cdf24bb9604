"""How an agent's program goes on: in the next job of the same store, and where it fails."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from lone_agents import agent_of, mark_of, store_of
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from ppctl.agent import job, lives, requeue
from ppctl.agent.node import NodeAgent
from ppctl.agent.rendezvous import NodeRendezvous
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem, TrainingError
from ppctl.launch.outcome import GO_ON, RESTART, JobOutcome
from ppctl.launch.run_directory import with_value
from ppctl.reach.store import SealedStore
from ppctl.runs.rundir import RunDir


@pytest.mark.parametrize("where", ["in SLURM's job", "in a pod", "by hand"])
@pytest.mark.parametrize(
    ("left", "least", "why"),
    [(1, 1, "only 1 of 4 hosts are here"), (3, 4, "nothing fits 3 of 4 nodes"), (3, 1, "")],
    ids=["it stood still", "too few for the run", "one is lost"],
)
def test_a_job_starts_again_rather_than_on_less_than_half_of_its_hosts(
    run: RunDir, jobs: list[str], where: str, left: int, least: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start has all nodes again. A count that a stranger raised makes no host."""

    def plan(_: RunDir, nodes: int, start: str) -> None:
        planned.append(nodes)
        if nodes < least:
            raise ConfigError(Problem("PP-E230", f"nothing fits {nodes} of 4 nodes", "--lost 0"))

    monkeypatch.setenv("PPCTL_NODES", "node-0 node-1 node-2 node-3")
    planned, agent = list[int](), agent_of(run)
    agent.in_slurm, agent.in_pod, agent.store = where == "in SLURM's job", where == "in a pod", store_of()
    settings = SimpleNamespace(max_nodes=4)
    agent.rendezvous = SimpleNamespace(settings=settings, has_begun=True, shrink="smaller", is_closed=lambda: False)
    for number, name in enumerate(["node-1", "node-2"][: left - 1], 1):
        agent.store.set(f"ppctl/left/j/{number}", name)
    agent.store.plain.add("ppctl/left/j", left + 1)
    monkeypatch.setattr(job, "plan_smaller", plan)
    for each in (job, requeue):
        monkeypatch.setattr(each, "host_name", lambda: "node-0")
    for name in ("publish_run", "read_run"):
        monkeypatch.setattr(job, name, lambda *_: None)
    monkeypatch.setattr(job, "receive_run", lambda *_: (None, None))
    if where == "by hand" and least > left:
        with pytest.raises(ConfigError, match=f"{why}.*\n.*ppctl node --rendezvous node-0:29500 --resume {run.path}"):
            job._anew(agent, ["j"], serves=True)
        return
    found: Any = job._anew(agent, ["j"], serves=True)
    goes_on = where == "by hand" or not why
    assert planned == [left] * (goes_on or least > 1)
    assert isinstance(found, tuple) == goes_on
    if not goes_on:
        assert found.exit_code == (GO_ON if where == "in a pod" else 75) and why in found.report
    doubt = "; 3 of 4 nodes are missing: whether they or"
    blamed = f"node-3\n{why}" if least > left else f"\n{why}{doubt}"
    assert (mark_of(run) or "").startswith(blamed if jobs else "") and bool(jobs) == (not goes_on and agent.in_slurm)


def still(run: RunDir) -> tuple[Any, SealedStore]:
    """An agent of two whose first one lives and does nothing, and the store of their rendezvous."""
    agent, store = agent_of(run), store_of()
    places = {_NodeDesc("0 node-0", 1, 0): 0, _NodeDesc("1 node-1", 2, 0): 1}
    agent.rendezvous = SimpleNamespace(
        num_nodes_waiting=lambda: 0, _state_holder=SimpleNamespace(state=SimpleNamespace(participants=places))
    )
    agent.rendezvous.host_of = lambda place: NodeRendezvous.host_of(agent.rendezvous, place)
    agent.launch = with_value(RunConfig(), "launch", start_limit="1s").launch
    return agent, store


@pytest.mark.parametrize("where", ["in SLURM's job", "in a pod", "by hand"])
def test_an_agent_that_lives_and_does_not_go_on_is_not_waited_for(run: RunDir, jobs: list[str], where: str) -> None:
    """Its main thread stands in the file system, and its signs of life come from another."""
    agent, store = still(run)
    lives.begin(run, "j", 1, ["node-0", "node-1"], 3)  # in which the first one stands
    agent.in_slurm, agent.in_pod = where == "in SLURM's job", where == "in a pod"
    agent.run = lambda: NodeAgent._value(agent, store, "life", 0, time.monotonic() + 1)
    agent.store = store
    if where == "by hand":
        with pytest.raises(TrainingError, match="PP-E709: the agent on node-0 lives"):
            job._to_the_end(agent, "node-0", "29500", [], serves=False)
    else:
        outcome = job._to_the_end(agent, "node-0", "29500", [], serves=False)
        assert outcome is not None and outcome.exit_code == (RESTART if agent.in_pod else 75)
    assert (mark_of(run) or "").startswith("node-0\nthe agent on node-0 lives" if agent.in_slurm else "")
    assert bool(jobs) == agent.in_slurm


def test_a_first_agent_that_plans_for_ever_is_not_waited_for(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, agent.store = still(run)
    agent.store.set("ppctl/job", ["j"])
    monkeypatch.setattr(job, "LOST", 0.1)
    monkeypatch.setattr(job.time, "sleep", lambda _: None)
    with pytest.raises(TrainingError, match="PP-E656: the host of the rendezvous, node-0, has planned nothing for"):
        job._anew(agent, ["j"], serves=False)


@pytest.mark.parametrize(("number", "code"), [(1, 130), (2, 130), (10, 130), (15, 143)])
def test_a_second_signal_by_hand_ends_with_the_exit_code_that_ppctl_train_has(
    run: RunDir, number: int, code: int
) -> None:
    agent = agent_of(run)
    agent._ranks, agent._submitted, agent.asked, agent.in_slurm = [], False, 2, False
    with pytest.raises(SystemExit) as left:
        NodeAgent._on_signal(agent, number, None)
    assert left.value.code == code


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


def test_an_error_of_the_system_that_may_pass_requeues_slurms_job_and_blames_no_node(
    run: RunDir, jobs: list[str]
) -> None:
    stale = OSError(116, "Stale file handle", str(run.path / "life"))
    outcome = job._failed(stale, str(run.path), "node-0", agent_of(run))
    assert (outcome.exit_code, outcome.state, jobs) == (75, "stopped", ["7"])
    assert (mark_of(run) or "").startswith("\nthe run directory cannot be written: Stale file handle")
    outcome = job._failed(OSError(28, "No space left on device"), str(run.path), "node-0", agent_of(run))
    assert (outcome.exit_code, jobs) == (2, ["7"])


def test_what_is_no_matter_of_files_is_not_told_as_one(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    job._failed(OSError(24, "Too many open files"), "", "node-0", None)
    said = capsys.readouterr().err
    assert "Too many open files" in said and "try: ulimit -a" in said and "run directory" not in said


def test_an_agent_without_a_life_does_not_write_over_a_newer_start(run: RunDir) -> None:
    agent = agent_of(run)
    agent._shutdown = lambda: None
    (run.path / "life").write_text("7.1")
    run.write_status("finished")
    NodeAgent._stop_workers(agent, SimpleNamespace(group_rank=0))
    assert run.status()["state"] == "finished"


@pytest.mark.parametrize(("state", "code"), [("interrupted", 130), ("stopped", 75)])
def test_a_second_signal_gives_the_exit_code_of_who_heard_it(run: RunDir, state: str, code: int) -> None:
    agent = agent_of(run)
    outcome = job._by_hand(agent, JobOutcome(143 if state == "interrupted" else 75, state), 130)
    assert outcome.exit_code == code


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
