"""One rank of a run, and how its parts are made: in one order on all ranks, because making groups is collective."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.distributed import ProcessGroup

from ppctl.comm.communicator import Communicator
from ppctl.comm.groups import clock_offset, make_group
from ppctl.comm.modes import Modes, pipeline_backend
from ppctl.config.batch_sizes import at_size
from ppctl.config.parallel_rules import is_plain
from ppctl.config.schema import DataConfig, RunConfig
from ppctl.data.batches import RankData
from ppctl.data.load import Data, load_data
from ppctl.engine.interpreter import Engine
from ppctl.engine.pace import DevicePace
from ppctl.engine.recorder import Recorder, StepTotals, make_recorder
from ppctl.engine.stage import StageProgram
from ppctl.geometry.layers import Layer
from ppctl.geometry.rows import Parts
from ppctl.parallel.axis_groups import AxisGroups
from ppctl.parallel.exchange_counts import watch
from ppctl.plan import Plan, RankPlan, StageSpec
from ppctl.plan.dispatch_nodes import dispatch_nodes
from ppctl.runs.heartbeat import HeartbeatFile
from ppctl.schedule.action import Schedule
from ppctl.topology import ParallelSizes, RankGrid
from ppctl.train.rank_model import ModelParts, RankModel, build_model
from ppctl.train.replica import Replica, make_replica

KEPT = 16
"""Steps whose totals are kept for profile.json: so neither a disturbed step nor the slow first one sets the price."""


def connect_pipeline(config: RunConfig, plan: Plan, pp_group: ProcessGroup, device: torch.device) -> Communicator:
    """Make the pipeline's communicator, on a separate group if messages have another backend. A collective."""
    backend = pipeline_backend(config.parallel.pipeline_model_parallel_comm_backend, device)
    group = pp_group if backend is None else make_group(RankGrid(plan.sizes).groups("pp"), backend=backend)
    modes, transport = Modes.of(config.parallel), "plain" if is_plain(config) else "channels"
    # Channels of the schedule's placement, which may be a V. The warm-up (`reach`) connects them, within a time limit.
    channels = plan.schedule.capacities
    return Communicator(group, modes, channels=channels, device=device, connect=False, transport=transport)


@dataclass(frozen=True)
class SessionParts(ModelParts):
    """Makers of the parts of a session that config and plan do not determine; a rehearsal has its own."""

    connect: Callable[[RunConfig, Plan, ProcessGroup, torch.device], Communicator] = connect_pipeline
    """Makes the pipeline's communicator; called if the pipeline has several ranks."""
    load_data: Callable[[DataConfig], Data | None] = load_data
    """Opens the training data; called on ranks that read data. Returns None if the caller passes the batches."""
    clock_offset: Callable[[], float] = clock_offset
    """Returns the seconds to add to this rank's clock to get the job's."""
    make_recorder: Callable[..., Recorder] = make_recorder


TRAINING = SessionParts()
"""The parts of a real run."""


@dataclass
class RankPipeline:
    """One rank's place in a pipeline: communicator, recorder and heartbeat."""

    communicator: Communicator | None
    """None if the pipeline has one rank."""
    recorder: Recorder
    heartbeat: HeartbeatFile | None
    deallocate_outputs: bool
    totals: deque[StepTotals] = field(default_factory=lambda: deque(maxlen=KEPT))
    """The last steps of this rank in figures."""
    _engine: Engine | None = None
    """The engine of the last schedule call, unless the device has been waited for since."""

    def train(
        self, schedule: Schedule, programs: Sequence[StageProgram], reduce_grad: Callable[[int], None] | None
    ) -> None:
        """Run one schedule call of a step; `reduce_grad(stage)` is called when a stage's gradients are complete. The
        device may still compute on return: `leave` and `settle` must follow the step's last call."""
        self._engine = Engine(
            schedule,
            programs,
            self.communicator,
            deallocate_pipeline_outputs=self.deallocate_outputs,
            reduce_grad=reduce_grad,
            recorder=self.recorder,
            heartbeat=self.heartbeat,
            pace=None if self._engine is None else self._engine.pace,
        )
        self._engine.start()

    @property
    def ahead(self) -> bool:
        """Whether the device may still be in the step's schedule calls."""
        return self._engine is not None and isinstance(self._engine.pace, DevicePace)

    def leave(self) -> None:
        """Call it after the step's last schedule call, before other work is enqueued. Raises EngineError."""
        assert self._engine is not None  # a step has a schedule call
        self._engine.leave()

    def settle(self) -> float:
        """Wait until the device has finished the step's schedule calls, but not for what was enqueued since `leave`;
        returns when the calls were finished, by `perf_counter`. Raises EngineError if one has failed."""
        assert self._engine is not None  # a step has a schedule call
        engine, self._engine = self._engine, None
        engine.settle()
        return engine.pace.ended

    def close(self) -> None:
        """End the connections of the pipeline's messages; every rank calls it, before the process groups go."""
        if self.communicator is not None:
            self.communicator.close()
        if self.heartbeat is not None:
            watch({})


@dataclass(frozen=True)
class Session:
    """One rank of a run while it trains."""

    config: RunConfig
    plan: Plan
    own: RankPlan
    device: torch.device
    groups: AxisGroups
    model: RankModel
    replica: Replica
    pipeline: RankPipeline
    data: RankData

    @property
    def microbatches_of_all(self) -> int:
        """Microbatches of the global batch: of all schedule calls of a step, on all data-parallel ranks."""
        return self.plan.gradient_accumulation_steps * self.plan.num_microbatches * self.plan.sizes.dp

    def of_batch(self, size: int) -> Session:
        """A session for steps of `size` samples, while the batch grows; it shares this one's tensors and groups."""
        if size == self.config.train.global_batch_size:
            return self
        plan = self.plan.of_batch(size)
        return replace(self, config=at_size(self.config, size), plan=plan, own=plan.for_rank(self.own.rank))


def reads_data(stage: StageSpec, data: DataConfig) -> bool:
    """Whether a stage needs a step's tokens: E, m and L do, and layers that documents' ends affect. Every rank finds
    the ends itself, since a batch is a function of (seed, step): no message carries them."""
    if {Layer("embedding"), Layer("mtp"), Layer("loss")} & set(stage.layers):
        return True
    return bool(stage.layers) and (data.reset_position_ids or data.reset_attention_mask)


def build_session(
    config: RunConfig,
    plan: Plan,
    rank: int,
    device: torch.device,
    heartbeat: HeartbeatFile | None = None,
    parts: SessionParts = TRAINING,
) -> Session:
    """Build this rank's groups, stages, optimizer and data. A collective: every rank of the world calls it once."""
    own, grid = plan.for_rank(rank), RankGrid(plan.sizes)
    groups = AxisGroups.make(
        plan.sizes,
        rank,
        experts=bool(config.model.num_moe_experts),
        sequence_parallel=config.parallel.sequence_parallel,
        inner=_inner_levels(config, plan.sizes),
    )
    if heartbeat is not None:
        groups.count_exchanges(heartbeat.exchange)
    communicator = parts.connect(config, plan, groups["pp"], device) if plan.sizes.pp > 1 else None
    data = parts.load_data(config.data) if any(reads_data(spec, config.data) for spec in own.stages) else None
    own_parts = Parts.at(grid.coordinates(rank) | grid.coordinates(rank, "expert"), plan.sizes)
    model = build_model(config, own.stages, own_parts, groups, device, parts)
    replica = make_replica(config, plan, rank, model, groups, device)
    actions = plan.schedule.actions[own.pp_rank]
    recorder = parts.make_recorder(own.pp_rank, actions, device, clock_offset=parts.clock_offset())
    deallocates = config.parallel.deallocate_pipeline_outputs
    return Session(
        config=config,
        plan=plan,
        own=own,
        device=device,
        groups=groups,
        model=model,
        replica=replica,
        pipeline=RankPipeline(communicator, recorder, heartbeat, deallocates),
        data=RankData(config, data, own.dp_rank, plan.sizes.dp),
    )


def _inner_levels(config: RunConfig, sizes: ParallelSizes) -> dict[str, int]:
    """Axis with two levels of exchange -> the number of neighbours in its inner level."""
    context, nodes = config.parallel.hierarchical_context_parallel_sizes, dispatch_nodes(config, sizes)
    return ({"cp": context[0]} if context else {}) | ({"ep": sizes.ep // nodes} if nodes > 1 else {})
