"""The records that a rank writes into the run: metrics, durations of the start, the result, or its failure.

`launch` judges which rank caused a failure.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from ppctl.comm.channels import PeerLost, without_guesses
from ppctl.comm.groups import gather_values
from ppctl.config.metadata import LARGEST
from ppctl.engine.engine_error import EngineError
from ppctl.errors import PpctlError, TrainingError
from ppctl.host.files import expanded
from ppctl.host.private_files import NODE_DIRECTORY
from ppctl.model.kernels import Kernels
from ppctl.plan import Plan
from ppctl.plan.profile import subject
from ppctl.rank.live_state import Phases
from ppctl.rank.own_process import Listener, end_after
from ppctl.rank.rendezvous import SharedRun
from ppctl.records.rank_records import RankFailure
from ppctl.records.run_records import ASKED_WORDS
from ppctl.runs import fence
from ppctl.runs.heartbeat import HeartbeatFile, host_name, leave_failure
from ppctl.runs.run_starts import slurm_start
from ppctl.runs.rundir import RunDir
from ppctl.schedule.trace import Span, message_times
from ppctl.topology import RankGrid
from ppctl.train.callback import Callback, TrainingEnd
from ppctl.train.generate import write_samples
from ppctl.train.metrics import Screen, TensorBoard, WeightsAndBiases
from ppctl.train.session import Session


class MetricsLog(Callback):
    """Adds records to metrics.jsonl. The first record replaces an earlier start's records of its step and later steps,
    which stay until then since the checkpoint may not fit; so does a record after one of a later step, when the run
    has gone back."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._last = run, LARGEST

    def log_metrics(self, record: Mapping[str, Any]) -> None:
        """Add a record to metrics.jsonl."""
        if record["step"] <= self._last:
            self._run.drop_metrics_from(record["step"])
        self._last = record["step"]
        self._run.add_metrics(record)


def metrics_writers(shared: SharedRun, at_end: ExitStack) -> Iterator[Callback]:
    """Rank 0's writers of records: metrics.jsonl first, then trackers, which `at_end` ends, and the screen."""
    log, run = shared.config.log, shared.run
    yield MetricsLog(run)
    if log.tensorboard:
        directory = run.trace if log.tensorboard_dir is None else expanded(log.tensorboard_dir) / run.name / run.id
        board = TensorBoard(str(directory))
        at_end.callback(board.end)
        yield board
    if log.wandb:
        directory = run.trace if log.wandb_dir is None else expanded(log.wandb_dir)
        directory.mkdir(parents=True, exist_ok=True)
        tracker = WeightsAndBiases(str(directory), run.id, shared.config)
        at_end.callback(tracker.end)
        yield tracker
    yield Screen(shared.config.train.steps)


def write_start_up(run: RunDir, phases: Phases, kernels: Kernels, replay: str) -> None:
    """Show and record, just before the first step, how long each phase of the start took, which kernels run, and what
    is computed twice."""
    phases.seconds = {"compose": round(float(run.environment().get("compose_s", 0.0)), 3)} | phases.seconds
    print(f"{phases.line()}\n{kernels.line()}{f'{chr(10)}replay: {replay}' if replay else ''}", flush=True)
    environment = run.environment() | {"kernels": kernels.names(), "replay": replay or None}
    for life in environment.get("starts", [])[-1:]:
        life["start_up"] = phases.seconds
    run.write_environment(environment)
    run.write_status(str(run.status()["state"]), step=0, start_up=phases.seconds)


def show_begin(run: RunDir, listener: Listener, heartbeat: HeartbeatFile) -> None:
    """Write on rank 0 that the run goes on, and, when Ctrl-C ends it, that it was interrupted."""
    run.write_status("running", step=0)
    listener.on(signal.SIGINT, lambda: end_after(lambda: run.write_status("interrupted", step=heartbeat.step)))


def show_end(outcome: TrainingEnd) -> None:
    """Print on rank 0 how the run ended, and its checkpoint."""
    how = f"stopped after step {outcome.step}, all saved: {outcome.why}" if outcome.stopped else "finished"
    print(f"{how}; {outcome.checkpoint}", flush=True)


def write_results(shared: SharedRun, session: Session, outcome: TrainingEnd, phases: Phases, *, leads: bool) -> None:
    """Write the result, measured costs, and samples if the run was not stopped. All ranks call it, rank 0 writes."""
    samples = [] if outcome.stopped else write_samples(session)
    spans = session.pipeline.recorder.spans() if session.own.in_first_pipeline else []
    costs = gather_costs(session, spans)
    if not leads:
        return
    run, state = shared.run, final_state(outcome)
    if costs is not None:
        run.write_profile(costs)
    start = slurm_start()
    if outcome.stopped and start is not None and outcome.why != ASKED_WORDS:
        run.write_requeue_mark(start, str(outcome.why))  # first, because a result without this mark ends the job
    run.write_result(
        {
            "state": state,
            "step": outcome.step,
            "loss": outcome.loss,
            "eval_loss": outcome.eval_loss,
            "checkpoint": None if outcome.checkpoint is None else str(outcome.checkpoint),
            "sample": next(iter(samples), None),
            "samples": samples,
            "start_up": phases.seconds,
        }
    )
    run.write_status(state, step=outcome.step, message=outcome.why)


def gather_costs(session: Session, spans: list[Span]) -> dict[str, Any] | None:
    """The content of profile.json, on rank 0: seconds of one microbatch's forward and backward by stage over the last
    steps, and of the last step's messages by channel (`message_times`). A collective over the world.

    `spans` are this rank's spans in the last step; empty on all replicas but the first.
    """
    totals, plan = session.pipeline.totals, session.plan
    forward, backward = _medians([step.forward for step in totals]), _medians([step.backward for step in totals])
    own = {stage: (forward[stage], backward[stage]) for stage in forward}, spans
    rows = gather_values(tuple[dict[int, tuple[float, float]], list[Span]], own)
    if dist.get_rank() > 0:
        return None
    measured = {stage: seconds for row, _ in rows for stage, seconds in row.items()}
    layers = {spec.stage: list(map(str, spec.layers)) for spec in plan.stages}
    stages = [
        {"stage": s, "layers": layers[s], "forward_s": f, "backward_s": b} for s, (f, b) in sorted(measured.items())
    ]
    times = message_times([[span for _, spans in rows for span in spans]])
    messages = [{"source": a, "target": b, "direction": d, "seconds": t} for (a, b, d), t in times.items()]
    return {
        "plan": plan.digest,
        "device": session.device.type,
        "subject": subject(session.config),
        "stages": stages,
        "messages": messages,
    }


def _medians(steps: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {stage: median(step[stage] for step in steps) for stage in steps[-1]} if steps else {}


def final_state(outcome: TrainingEnd) -> str:
    """How the run ended, as status.json has it."""
    return "stopped" if outcome.stopped else "finished"


def fail(error: Exception, run: RunDir | None, rank: int, plan: Plan | None, *, watched: bool) -> int:
    """Write the failure into the run (or beside the heartbeat if the run's disk is full), print it, return the exit
    code. If `watched`, print only the traceback: ppctl's own launcher prints the rest and writes the status."""
    code = error.exit_code if isinstance(error, PpctlError) else 1
    # If the run goes on without this rank, its node was lost and came back. If a watch has written the rank's failure,
    # then this error is only a consequence.
    if (older := fence.older()) is not None:
        run, error = None, TrainingError(older)
    if run is not None and run.has_error(rank):
        run = None
    if run is not None:
        failure = _failure_of(error, rank, plan, code)
        try:
            run.write_error(failure)
        except OSError:
            with suppress(OSError, KeyError):  # no launcher of ppctl's would look for it
                leave_failure(Path(os.environ[NODE_DIRECTORY]), failure)
    if watched:
        traceback.print_exception(error)
    else:
        _show_failure(error, run, rank)
    return code


def _show_failure(error: Exception, run: RunDir | None, rank: int) -> None:
    """Write that `run` has failed, and print problems without the traceback, which is in the failure's record."""
    with suppress(OSError):
        if run is not None:
            run.write_status("failed", rank=rank)
    if isinstance(error, PpctlError) and not isinstance(error, EngineError):
        print("\n".join(f"error {problem}" for problem in error.problems), file=sys.stderr)
    else:
        traceback.print_exception(error)


def _failure_of(error: Exception, rank: int, plan: Plan | None, exit_code: int) -> RankFailure:
    """The record of an error for errors/: for an EngineError its cause, with stage and action; for several problems the
    first, and the others as text."""
    action = error.action if isinstance(error, EngineError) else None
    cause = error.__cause__ or error if isinstance(error, EngineError) else error
    problem, *others = cause.problems if isinstance(cause, PpctlError) else [None]
    return RankFailure(
        rank,
        without_guesses(str(cause)) if problem is None else problem.message,
        type(cause).__name__,
        code=None if problem is None else problem.code,
        exit_code=exit_code,
        stage=None if action is None else action.stage,
        action=None if action is None else str(action),
        place="" if problem is None else problem.place,
        remedy="" if problem is None else problem.remedy,
        others=tuple(map(str, others)),
        ends=_broken_connection(cause, rank, plan),
        traceback="".join(traceback.format_exception(error)),
        host=host_name(),
    )


def _broken_connection(cause: BaseException, rank: int, plan: Plan | None) -> tuple[int, ...]:
    """Return the global ranks at the two ends of a lost connection; () for any other error."""
    if plan is None or not isinstance(cause, PeerLost):
        return ()
    pipeline = RankGrid(plan.sizes).group_of("pp", rank)
    return tuple(pipeline[end] for end in cause.channel[:2])
