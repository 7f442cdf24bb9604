"""Hosts whose agents start ranks again: what kills them, what takes their place, and the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agents import AGENT, TRAIN, Hosts, kill, until
from command import alive, losses, metrics, only_run, ppctl, start
from oracle.reference import reference_losses

from ppctl.runs.checkpoint_folder import MANIFEST, find

pytestmark = pytest.mark.timeout(300)
SLOW = "slow 3 0 -"
"""A step takes a second: it is still under way when a test has seen the one before."""


def train(text: Path, steps: int, *more: str) -> tuple[str, ...]:
    return (*TRAIN, f"steps={steps}", f"data.path={text}", *more)


def starts(run: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((run / "env.json").read_text())["starts"]
    return found


def assert_undisturbed(cwd: Path, steps: int) -> Path:
    """The run has done each step once, with the losses of one process."""
    run = only_run(cwd)
    assert [record["step"] for record in metrics(run)] == list(range(1, steps + 1))
    assert losses(run) == reference_losses(run, steps)
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert not list((run / "errors").glob("*.json"))
    return run


def has_waited(rank: int) -> bool:
    """Whether this process began as one that waits to become a rank."""
    try:
        return b"\0ppctl.rank.standby\0" in Path(f"/proc/{rank}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return False


def test_when_a_rank_dies_all_hosts_start_theirs_again_and_go_on_bitwise(tmp_path: Path, text: Path) -> None:
    """Killed in its tenth step: the next life has no tenth. All ranks waited before to become one."""
    hosts = Hosts(tmp_path, *train(text, 14), PPCTL_FAULT="kill 2 9 2B0")
    waited, ranks = set[int](), set[int]()
    while any(agent.poll() is None for agent in hosts.agents.values()):
        ranks |= (now := {*hosts.ranks(0), *hosts.ranks(1)})
        waited |= set(filter(has_waited, now))
        time.sleep(0.1)
    assert len(ranks) == 8 and ranks <= waited, hosts.said()
    assert hosts.ends() == {0: 0, 1: 0}, hosts.said()
    first, second = starts(assert_undisturbed(tmp_path, 14))
    assert first["nodes"] == second["nodes"] == ["node-0", "node-1"]
    assert (second["step"], second["why"]) == (9, "rank 2: killed by signal 9 (SIGKILL)")
    shown = ppctl("status", cwd=tmp_path).stdout
    assert "start after step 9 on node-0, node-1: rank 2: killed by signal 9 (SIGKILL)" in shown


@pytest.mark.whole
def test_ranks_that_start_again_take_their_copies_in_memory(tmp_path: Path, text: Path) -> None:
    copies = tmp_path / "memory"
    copies.mkdir(mode=0o700)
    local = (f"checkpoint.local={copies}", "checkpoint.local_every=1")
    hosts = Hosts(tmp_path, *train(text, 14, "checkpoint.interval=100", *local), PPCTL_FAULT="kill 2 9 2B0")
    assert hosts.ends() == {0: 0, 1: 0}, hosts.said()
    run = assert_undisturbed(tmp_path, 14)
    assert re.search("going on from the copies of step [89] in memory", hosts.said())
    assert [start["step"] for start in starts(run)] == [0, 9]


@pytest.mark.whole
def test_a_rank_that_hangs_is_named_by_the_watch_and_all_start_again(tmp_path: Path, text: Path) -> None:
    limits = ("launch.step_limit=4s", "launch.first_step_limit=20s", "launch.start_limit=60s")
    hosts = Hosts(tmp_path, *train(text, 14, *limits), PPCTL_FAULT="hold 3 9 3B0")  # rank 2 tells of both
    assert hosts.ends() == {0: 0, 1: 0}, hosts.said()
    _, second = starts(assert_undisturbed(tmp_path, 14))
    assert str(second["why"]).startswith("rank 3: ")


@pytest.mark.whole
def test_a_spare_takes_the_place_of_a_lost_host_and_one_host_more_is_refused(tmp_path: Path, text: Path) -> None:
    hosts = Hosts(tmp_path, *train(text, 30, "launch.spares=1"), hosts=(0, 1, 2), PPCTL_FAULT=SLOW)
    hosts.wait_for_step(5)
    gone = 1 if hosts.ranks(1) else 2
    surplus = hosts.start(3)
    until(lambda: surplus.poll() is not None, 60)
    assert surplus.poll() == 2 and "the run has all hosts that it needs: nodes 2, spares 1" in surplus.communicate()[1]
    del hosts.agents[3]
    until(lambda: len(hosts.waiting(0)) == 2)
    waiting = hosts.waiting(0), hosts.waiting(3 - gone)
    assert [len(each) for each in waiting] == [2, 2]
    kill([hosts.agents[gone].pid])
    until(lambda: len(hosts.ranks(3 - gone)) == 2)
    assert [{*hosts.ranks(0)}, {*hosts.ranks(3 - gone)}] == [*waiting], hosts.said()
    assert not {os.getpriority(os.PRIO_PROCESS, rank) for rank in hosts.ranks(0)} - {os.getpriority(os.PRIO_PROCESS, 0)}
    codes = hosts.ends()
    assert codes.pop(gone) == -9
    assert set(codes.values()) == {0}, hosts.said()
    _, second = starts(assert_undisturbed(tmp_path, 30))
    assert str(second["why"]).endswith(f"node-{gone} has gone; node-{3 - gone} takes its place")


@pytest.mark.whole
def test_a_host_that_stood_still_and_wakes_in_the_next_life_writes_nothing(tmp_path: Path, text: Path) -> None:
    """Its ranks wake first, while its agent still stands; then the agent, which waits as a spare."""
    hosts = Hosts(tmp_path, *train(text, 40, "launch.spares=1"), hosts=(0, 1, 2), PPCTL_FAULT=SLOW)
    hosts.wait_for_step(5)
    still = 1 if hosts.ranks(1) else 2
    ranks, agent = hosts.ranks(still), hosts.agents[still]
    writers = [pid for pid in alive(tmp_path, "ppctl.checkpoint.writer") if f"node-{still}\0" in environ(pid)]
    kill([agent.pid, *ranks, *writers], signal.SIGSTOP)
    run = only_run(tmp_path)
    until(lambda: len(starts(run)) == 2 and metrics(run)[-1]["step"] > starts(run)[1]["step"] + 2, 120)
    kill([*ranks, *writers], signal.SIGCONT)
    until(lambda: not set(ranks) & set(alive(tmp_path)), 30)
    assert not set(ranks) & set(alive(tmp_path)), "each ended by itself"
    kill([agent.pid], signal.SIGCONT)
    assert hosts.ends() == {0: 0, 1: 0, 2: 0}, hosts.said()
    assert len(starts(assert_undisturbed(tmp_path, 40))) == 2
    said = "".join(path.read_text() for path in (run / "logs").glob("rank-*.log"))
    assert "error PP-E779" in said and f"the run's newest is {(run / 'life').read_text()}" in said


def environ(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("number", "by", "twice"), [(1, signal.SIGTERM, False), (0, signal.SIGINT, False), (1, signal.SIGINT, True)]
)
def test_an_agent_that_is_asked_to_leave_stops_the_run_in_good_order(
    tmp_path: Path, text: Path, number: int, by: int, twice: bool
) -> None:
    """All ranks save the step that they are in; a second Ctrl-C ends them at once, on all hosts."""
    hosts = Hosts(tmp_path, *train(text, 100, "checkpoint.interval=50"), PPCTL_FAULT=SLOW)
    hosts.wait_for_step(3)
    kill([hosts.agents[number].pid], by)
    if twice:
        time.sleep(0.3)
        kill([hosts.agents[number].pid], by)
    codes = hosts.ends()
    run = only_run(tmp_path)
    assert len(starts(run)) == 1
    if twice:
        assert codes == {number: 130, 1 - number: 143}, hosts.said()
        return
    assert set(codes.values()) == {75}, hosts.said()
    done = len(metrics(run))
    assert 3 <= done < 8 and find(run / "checkpoints").path.name == f"step-{done}"  # type: ignore[union-attr]
    assert losses(run) == reference_losses(run, done)


@pytest.mark.whole
@pytest.mark.parametrize("when", ["while it imports", "while it waits"])
def test_a_host_that_has_not_met_the_first_one_leaves_at_once(tmp_path: Path, when: str) -> None:
    """Ctrl-C ends the wait for a host that does not answer, which is in C++, and imports without their traceback."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = start("node", "--rendezvous", f"127.0.0.1:{silent.getsockname()[1]}", cwd=tmp_path)
        until(lambda: AGENT in Path(f"/proc/{host.pid}/cmdline").read_text())
        if when == "while it waits":
            assert host.stderr is not None and "waiting for the first host" in host.stderr.readline()
        host.send_signal(signal.SIGINT)
        said = host.communicate(timeout=60)[1]
    assert host.returncode == -signal.SIGINT and "Traceback" not in said, said


@pytest.mark.whole
def test_a_first_host_without_others_leaves_without_a_traceback_however_often_it_is_asked(
    tmp_path: Path, text: Path
) -> None:
    hosts = Hosts(tmp_path, *train(text, 4), hosts=(0,))
    pid = hosts.agents[0].pid
    until(lambda: caught(pid) & 1 << signal.SIGUSR1 - 1)  # the agent listens
    kill([pid], signal.SIGINT)
    time.sleep(0.5)
    kill([pid], signal.SIGINT)
    assert hosts.ends() == {0: 130} and "Traceback" not in (said := hosts.said()), said
    status = json.loads(ppctl("status", "--json", cwd=tmp_path).stdout)
    assert status["state"] == "interrupted"


def caught(pid: int) -> int:
    """The signals that a process has handlers for, a bit for each."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))


@pytest.mark.whole
def test_what_fails_in_every_life_ends_the_run_after_few_and_is_named(tmp_path: Path, text: Path) -> None:
    hosts = Hosts(tmp_path, *train(text, 14, "launch.max_restarts=1"), PPCTL_FAULT="raise 2 1 2B0")
    assert hosts.ends() == {0: 1, 1: 1}, hosts.said()
    assert [start["step"] for start in starts(only_run(tmp_path))] == [0, 1, 1]
    assert "struck by a test" in hosts.said()


@pytest.mark.whole
def test_a_damaged_checkpoint_ends_the_run_with_its_exit_code_and_is_not_tried_again(
    tmp_path: Path, text: Path
) -> None:
    hosts = Hosts(tmp_path, *train(text, 4))
    assert hosts.ends() == {0: 0, 1: 0}, hosts.said()
    run = only_run(tmp_path)
    (run / "checkpoints" / "step-4" / MANIFEST).unlink()
    again = Hosts(tmp_path, "--resume", str(run), "steps=8")
    assert again.ends() == {0: 3, 1: 3}, again.said()
    assert len(starts(run)) == 1 and "PP-E501" in again.said()


@pytest.mark.whole
def test_when_the_host_of_the_rendezvous_is_lost_the_others_say_so_and_another_one_goes_on(
    tmp_path: Path, text: Path
) -> None:
    hosts = Hosts(tmp_path, *train(text, 20), PPCTL_FAULT=SLOW)
    hosts.wait_for_step(5)
    kill([hosts.agents[0].pid])
    codes = hosts.ends()
    assert codes == {0: -9, 1: 1}
    assert "PP-E656: the host of the rendezvous" in hosts.said()
    again = Hosts(tmp_path, "--resume", str(only_run(tmp_path)))
    assert again.ends() == {0: 0, 1: 0}, again.said()
    assert_undisturbed(tmp_path, 20)


@pytest.mark.whole
def test_hosts_that_cannot_take_part_say_why_and_do_not_disturb(tmp_path: Path, text: Path) -> None:
    hosts = Hosts(tmp_path, *train(text, 12), hosts=(0,), PPCTL_FAULT=SLOW)
    other = hosts.start(1, "steps=13")
    until(lambda: other.poll() is not None)
    assert other.poll() == 2 and "PP-E655" in other.communicate()[1]
    hosts.start(1)
    assert hosts.ends() == {0: 0, 1: 0}, hosts.said()
    assert_undisturbed(tmp_path, 12)


STRIKES: dict[str, Callable[[Hosts, random.Random], int | None]] = {
    "a rank": lambda hosts, draw: kill(
        draw.sample(everyone := [*hosts.ranks(0), *hosts.ranks(1), *hosts.ranks(2)], min(1, len(everyone)))
    ),
    "two ranks": lambda hosts, draw: kill([*hosts.ranks(0)[:1], *hosts.ranks(1)[-1:], *hosts.ranks(2)[-1:]]),
    "an agent": lambda hosts, draw: lost(hosts, draw.choice([1, 2])),
    "an agent and a rank": lambda hosts, draw: (kill(hosts.ranks(0)[:1]), lost(hosts, draw.choice([1, 2])))[1],
}


def lost(hosts: Hosts, number: int) -> int:
    """Kill the agent of a host, and its ranks with it."""
    kill([hosts.agents[number].pid])
    return number


@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.whole), *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 11))]
)
def test_ten_kills_at_random_moments_cost_no_bit(tmp_path: Path, text: Path, seed: int) -> None:
    """Of ranks, agents and both at once, also while ranks start; a host that is lost comes back as a spare."""
    draw = random.Random(seed)
    more = ("launch.spares=1", "launch.max_restarts=30", "launch.start_limit=60s")
    steps = 160  # of a second each: ten strikes take less than that
    hosts = Hosts(tmp_path, *train(text, steps, *more), hosts=(0, 1, 2), PPCTL_FAULT=SLOW)
    hosts.wait_for_step(3)
    run = only_run(tmp_path)
    for _ in range(10):
        before = len(starts(run))
        assert metrics(run)[-1]["step"] < steps - 10, "struck while it trains"
        gone = STRIKES[draw.choice(list(STRIKES))](hosts, draw)
        if gone is not None:
            until(lambda: hosts.agents[gone].poll() is not None)  # noqa: B023
            hosts.start(gone)
        until(lambda: len(starts(run)) > before, 20)  # noqa: B023 (a spare's loss begins no life)
        time.sleep(draw.uniform(0, 12))  # into its start, or its steps
    assert set(hosts.ends(400).values()) == {0}, hosts.said()
    assert len(starts(assert_undisturbed(tmp_path, steps))) > 4
