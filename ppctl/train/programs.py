"""The programs of a rank's stages in a step: the module, with tokens if it reads them, then the objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ppctl.comm.buffers import Message
from ppctl.config.precision import autocast_dtype
from ppctl.config.schema import ModelConfig
from ppctl.data.batches import StepBatch
from ppctl.data.sampler import microbatches
from ppctl.engine.stage import StageProgram
from ppctl.geometry.foreign_model import foreign_of
from ppctl.geometry.layers import Layer, routers_with_losses
from ppctl.model.dropout import Draws, sample_key
from ppctl.model.linear import own_words
from ppctl.model.loss import Words, microbatch_loss, mtp_targets, without
from ppctl.model.packing import ROWS, Packing, bounds_of
from ppctl.model.router import Router
from ppctl.parallel.tensor import SharedTokens
from ppctl.plan import StageSpec
from ppctl.schedule.action import Op
from ppctl.schedule.sync_events import checkpoint_flags, forwards_in_flight, gathers_ahead
from ppctl.sequence_halves import Halves
from ppctl.tensors.tensor_halves import own_halves
from ppctl.train.mixed_precision import in_precision
from ppctl.train.session import Session
from ppctl.weight_gradients.functions import tell_what_stays


class StagePrograms:
    """Makes the programs of a rank's stages, and holds the values that they read and record in a step."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.batch: StepBatch | None = None
        """The step's samples, on ranks that read data."""
        self.bounds: Sequence[Tensor] | None = None
        """For each microbatch, where documents begin in it, for kernels that take all documents in one call."""
        self.losses: dict[int, Tensor] = {}
        """For each microbatch of the step, its share of the step's loss; on the rank that owns the loss."""
        self.samples: Tensor | None = None
        """[m, b] int64: the keys of this rank's samples in the step, if the model has dropout."""
        self.mtp_losses: dict[int, Tensor] = {}
        """For each microbatch, the mean of its MTP modules' shares of the step's losses."""
        self.mtp_weight = session.config.model.mtp_loss_scaling_factor
        """Weight of the MTP modules' losses in the loss of the step."""
        self.added: dict[int, Tensor] = {}
        """For each microbatch, the loss that the model itself adds."""
        split = session.groups.split
        self.words = None if split is None else Words(own_words(session.config.model.vocab_size, split), split)
        """The part of the vocabulary whose logits the rank has, if tensor-parallel ranks divide it."""
        size, length = session.plan.sizes.cp, session.config.data.seq_length
        self.halves = Halves(session.own.cp_rank, size, length) if size > 1 else None
        """The tokens of every sequence whose losses this rank computes; None: all."""
        row = session.plan.schedule.actions[session.own.pp_rank]
        spared = session.config.parallel.num_microbatches_with_partial_activation_checkpoints
        flags = checkpoint_flags(row, spared, forwards_in_flight(row))
        self.keeping = {(action.stage, action.mb) for action, recomputed in flags.items() if not recomputed}
        """(stage, microbatch) of the forwards whose activations are kept, although layers are recomputed otherwise."""
        self.first = next(action.stage for action in row if action.op is Op.F)
        """The stage that the rank's list begins with."""
        self.gathers = {(action.stage, action.mb): stage for action, stage in gathers_ahead(row).items()}
        """(stage, microbatch) -> the stage whose weights begin to be gathered before that forward."""

    def make(self, first: int) -> list[StageProgram]:
        """The programs, in the config's precision and chunk order, of a schedule call that begins at the step's
        microbatch `first`."""
        s = self.session
        autocast, scale = autocast_dtype(s.config.parallel), s.replica.loss_scale
        return [in_precision(self._program(spec, first), autocast, s.device, scale) for spec in s.own.stages]

    def begin(self, batch: StepBatch | None, step: int | None = None) -> None:
        """Clear the losses of the previous step, and take the samples of this step (`step` None: outside training).
        Start gathering the first stage's weights, if they are gathered, beside the wait for the first message."""
        if (gathered := self.session.replica.gathered) is not None:
            gathered.begin(self.first)
        self.samples = None if step is None else sample_keys(self.session, step)
        self.batch = None if batch is None else _moved(batch, self.session.device)
        documents = None if batch is None or self.session.model.kernels.attend_documents is None else batch.documents
        self.bounds = None if documents is None else bounds_of(documents, self.session.device)
        self.losses, self.mtp_losses, self.added = {}, {}, {}

    @property
    def own_batch(self) -> StepBatch:
        """The step's samples."""
        assert self.batch is not None  # only stages with E, m or L ask, and their ranks read data
        return self.batch

    def _program(self, spec: StageSpec, first: int) -> StageProgram:
        module, recompute = self.session.model.stages[spec.stage], self.session.model.recompute[spec.stage]
        gathered = self.session.replica.gathered
        embeds, predicts, ends = (Layer(kind) in spec.layers for kind in ("embedding", "mtp", "loss"))

        def forward(mb: int, inputs: Message) -> Message:
            recompute.on = (spec.stage, mb) not in self.keeping
            number = first + mb
            tokens = self.own_batch.tokens[number] if embeds or predicts else None
            given = inputs if tokens is None or not embeds else (tokens,)
            outputs = module(*given, tokens=tokens, packing=self._packing(number))
            return self._closed(number, outputs, adds=module.adds_to_loss) if ends else outputs

        def prepare(mb: int) -> None:
            assert gathered is not None
            gathered.hold(spec.stage)
            if (spec.stage, mb) in self.gathers:
                gathered.begin(self.gathers[spec.stage, mb])

        tell = partial(tell_what_stays, spec.stage, module, say=partial(print, flush=True))
        return StageProgram(
            spec.stage,
            forward,
            spec.receives,
            spec.sends,
            prepare=None if gathered is None else prepare,
            whole=module.whole,
            intercept=not module.asks,
            on_deferred=tell if self.session.own.in_first_pipeline else None,
        )

    def _loss(self, mb: int, logits: Tensor, *of_modules: Tensor) -> Tensor:
        """The loss whose backward runs; records the microbatch's share of the step's loss and of its MTP modules'
        losses. Loss and share differ if the schedule scales gradients: then the backward starts from the mean over the
        microbatch's own tokens."""
        pipeline, batch = self.session.config.pipeline, self.own_batch
        labels, mask = batch.labels[mb], batch.loss_mask[mb]
        scales = pipeline.scale_grads_in_schedule and torch.is_grad_enabled()
        tokens = mask.sum().clamp(min=1) if scales else batch.total_tokens
        shares = self.session.microbatches_of_all if scales else 1

        def against(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
            if self.halves is not None:
                labels, mask = own_halves(labels, self.halves, 1), own_halves(mask, self.halves, 1)
            if pipeline.loss_fn is None:
                return microbatch_loss(logits, labels, mask, tokens, overwrite=True, words=self.words)
            loss: Tensor = pipeline.loss_fn(logits, without(labels, mask))
            return loss / (1.0 if scales else batch.total_tokens)

        loss = against(logits, labels, mask)
        self.losses[mb] = loss.detach() / shares
        if of_modules:
            targets = mtp_targets(labels, mask, len(of_modules), self._packing(mb).documents)
            further = [against(each, *target) for each, target in zip(of_modules, targets, strict=True)]
            mean = torch.stack(further).mean()
            self.mtp_losses[mb] = mean.detach() / shares
            loss = loss + self.mtp_weight * mean
        return loss

    def _closed(self, mb: int, outputs: Message, *, adds: bool) -> Message:
        """The objective in place of the last stage's outputs: the loss, plus the microbatch's share of the loss that
        the model itself `adds`. Records both."""
        if not (adds and torch.is_grad_enabled()):
            return (self._loss(mb, *outputs),)
        *logits, added = outputs
        self.added[mb] = added.detach()
        return (self._loss(mb, *logits) + auxiliary_weight(self.session) * added,)

    def _packing(self, mb: int) -> Packing:
        """The packing of the step's microbatch `mb` for the layers; without documents on a rank without data."""
        draws = None if self.samples is None or not torch.is_grad_enabled() else Draws(self.samples[mb])
        if self.batch is None:
            return ROWS._replace(draws=draws)
        return Packing.of(self.batch.positions, self.batch.documents, mb, self.bounds, draws)


def auxiliary_weight(session: Session) -> float:
    """The factor of a microbatch's auxiliary loss in the objective, which has the mean; 1 if the schedule scales."""
    return 1.0 if session.config.pipeline.scale_grads_in_schedule else 1.0 / session.microbatches_of_all


def sample_keys(session: Session, step: int) -> Tensor | None:
    """The keys [m, b] (int64, on the device) of this rank's samples in the global batch; None without dropout."""
    model, train, foreign = session.config.model, session.config.train, foreign_of(session.config.model)
    adapters = None if foreign is None else foreign.adapters
    if not (model.hidden_dropout or model.attention_dropout or (adapters and adapters.dropout)):
        return None
    size, own = train.global_batch_size, session.own
    mine = microbatches(np.arange(size), train.micro_batch_size, own.dp_rank, session.plan.sizes.dp)
    keys = torch.tensor(
        [[sample_key(train.seed, step, sample) for sample in row] for row in mine.tolist()], device="cpu"
    )
    keys = keys.pin_memory() if session.device.type == "cuda" else keys
    return keys.to(session.device, non_blocking=True)


def _moved(batch: StepBatch, device: torch.device) -> StepBatch:
    """The batch on the device: copied before the pipeline, in which the host must not wait for the device."""
    if device.type != "cuda":
        return batch
    tensors = {name: getattr(batch, name) for name in ("tokens", "labels", "loss_mask", "positions")}
    on_device = {n: t.pin_memory().to(device, non_blocking=True) for n, t in tensors.items() if t is not None}
    return replace(batch, **on_device)


class RouterBalance:
    """Keeps the load of the experts in this rank's layers even. `others` are the ranks that route other tokens through
    the same layers, `weight` is the factor of an auxiliary loss in the objective."""

    def __init__(self, routers: Sequence[Router], model: ModelConfig, *, weight: float, others: SharedTokens) -> None:
        self.routers = tuple(routers)
        self.rate = model.moe_router_bias_update_rate if model.moe_router_enable_expert_bias else 0.0
        self.weight = weight
        self.others = others

    def begin(self, loss_scale: float) -> None:
        """Clear the counts of the last step; the next step's objective is multiplied by `loss_scale`."""
        for router in self.routers:
            router.ledger.clear()
            router.ledger.scale = self.weight * loss_scale

    def losses(self) -> list[list[Tensor]]:
        """The auxiliary losses of each router that has them, by this rank's microbatches."""
        return [router.ledger.losses for router in self.routers if router.ledger.losses]

    @torch.no_grad()
    def move_biases(self, left_out: Tensor | None = None) -> None:
        """Raise the biases of experts with fewer tokens than the step's mean, and lower the biases of experts with
        more, by one rate. A collective of all ranks. If `left_out` (a scalar on the device) is 1, biases stay."""
        if not (self.rate and self.routers):
            return
        counts = torch.stack([router.counts_of_step() for router in self.routers])
        self.others.sum(counts)
        loads = counts.float()
        for router, step in zip(self.routers, (loads.mean(-1, keepdim=True) - loads).sign(), strict=True):
            assert router.expert_bias is not None
            router.expert_bias += self.rate * (step if left_out is None else step * (1 - left_out))


def auxiliary_width(stages: Sequence[Sequence[StageSpec]], model: ModelConfig) -> int:
    """The most routers with auxiliary losses that a rank has; `stages` are the stages of each rank."""
    return max(sum(routers_with_losses(model, spec.layers) for spec in own) for own in stages)
