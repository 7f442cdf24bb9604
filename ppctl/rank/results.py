"""What rank 0 writes into the run: metrics of every step, durations of the start, and in the end the result.

Knows the files' contents. Must not know how a step is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from ppctl.config.mapping import to_mapping
from ppctl.model.kernels import Kernels
from ppctl.rank.rendezvous import SharedRun
from ppctl.rank.times import Phases
from ppctl.run_starts import slurm_start
from ppctl.rundir import RunDir
from ppctl.train.generate import write_sample
from ppctl.train.loop import TrainingEnd
from ppctl.train.measured_costs import gather_costs
from ppctl.train.metrics import Writer, tensorboard_writer, wandb_writer, writers
from ppctl.train.session import Session


def metrics_writer(shared: SharedRun, at_end: ExitStack) -> Writer:
    """What takes each step's record: metrics.jsonl, the screen, and trackers, which `at_end` closes."""
    log, trackers = shared.config.log, []
    directory = str(shared.run.trace)
    if log.tensorboard:
        trackers.append(at_end.enter_context(tensorboard_writer(directory)))
    if log.wandb:
        shared.run.trace.mkdir(exist_ok=True)
        to_wandb = wandb_writer(directory, log.name, shared.run.id, to_mapping(shared.config))
        trackers.append(at_end.enter_context(to_wandb))
    return writers(_append_to(shared.run), trackers, screen=True, steps=shared.config.train.steps)


def _append_to(run: RunDir) -> Writer:
    """Adds records to metrics.jsonl.

    The first one replaces the records of its step and of later ones that an earlier start of the run has left; no
    sooner, because until then the checkpoint may turn out not to fit.
    """
    begun = False

    def append(record: Mapping[str, Any]) -> None:
        nonlocal begun
        if not begun:
            run.drop_metrics_from(record["step"])
        begun = True
        run.add_metrics(record)

    return append


def write_start_up(run: RunDir, phases: Phases, kernels: Kernels) -> None:
    """Show and record how long each phase of the start took, and with which kernels, just before the first step."""
    phases.seconds = {"compose": round(float(run.environment().get("compose_s", 0.0)), 3)} | phases.seconds
    print(f"{phases.line()}\n{kernels.line()}", flush=True)
    run.write_environment(run.environment() | {"kernels": kernels.names()})
    run.write_status(str(run.status()["state"]), step=0, start_up=phases.seconds)


def write_results(shared: SharedRun, session: Session, outcome: TrainingEnd, phases: Phases, *, leads: bool) -> None:
    """Write the result, measured costs, and a sample if the run was not stopped. A collective: only rank 0 writes."""
    sample = None if outcome.stopped else write_sample(session)
    spans = session.recorder.spans() if session.own.in_first_pipeline else []
    costs = gather_costs(session.steps, spans, session.plan, session.config, session.device.type)
    if not leads:
        return
    run, state = shared.run, final_state(outcome)
    if costs is not None:
        run.write_profile(costs)
    run.write_result(
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
    run.write_status(state, step=outcome.step, message=outcome.why)
    start = slurm_start()
    if outcome.stopped and start is not None:
        run.write_requeue_mark(start, str(outcome.why))


def final_state(outcome: TrainingEnd) -> str:
    """How the run ended, as status.json has it."""
    return "stopped" if outcome.stopped else "finished"
