"""The run: step after step until the last one or a request to stop, with evaluations and checkpoints between.

Knows when to evaluate, save and stop. Must not know how a step is computed, nor the paths of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ppctl.checkpoint_folder import Found
from ppctl.data.sampler import SAMPLE_ORDER
from ppctl.schedule.measured_step import MeasuredStep
from ppctl.step_lines import Record
from ppctl.train.evaluate import Evaluator
from ppctl.train.metrics import Writer
from ppctl.train.session import Session
from ppctl.train.snapshot import load_first, save_checkpoint, start_from
from ppctl.train.step import Trainer


@dataclass(frozen=True, slots=True)
class TrainingEnd:
    """How training ended, the same on every rank."""

    step: int
    """Completed optimizer steps."""
    stopped: bool
    """Whether a signal ended it before the last step."""
    loss: float | None
    """Of the last step that this process ran; None if there was none left to run."""
    eval_loss: float | None
    """Of the last evaluation, if there was one."""
    checkpoint: Path | None
    why: str | None = None
    """Why it stopped before the last step."""


def train(
    session: Session,
    checkpoints: Path,
    *,
    resume: Callable[[], list[Found]],
    write: Writer | None,
    keep: Callable[[MeasuredStep], None] | None = None,
    stop_requested: Callable[[], int],
    enter: Callable[[str, int], None],
    say: Callable[[str], None] = print,
) -> TrainingEnd:
    """Train to `train.steps`; saves at the interval, at the end, and when any rank was asked to stop.

    Goes on from the first checkpoint of `resume` that is not damaged; starts anew where there is none at all.

    Evaluates at its interval and at the end. `write` takes each step's record, `keep` the steps of `log.trace`, and
    `say` lines for the user (rank 0 only); `enter(state, step)` is called when `training`, `evaluating` or `saving`
    begins.
    """
    config = session.config
    first, consumed, sample_order = 0, 0, SAMPLE_ORDER
    found = load_first(session, resume, say)
    saved = None if found is None else found.path
    if found is not None:
        state = found.state
        first, consumed, sample_order = state["step"], state["consumed_samples"], state["sample_order"]
    elif config.model.from_ is not None:
        start_from(session, Path(config.model.from_))
    trainer = Trainer(session, session.batches(first, consumed, sample_order), stop_requested)
    if session.device.type == "cuda" and first < config.train.steps:
        enter("training", first)  # kernels are loaded and compiled here: the first step's limit holds
        trainer.dry_pass(first)

    def position(done: int) -> int:
        return consumed + (done - first) * config.train.global_batch_size

    evaluator = Evaluator(trainer) if config.train.eval_interval else None
    loss, eval_loss = None, None
    for step in range(first, config.train.steps):
        enter("training", step)
        result = trainer.step(step)
        loss, done = result.record["loss"], step + 1
        last = done == config.train.steps
        record = result.record | {"consumed_samples": position(done)}
        if evaluator is not None and (last or (evaluator.is_due(done) and not result.stop)):
            enter("evaluating", step)
            record |= evaluator()
            eval_loss = record["eval_loss"]
        _hand_out(record, result.measured, write, keep)
        due = config.checkpoint.interval > 0 and done % config.checkpoint.interval == 0
        if last or due or result.stop:
            enter("saving", step)
            saved = save_checkpoint(session, checkpoints, done, position(done), sample_order)
        if result.stop and not last:
            return TrainingEnd(done, True, loss, eval_loss, saved, result.stop)
    return TrainingEnd(max(first, config.train.steps), False, loss, eval_loss, saved)


def _hand_out(
    record: Record,
    measured: MeasuredStep | None,
    write: Writer | None,
    keep: Callable[[MeasuredStep], None] | None,
) -> None:
    if write is not None:
        write(record)
    if keep is not None and measured is not None:
        keep(measured)
