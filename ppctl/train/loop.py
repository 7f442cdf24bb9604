"""The run: step after step until the last one or a request to stop, with evaluations between."""

from __future__ import annotations

from typing import Any

import torch

from ppctl.comm.groups import gather_rows
from ppctl.config.batch_sizes import BatchSizes
from ppctl.data.batches import StepBatch, check_same_samples
from ppctl.data.sampler import SAMPLE_ORDER
from ppctl.engine.interpreter import run_schedule
from ppctl.train.callback import Callback, Start, TrainingEnd, TrainingRun
from ppctl.train.programs import StagePrograms
from ppctl.train.session import Session
from ppctl.train.step import Trainer

_READS_NOTHING = -1.0


class Evaluator:
    """Evaluates a session's stages on batches of the run's global size. Making and calling are collectives."""

    def __init__(self, session: Session, sample_order: int = SAMPLE_ORDER) -> None:
        self.session = session
        self.batches = session.data.held_out_batches(sample_order)
        plan, self._stages = session.plan, StagePrograms(session)
        calls = range(plan.gradient_accumulation_steps)
        self._programs = [self._stages.make(call * plan.num_microbatches) for call in calls]
        counts = [] if self.batches is None else [self.batches.num_batches, self.batches.num_samples]
        # Ranks that read no data take part in the same number of forwards.
        self.num_batches, self.num_samples = (
            max(column) for column in zip(*self._gather(counts or [0, 0]), strict=True)
        )

    def __call__(self) -> dict[str, Any]:
        """`eval_loss`, the mean over all tokens in nats (sums in float64, by microbatch, then by rank), and
        `eval_samples`, the number of samples. Raises TrainingError if ranks read different samples."""
        loss = tokens = 0.0
        for number in range(int(self.num_batches)):
            batch = None if self.batches is None else self.batches.batch(number)
            losses = self.losses(batch)
            if self.session.own.tp_rank > 0:  # other tp ranks have the same losses
                losses = []
            loss += sum(losses)
            if losses and batch is not None and self.session.own.cp_rank == 0:  # the batch has whole sequences
                tokens += float(batch.loss_mask.sum())
        checksum = _READS_NOTHING if self.batches is None else float(self.batches.checksum)
        rows = self._gather([loss, tokens, checksum])
        seen = {rank: int(row[2]) for rank, row in enumerate(rows) if row[2] != _READS_NOTHING}
        check_same_samples(self.session.config.train.steps, seen)
        total = sum(row[0] for row in rows), sum(row[1] for row in rows)
        return {"eval_loss": total[0] / total[1], "eval_samples": int(self.num_samples)}

    def losses(self, batch: StepBatch | None) -> list[float]:
        """The losses of `batch` by microbatch, in evaluation mode; empty on ranks without the loss. A collective of the
        pipeline."""
        s, gathered = self.session, self.session.replica.gathered
        self._stages.begin(batch)
        for module in s.model.stages.values():
            module.train(False)
        for programs in self._programs:
            run_schedule(s.plan.forward_schedule, programs, s.pipeline.communicator, heartbeat=s.pipeline.heartbeat)
        if gathered is not None:
            gathered.release_all()
        for module in s.model.stages.values():
            module.train()
        losses = [self._stages.losses[mb] for mb in sorted(self._stages.losses)]
        return list(map(float, torch.stack(losses).tolist())) if losses else []  # waits for the device once

    def _gather(self, own: list[float] | list[int]) -> list[list[float]]:
        rows: list[list[float]] = gather_rows(own, self.session.own.rank, self.session.groups.world).tolist()
        return rows


def train(session: Session, start: Start, callback: Callback) -> TrainingEnd:
    """Train from `start` to `train.steps`, or until a rank is asked to stop; evaluate at the interval and at the end.
    `callback` is called as its class says, and with the states `loading kernels` and `evaluating`."""
    config = session.config
    end = TrainingEnd(start.step, checkpoint=start.checkpoint)
    error: BaseException | None = None
    try:
        callback.pre_train(TrainingRun(session, start, callback.enter))
        trainer, sizes = _trainer_from(start, session, callback)
        if trainer.on_gpu and start.step < config.train.steps:
            # This may take minutes, if layers are compiled: it is no part of a step's time.
            callback.enter("loading kernels", start.step)
            trainer.dry_pass(start.step)
        evaluator = Evaluator(session, start.sample_order) if config.train.eval_interval else None
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
