"""The run: step after step until the last one or a request to stop, with evaluations and checkpoints between.

Knows when to evaluate, save and stop. Must not know how a step is computed, nor the paths of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ppctl.checkpoint.writer import WriterAddress
from ppctl.checkpoint_folder import FoundCheckpoint
from ppctl.config.batch_sizes import BatchSizes
from ppctl.data.sampler import SAMPLE_ORDER
from ppctl.schedule.measured_step import MeasuredStep
from ppctl.step_lines import Record
from ppctl.train.evaluate import Evaluator
from ppctl.train.local_start import load_local
from ppctl.train.metrics import Writer
from ppctl.train.rank_reports import SAVE_FAILED
from ppctl.train.saving import Saves
from ppctl.train.session import Session
from ppctl.train.snapshot import load_first, start_from
from ppctl.train.step import Trainer
from ppctl.train.torch_profile import step_profiles


@dataclass(frozen=True, slots=True)
class TrainingEnd:
    """How training ended, the same on every rank."""

    step: int
    """Completed optimizer steps."""
    stopped: bool
    """Whether a signal ended it before the last step."""
    loss: float | None
    """Loss of the last step that this process ran; None if no step was left."""
    eval_loss: float | None
    """Loss of the last evaluation, if there was one."""
    checkpoint: Path | None
    why: str | None = None
    """Why it stopped before the last step."""


def train(
    session: Session,
    checkpoints: Path,
    *,
    resume: Callable[[], list[FoundCheckpoint]],
    write: Writer | None,
    keep: Callable[[MeasuredStep], None] | None = None,
    gradients: Path | None = None,
    profiles: Path | None = None,
    stop_requested: Callable[[], int],
    enter: Callable[[str, int], None],
    say: Callable[[str], None] = print,
    writer: Callable[[], WriterAddress] = WriterAddress,
    note_save: Callable[[float], None] = lambda seconds: None,
) -> TrainingEnd:
    """Train to `train.steps`; saves at the interval, at the end, and when any rank was asked to stop.

    Goes on from the first checkpoint of `resume` that is not damaged; starts anew where there is none at all.

    Evaluates at its interval and at the end. `write` takes the records of `log.interval`, `keep` the steps of
    `log.trace`, and `say` lines for the user (rank 0 only); `gradients` and `profiles` are the directories for steps
    of `log.gradients` and `log.torch_profile`. `enter(state, step)` is called when `loading kernels`, `training`,
    `evaluating`, `saving` or `recording` begins. `writer` and `note_save` are `Saves`'.
    """
    config = session.config
    saves = Saves(session, checkpoints, writer=writer, say=say, note=note_save)
    first, consumed, sample_order, saved = _begin(session, saves, checkpoints, resume, say)
    sizes = BatchSizes.of(config.train, first, consumed)

    def writes(number: int) -> None:
        """Files of a step are written, which may take longer than a step ever does."""
        enter("recording", number - 1)

    trainer = Trainer(
        session,
        session.batches(first, consumed, sample_order),
        lambda: SAVE_FAILED if saves.failed else stop_requested(),
        sizes,
        gradients,
        writes,
    )
    if trainer.on_gpu and first < config.train.steps:
        enter("loading kernels", first)  # minutes, where layers are compiled: they say nothing of a step's length
        trainer.dry_pass(first)

    position = sizes.position
    profiled = step_profiles(config, session.own.rank, session.device, profiles, say, writes)
    evaluator = Evaluator(trainer) if config.train.eval_interval else None
    loss, eval_loss, why = None, None, None
    done = max(first, config.train.steps)
    with saves:
        for step in range(first, config.train.steps):
            enter("training", step)
            with profiled(step + 1):
                result = trainer.step(step)
            saves.look()
            loss, done = result.record["loss"], step + 1
            last = done == config.train.steps
            record = result.record | {"consumed_samples": position(done)}
            if evaluator is not None and (last or (evaluator.is_due(done) and not result.stop)):
                enter("evaluating", step)
                record |= evaluator()
                eval_loss = record["eval_loss"]
            logged = done % config.log.interval == 0 or step == first or last or "eval_loss" in record or result.stop
            # Figures of saves wait for the next line.
            _hand_out(record | saves.figures() if logged else None, result.measured, write, keep)
            if last or saves.is_due(done) or result.stop:
                enter("saving", step)
                ends, saving = last or result.stop is not None, partial(enter, "saving", step)
                saves.save(done, position(done), sample_order, last=ends, waited=saving)
            if result.stop and not last:
                why = result.stop
                break
        if saves.waits:  # with a limit of its own: it is not the wait for the one before
            enter("saving", done - 1)
        saved = saves.finish() or saved
    return TrainingEnd(done, why is not None, loss, eval_loss, saved, why)


class _Begin(NamedTuple):
    """The start of a run: completed steps, the position in the data, and the checkpoint that it continues from."""

    step: int = 0
    consumed_samples: int = 0
    sample_order: int = SAMPLE_ORDER
    checkpoint: Path | None = None


def _begin(
    session: Session,
    saves: Saves,
    checkpoints: Path,
    resume: Callable[[], list[FoundCheckpoint]],
    say: Callable[[str], None],
) -> _Begin:
    model, from_disk = session.config.model.from_, partial(load_first, session, resume, say)
    if saves.local is None:
        found = from_disk()
    else:
        room = saves.make_room
        found = load_local(session, saves.local, checkpoints, resume, from_disk=from_disk, make_room=room, say=say)
    if found is not None:
        state = found.state
        return _Begin(state["step"], state["consumed_samples"], state["sample_order"], found.path)
    if model is not None:
        start_from(session, Path(model))
    return _Begin()


def _hand_out(
    record: Record | None,
    measured: MeasuredStep | None,
    write: Writer | None,
    keep: Callable[[MeasuredStep], None] | None,
) -> None:
    if write is not None and record is not None:
        write(record)
    if keep is not None and measured is not None:
        keep(measured)
