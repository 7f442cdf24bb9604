"""The loss on held-out samples, through the forward-only schedule on the ranks that train.

Must not know how a step is computed, nor change anything that training sees: weights, gradients, position.
"""

from __future__ import annotations

from typing import Any

from ppctl.comm.groups import gather_rows
from ppctl.data.batches import check_same_samples
from ppctl.train.step import Trainer

_READS_NOTHING = -1.0


class Evaluator:
    """Evaluates the stages of a trainer. Calling it is a collective of the world."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        training = trainer.batches  # ranks that read training data read the held-out data, in the same order
        self.batches = None if training is None else trainer.session.held_out_batches(training.sample_order)
        counts = [] if self.batches is None else [self.batches.num_batches, self.batches.num_samples]
        # Ranks that read nothing take part in the same number of forwards.
        self.num_batches, self.num_samples = (
            max(column) for column in zip(*self._gather(counts or [0, 0]), strict=True)
        )

    def is_due(self, done: int) -> bool:
        """Whether an evaluation follows the `done`-th step."""
        return done % self.trainer.session.config.train.eval_interval == 0

    def __call__(self) -> dict[str, Any]:
        """`eval_loss`, the mean over all tokens in nats, and `eval_samples`, the number of samples.

        Sums are float64, by microbatch and then by rank. Raises TrainingError where ranks read different samples.
        """
        loss = tokens = 0.0
        for number in range(int(self.num_batches)):
            batch = None if self.batches is None else self.batches.batch(number)
            losses = self.trainer.forward_only(batch)
            if self.trainer.session.own.tp_rank > 0:  # they have the losses of the first
                losses = []
            loss += sum(losses)
            if losses and batch is not None and self.trainer.session.own.cp_rank == 0:  # it has whole sequences
                tokens += float(batch.loss_mask.sum())
        checksum = _READS_NOTHING if self.batches is None else float(self.batches.checksum)
        rows = self._gather([loss, tokens, checksum])
        seen = {rank: int(row[2]) for rank, row in enumerate(rows) if row[2] != _READS_NOTHING}
        check_same_samples(self.trainer.session.config.train.steps, seen)
        total = sum(row[0] for row in rows), sum(row[1] for row in rows)
        return {"eval_loss": total[0] / total[1], "eval_samples": int(self.num_samples)}

    def _gather(self, own: list[float] | list[int]) -> list[list[float]]:
        """Every rank's numbers, by rank."""
        s = self.trainer.session
        found: list[list[float]] = gather_rows(own, s.own.rank, s.world_groups).tolist()
        return found
