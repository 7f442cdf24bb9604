"""What one rank does, top to bottom.

    python -m ppctl.rank.worker --run DIR      started by ppctl's launcher: the run directory holds config and plan
    python -m ppctl.rank.worker --submitted DIR  the same, in a job of SLURM's: no launcher of ppctl's watches
    python -m ppctl.rank.worker --publish DIR  rank 0 of ranks that others started: hands config and plan to the others
    python -m ppctl.rank.worker --join         every other such rank
        --json                            rank 0 of these prints one object on stdout, and all else on stderr
    python -m ppctl.rank.worker --refuse CODE  rank 0 found a mistake and has printed it: all ranks leave with CODE

Knows the order of things. Must not know Hydra or how a config was composed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist

from ppctl import checkpoint_folder
from ppctl.comm.channels import PeerLost
from ppctl.config.durations import seconds
from ppctl.config.gpu_environment import gpu_environment
from ppctl.config.mapping import to_mapping
from ppctl.devices import device_type
from ppctl.engine.interpreter import EngineError
from ppctl.errors import ConfigError, PpctlError
from ppctl.hang.limits import GRACE, Limits
from ppctl.heartbeat import Heartbeat, Publisher, Write, leave_word
from ppctl.plan import Plan
from ppctl.rank import flight_record
from ppctl.rank.log import lose_lines_rather_than_fail
from ppctl.rank.phases import Phases, process_age
from ppctl.rank.rendezvous import (
    START_UP,
    Job,
    Ranks,
    join_world,
    meet,
    publish_job,
    read_job,
    receive_job,
    refuse_job,
)
from ppctl.rank.signals import Listener, StopRequest, end_after
from ppctl.rank.sockets import raise_file_limit
from ppctl.rank.time_left import TimeLeft, job_end
from ppctl.rank.watchdog import Alarm, NodeWatch, write_stacks_on_request
from ppctl.reach.roll_call import call_roll
from ppctl.reach.warm_up import warm_up
from ppctl.rundir import RunDir
from ppctl.topology import RankGrid
from ppctl.train.generate import write_sample
from ppctl.train.loop import Outcome, train
from ppctl.train.measured_costs import gather_costs
from ppctl.train.metrics import Writer, tensorboard_writer, wandb_writer, writers
from ppctl.train.rank_reports import TIME_IS_OVER
from ppctl.train.session import Session, build_session

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; returns its exit code. A failure is told in the run directory before anything else."""
    arguments = _parse(argv)
    stop, phases = StopRequest(), Phases()
    lose_lines_rather_than_fail()
    raise_file_limit()
    phases.add("import", process_age())
    ranks = Ranks.from_environment()
    directory, by_others = arguments.run or arguments.submitted or arguments.publish, arguments.run is None
    answers = _keep_stdout() if arguments.json else None
    run, plan = None if directory is None else RunDir(directory), None
    with ExitStack() as to_close:
        try:
            known = None if directory is None else read_job(directory)
            plan = None if known is None else known.plan
            with phases("groups"):
                store = meet(ranks, START_UP if known is None else _patience(known))
            job = known or _receive(arguments.refuse, ranks, store)
            if isinstance(job, int):
                return job
            if arguments.publish is not None:
                publish_job(store, job)
            run, plan = job.run, job.plan
            state, code, message = _work(job, ranks, store, stop, phases, to_close, by_others=by_others), 0, ""
        except Exception as error:
            code = _fail(error, run, ranks, plan, by_others=by_others)
            state, message = "failed", str(error)
    if answers is not None and run is not None:
        print(json.dumps(run.answer(state, code, message)), file=answers)
        answers.flush()
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ppctl.rank.worker", description="One rank; started by a launcher.")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--run", type=Path, metavar="DIR")
    how.add_argument("--submitted", type=Path, metavar="DIR")
    how.add_argument("--publish", type=Path, metavar="DIR")
    how.add_argument("--join", action="store_true")
    how.add_argument("--refuse", type=int, metavar="CODE")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def _keep_stdout() -> TextIO:
    """Stdout for the one answer: all else that is written there, by libraries too, goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _patience(job: Job) -> timedelta:
    """How long to wait for the other ranks: whoever watches the job is to speak first."""
    return timedelta(seconds=seconds(job.config.launch.start_limit) + 10)


def _receive(refused: int | None, ranks: Ranks, store: Store) -> Job | int:
    """The job that rank 0 publishes, or the code to leave with: rank 0's own is `refused`."""
    if refused is not None:
        refuse_job(store, refused, ranks)
        return refused
    job = receive_job(store)
    if isinstance(job, Job):
        _become(job.config.launch.env)
    return job


def _become(environment: Mapping[str, str]) -> None:
    """Start this process anew with `launch.env`, as rank 0 was: some variables count at the start alone."""
    if environment.items() - os.environ.items():
        # Kept back until the new process hears them.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
        os.execve(sys.executable, [sys.executable, "-m", "ppctl.rank.worker", "--join"], os.environ | dict(environment))


def _work(
    job: Job, ranks: Ranks, store: Store, stop: StopRequest, phases: Phases, to_close: ExitStack, *, by_others: bool
) -> str:
    """Train; returns how the run ended: `finished` or `stopped`."""
    device = _device(job, ranks)
    heartbeat = Heartbeat.open(job.run.id, ranks.rank)
    to_close.callback(heartbeat.close)
    listener = _ready_for_a_hang(job.run, ranks.rank)
    limits = Limits.of(job.config.launch)
    alarm = Alarm(limits)
    watch = _watch(job, limits) if by_others else None
    publisher = _publisher(job, ranks, limits, job.run.write_heartbeats if watch is None else watch)
    with phases("groups"):
        _join(job, ranks, store, device, limits, watch)
    with phases("build"):
        session = build_session(job.config, job.plan, ranks.rank, device, heartbeat)
    leads = ranks.rank == 0
    if leads and by_others:
        _lead(job.run, listener, heartbeat)
    time_left = _time_left(job) if leads else TimeLeft()
    with phases("warm-up"):
        heartbeat.set_state("warming up")
        edges = warm_up(store, job.config.launch, device, session.communicator, session.groups, ties=session.ties.group)
        if edges is not None:
            job.run.write_edges(edges)
    heartbeat.set_state("loading")
    load_began = time.perf_counter()

    def enter(state: str, step: int) -> None:
        if "load" not in phases.seconds:
            phases.add("load", time.perf_counter() - load_began)
            if leads:
                _tell_start(job, phases, by_others=by_others)
        heartbeat.step = step
        heartbeat.set_state(state)
        alarm.set(state)
        time_left.enter(state)

    outcome = train(
        session,
        job.run.checkpoints,
        resume=_resumed(job),
        write=_writer(job, to_close) if leads else None,
        stop_requested=lambda: TIME_IS_OVER * time_left.over() or stop(),
        enter=enter,
    )
    heartbeat.set_state("generating")
    _conclude(job, session, outcome, phases, leads=leads, by_others=by_others)
    # Nobody leaves before the last word is written: a rank that has left may take the others with it.
    dist.all_reduce(torch.zeros(1))
    heartbeat.set_state("done")
    alarm.off()
    if publisher is not None:
        publisher.stop()
    _leave(session)
    return _state(outcome)


def _leave(session: Session) -> None:
    """End the connections in one order. The run is over and written down: nothing that fails here changes that."""
    patience = Timer(GRACE, os._exit, (0,))
    patience.daemon = True
    patience.start()
    try:
        session.close()
        dist.destroy_process_group()
    except Exception:
        traceback.print_exc()
    patience.cancel()


def _lead(run: RunDir, listener: Listener, heartbeat: Heartbeat) -> None:
    """Where no launcher of ours does, rank 0 says that the run goes on, and says so when Ctrl-C ends it."""
    run.write_status("running", step=0)
    last_words = partial(run.write_status, "interrupted")
    listener.on(signal.SIGINT, lambda: end_after(lambda: last_words(step=heartbeat.step)))


def _ready_for_a_hang(run: RunDir, rank: int) -> Listener:
    """From now on SIGUSR2 makes this rank tell where it is: stacks to its log, torch's flight records to the run."""
    listener = Listener()
    flight_record.turn_on(run)
    listener.on(signal.SIGUSR2, lambda: flight_record.write(run, rank, flight_record.dumps()))
    write_stacks_on_request()
    return listener


def _device(job: Job, ranks: Ranks) -> torch.device:
    """Where this rank computes. Raises ConfigError for an environment in which it would hang there."""
    # What the launcher has seen is not always what reaches a rank: a job's setup and a node's own profile come later.
    missing, problems = gpu_environment(job.config, job.plan.sizes.pp, os.environ, {})
    if job.config.launch.device != "cpu":
        os.environ |= missing  # before CUDA is used at all: even to count devices may read it
    if device_type(job.config.launch.device, torch.cuda.device_count(), ranks.local_world_size) == "cpu":
        return torch.device("cpu")
    if problems:
        raise ConfigError(problems)
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


def _join(job: Job, ranks: Ranks, store: Store, device: torch.device, limits: Limits, watch: NodeWatch | None) -> None:
    """Join the world, when all are there and reach each other."""
    hosts = call_roll(
        store,
        ranks.rank,
        ranks.world_size,
        job.digest,
        edge_limit=seconds(job.config.launch.edge_limit),
        patience=_patience(job).total_seconds(),
    )
    if watch is not None:
        watch.meet(hosts)
    join_world(store, ranks, device, limits.of_groups)


def _watch(job: Job, limits: Limits) -> NodeWatch:
    """What watches the job where no launcher of ours does."""
    return NodeWatch(job.run, job.plan, limits, checkpoint_folder.step_of(job.config.checkpoint.resume))


def _publisher(job: Job, ranks: Ranks, limits: Limits, write: Write) -> Publisher | None:
    """One rank a node publishes the records of all its ranks."""
    if ranks.local_rank != 0:
        return None
    own = range(ranks.rank, ranks.rank + ranks.local_world_size)
    publisher = Publisher(job.run.id, own, write, limits.look)
    publisher.start()
    return publisher


def _resumed(job: Job) -> Path | None:
    """The checkpoint to go on from, where it is now: a `step-N.old` of the config may have its name back."""
    if job.config.checkpoint.resume is None:
        return None
    named = Path(job.config.checkpoint.resume)
    return checkpoint_folder.at(named) or named


def _writer(job: Job, to_close: ExitStack) -> Writer:
    """What takes each step's record; trackers that have to be closed in the end are entered into `to_close`."""
    log, others = job.config.log, []
    directory = str(job.run.trace)
    if log.tensorboard:
        others.append(to_close.enter_context(tensorboard_writer(directory)))
    if log.wandb:
        job.run.trace.mkdir(exist_ok=True)
        to_wandb = wandb_writer(directory, log.name, job.run.id, to_mapping(job.config))
        others.append(to_close.enter_context(to_wandb))
    return writers(_append_to(job.run), others, screen=True, steps=job.config.train.steps)


def _append_to(run: RunDir) -> Writer:
    """What adds a record to metrics.jsonl.

    The first one takes the place of its step's and later ones of an earlier life: no sooner, because until then the
    checkpoint may turn out not to fit.
    """
    begun = False

    def append(record: Mapping[str, Any]) -> None:
        nonlocal begun
        if not begun:
            run.drop_metrics_from(record["step"])
        begun = True
        run.add_metrics(record)

    return append


def _time_left(job: Job) -> TimeLeft:
    after = job.config.train.exit_after
    return TimeLeft(None if after is None else time.time() - process_age() + seconds(after), job_end())


def _tell_start(job: Job, phases: Phases, *, by_others: bool) -> None:
    """Show and record how long the start took, just before the first step."""
    told = Phases()
    told.add("compose", float(job.run.environment().get("compose_s", 0.0)))
    told.seconds |= phases.seconds
    print(told.line(), flush=True)
    phases.seconds = told.seconds
    state = "running" if by_others else str(job.run.status()["state"])
    job.run.write_status(state, step=0, start_up=told.seconds)


def _conclude(job: Job, session: Session, outcome: Outcome, phases: Phases, *, leads: bool, by_others: bool) -> None:
    """Write what the run came to: the result, measured costs, and a sample where it ran to its end."""
    state = _state(outcome)
    sample = None if outcome.stopped else write_sample(session)
    spans = session.recorder.spans() if session.own.dp_rank == 0 else []
    costs = gather_costs(session.steps, spans, session.plan, session.config, session.device.type)
    if not leads:
        return
    if costs is not None:
        job.run.write_profile(costs)
    job.run.write_result(
        {
            "state": state,
            "step": outcome.step,
            "loss": outcome.loss,
            "eval_loss": outcome.eval_loss,
            "checkpoint": None if outcome.checkpoint is None else str(outcome.checkpoint),
            "sample": sample,
            "start_up": phases.seconds,
        }
    )
    job.run.write_status(state, step=outcome.step, message=outcome.why)
    slurm_job = os.environ.get("SLURM_JOB_ID")
    if outcome.stopped and slurm_job:
        job.run.write_requeue_mark(slurm_job, int(os.environ.get("SLURM_RESTART_COUNT") or 0), str(outcome.why))
    if by_others:
        why = f"stopped after step {outcome.step}, all saved: {outcome.why}" if outcome.stopped else "finished"
        print(f"{why}; {outcome.checkpoint}", flush=True)


def _state(outcome: Outcome) -> str:
    return "stopped" if outcome.stopped else "finished"


def _fail(error: Exception, run: RunDir | None, ranks: Ranks, plan: Plan | None, *, by_others: bool) -> int:
    """Tell the failure where the launcher looks for it, then in the log; returns the exit code."""
    code = error.exit_code if isinstance(error, PpctlError) else 1
    # Where a watch has told of this rank, what it says itself is what came of that.
    if run is not None and not _outlived(run) and not run.has_error(ranks.rank):
        record = _error_record(error, ranks, plan, code)
        try:
            run.write_error(ranks.rank, record)
        except OSError:
            with suppress(OSError):
                leave_word(run.id, ranks.rank, record)
        with suppress(OSError):
            if by_others:
                run.write_status("failed", rank=ranks.rank)
    if (
        by_others and isinstance(error, PpctlError) and not isinstance(error, EngineError)
    ):  # a person reads it: where it was raised is in the record
        print("\n".join(f"error {problem}" for problem in error.problems), file=sys.stderr)
    else:
        traceback.print_exception(error)
    return code


def _outlived(run: RunDir) -> bool:
    """Whether the run goes on without this rank: its node was lost, and came back when the job had been requeued."""
    own = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_RESTART_COUNT') or 0}"
    return run.life() not in ("", own)


def _error_record(error: Exception, ranks: Ranks, plan: Plan | None, exit_code: int) -> dict[str, Any]:
    engine = error if isinstance(error, EngineError) else None
    cause = error.__cause__ if engine is not None and error.__cause__ is not None else error
    problem, *others = cause.problems if isinstance(cause, PpctlError) else [None]
    return {
        "rank": ranks.rank,
        "stage": None if engine is None else engine.action.stage,
        "action": None if engine is None else str(engine.action),
        "time": time.time(),
        "code": None if problem is None else problem.code,
        "type": type(cause).__name__,
        "message": str(cause) if problem is None else problem.message,
        "place": "" if problem is None else problem.place,
        "remedy": "" if problem is None else problem.remedy,
        "others": [str(other) for other in others],
        "ends": _ends(cause, ranks, plan),
        "traceback": "".join(traceback.format_exception(error)),
        "exit_code": exit_code,
    }


def _ends(cause: BaseException, ranks: Ranks, plan: Plan | None) -> list[int] | None:
    """The global ranks between which a connection broke."""
    if plan is None or not isinstance(cause, PeerLost):
        return None
    pipeline = RankGrid(plan.sizes).group_of("pp", ranks.rank)
    return [pipeline[end] for end in cause.channel[:2]]


if __name__ == "__main__":
    # Not sys.exit: after a failure, threads of the process groups may never end.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
