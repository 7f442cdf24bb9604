"""`python -m ppctl.agent HOST PORT TYPED [RUN FD]`: this host's agent; `ppctl node` becomes it.

TYPED is what was typed after `ppctl node` here. With RUN and FD this host has the rendezvous, on the listening socket
FD, and has made the run's directory; the others ask it for all that they need.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

from ppctl.agent.node import Job, JobOver, Left, NodeAgent
from ppctl.agent.rendezvous import JOIN, LOST, NodeRendezvous
from ppctl.agent.smaller import plan_smaller
from ppctl.config.quantities import seconds
from ppctl.errors import ConfigError, PpctlError, Problem, TrainingError, pasted
from ppctl.host.devices import machines
from ppctl.launch.enter import check_node, package_digest
from ppctl.launch.leave import job_outcome
from ppctl.launch.machine import shortage
from ppctl.launch.outcome import STOPPED, JobOutcome
from ppctl.rank.own_process import raise_file_limit
from ppctl.rank.rendezvous import announced
from ppctl.reach.store import SealedStore
from ppctl.runs.heartbeat import host_name
from ppctl.runs.run_starts import secret_of
from ppctl.runs.rundir import RunDir

_JOB, _ANSWER = "ppctl/job", timedelta(minutes=1)  # after which the host of the store counts as lost


def main() -> int:
    """Run this host's agent to the end of the job; returns the exit code."""
    host, port, typed, *served = sys.argv[1:]
    raise_file_limit()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)  # what matters is told here
    # All agents have as many ranks: torch computes their numbers, and asks no store that strangers write into.
    os.environ |= {"TORCH_ELASTIC_WORKER_IDENTICAL": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    try:
        store, told = _serve(host, int(port), typed, *served) if served else _join(host, int(port), typed)
        # Names decide the order of hosts: that of the store comes first, and rank 0's lines stay on its terminal.
        name = f"{int(not served)} {host_name()}"
        agent = _agent((host, int(port)), store, told, name)
        while (outcome := _to_the_end(agent)) is None:
            told = _on_fewer(agent.job, store, told, serves=bool(served))
            agent = _agent((host, int(port)), store, told, name)
    except PpctlError as error:
        print("\n".join(f"error {problem}" for problem in error.problems), file=sys.stderr)
        return error.exit_code
    except Left as left:  # while hosts that are left plan anew
        return 128 + left.number
    if outcome.report:
        print(outcome.report, file=sys.stderr)
    if served:
        outcome.write(agent.job.run, ())
        agent.rendezvous.farewell()
    return outcome.exit_code


def _serve(host: str, port: int, typed: str, run: str, descriptor: str) -> tuple[SealedStore, dict[str, str]]:
    """The store, and what the other agents are told: the run, the job's id, the code and the words typed here."""
    plain = TCPStore(host, port, None, True, _ANSWER, False, multi_tenant=True, master_listen_fd=int(descriptor))
    told = {"directory": run, "job": secrets.token_hex(4), "code": package_digest(), "typed": typed}
    store = SealedStore(plain, secret_of(RunDir(Path(run))), Path(run).name)
    store.set(_JOB, told)
    return store, told


def _join(host: str, port: int, typed: str) -> tuple[SealedStore, dict[str, str]]:
    """The same on another host. Raises PpctlError if the first host does not answer (PP-E708), or this one has another
    run directory, code or command line (PP-E623, PP-E624, PP-E655)."""
    print(f"note: {host_name()}: waiting for the first host at {host}:{port}; steps are printed there", file=sys.stderr)
    try:
        plain = TCPStore(host, port, None, False, JOIN, False)
        plain.wait([_JOB])
        plain.set_timeout(_ANSWER)
    except RuntimeError as error:
        message = f"{host_name()} did not reach the first host's agent at {host} port {port}"
        remedy = pasted("python", "-c", f"import socket; socket.create_connection({(host, port)}, 5)")
        raise TrainingError(Problem("PP-E708", message, remedy)) from error
    named = RunDir(Path(announced(plain, _JOB)["directory"]))
    check_node(named)
    store = SealedStore(plain, secret_of(named, reported=True), named.id)
    told = store.get(_JOB)
    check_node(RunDir(Path(told["directory"])), told["code"], "the same version of ppctl on all hosts")
    if typed not in ("", told["typed"]):
        message = f"the command line of this host is `{typed}`, that of the first `{told['typed']}`"
        remedy = f"ppctl node --rendezvous {host}:{port}"
        raise ConfigError(Problem("PP-E655", message, remedy, "command line"))
    return store, dict(told)


def _agent(address: tuple[str, int], store: SealedStore, told: dict[str, str], name: str) -> NodeAgent:
    """This host's agent. Raises ConfigError if the host has too few GPUs."""
    run = RunDir(Path(told["directory"]))
    launch, world = run.read_config().launch, run.read_plan().sizes.world
    nodes, per_node = machines(launch.nodes, launch.gpus_per_node, world)
    if problems := shortage(launch.device, per_node, (), os.environ, share=launch.share_gpu, command="node HOST"):
        raise ConfigError(problems)
    job = Job(run, launch, told["job"], nodes, per_node, address)
    rendezvous = NodeRendezvous.over(store.plain, job.id, store.key_for("rendezvous"), nodes, launch.spares, name)
    rendezvous.patience = None if launch.shrink == "wait" else timedelta(seconds=seconds(launch.shrink_after))
    return NodeAgent(job, store, rendezvous)


def _on_fewer(job: Job, store: SealedStore, told: dict[str, str], *, serves: bool) -> dict[str, str]:
    """The job with which all agents that are left go on; the first plans it once all have noticed that one is missing.
    Raises ConfigError (PP-E230), TrainingError (PP-E656)."""
    here = f"ppctl/left/{job.id}"
    try:
        store.plain.add(here, 1)
        if serves:
            time.sleep(2 * LOST)
            plan_smaller(job.run, store.plain.add(here, 0))
            store.set(_JOB, told | {"job": secrets.token_hex(4)})
        while (now := dict(store.get(_JOB)))["job"] == job.id:
            time.sleep(1.0)
        return now
    except RuntimeError as error:
        raise TrainingError(_no_answer(job)) from error


def _no_answer(job: Job) -> Problem:
    message = "the host of the rendezvous, {}:{}, does not answer any more".format(*job.address)
    return Problem("PP-E656", message, _again(job))


def _again(job: Job) -> str:
    return f"ppctl node --rendezvous HOST:{job.address[1]} --resume {pasted(job.run.path)}"


def _to_the_end(agent: NodeAgent) -> JobOutcome | None:
    """Run the agent; how the job ended, by the run directory, and None if agents are missing and the others go on
    without. Raises TrainingError: PP-E709 if agents are missing, PP-E656 if the host of the rendezvous is lost."""
    run, shrink = agent.job.run, agent.job.launch.shrink
    try:
        agent.run()
    except Left as left:
        if not agent.asked:  # the others go on
            return JobOutcome(128 + left.number if left.number else 1, "interrupted")
    except (JobOver, RendezvousClosedError):
        pass
    except RendezvousTimeoutError as error:
        if agent.rendezvous.has_begun and shrink == "smaller":
            return None
        message = f"the run needs {agent.job.nodes} nodes, and not all came in time"
        if agent.rendezvous.has_begun:
            return JobOutcome(STOPPED, "stopped", f"{message} (launch.shrink=requeue); go on with: {_again(agent.job)}")
        raise TrainingError(Problem("PP-E709", message, _again(agent.job))) from error
    except (RendezvousError, RuntimeError) as error:
        raise TrainingError(_no_answer(agent.job)) from error
    agent.rendezvous.shutdown()
    return job_outcome(run, 1, ended=True)


if __name__ == "__main__":
    sys.exit(main())
