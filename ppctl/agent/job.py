"""The program of a host's agent, to the end of the job.

    python -m ppctl.agent HOST PORT TYPED [RUN FD]   what `ppctl node` becomes
    python -m ppctl.agent --submitted RUN            on each node of SLURM's job, and in each pod

TYPED is what was typed after `ppctl node` here. With RUN and FD this host has the rendezvous, on the listening socket
FD, and has made the run's directory; the others ask it for all that they need. Nodes of a submitted run read its
directory, and the first of them has the rendezvous.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

from ppctl.agent import lives
from ppctl.agent.node import ASKS, NodeAgent
from ppctl.agent.rendezvous import CAME, JOIN, LOST, NodeRendezvous, StandsStillError
from ppctl.agent.requeue import absent, requeue
from ppctl.agent.smaller import complete, plan_smaller
from ppctl.config.quantities import seconds
from ppctl.errors import ConfigError, PpctlError, Problem, TrainingError, pasted, visible
from ppctl.host.devices import machines
from ppctl.launch.enter import check_node, package_digest
from ppctl.launch.environment import node_place
from ppctl.launch.leave import job_outcome
from ppctl.launch.machine import shortage
from ppctl.launch.outcome import DONE, FINAL, GO_ON, RESTART, STOPPED, TERMINATED, JobOutcome
from ppctl.rank.own_process import raise_file_limit
from ppctl.rank.rendezvous import SharedRun, publish_run, read_run, receive_run, sealed
from ppctl.reach.store import SealedStore, join, limit_answers, listen_as, unproved
from ppctl.records.run_records import ASKED_WORDS
from ppctl.runs import fence
from ppctl.runs.heartbeat import host_name
from ppctl.runs.run_starts import slurm_start
from ppctl.runs.rundir import RunDir, unwritable

_JOB, _ASKED, _ANSWER = "ppctl/job", "ppctl/asked", timedelta(seconds=20)
"""How long the store may take for an answer: after at most two such times its host counts as lost."""
_GONE = ("PP-E656", "PP-E708")
"""Codes of errors which say that the host of the rendezvous does not answer."""
_LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""Errors that another start would meet again."""


def main() -> int:
    """Run this host's agent to the end of the job; returns the exit code."""
    submitted, agent, run, host, before, served = sys.argv[1] == "--submitted", None, "", "", "", list[str]()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there may be ranks, this ends it even inside a wait in C++
    if not submitted:  # in a submitted job a request to save is kept until the agent listens
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS)
    raise_file_limit()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)  # what matters is told here
    # All agents have equally many ranks: torch computes their numbers, and asks no store that strangers write into.
    os.environ |= {"TORCH_ELASTIC_WORKER_IDENTICAL": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    os.environ["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "").replace("3", "")  # torch has read it
    try:
        # The host of the store comes first in the order of names: rank 0's lines stay on its terminal.
        by_hand = "1" if len(sys.argv) == 4 else "0", "", *sys.argv[1:]
        index, run, host, port, typed, *served = _of_job(sys.argv[2]) if submitted else by_hand
        before = lives.before(RunDir(Path(own)), submitted=submitted) if (own := run or "".join(served[:1])) else ""
        os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "", "PPCTL_START": ""}  # what `sealed` proves
        store, shared, told = _serve(host, int(port), typed, *served) if served else _join(host, int(port), typed, run)
        address, name = (host, int(port)), f"{index} {host_name()}"
        agent = _agent(shared, told[0], address, store, name, submitted=submitted)
        agent.before = before or lives.before(agent.run_dir, submitted=submitted)
        while (outcome := _to_the_end(agent, host, port, told, serves=bool(served))) is None:
            if isinstance(found := _anew(last := agent, told, serves=bool(served)), JobOutcome):
                outcome = found
                break
            shared, told = found
            agent = _agent(shared, told[0], address, store, name, submitted=submitted)
            agent.follow(last)
        if outcome.report and not agent.in_slurm:  # there the script says it
            print(visible(outcome.report), file=sys.stderr)
    except (PpctlError, OSError) as error:
        outcome = _failed(error, run, host_name() if served else host, agent)
        if agent is None or not submitted or outcome.exit_code == GO_ON:
            # Else the others would have the job start again. An agent of an older start has no say.
            if agent is None and served and outcome.exit_code != GO_ON:
                _write(outcome, RunDir(Path(served[0])), before)
            return outcome.exit_code
        if served:
            agent.rendezvous.shutdown()
    if served:
        _write(outcome, agent.run_dir, agent.start)
        agent.rendezvous.farewell()
    return 0 if agent.in_slurm and outcome.state == "stopped" else outcome.exit_code  # the script decides


def _write(outcome: JobOutcome, run: RunDir, start: str) -> None:
    if fence.older(start) is None:
        outcome.write(run, ())


def _failed(error: PpctlError | OSError, run: str, host: str, agent: NodeAgent | None) -> JobOutcome:
    """Print an error that ends this agent; returns the outcome. SLURM's job of the `run` starts again if its first
    `host` is lost, and after a system error that may pass, for which no node is to blame; pods meet anew."""
    in_slurm, passes = slurm_start() is not None, isinstance(error, OSError)
    again = isinstance(error, OSError) and in_slurm and error.errno not in _LASTING
    if isinstance(error, OSError):
        error = _of_system(error, agent.run_dir.path if agent else Path(run or "."))
    problem = error.problems[0]
    gone = run and problem.code in _GONE
    if run and not in_slurm and (gone or passes):
        print(visible(f"note: {problem.message}; all meet anew when it is back"), file=sys.stderr)
        return JobOutcome(GO_ON, "stopped")
    print("\n".join(f"error {each}" for each in error.problems), file=sys.stderr)
    if gone:  # if it is this agent that is lost, the others requeue or begin a life, which they may have to plan first
        time.sleep((3 + 7 * (RunDir(Path(run)).read_config().launch.shrink == "smaller")) * LOST)
        requeue(RunDir(Path(run)), agent, problem.message, [host])
    if again and agent is not None:
        with suppress(OSError):
            if requeue(agent.run_dir, agent, problem.message, []):
                return JobOutcome(STOPPED, "stopped", problem.message)
    return JobOutcome(error.exit_code, "failed", str(problem))


def _of_system(error: OSError, run: Path) -> ConfigError:
    if error.errno in _LASTING or str(error.filename or "").startswith(f"{run}/"):
        return unwritable(error, run, f"df -h {pasted(run)}", host_name())
    return ConfigError(Problem("PP-E610", f"{host_name()} cannot go on: {error}", "ulimit -a", host_name()))


def _of_job(run: str) -> tuple[str, ...]:
    """The agent's place in the order of nodes, its run, and the arguments that `ppctl node` would have given. Raises
    ConfigError (PP-E605, PP-E606)."""
    index, _, host, port = node_place(os.environ)
    served = []
    if index == 0:
        listening = listen_as(host, port)
        host, served = listening.getsockname()[0], [run, str(listening.detach())]
    return f"{index:05}", run, host, str(port), "", *served


def _serve(host: str, port: int, typed: str, run: str, descriptor: str) -> tuple[SealedStore, SharedRun, list[str]]:
    """Serve the store; returns it, the run, and what else agents are told: the job's id, the code, the typed words."""
    plain = TCPStore(host, port, None, True, _ANSWER, False, multi_tenant=True, master_listen_fd=int(descriptor))
    complete(RunDir(Path(run)))
    shared, told = read_run(Path(run)), [secrets.token_hex(4), package_digest(), typed]
    store, unanswered, newest = sealed(plain, shared.run), deque[int](maxlen=100), 0

    def answer() -> None:
        nonlocal newest
        known, newest = newest, plain.add(_ASKED, 0)
        unanswered.extend(range(max(known, newest - 100) + 1, newest + 1))
        for number in tuple(unanswered):  # a host may have died before it wrote its word
            if plain.check([asked := f"{_ASKED}/{number}"]):
                store.set(f"{asked}/answer", plain.get(asked).decode("latin-1"))
                unanswered.remove(number)

    NodeRendezvous.answer = staticmethod(answer)
    store.set(_JOB, told)
    publish_run(store, shared)
    return store, shared, told


def _join(host: str, port: int, typed: str, run: str) -> tuple[SealedStore, SharedRun, list[str]]:
    """As `_serve` on another host, which must ask for the run if it has no `run`. Raises PpctlError if the first host
    does not answer (PP-E708), or this one has another run directory, code, command line or secret (PP-E623, PP-E624,
    PP-E655, PP-E777)."""
    if not run:
        told = f"waiting for the first host at {host}:{port}; steps are printed there"
        print(f"note: {host_name()}: {told}", file=sys.stderr)
    try:
        plain = join(host, port, None, JOIN)
        limit_answers(port, _ANSWER)
        entered = receive_run(plain, Path(run) if run else None)
        assert not isinstance(entered, int)  # no agent refuses a run there
        shared, store = entered
        told = store.get(_JOB)
        if not run:  # this secret may be of a run that is over: the first host must prove a word drawn now
            asked, word = f"{_ASKED}/{plain.add(_ASKED, 1)}", secrets.token_hex(16)
            plain.set(asked, word)
            if store.get(f"{asked}/answer") != word:
                raise TrainingError(unproved(asked))
        plain.set_timeout(_ANSWER)
    except RuntimeError as error:
        message = f"{host_name()} did not reach the first host's agent at {host} port {port}"
        remedy = pasted("python", "-c", f"import socket; socket.create_connection({(host, port)}, 5)")
        raise TrainingError(Problem("PP-E708", message, remedy)) from error
    if not run:  # else `enter` has checked this node
        check_node(shared.run, told[1], "the same version of ppctl on all hosts")
    if typed not in ("", told[2]):
        message = f"the command line of this host is `{typed}`, but that of the first host is `{told[2]}`"
        remedy = f"ppctl node --rendezvous {host}:{port}"
        raise ConfigError(Problem("PP-E655", message, remedy, "command line"))
    return store, shared, told


def _agent(
    shared: SharedRun, job: str, address: tuple[str, int], store: SealedStore, name: str, *, submitted: bool
) -> NodeAgent:
    """Make this host's agent. Raises ConfigError if the host has too few GPUs; in a submitted job its ranks do."""
    launch = shared.config.launch
    nodes, per_node = machines(launch.nodes, launch.gpus_per_node, shared.plan.sizes.world)
    problems = shortage(launch.device, per_node, (), os.environ, share=launch.share_gpu, command="node HOST")
    if problems and not submitted:
        raise ConfigError(problems)
    index, hosts, *_ = node_place(os.environ) if submitted else (0, nodes + launch.spares)
    rendezvous = NodeRendezvous.over(store.plain, job, store.key_for("rendezvous"), nodes, hosts - nodes, name)
    rendezvous.stands_back = 2.0 * LOST * (index >= nodes)
    rendezvous.shrink, rendezvous.patience = launch.shrink, timedelta(seconds=seconds(launch.shrink_after))
    return NodeAgent(shared, job, address, store, rendezvous, submitted=submitted)


def _anew(agent: NodeAgent, told: list[str], *, serves: bool) -> tuple[SharedRun, list[str]] | JobOutcome:
    """The run and the job with which all agents that are left go on: if one is missing, the first plans the run on
    fewer hosts once all have noticed. Returns the outcome if the job starts again instead. Raises ConfigError
    (PP-E230), TrainingError (PP-E656; PP-E779 in an older start)."""
    run, store, left, known = agent.run_dir, agent.store, f"ppctl/left/{told[0]}", told
    agent.rendezvous.nobody_comes = False  # else each further look tells again that some are missing
    try:
        store.set(f"{left}/{store.plain.add(left, 1)}", host_name())
        if serves:
            if not agent.rendezvous.is_closed():  # else the job has ended in good order
                time.sleep(2 * LOST)
                if why := _plan_smaller(agent, here := _names(store, left)):
                    return _too_few(agent, None, why, here, serves=True)
            if older := fence.older(agent.start):
                raise TrainingError(older)
            run.write_status("starting")
            publish_run(store, read_run(run.path))
            store.set(_JOB, [secrets.token_hex(4), *told[1:]])
        until = time.monotonic() + (limit := 2 * LOST + seconds(agent.launch.start_limit))
        while (told := store.get(_JOB)) == known:
            if time.monotonic() > until:
                raise _gone(f", {agent.address[0]}, has planned nothing for {limit:g} s (launch.start_limit), and")
            time.sleep(1.0)
        entered = receive_run(store.plain, run.path)
    except RuntimeError as error:
        raise _gone("") from error
    assert not isinstance(entered, int)
    return entered[0], told


def _plan_smaller(agent: NodeAgent, here: Sequence[str]) -> str:
    """Plan the run on the hosts that are `here`; returns an empty text. In a submitted job it may instead return why
    the job's next start, with all nodes again, is better. Raises ConfigError (PP-E230)."""
    nodes, submitted = agent.rendezvous.settings.max_nodes, agent.in_slurm or agent.in_pod
    if submitted and nodes > 2 and 2 * len(here) <= nodes:  # perhaps this one stood still, and the others are well
        return f"only {len(here)} of {nodes} hosts are here"
    try:
        plan_smaller(agent.run_dir, len(here), agent.start)
    except ConfigError as error:
        problem = error.problems[0]
        if problem.code != "PP-E230":
            raise
        if submitted:
            return problem.message
        raise ConfigError(replace(problem, remedy=_remedy(agent))) from error
    return ""


def _names(store: SealedStore, key: str) -> list[str]:
    """The hosts of agents that have counted themselves under `key` and written their names there: a count alone proves
    nothing, and an agent that died may have written no name."""
    keys = [f"{key}/{number + 1}" for number in range(min(store.plain.add(key, 0), 10_000))]
    return [store.get(each) for each in keys if store.plain.check([each])]


def _remedy(agent: NodeAgent) -> str:
    (host, port), run = agent.address, pasted(agent.run_dir.path)
    return f"ppctl requeue {run}" if agent.in_slurm else f"ppctl node --rendezvous {host}:{port} --resume {run}"


def _to_the_end(agent: NodeAgent, host: str, port: str, told: list[str], *, serves: bool) -> JobOutcome | None:
    """Run the agent; returns how the job ended, by the run directory, or None if the agents that are left begin another
    job. Raises TrainingError: PP-E709 if agents are missing, PP-E656 if the host of the rendezvous is lost. SLURM's job
    starts again without lost nodes, also before its first life."""
    run, ended, code = agent.run_dir, True, None
    try:
        agent.store.set(f"{CAME}/{agent.store.plain.add(CAME, 1)}", host_name())
        _live(agent, serves=serves)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
        if agent.in_pod or not agent.asked:  # the others go on
            if agent.in_slurm and serves:
                requeue(run, agent, f"ranks on {host_name()} cannot be killed", [host_name()])
            return JobOutcome(code, "interrupted")
    except RendezvousClosedError as closed:
        ended = not closed.args
    except StandsStillError as error:
        return _still(agent, error)
    except RendezvousTimeoutError as error:
        smaller = agent.rendezvous.has_begun and agent.rendezvous.shrink == "smaller"
        return None if smaller else _too_few(agent, error, serves=serves)
    except (RendezvousError, RuntimeError) as error:
        raise _gone(f", {host}:{port},", _remedy(agent)) from error
    agent.rendezvous.shutdown()
    outcome = job_outcome(run, 1, ended=ended)
    if agent.in_pod:
        return _in_pod(agent, outcome, told)
    return outcome if agent.in_slurm else _by_hand(agent, outcome, code)


def _by_hand(agent: NodeAgent, outcome: JobOutcome, code: int | None) -> JobOutcome:
    if code is not None and outcome.state == "interrupted":  # a second signal to this agent
        return replace(outcome, exit_code=code)
    return replace(outcome, report=f"go on with: {_remedy(agent)}") if outcome.exit_code == STOPPED else outcome


def _live(agent: NodeAgent, *, serves: bool) -> None:
    try:
        agent.run()
    finally:
        if serves:  # nobody goes on in its store without this agent, even if it stood by
            agent.life = fence.latest(agent.life, agent.job, agent.run_dir.path)


def _still(agent: NodeAgent, error: StandsStillError) -> JobOutcome:
    """The outcome of a job in which one agent stands still: SLURM's starts again without that agent's host, a JobSet
    restarts. Other jobs raise TrainingError (PP-E709)."""
    # The agent that stands still may have begun the life in which all that are here have places.
    agent.life = fence.latest(agent.life, agent.job, agent.run_dir.path)
    if not (agent.in_pod or (agent.in_slurm and requeue(agent.run_dir, agent, str(error), [error.host]))):
        raise TrainingError(Problem("PP-E709", str(error), _remedy(agent))) from error
    return JobOutcome(RESTART if agent.in_pod else STOPPED, "stopped", str(error))


def _too_few(
    agent: NodeAgent, error: Exception | None, why: str = "", here: Sequence[str] = (), *, serves: bool
) -> JobOutcome:
    """The outcome of a job that lacks agents; `why` is given if too few are `here` for a plan. SLURM's job and a JobSet
    start again. Raises TrainingError (PP-E709) if nothing does and there was no life."""
    run, goes_on = agent.run_dir, agent.rendezvous.has_begun
    message = why or "not all hosts of the run came in time" + " (launch.shrink=requeue)" * goes_on
    if agent.in_slurm and serves:
        here = here or (agent.rendezvous.here() if goes_on else _names(agent.store, CAME))
        gone, doubt = absent(here)
        told = why or (goes_on and lives.why(run, [*here, *gone], here)) or message
        goes_on |= requeue(run, agent, told + doubt, gone)
    if not goes_on:
        raise TrainingError(Problem("PP-E709", message, _remedy(agent))) from error
    if agent.in_pod:
        return JobOutcome(GO_ON, "stopped", message)
    return JobOutcome(STOPPED, "stopped", f"{message}; go on with: {_remedy(agent)}")


def _in_pod(agent: NodeAgent, outcome: JobOutcome, told: list[str]) -> JobOutcome | None:
    """The outcome of a job in a pod; None if the run was stopped from outside and goes on in the pods that stay. Raises
    TrainingError (PP-E656)."""
    asked_for = outcome.state == "stopped" and agent.run_dir.status().get("message") == ASKED_WORDS
    if asked_for or outcome.exit_code in (DONE, *FINAL):
        return replace(outcome, exit_code=DONE) if asked_for else outcome
    if agent.asked:
        return replace(outcome, exit_code=TERMINATED)
    try:
        goes_on = outcome.exit_code in (STOPPED, TERMINATED) or agent.store.get(_JOB) != told
    except RuntimeError as error:
        raise _gone("") from error
    return None if goes_on else outcome


def _gone(which: str, remedy: str = "") -> TrainingError:
    return TrainingError(Problem("PP-E656", f"the host of the rendezvous{which} does not answer any more", remedy))
