"""The run: step after step until the last one or a request to stop, with evaluations between."""

from __future__ import annotations

from ppctl.config.batch_sizes import BatchSizes
from ppctl.train.callback import Callback, Start, TrainingEnd, TrainingRun
from ppctl.train.evaluate import Evaluator
from ppctl.train.session import Session
from ppctl.train.step import Trainer


def train(session: Session, start: Start, callback: Callback) -> TrainingEnd:
    """Train from `start` to `train.steps`, or until a rank is asked to stop; evaluate at the interval and at the end.
    `callback` is called as its class says, and besides with the states `loading kernels` and `evaluating`."""
    config = session.config
    callback.pre_train(TrainingRun(session, start, callback.enter))
    trainer, sizes = _trainer_from(start, session, callback)
    if trainer.on_gpu and start.step < config.train.steps:
        # Minutes, if layers are compiled: they say nothing of a step's length.
        callback.enter("loading kernels", start.step)
        trainer.dry_pass(start.step)
    evaluator = Evaluator(session, start.sample_order) if config.train.eval_interval else None
    end = TrainingEnd(start.step, checkpoint=start.checkpoint)
    error: BaseException | None = None
    try:
        step = start.step
        while step < config.train.steps:
            callback.enter("training", step)
            callback.pre_step(step + 1)
            result = trainer.step(step)
            result.record["consumed_samples"] = sizes.position(step + 1)
            callback.post_update(result)
            due = result.last or (result.step % (config.train.eval_interval or 1) == 0 and not result.stop)
            if evaluator is not None and due and not result.goes_back:
                callback.enter("evaluating", step)
                result.record |= evaluator()
            end.step, end.loss = result.step, result.record["loss"]
            end.eval_loss = result.record.get("eval_loss", end.eval_loss)
            begins_or_ends = step == start.step or result.last or bool(result.stop) or result.goes_back
            if begins_or_ends or result.step % config.log.interval == 0 or "eval_loss" in result.record:
                callback.log_metrics(result.record)
            callback.post_step(result)
            step = result.step
            if result.start is not None:
                start, step = result.start, result.start.step
                trainer, sizes = _trainer_from(start, session, callback)
            if result.stop and not result.last:
                end.why = result.stop
                break
        callback.post_train(end)
    except BaseException as raised:
        error = raised
        raise
    finally:
        callback.close(error)
    return end


def _trainer_from(start: Start, session: Session, callback: Callback) -> tuple[Trainer, BatchSizes]:
    sizes = BatchSizes.of(session.config.train, start.step, start.consumed_samples)
    sizes.pass_by(start.passed)
    batches = session.data.batches(start.step, start.consumed_samples, start.sample_order)
    if batches is not None:
        batches.sizes = sizes
    return Trainer(session, batches, sizes, callback), sizes
