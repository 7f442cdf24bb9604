"""Batches: the samples of one data-parallel rank in a step, as tensors. The only file of `data/` that imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from ppctl.config.batch_sizes import BatchSizes, rampup_of
from ppctl.config.pieces import Rampup
from ppctl.config.schema import RunConfig
from ppctl.data.blend import Blend
from ppctl.data.corpus import refuse_beyond
from ppctl.data.load import NO_END, Data, DocumentEnd
from ppctl.data.sampler import SAMPLE_ORDER, Ids, checksum, microbatches
from ppctl.errors import Problem, TrainingError
from ppctl.sequence_halves import Lengths


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's data on one dp rank; m micro-batches of b samples of s tokens, on the CPU."""

    tokens: torch.Tensor
    """[m, b, s] int64."""
    labels: torch.Tensor
    """[m, b, s] int64: the token after each of `tokens`."""
    loss_mask: torch.Tensor
    """[m, b, s] float32: 1 if the label counts. In text all labels count (samples are cut from one array, never padded)
    unless documents' ends are masked; in conversations the answers count."""
    total_tokens: int
    """Unmasked labels of the whole global batch, over all dp ranks: the divisor of the loss."""
    checksum: int
    """CRC-32 of the global batch's sample ids, equal on all ranks that read data (`check_same_samples`)."""
    positions: torch.Tensor | None = None
    """[m, b, s] int64, if positions restart in every document."""
    documents: tuple[Lengths, ...] | None = None
    """For each micro-batch the lengths of its samples' documents, if documents are kept separate."""


@dataclass(eq=False)
class Batches:
    """The run's batches by step number; nothing is kept between calls, so any step can be asked for at any time.

    `step` counts completed optimizer steps: the run's first is step 0, and a run resumed from a checkpoint of step k
    goes on with step k. `consumed_samples` is the data position at `first_step` (both 0 for a new run); later positions
    follow from it, so that another global_batch_size after a resume neither skips nor repeats a sample. Steps take
    global_batch_size samples, fewer while a batch grows (`rampup`). `sample_order` is the version of the sampler's
    rule, which a run keeps for its whole life. `end` says how a document's end affects loss, positions and attention.
    Raises DataError for a corpus shorter than one sample or with tokens that the model's vocabulary lacks.
    """

    corpus: Blend
    _: KW_ONLY
    seq_length: int
    global_batch_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    seed: int
    vocab_size: int
    first_step: int = 0
    consumed_samples: int = 0
    end: DocumentEnd = NO_END
    sample_order: int = SAMPLE_ORDER
    rampup: Rampup | None = None

    def __post_init__(self) -> None:
        self.sizes = BatchSizes(self.global_batch_size, self.rampup, self.first_step, self.consumed_samples)
        self.corpus.check_vocabulary(self.vocab_size)
        self.num_samples = self.corpus.num_samples(self.seq_length)

    def sample_ids(self, step: int) -> Ids:
        """Ids of the global batch of `step`, shape [its samples], the same on every rank."""
        return self.ids_at(self.sizes.position(step), self.sizes.at(step))

    def ids_at(self, first: int, count: int) -> Ids:
        """Ids at positions first .. first + count - 1 of the run."""
        return self.corpus.order(self.seed, first, count, self.seq_length, self.sample_order)

    def step(self, step: int) -> StepBatch:
        """This dp rank's share of `step`. Raises DataError (PP-E406) for a token that the vocabulary lacks."""
        ids = self.sample_ids(step)
        mine = microbatches(ids, self.micro_batch_size, self.dp_rank, self.dp_size)
        read = self.corpus.samples(mine, self.seq_length)
        refuse_beyond(read.ravel(), self.vocab_size, lambda _: f"step {step + 1} of {self.corpus.description}")
        windows = torch.from_numpy(read)
        tokens = windows[..., :-1].contiguous()
        details = self.corpus.details(mine, self.seq_length)
        counts = torch.ones_like(tokens, dtype=torch.float32)
        if details is not None:
            counts = torch.from_numpy(details.counts).to(torch.float32)
        elif self.end.masks_loss:
            counts[tokens == self.end.token] = 0.0
        places, documents = find_documents(tokens, self.end, None if details is None else details.places)
        return StepBatch(
            tokens=tokens,
            labels=windows[..., 1:].contiguous(),
            loss_mask=counts,
            total_tokens=self._total_tokens(ids),
            checksum=checksum(ids),
            positions=places,
            documents=documents,
        )

    def _total_tokens(self, ids: Ids) -> int:
        details = self.corpus.details(ids, self.seq_length)
        if details is not None:
            return max(1, int(np.count_nonzero(details.counts)))
        if not self.end.masks_loss:
            return len(ids) * self.seq_length
        inputs = self.corpus.samples(ids, self.seq_length)[:, :-1]
        return max(1, int(np.count_nonzero(inputs != self.end.token)))


def positions(tokens: npt.NDArray[np.int64], end: int) -> npt.NDArray[np.int64]:
    """The distance of each of `tokens` [..., s] from its document's first token. An end mark belongs to the document
    that it ends; the part of a document in a sample counts as a document."""
    places = np.broadcast_to(np.arange(tokens.shape[-1]), tokens.shape)
    begins = np.zeros_like(tokens)
    begins[..., 1:] = np.where(tokens[..., :-1] == end, places[..., 1:], 0)
    return places - np.maximum.accumulate(begins, axis=-1)


def lengths(positions: npt.NDArray[np.int64]) -> Lengths:
    """The lengths of the documents in each sample of `positions` [b, s]: a document begins at each 0."""
    begins = [[*np.flatnonzero(row == 0).tolist(), len(row)] for row in positions]
    return tuple(tuple(after - first for first, after in pairwise(row)) for row in begins)


def find_documents(
    tokens: torch.Tensor, end: DocumentEnd, places: npt.NDArray[np.int64] | None = None
) -> tuple[torch.Tensor | None, tuple[Lengths, ...] | None]:
    """A StepBatch's `positions` and `documents`, each None if `end` does not need it: from its `tokens`, or from the
    `places` of tokens in their documents if the data has them."""
    if not (end.restarts_positions or end.separates):
        return None, None
    restarting = positions(tokens.numpy(), end.token) if places is None else places
    documents = tuple(lengths(rows) for rows in restarting) if end.separates else None
    return torch.from_numpy(restarting) if end.restarts_positions else None, documents


class HeldOutBatches:
    """The batches of an evaluation: always the same, in the run's own proportions, each sample counted once.

    There are at most `steps` batches, and no more than all samples need. If a sample comes again (to fill the last
    batch, or because a blend repeats a small corpus) its `loss_mask` is 0. `total_tokens` is 1: losses are sums.
    """

    def __init__(self, batches: Batches, steps: int) -> None:
        self._batches = batches
        size = batches.global_batch_size
        steps = min(steps, -(-batches.corpus.span(batches.seq_length) // size))
        ids = batches.ids_at(0, steps * size)
        fresh = np.zeros(len(ids), dtype=np.int64)
        fresh[np.unique(ids, return_index=True)[1]] = 1
        self._fresh = fresh.reshape(steps, size)
        self.num_batches = int(np.flatnonzero(self._fresh.any(axis=1))[-1]) + 1
        self.num_samples = int(fresh.sum())
        self.checksum = checksum(ids)
        """A checksum, equal on all ranks that read data."""

    def batch(self, number: int) -> StepBatch:
        """This dp rank's share of batch `number`, from 0."""
        batches = self._batches
        whole = batches.step(number)
        fresh = microbatches(self._fresh[number], batches.micro_batch_size, batches.dp_rank, batches.dp_size)
        mask = whole.loss_mask * torch.from_numpy(fresh.copy())[:, :, None].to(whole.loss_mask.dtype)
        return replace(whole, loss_mask=mask, total_tokens=1)


@dataclass(frozen=True)
class RankData:
    """The part of a run's data that one of `dp_size` data-parallel ranks reads; `data` is None if its stages need no
    tokens. `config` is the run's, with the size of its whole batch."""

    config: RunConfig
    data: Data | None
    dp_rank: int
    dp_size: int

    @property
    def end(self) -> DocumentEnd:
        """The token that ends a document, and its effects."""
        return NO_END if self.data is None else self.data.end

    @property
    def training(self) -> Blend | None:
        """The samples that are trained on."""
        return None if self.data is None else self.data.training

    def batches(
        self, first_step: int = 0, consumed_samples: int = 0, sample_order: int = SAMPLE_ORDER
    ) -> Batches | None:
        """This rank's share of the batches from a position on; None if no stage needs tokens."""
        if self.data is None:
            return None
        rampup = rampup_of(self.config.train)
        return self._of(self.data.training, sample_order, rampup, first_step, consumed_samples)

    def held_out_batches(self, sample_order: int = SAMPLE_ORDER) -> HeldOutBatches | None:
        """This rank's share of the evaluation's samples; None without such data, or if no stage needs tokens."""
        if self.data is None or self.data.held_out is None:
            return None
        return HeldOutBatches(self._of(self.data.held_out, sample_order), self.config.train.eval_steps)

    def _of(
        self, samples: Blend, sample_order: int, rampup: Rampup | None = None, first_step: int = 0, consumed: int = 0
    ) -> Batches:
        train = self.config.train
        return Batches(
            samples,
            seq_length=self.config.data.seq_length,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            seed=train.seed,
            vocab_size=self.config.model.vocab_size,
            first_step=first_step,
            consumed_samples=consumed,
            rampup=rampup,
            end=self.end,
            sample_order=sample_order,
        )


def check_same_samples(step: int, checksums: Mapping[int, int]) -> None:
    """Raise TrainingError unless all ranks that read data (rank -> checksum) drew the same samples for `step`."""
    if len(set(checksums.values())) <= 1:
        return
    seen = ", ".join(f"rank {rank}: {value:08x}" for rank, value in sorted(checksums.items()))
    message = f"the ranks that read data drew different samples for step {step}: their inputs and labels do not belong"
    remedy = "compare the data files and the version of Python on the hosts of these ranks"
    raise TrainingError(Problem("PP-E407", f"{message} together", remedy, seen))
