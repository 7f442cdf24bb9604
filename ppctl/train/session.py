"""Everything that one rank holds while it trains, built from the config and the plan.

Knows what a rank needs and in which order it is made (groups are collective). Must not know the order of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ppctl.comm.communicator import Communicator
from ppctl.comm.groups import clock_offset, make_group
from ppctl.comm.modes import Modes, pipeline_backend
from ppctl.config.batch_rampup import Rampup
from ppctl.config.batch_sizes import at_size, rampup_of
from ppctl.config.precision import weight_dtype
from ppctl.config.schema import DataConfig, ModelConfig, RunConfig
from ppctl.data.batches import Batches, HeldOutBatches
from ppctl.data.blend import Blend
from ppctl.data.load import NO_END, Data, DocumentEnd, load_data
from ppctl.data.sampler import SAMPLE_ORDER
from ppctl.engine.recorder import Recorder, StepTotals, make_recorder
from ppctl.geometry.foreign_model import foreign_of
from ppctl.geometry.layers import Layer, offloaded_layers
from ppctl.geometry.parts import Parts as WhichParts
from ppctl.geometry.parts import tp_sums
from ppctl.geometry.rows import Parameter
from ppctl.heartbeat import HeartbeatFile
from ppctl.model.compile import compile_stage
from ppctl.model.core_attention import Attend, attend
from ppctl.model.feed_forward import ExchangeRows
from ppctl.model.initialize import Initialize, initialize
from ppctl.model.kernels import Capability, Kernels, choose_kernels
from ppctl.model.offload import Offload
from ppctl.model.recompute import Switch, recompute
from ppctl.model.stage import build_stage
from ppctl.model.stage_model import StageModel
from ppctl.parallel.context import context_attention
from ppctl.parallel.dispatch import ExpertExchange
from ppctl.parallel.exchange_counts import watch
from ppctl.parallel.replicate import GradientReducer
from ppctl.parallel.tensor import SharedTokens, TensorParallel
from ppctl.parallel.ties import TiedGradients, tied_uses
from ppctl.plan import Plan, RankPlan, StageSpec
from ppctl.rank_records import EXCHANGING_AXES
from ppctl.topology import RankGrid, axes_with_groups, levels
from ppctl.train.grad_norm import GradientNorm, locate_parameters
from ppctl.train.loss_scale import LossScale
from ppctl.train.measured_costs import KEPT
from ppctl.train.muon import Muon, make_optimizer
from ppctl.train.optimizer import AdamW
from ppctl.train.precision import Weights
from ppctl.train.sharded import GatheredWeights, GradientScatter, ShardedWeights
from ppctl.train.summed_weights import norm_groups, weights_and_sums
from ppctl.wide_dtype import wide_dtype


def connect_pipeline(config: RunConfig, plan: Plan, pp_group: ProcessGroup, device: torch.device) -> Communicator:
    """The pipeline's messages, on a group of their own where they have a backend of their own."""
    backend = pipeline_backend(config.parallel.pipeline_model_parallel_comm_backend, device)
    group = pp_group if backend is None else make_group(RankGrid(plan.sizes).groups("pp"), backend=backend)
    modes = Modes.of(config.parallel)
    # Channels of the schedule's placement, which may be a V. The warm-up (`reach`) connects them, within a limit.
    return Communicator(group, modes, channels=plan.schedule.capacities, device=device, connect=False)


@dataclass(frozen=True)
class Parts:
    """What a session gets from outside its config and plan. A rehearsal (`ppctl/rehearsal`) brings its own."""

    connect: Callable[[RunConfig, Plan, ProcessGroup, torch.device], Communicator] = connect_pipeline
    """Makes the pipeline's communicator; called where the pipeline has several ranks."""
    exchange: Callable[[ProcessGroup | None, ProcessGroup | None], ExchangeRows] = ExpertExchange
    """(ep group, etp group), at least one of them: makes the way of rows to experts on other ranks."""
    initialize: Initialize = initialize
    """Fills a stage's weights."""
    capability: Callable[..., Capability] = Capability.of
    """(device, packed=whether documents are kept apart): what kernels can be chosen from."""
    load_data: Callable[[DataConfig], Data | None] = load_data
    """Opens what is trained on; called on ranks that read data. None: the caller brings the batches."""
    clock_offset: Callable[[], float] = clock_offset
    """Seconds from this rank's clock to the job's."""
    make_recorder: Callable[..., Recorder] = make_recorder


TRAINING = Parts()
"""The parts of a real run."""


@dataclass(frozen=True)
class Session:
    """What one rank holds while it trains. Collections go by stage, in chunk order."""

    config: RunConfig
    plan: Plan
    own: RankPlan
    device: torch.device
    groups: Mapping[str, ProcessGroup]
    """Every group of this rank by its axis."""
    communicator: Communicator | None
    """None where the pipeline has one rank."""
    kernels: Kernels
    stages: Mapping[int, StageModel]
    recompute: Mapping[int, Switch]
    offload: Offload | None
    """What moves activations to the host, where any are."""
    rows: Mapping[str, Parameter]
    """What each parameter and buffer of these stages is, by canonical name."""
    parts: WhichParts
    """What of its parameters the axes that split them leave to this rank."""
    weights: Weights
    optimizer: AdamW | Muon
    loss_scale: LossScale | None
    """In float16 only."""
    reducer: GradientReducer | GradientScatter
    partial_gradients: Sequence[str]
    """Parameters that are whole here, of whose gradients every tensor-parallel rank has a part."""
    ties: TiedGradients
    norm: GradientNorm
    corpus: Blend | None
    """The training data, on ranks that read data (`reads_data`)."""
    held_out: Blend | None
    """The data of evaluations, if the config names any; on the same ranks."""
    document_end: DocumentEnd
    """What ends a document, and what follows from it; on the same ranks."""
    recorder: Recorder
    steps: deque[StepTotals]
    """This rank's last steps, for profile.json."""
    heartbeat: HeartbeatFile | None

    @property
    def gathered(self) -> GatheredWeights | None:
        """The weights, where they are whole only while a stage computes."""
        return self.weights if isinstance(self.weights, GatheredWeights) else None

    @property
    def microbatches_of_all(self) -> int:
        """Microbatches of the global batch: of all schedule calls of a step, on all data-parallel ranks."""
        return self.plan.gradient_accumulation_steps * self.plan.num_microbatches * self.plan.sizes.dp

    def close(self) -> None:
        """End the connections of the pipeline's messages; every rank calls it, before the process groups go."""
        if self.communicator is not None:
            self.communicator.close()
        if self.heartbeat is not None:
            watch({})

    @property
    def world_groups(self) -> list[ProcessGroup]:
        """The groups along the axes that make up the world: a gather over one after another reaches every rank."""
        return [self.groups[axis] for axis in ("pp", "dp", "cp", "tp") if axis in self.groups]

    @property
    def exchanges(self) -> dict[str, list[str]]:
        """Group -> how its ranks exchange something other than by collectives (`reach/first_contact.py`)."""
        listed = self.config.model.cp_comm_type
        ways = {listed} if isinstance(listed, str) else set(listed)
        found: dict[str, list[str]] = {
            "ep": ["all to all"],
            "etp": ["all to all"],
            "cp": ["round"] * ("p2p" in ways) + ["all to all"] * ("a2a" in ways),
            "cp-inner": ["all to all"],
            "cp-outer": ["round"],
        }
        return {axis: found[axis] for axis in found if axis in self.groups}

    @property
    def split(self) -> TensorParallel | None:
        """The ranks that divide weights with this one."""
        group = self.groups.get("tp")
        return None if group is None else TensorParallel(group, sequence=self.config.parallel.sequence_parallel)

    @property
    def other_tokens(self) -> SharedTokens:
        """The ranks that route other tokens of a step through the same layers."""
        axes = ["tp"] * self.config.parallel.sequence_parallel + ["cp", "dp"]
        return SharedTokens([group for axis in axes if (group := self.groups.get(axis)) and group.size() > 1])

    def batches(
        self, first_step: int = 0, consumed_samples: int = 0, sample_order: int = SAMPLE_ORDER
    ) -> Batches | None:
        """The batches of this rank's data-parallel share from a position on; None where it reads none."""
        if self.corpus is None:
            return None
        return self._batches(self.corpus, sample_order, first_step, consumed_samples, rampup_of(self.config.train))

    def held_out_batches(self, sample_order: int) -> HeldOutBatches | None:
        """This rank's share of what an evaluation reads; None where it reads none."""
        if self.held_out is None:
            return None
        return HeldOutBatches(self._batches(self.held_out, sample_order), self.config.train.eval_steps)

    def of_batch(self, size: int) -> Session:
        """The same tensors, groups and messages, for steps of `size` samples while the batch grows."""
        if size == self.config.train.global_batch_size:
            return self
        plan = self.plan.of_batch(size)
        return replace(self, config=at_size(self.config, size), plan=plan, own=plan.for_rank(self.own.rank))

    def _batches(
        self,
        samples: Blend,
        sample_order: int,
        first_step: int = 0,
        consumed_samples: int = 0,
        rampup: Rampup | None = None,
    ) -> Batches:
        return Batches(
            samples,
            seq_length=self.config.data.seq_length,
            global_batch_size=self.config.train.global_batch_size,
            micro_batch_size=self.config.train.micro_batch_size,
            dp_rank=self.own.dp_rank,
            dp_size=self.plan.sizes.dp,
            seed=self.config.train.seed,
            vocab_size=self.config.model.vocab_size,
            first_step=first_step,
            consumed_samples=consumed_samples,
            rampup=rampup,
            end=self.document_end,
            sample_order=sample_order,
        )


def reads_data(stage: StageSpec, data: DataConfig) -> bool:
    """Whether a stage needs a step's tokens: E, m and L do, and layers where documents' ends mean something to them.

    A batch is a pure function of (seed, step): every rank finds the ends for itself, and no message carries them.
    """
    if {Layer("embedding"), Layer("mtp"), Layer("loss")} & set(stage.layers):
        return True
    return bool(stage.layers) and (data.reset_position_ids or data.reset_attention_mask)


def build_session(
    config: RunConfig,
    plan: Plan,
    rank: int,
    device: torch.device,
    heartbeat: HeartbeatFile | None = None,
    parts: Parts = TRAINING,
) -> Session:
    """Build this rank's stages, groups, optimizer and data. A collective: every rank of the world calls it once."""
    own = plan.for_rank(rank)
    grid = RankGrid(plan.sizes)
    named = axes_with_groups(plan.sizes, experts=bool(config.model.num_moe_experts))
    groups = {axes: make_group(grid.groups(*axes.split("-"))) for axes in named}
    if config.parallel.hierarchical_context_parallel_sizes:
        inner, *_ = config.parallel.hierarchical_context_parallel_sizes
        both = levels(grid.group_of("cp", rank), inner)
        groups |= {name: make_group(level) for name, level in zip(("cp-inner", "cp-outer"), both, strict=True)}
    if heartbeat is not None:
        levels_of_cp = {name: groups[name] for name in ("cp-inner", "cp-outer") if name in groups}
        counted = {axis: groups[axis] for axis in EXCHANGING_AXES if axis in groups} | levels_of_cp
        watch({group: partial(heartbeat.exchange, axis.partition("-")[0]) for axis, group in counted.items()})
    pp_group = groups["pp"]
    communicator = parts.connect(config, plan, pp_group, device) if plan.sizes.pp > 1 else None
    data = parts.load_data(config.data) if any(reads_data(spec, config.data) for spec in own.stages) else None
    if config.parallel.deterministic_mode != torch.are_deterministic_algorithms_enabled():
        # Only where it changes something: the call imports torch's compiler.
        torch.use_deterministic_algorithms(config.parallel.deterministic_mode)
    kernels = choose_kernels(config, parts.capability(device, packed=config.data.reset_attention_mask))
    own_parts = WhichParts.at(grid.coordinates(rank) | grid.coordinates(rank, "expert"), plan.sizes)
    stages = _build_stages(config, own_parts, own.stages, device, kernels, groups, parts)
    rows = {name: row for stage in stages.values() for name, row in stage.parameter_rows().items()}
    weights, reducer = weights_and_sums(config, plan, stages, rows, groups)
    sp = config.parallel.sequence_parallel
    uses = tied_uses(plan.stages, config.model, grid.group_of("pp", rank))
    switches, offload = _recompute(config, own.stages, stages, device)
    return Session(
        config=config,
        plan=plan,
        own=own,
        device=device,
        groups=groups,
        communicator=communicator,
        kernels=kernels,
        stages=stages,
        recompute=switches,
        offload=offload,
        rows=rows,
        parts=own_parts,
        weights=weights,
        optimizer=make_optimizer(weights.master, config.optim, rows),
        loss_scale=LossScale.of(config.optim) if config.parallel.fp16 else None,
        reducer=reducer,
        partial_gradients=[name for name in weights.master if tp_sums(rows[name], plan.sizes.tp, sequence_parallel=sp)],
        ties=TiedGradients(uses, weights.master, rank),
        norm=GradientNorm(
            locate_parameters(plan.stages, config.model),
            device=device,
            dtype=wide_dtype(getattr(torch, weight_dtype(config.parallel))),
            group=pp_group if plan.sizes.pp > 1 else None,
            parts=norm_groups(rows, own_parts, groups, sharded=isinstance(weights, ShardedWeights)),
        ),
        corpus=None if data is None else data.training,
        held_out=None if data is None else data.held_out,
        document_end=NO_END if data is None else data.end,
        recorder=parts.make_recorder(
            own.pp_rank, plan.schedule.actions[own.pp_rank], device, clock_offset=parts.clock_offset()
        ),
        steps=deque(maxlen=KEPT),
        heartbeat=heartbeat,
    )


def _build_stages(
    config: RunConfig,
    own_parts: WhichParts,
    specs: Sequence[StageSpec],
    device: torch.device,
    kernels: Kernels,
    groups: Mapping[str, ProcessGroup],
    parts: Parts,
) -> dict[int, StageModel]:
    """This rank's stages in chunk order, with their weights, their exchanges and, where asked for, compiled."""
    given: dict[str, Any] = dict(
        seed=config.train.seed,
        dtype=getattr(torch, weight_dtype(config.parallel)),
        device=device,
        parts=own_parts,
        initialize=parts.initialize,
    )
    build: Callable[[StageSpec, ModelConfig], StageModel] = partial(build_stage, kernels=kernels, **given)
    if (foreign := foreign_of(config.model)) is not None:
        from ppctl.foreign.foreign_stage import build_foreign_stage  # transformers, which few runs need

        build = partial(build_foreign_stage, foreign=foreign, **given)
    stages = {spec.stage: build(spec, config.model) for spec in specs}
    sequence = config.parallel.sequence_parallel
    others = SharedTokens([groups[axis] for axis in ("tp", "cp") if axis in groups and (axis != "tp" or sequence)])
    for stage in stages.values():
        if "tp" in groups:
            stage.split_over(TensorParallel(groups["tp"], sequence=sequence))
        if "cp" in groups:
            stage.share_sequences(own_parts.cp, _ways(config, kernels, groups))
        if others.groups:
            stage.share_tokens(others)
        if "ep" in groups or "etp" in groups:
            stage.spread_experts(parts.exchange(groups.get("ep"), groups.get("etp")))
        if config.train.compile:
            compile_stage(stage, device, packed=config.data.reset_attention_mask)
    return stages


def _recompute(
    config: RunConfig, specs: Sequence[StageSpec], stages: Mapping[int, StageModel], device: torch.device
) -> tuple[dict[int, Switch], Offload | None]:
    """Let stages recompute, and their first layers leave the rest to the host."""
    chosen = {spec.stage: offloaded_layers(config.parallel, spec.layers) for spec in specs}
    offload = Offload(device) if any(chosen.values()) else None
    found = {
        number: recompute(stage, config.train, number, offload, chosen[number]) for number, stage in stages.items()
    }
    return found, offload


def _ways(config: RunConfig, kernels: Kernels, groups: Mapping[str, ProcessGroup]) -> dict[str, Attend]:
    """How attention reaches other ranks' tokens, for every `cp_comm_type` of the model."""
    assert kernels.blocks is not None  # chosen where ranks share sequences
    listed = config.model.cp_comm_type
    levels = (groups["cp-inner"], groups["cp-outer"]) if "cp-inner" in groups else None
    make = partial(
        context_attention, group=groups["cp"], kernel=kernels.blocks, attend=partial(attend, kernels=kernels)
    )
    return {kind: make(kind, levels=levels) for kind in {"p2p", *([listed] if isinstance(listed, str) else listed)}}
