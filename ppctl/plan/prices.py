"""Seconds of a microbatch on every stage and of a step, from a device preset or a profile; and the bytes sent.

Plans, simulations and searches for a layout all read the numbers of `pricer`. Knows which keys of the config set
prices. Must not know how schedules are made or how closed forms work (`ppctl.cost`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache

from ppctl.config.schema import ModelConfig, RunConfig, TrainConfig
from ppctl.cost.activations import StageActivations, stage_activations
from ppctl.cost.parameter_counts import Count, on_device, trained_count
from ppctl.cost.setting import Setting
from ppctl.cost.step_traffic import Stages, Sums, once_a_step
from ppctl.cost.times import (
    Machine,
    PartSeconds,
    beside_copies,
    host_seconds,
    layer_seconds,
    layer_work,
    machine_of,
    message_seconds,
    newton_schulz_seconds,
    optimizer_seconds,
    reduce_seconds,
)
from ppctl.cost.traffic import Traffic, stage_passes
from ppctl.errors import ScheduleError
from ppctl.geometry.foreign_model import foreign_of
from ppctl.geometry.layers import Kind, Layer, alike, count_of, layer_kinds, recomputed_modules, recomputed_runs
from ppctl.host.accelerators import MEGATRON
from ppctl.plan.dispatch_nodes import ranks_per_node
from ppctl.plan.memory import device_of, message_bytes, setting_of
from ppctl.plan.memory_limit import GIB, amount
from ppctl.plan.profile import LayerSeconds, Profile, fitted
from ppctl.plan.stages import moved_by_muon, precision_of, sharding_of
from ppctl.plan.types import Derived, Exchange, RankCost, StageCost, StageSpec, Timing, once_a_kind
from ppctl.schedule.action import Channel, Schedule
from ppctl.schedule.executor import Execution
from ppctl.schedule.simulate import Costs, bubble_of, computing, longest_chain, seconds_by_kind, simulate, timed
from ppctl.schedule.trace import Trace
from ppctl.topology import ParallelSizes


def stage_costs(
    config: RunConfig,
    layers: Iterable[Sequence[Layer]],
    sizes: ParallelSizes,
    micro_batch_size: int,
    measured: Profile | None = None,
) -> tuple[StageCost, ...]:
    """The cost of every stage from the layers that it holds, in model order.

    `measured` costs replace the costs from the preset, kind of layer by kind of layer.
    """
    price = pricer(config, sizes, micro_batch_size, measured)
    held = list(enumerate(map(tuple, layers)))
    kinds = [(alike(config.model, config.train, *each), each[0] == len(held) - 1) for each in held]
    return tuple(once_a_kind(kinds, held, lambda each: price(*each, each[0] == len(held) - 1)))


def pricer(
    config: RunConfig, sizes: ParallelSizes, micro_batch_size: int, measured: Profile | None = None
) -> Callable[..., StageCost]:
    """Return a function (stage, its layers, whether it is the last stage, its activations or None) -> the stage's cost.
    Equal layers are priced once."""
    model, train = config.model, config.train
    setting = setting_of(config, sizes, micro_batch_size)
    machine = machine_for(config, setting)

    @cache
    def of_kind(kind: Kind, recomputed: tuple[str, ...] | None) -> PartSeconds:
        return layer_seconds(layer_work(model, kind, setting), machine, recomputed)

    scales, sent = _scales(model, measured, of_kind), measured.message if measured else None

    def of_stage(stage: int, held: tuple[Layer, ...], last: bool, alive: StageActivations | None = None) -> StageCost:
        """The cost of a stage with the layers `held`: seconds of a microbatch, its message, and its bytes."""
        seconds = []
        for layer in _as_run(model, train, stage, held):
            one, (ahead, back) = of_kind(*layer), scales.get(layer, scales.get(layer[0], (1.0, 1.0)))
            scale = (ahead, back, back, ahead, back)
            seconds.append(PartSeconds(*(each * by for each, by in zip(one, scale, strict=True))))
        size = 0 if last else setting.hidden_bytes(model) * (1 + count_of("mtp", held)) + _routed(model, held, setting)
        alive = alive or stage_activations(model, held, setting, stage)
        copies = host_seconds(alive.offloaded, machine)
        whole = PartSeconds(*map(sum, zip(*seconds, strict=True))) if seconds else PartSeconds(0.0, 0.0, 0.0)
        ahead, inputs, weights, exchanged, exchanged_back = beside_copies(whole, copies)
        return StageCost(
            *(ahead, inputs, weights),
            0.0 if last else (sent or message_seconds(size, machine)),
            size,
            alive.kept,
            reduction(config, trained_count(model, held), machine, ahead + inputs + weights),
            alive.offloaded,
            copies,
            *(exchanged, exchanged_back, config.cost.overlapped_link),
        )

    return of_stage


def machine_for(config: RunConfig, setting: Setting) -> Machine:
    """The config's device, with the rates of its kernels, and with domains of fast links that end with a machine."""
    device, per_node = device_of(config), ranks_per_node(config, setting.sizes.world)
    device = device if device.wide else device._replace(domain=min(device.domain, per_node))
    products = config.cost.matmul or ("fp8" if config.model.fp8 else precision_of(config).dtype)
    return machine_of(device, products, setting.sizes, config.model, setting.nodes, config.cost.stack)


def _routed(model: ModelConfig, held: tuple[Layer, ...], setting: Setting) -> int:
    """Bytes of router logits that a message carries beside the hidden state, for a loss over all layers' routers."""
    foreign, behind = foreign_of(model), max((layer.index + 1 for layer in held if layer.kind == "decoder"), default=0)
    return 0 if foreign is None else foreign.routed_bytes(behind, setting.tokens, setting.element)


_AsRun = tuple[Kind, tuple[str, ...] | None]
"""A kind of layer, and the modules of it that are recomputed; None if the whole layer is."""


def _as_run(model: ModelConfig, train: TrainConfig, stage: int, held: tuple[Layer, ...]) -> list[_AsRun]:
    """How each layer of a stage is run."""
    modules, runs = recomputed_modules(train, stage), recomputed_runs(train, stage, held)
    whole = {layer for run in runs for layer in run}
    kinds = layer_kinds(model, held)
    return [(kind, None if layer in whole else modules) for layer, kind in zip(held, kinds, strict=True)]


def _scales(
    model: ModelConfig, measured: Profile | None, preset: Callable[[Kind, tuple[str, ...] | None], PartSeconds]
) -> dict[_AsRun | Kind, tuple[float, float]]:
    """Measured over preset seconds, of forward and backward, of layers as the measured run had them; a kind's own key
    is for layers that it did not run so."""
    if measured is None:
        return {}
    held = enumerate(measured.stages)
    rows = [(Counter(_as_run(model, measured.train, stage, layers)), seconds) for stage, (layers, seconds) in held]
    prior = {}
    for layer in dict.fromkeys(layer for counts, _ in rows for layer in counts):
        one = preset(*layer)
        prior[layer] = LayerSeconds(one.forward, one.input_gradient + one.weight_gradient)
    priced = fitted(rows, prior)
    scales: dict[_AsRun | Kind, tuple[float, float]] = {}
    for layer, before in prior.items():
        own = priced[layer]
        scales[layer] = own.forward / (before.forward or 1.0), own.backward / (before.backward or 1.0)
        scales[layer[0]] = scales[layer]
    return scales


def reduction(config: RunConfig, count: Count, machine: Machine, beside: float) -> float:
    """Seconds that a stage waits for the sums of its gradients: of whole ones on every rank, or of shards, after which
    ranks send the new weights. Megatron's sums overlap with `beside`, the seconds of forward and backward."""
    precision = precision_of(config)
    each = 2 * precision.gradient
    if sharding_of(config, machine.sizes) != "none":
        each = precision.gradient + precision.weight
    summing = reduce_seconds(*on_device(count, machine.sizes), each, machine)
    # Megatron sums bucket by bucket, beside the last backward and the next step's forward.
    return max(0.0, summing - beside) if config.cost.stack == MEGATRON else summing


def simulation_costs(costs: Sequence[StageCost], stages: Sequence[StageSpec]) -> Costs:
    """Stage costs in the form that a schedule's simulation takes.

    A chunk's gradients are summed while other chunks compute; a rank waits only for the sums of its first chunk, which
    finishes last.
    """
    messages: dict[Channel, float] = {}
    for here, there, cost in zip(stages, stages[1:], costs, strict=False):
        for channel in (Channel(here.pp_rank, there.pp_rank, "F"), Channel(there.pp_rank, here.pp_rank, "B")):
            messages[channel] = max(messages.get(channel, 0.0), cost.message_s)
    return Costs(
        [cost.forward_s for cost in costs],
        [cost.backward_s for cost in costs],
        [cost.input_grad_s for cost in costs],
        [cost.weight_grad_s for cost in costs],
        [cost.reduce_s if stage.vpp_rank == 0 else 0.0 for cost, stage in zip(costs, stages, strict=True)],
        messages=messages,
        exchanges=[(cost.exchange_s, cost.exchange_back_s) for cost in costs],
        overlapped_link=costs[0].overlapped_link if costs else 1.0,
    )


def predicted(schedule: Schedule, costs: Costs) -> Trace:
    """The step as it would run at these costs. Empty for a schedule that hangs."""
    try:
        return simulate(schedule, costs)
    except ScheduleError:
        return Trace(schedule.placement.pp, ())


def step_timing(
    config: RunConfig,
    stages: Sequence[StageSpec],
    sizes: ParallelSizes,
    schedule: Schedule,
    run: Execution,
    costs: Sequence[StageCost],
    ranks: Sequence[RankCost],
    calls: int,
    priced_by: str,
) -> tuple[Timing, float]:
    """All times of `calls` schedule calls and one optimizer step, and the bubble's share of a call."""
    device, actions = device_of(config), timed(schedule)
    computed = computing(actions, run)
    pipeline, optimizer = run.seconds, seconds_after(config, stages, sizes, ranks)
    step = calls * pipeline + optimizer
    tokens = config.train.global_batch_size * config.data.seq_length
    flops = sum(s.flops for s in stages) * schedule.num_microbatches * calls * sizes.dp
    rate = flops / step / sizes.world if pipeline else 0.0
    timing = Timing(
        priced_by=priced_by,
        pipeline_s=pipeline,
        optimizer_s=optimizer,
        tokens_per_s=tokens / step if pipeline else 0.0,
        tokens_per_s_per_device=tokens / step / sizes.world if pipeline else 0.0,
        tflops_per_device=rate / 1e12,
        mfu=rate / device.bf16_flops if device.name != "cpu" else None,
        bubbles=tuple(1 - sum(row) / pipeline for row in computed) if pipeline else (),
        critical=tuple(seconds_by_kind(longest_chain(actions, run)).items()),
        stages=tuple(costs),
    )
    return timing, bubble_of(computed, run)


def seconds_after(
    config: RunConfig, stages: Sequence[StageSpec], sizes: ParallelSizes, ranks: Sequence[RankCost]
) -> float:
    """Seconds of the optimizer step after the pipeline."""
    device = device_of(config)
    return max(
        optimizer_seconds(r.weight_bytes, r.gradient_bytes, r.optimizer_bytes, device, config.cost.stack)
        + _orthogonalising(config, [stage for stage in stages if stage.pp_rank == r.pp_rank], sizes)
        for r in ranks
    )


def matrix_owners(config: RunConfig, stages: Sequence[StageSpec], sizes: ParallelSizes) -> tuple[Derived, ...]:
    """A line on the owners of Muon's matrices if ranks shard state; nothing if each rank updates all that it has."""
    if config.optim.name != "muon" or sharding_of(config, sizes) == "none":
        return ()
    by_rank = [[stage for stage in stages if stage.pp_rank == pp_rank] for pp_rank in range(sizes.pp)]
    owned = max(moved_by_muon(config, [stage.layers for stage in own], sizes).owned for own in by_rank)
    held = 2 * owned * precision_of(config).gradient
    seconds = max(_orthogonalising(config, own, sizes) for own in by_rank)
    experts = f", an expert's by one of edp {sizes.edp}" if config.model.num_moe_experts else ""
    equation = (
        f"Muon: a matrix of hidden layers is owned whole by one of dp {sizes.dp} x cp {sizes.cp} ranks{experts}; a "
        f"rank has at most {amount(held)} of masters and momentum, and iterates for {1e3 * seconds:.3g} ms a step"
    )
    return (Derived("matrix owners", round(held / GIB.size, 2), equation),)


def _orthogonalising(config: RunConfig, own: Sequence[StageSpec], sizes: ParallelSizes) -> float:
    """Seconds of the optimizer step that Muon's iteration takes on the rank that owns the most costly matrices."""
    moved = moved_by_muon(config, [stage.layers for stage in own], sizes)
    return newton_schulz_seconds(config.optim.muon_ns_steps * moved.operations, device_of(config), config.cost.stack)


def step_traffic(
    config: RunConfig,
    stages: Sequence[StageSpec],
    sizes: ParallelSizes,
    schedule: Schedule,
    micro_batch_size: int,
    calls: int,
) -> tuple[tuple[Exchange, ...], ...]:
    """pp_rank -> the exchanges of a step of `calls` schedule calls."""
    model, setting, precision = config.model, setting_of(config, sizes, micro_batch_size), precision_of(config)
    microbatches = calls * schedule.num_microbatches
    scatters, muon = config.launch.device != "cpu", config.optim.name == "muon"
    sums = Sums(sharding_of(config, sizes), precision.gradient, precision.weight, scatters, muon)
    sp = config.parallel.sequence_parallel
    by_rank = [[stage for stage in stages if stage.pp_rank == pp_rank] for pp_rank in range(sizes.pp)]
    layers = [[stage.layers for stage in own] for own in by_rank]
    exchanges, passes, after = [], dict[Hashable, Traffic](), dict[Hashable, Traffic]()
    for pp_rank, (own, held) in enumerate(zip(by_rank, Stages.each(model, layers), strict=True)):
        kinds = tuple(alike(model, config.train, stage.stage, stage.layers) for stage in own)
        if (rank := (kinds, pp_rank * sums.owned)) not in after:
            after[rank] = once_a_step(model, held, sizes, sums, sequence_parallel=sp)
        total = Traffic().add(after[rank])
        for stage, kind in zip(own, kinds, strict=True):
            if kind not in passes:
                passes[kind] = stage_passes(model, stage.layers, setting, stage.stage).all
            total.add(passes[kind], microbatches)
            for edge, other in ((stage.sends, stage.stage + 1), (stage.receives, stage.stage - 1)):
                if edge and stages[other].pp_rank != pp_rank:
                    total.note("pp", "send", microbatches * message_bytes(edge), microbatches * len(edge))
        exchanges.append(tuple(Exchange(axis, kind, *numbers) for (axis, kind), numbers in total.shown))
    return tuple(exchanges)
