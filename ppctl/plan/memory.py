"""Bytes on every pp_rank's device: state, activations of the schedule as it runs, buffers, messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.cost.activations import StageActivations, stage_activations
from ppctl.cost.operands import stage_operands
from ppctl.cost.parameter_counts import Count, largest_matrices, on_device, stage_count, trained_count, untrained_bytes
from ppctl.cost.setting import ALLOCATOR_OF, ALLOCATORS, TORCH_ON_CPU, Setting, for_norms
from ppctl.cost.state import (
    Ends,
    Passing,
    State,
    dummy_gradient_bytes,
    ends_of,
    fetched_at_once,
    most,
    passing,
    peaks,
    saved_bytes,
    state_bytes,
)
from ppctl.geometry.canonical_names import embedding_uses
from ppctl.geometry.layers import NUMBERED, Layer, alike
from ppctl.host.accelerators import MEGATRON, Device, preset
from ppctl.plan.dispatch_nodes import dispatch_nodes
from ppctl.plan.memory_limit import GIB, MIB, amount, unit_for
from ppctl.plan.stages import moved_by_muon, precision_of, sharding_of, summed_copies, updating_bytes, while_summed
from ppctl.plan.types import Derived, RankCost, StageSpec, TensorSpec, once_a_kind
from ppctl.schedule.action import COMPUTE, Action, B, I, Schedule, receive_slots, send_slots
from ppctl.schedule.batching import shorter
from ppctl.topology import ParallelSizes

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def device_of(config: RunConfig) -> Device:
    """The device preset that a plan is priced for: `cost.device`, else an H100, or the CPU for a run on CPUs. Where a
    search has changed prices, `cost.device` is the device itself."""
    named: str | Device = config.cost.device or ("h100" if config.launch.device == "cuda" else "cpu")
    return named if isinstance(named, Device) else preset(named)


def setting_of(config: RunConfig, sizes: ParallelSizes, micro_batch_size: int) -> Setting:
    """The sizes and options on which the activations of a layer depend."""
    parallel, allocator = config.parallel, ALLOCATORS[config.cost.allocator or ALLOCATOR_OF[config.cost.stack]]
    levels = parallel.hierarchical_context_parallel_sizes
    if allocator.name == "torch" and device_of(config).name == "cpu":
        allocator = TORCH_ON_CPU
    return Setting(
        micro_batch_size,
        config.data.seq_length,
        precision_of(config).activation,
        sizes,
        parallel.sequence_parallel,
        parallel.cross_entropy_loss_fusion,
        for_norms(allocator, config.model.normalization),
        config.train,
        config.data.reset_attention_mask,
        None if levels is None else (levels[0], levels[1]),
        parallel,
        dispatch_nodes(config, sizes),
        narrow=config.cost.stack == MEGATRON and (config.cost.matmul or "bf16") != "bf16",
    )


RankPricer = Callable[..., tuple[RankCost, ...]]
"""(schedule, samples of a step, by default the global batch size; `only`, by default all pp_ranks) -> the cost of each
pp_rank under it."""


class _StageBytes(NamedTuple):
    """By stage, the bytes of `StageActivations`, and of the message that the stage receives."""

    kept: list[int]
    in_forward: list[int]
    in_backward: list[int]
    offloaded: list[int]
    received: list[int]


class _LastingBytes(NamedTuple):
    params: int
    state: State
    passing: dict[int, Passing] | None
    """By stage, weights and gradients that exist only while it computes; None if all state is permanent."""
    always: int
    """Bytes of the weights that are always held."""
    updating: int
    """Peak bytes during the optimizer step."""
    summed: dict[int, int]
    """By stage, bytes of the copy of its gradients while they are summed; empty if no copy is made."""
    tied: int | None
    """Bytes of a tied embedding's gradient (`_tied_sum`), beside the state; None without figures for backwards."""
    buffers: int

    def at(self, stages: Mapping[int, int]) -> _LastingBytes:
        """The bytes of a rank with equal layers whose stages are `stages[s]` in place of s."""
        passing = None if self.passing is None else {stages[s]: each for s, each in self.passing.items()}
        return self._replace(passing=passing, summed={stages[s]: size for s, size in self.summed.items()})


def rank_pricer(
    config: RunConfig, stages: Sequence[StageSpec], sizes: ParallelSizes, micro_batch_size: int
) -> RankPricer:
    """Return a function from a schedule to each pp_rank's bytes; what depends on no schedule is computed once."""
    setting = setting_of(config, sizes, micro_batch_size)
    kinds = [alike(config.model, config.train, stage.stage, stage.layers) for stage in stages]
    alive = once_a_kind(kinds, stages, lambda each: stage_activations(config.model, each.layers, setting, each.stage))
    for at, stage in enumerate(stages if config.train.replay else ()):  # gradients twice, and the forward once more
        once, count = alive[at], trained_count(config.model, stage.layers)
        more = state_bytes(count, sizes, precision_of(config), "none").gradients
        alive[at] = once._replace(in_backward=max(once.in_backward, once.in_forward - once.kept) + more)
    received = [message_bytes(stage.receives) for stage in stages]
    kept, in_forward, in_backward, offloaded = ([each[i] for each in alive] for i in range(4))
    held = _StageBytes(kept, in_forward, in_backward, offloaded, received)
    of_rank: list[list[StageSpec]] = [[] for _ in range(sizes.pp)]
    for stage in stages:
        of_rank[stage.pp_rank].append(stage)
    ranks = _ranks(config, kinds, of_rank, sizes, setting)
    last: tuple[Schedule, object, tuple[RankCost, ...]] | None = None

    @cache
    def halves() -> Ends | None:
        return halves_of(config, stages, setting, alive)

    def price(
        schedule: Schedule, samples: int = config.train.global_batch_size, only: int | None = None
    ) -> tuple[RankCost, ...]:
        nonlocal last
        lists = shorter(schedule) or schedule  # a further round holds the same as the others
        ends = halves() if lists.split else None
        for at in range(schedule.frozen_stages):  # an arrived message is not kept, but lies in a message buffer
            in_forward[at] = alive[at].in_forward - (received[at] if schedule.messages_into[at] else 0)
        messages = _messages(of_rank, schedule) if setting.allocator.receives else [0] * len(of_rank)
        calls = samples // (micro_batch_size * sizes.dp * schedule.num_microbatches)
        if last is None or last[0] is not lists or last[1] != (calls, messages, only):
            rows = zip(range(sizes.pp), ranks, lists.actions, messages, strict=True)
            costs = tuple(
                _rank_cost(r, rank, row, held, ends, size, calls) for r, rank, row, size in rows if only in (None, r)
            )
            last = lists, (calls, messages, only), costs
        return last[2]

    return price


def _rank_cost(
    pp_rank: int,
    rank: _LastingBytes,
    actions: Sequence[Action],
    held: _StageBytes,
    ends: Ends | None,
    messages: int,
    calls: int,
) -> RankCost:
    """The bytes of a pp_rank that runs this list `calls` times a step, with `messages` bytes of posted receives."""
    state, (kept, in_forward, in_backward, offloaded, received) = rank.state, held
    actions = [action for action in actions if action[0] in COMPUTE]
    in_flight, activations = peaks(actions, kept, in_forward, in_backward if any(in_backward) else None, ends)
    in_step = state.total + activations
    if rank.passing is not None:
        peak = most(actions, kept, in_forward, in_backward, rank.passing, ends, received=received, calls=calls)
        state = State(rank.always + peak.weights, peak.gradients, state.optimizer)
        in_step = peak.total + rank.always + state.optimizer
    if rank.summed:
        in_step = max(in_step, state.total + while_summed(actions, kept, rank.summed, ends))
    in_step = max(in_step, rank.updating)
    if rank.tied is not None:
        in_step = max(in_step, state.total + rank.tied)
    return RankCost(
        pp_rank,
        rank.params,
        *state,
        activation_bytes=activations,
        peak_bytes=in_step + rank.buffers + messages,
        in_flight=in_flight,
        buffer_bytes=rank.buffers,
        message_bytes=messages,
        host_bytes=peaks(actions, offloaded, ends=fetched_at_once(offloaded))[1] if any(offloaded) else 0,
    )


def _ranks(
    config: RunConfig,
    kinds: Sequence[Hashable],
    of_rank: Sequence[list[StageSpec]],
    sizes: ParallelSizes,
    setting: Setting,
) -> list[_LastingBytes]:
    """The `_rank` of every pp_rank; ranks with alike stages are priced once."""
    known: dict[Hashable, tuple[list[StageSpec], _LastingBytes]] = {}
    ranks = []
    for own in of_rank:
        # The owners of Muon's matrices depend on more than shapes.
        key = (*(kinds[stage.stage] for stage in own), *(own if config.optim.name == "muon" else ()))
        if key not in known:
            known[key] = own, _rank(config, own, sizes, setting)
        like, lasting = known[key]
        ranks.append(lasting.at({there.stage: here.stage for there, here in zip(like, own, strict=True)}))
    return ranks


def _rank(config: RunConfig, own: list[StageSpec], sizes: ParallelSizes, setting: Setting) -> _LastingBytes:
    """Bytes of a pp_rank with the stages `own`, in the whole step or at its end, that are equal under all schedules."""
    model, sharding, backward = config.model, sharding_of(config, sizes), setting.allocator.backward
    counts = [trained_count(model, stage.layers) for stage in own]
    biases = sum(_untrained(config, stage.layers, sizes) for stage in own)
    moved = moved_by_muon(config, [stage.layers for stage in own], sizes)
    state = state_bytes(sum(counts, Counter()), sizes, precision_of(config), sharding, moved)
    state = state._replace(weights=state.weights + biases)
    passes = sharding == "full" or (sharding == "optimizer_gradients" and backward)
    return _LastingBytes(
        sum(stage_count(model, stage.layers).total() for stage in own),
        state,
        _passing(config, own, sizes, sharding) if passes else None,
        biases if sharding == "full" else state.weights,
        updating_bytes(config, own, sizes, setting, state._replace(weights=biases) if sharding == "full" else state),
        summed_copies(config, own, sizes, setting),
        _tied_sum(config, own, sizes, sharding) if backward else None,
        _buffers(config, own, sizes, setting),
    )


def halves_of(
    config: RunConfig, stages: Sequence[StageSpec], setting: Setting, alive: Sequence[StageActivations]
) -> Ends | None:
    """Bytes that the halves of split backwards free and need on every stage; None for an allocator without figures."""
    if not setting.allocator.backward:
        return None
    model, of_inputs = config.model, setting._replace(deferred=True)
    kinds = [alike(config.model, config.train, stage.stage, stage.layers) for stage in stages]
    later = once_a_kind(kinds, stages, lambda each: stage_operands(model, each.layers, setting, each.stage))
    inputs = once_a_kind(kinds, stages, lambda each: stage_activations(model, each.layers, of_inputs, each.stage))
    whole, first = ([each.in_backward for each in some] for some in (alive, inputs))
    ends = ends_of([each.kept for each in alive], whole, first, later)
    most = [*map(max, ends.needs[I], ends.needs[B])] if config.train.replay else ends.needs[I]  # replay's W has no work
    return ends._replace(needs={**ends.needs, I: most})


def gathered(config: RunConfig, sizes: ParallelSizes, costs: Sequence[RankCost]) -> tuple[Derived, ...]:
    """A line on weights and gradients that are whole only at times; nothing if they always are."""
    if sharding_of(config, sizes) != "full":
        return ()
    weights, gradients, rest = map(
        max, zip(*((c.weight_bytes, c.gradient_bytes, c.optimizer_bytes) for c in costs), strict=True)
    )
    unit = unit_for(weights)
    equation = (
        f"gathered weights {unit.of(weights)} {unit.name} at most: a stage's are whole from its first forward to "
        f"its last backward, its gradients ({unit.of(gradients)}) from its first backward on; between steps a rank "
        f"holds {unit.of(rest)}"
    )
    return (Derived("gathered weights", round(weights / GIB.size, 2), equation),)


def checkpoint_copies(config: RunConfig, stages: Sequence[StageSpec], sizes: ParallelSizes) -> tuple[Derived, ...]:
    """A line on host memory for copies beside training; nothing if training waits for the disk. A rank saves masters
    and moments, or its part of them, each as wide as a gradient."""
    if not config.checkpoint.in_background:
        return ()
    by_rank = [[stage.layers for stage in stages if stage.pp_rank == pp_rank] for pp_rank in range(sizes.pp)]
    precision, sharding = precision_of(config), sharding_of(config, sizes)
    copies = 1 + config.checkpoint.local_replicas
    more = ", and as much for a neighbour's" * config.checkpoint.local_replicas

    def saved(own: Sequence[tuple[Layer, ...]]) -> int:
        count = sum((trained_count(config.model, layers) for layers in own), Counter())
        return saved_bytes(count, sizes, precision, sharding, moved_by_muon(config, own, sizes))

    most = max(map(saved, by_rank))
    equation = (
        f"checkpoint.async: a rank keeps {amount(most)} of its host's memory at most for a copy of what it saves{more};"
        " the ranks of a machine add up"
    )
    return (Derived("checkpoint copies", round(copies * most / GIB.size, 2), equation),)


def deferred(
    config: RunConfig, stages: Sequence[StageSpec], sizes: ParallelSizes, schedule: Schedule, micro_batch_size: int
) -> tuple[Derived, ...]:
    """A line on the operands that split backwards keep for W; nothing if no backward is split."""
    if not (shorter(schedule) or schedule).split:
        return ()
    setting = setting_of(config, sizes, micro_batch_size)
    kinds = {alike(config.model, config.train, 0, stage.layers): stage.layers for stage in stages}
    most = max(stage_operands(config.model, layers, setting).kept for layers in kinds.values())
    unit = unit_for(most)
    equation = (
        "backwards are split: first the gradient that the stage before waits for, and those of routers and the output; "
        f"later those of other weights, for which a stage keeps at most {unit.of(most)} {unit.name} of each microbatch"
    )
    return (Derived("put off to W", round(most / GIB.size, 2), equation),)


class Held(NamedTuple):
    """Bytes of a stage on one device, without those that live only while an operation runs."""

    state: int
    kept: int
    """Bytes of one microbatch from its F to its B or I."""
    deferred: int
    """Bytes of one microbatch from its I to its W."""


def held_bytes(
    config: RunConfig, stage: int, layers: tuple[Layer, ...], sizes: ParallelSizes, micro_batch_size: int
) -> Held:
    """Bytes that a stage of these layers holds, without buffers and messages, which belong to ranks (`rank_pricer`)."""
    setting, count = setting_of(config, sizes, micro_batch_size), trained_count(config.model, layers)
    state = state_bytes(
        count, sizes, precision_of(config), sharding_of(config, sizes), moved_by_muon(config, [layers], sizes)
    )
    kept = stage_activations(config.model, layers, setting, stage).kept
    # All kept bytes, if the allocator preset has no figures for backwards.
    later = stage_operands(config.model, layers, setting).kept if setting.allocator.backward else kept
    return Held(state.total + _untrained(config, layers, sizes), kept, later)


def _untrained(config: RunConfig, layers: Collection[Layer], sizes: ParallelSizes) -> int:
    """Bytes of untrained tensors of a stage, including a GPU's two copies of experts' weights in 8 bits."""
    model, precision = config.model, precision_of(config)
    copied = on_device(stage_count(model, layers), sizes)[1] if model.fp8 and config.launch.device == "cuda" else 0
    return untrained_bytes(model, layers, weight=precision.weight, gradient=precision.gradient) + 2 * copied


def _tied_sum(config: RunConfig, own: Sequence[StageSpec], sizes: ParallelSizes, sharding: str) -> int:
    """Bytes of a tied token embedding's gradient that a rank receives from another stage after the schedule."""
    model = config.model
    of_model = Layer("embedding"), Layer("loss"), *(Layer("mtp", n) for n in range(model.mtp_num_layers or 0))
    if len(embedding_uses(model, of_model)) < 2 or not any(embedding_uses(model, stage.layers) for stage in own):
        return 0
    elements = -(-model.vocab_size // sizes.tp) * model.hidden_size
    return precision_of(config).gradient * (elements if sharding == "none" else -(-elements // (sizes.dp * sizes.cp)))


def _passing(config: RunConfig, own: Sequence[StageSpec], sizes: ParallelSizes, sharding: str) -> dict[int, Passing]:
    """Stage -> bytes of state that the stages of a rank hold only while they compute."""
    model, precision = config.model, precision_of(config)

    def of(layers: tuple[Layer, ...]) -> Passing:
        matrices = largest_matrices(model, layers, sizes)
        held = passing(
            trained_count(model, layers), sizes, precision, matrices, muon=moved_by_muon(config, [layers], sizes)
        )
        if config.cost.stack == MEGATRON and sharding == "full":  # two layers together; gradients leave layer by layer
            pair = passing(largest_pair(model, layers), sizes, precision, matrices)
            return held._replace(weights=pair.weights, gradients=pair.gradients)
        # If weights stay whole, the gathered parts for a first forward lie beside them until then.
        return held if sharding == "full" else held._replace(weights=0, arriving=held.weights + held.arriving)

    return {stage.stage: of(stage.layers) for stage in own}


def largest_pair(model: ModelConfig, layers: Sequence[Layer]) -> Count:
    """Trained parameters of the two largest layers, whose weights Megatron gathers together."""
    return sum(sorted((trained_count(model, [layer]) for layer in layers), key=Counter.total)[-2:], Counter())


def _buffers(config: RunConfig, own: Sequence[StageSpec], sizes: ParallelSizes, setting: Setting) -> int:
    """Bytes of workspaces, hidden states that outlive their microbatch, and dummy gradients."""
    allocator, device, cost = setting.allocator, device_of(config), config.cost
    experts = any(layer.kind in NUMBERED for stage in own for layer in stage.layers)
    streams = 5 if config.model.num_moe_experts and experts else 1  # grouped products use four more streams
    te = device.te_workspace_mib * streams if cost.te_workspace_mib is None else cost.te_workspace_mib
    cublas = device.cublas_workspace_mib if cost.cublas_workspace_mib is None else cost.cublas_workspace_mib
    workspaces = int((allocator.cublas_workspaces * cublas + te * allocator.transformer_engine) * MIB)
    dummies = 0
    if allocator.dummy_weight_gradients:
        layers = [layer for stage in own for layer in stage.layers]
        dummies = dummy_gradient_bytes(config.model, layers, sizes)
    return workspaces + allocator.chunk_buffers * len(own) * setting.hidden_bytes(config.model) + dummies


def _messages(of_rank: Sequence[Sequence[StageSpec]], schedule: Schedule) -> list[int]:
    """Bytes of the receives that each rank posts ahead: for every channel to it, capacity x each form of its messages.
    Buffers of one form (shapes and dtypes) are not used for another. A capacity includes the sends that may be under
    way, as if each rank sent as many messages as it gets; with frozen stages, sends are counted at the channel's sender
    instead."""
    total = [0] * len(of_rank)
    for channel, capacity in schedule.capacities.items():
        senders = of_rank[channel.source]
        edges = [stage.sends if channel.direction == "F" else stage.receives for stage in senders]
        size = sum(map(message_bytes, set(edges)))
        total[channel.target] += (receive_slots(capacity) if schedule.frozen_stages else capacity) * size
        if schedule.frozen_stages:
            total[channel.source] += send_slots(capacity) * size
    return total


def message_bytes(edge: Sequence[TensorSpec]) -> int:
    """Bytes of one message."""
    return sum(prod(spec.shape) * BYTES.get(spec.dtype, 4) for spec in edge)
