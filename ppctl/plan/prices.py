"""What a microbatch costs on every stage: seconds and bytes, from a device preset or from measured costs.

`stage_costs` is the one door: plans, simulations and searches for a layout read the same numbers. Knows which keys of
the config set prices. Must not know schedules or how closed forms work (`ppctl.cost`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from ppctl.config.schema import RunConfig
from ppctl.cost.activations import stage_activations
from ppctl.cost.devices import Device
from ppctl.cost.parameters import Count, stage_count
from ppctl.cost.profile import LayerSeconds, fitted
from ppctl.cost.times import Layout, PartSeconds, layer_seconds, message_seconds, rates_of, reduce_seconds
from ppctl.cost.work import layer_work
from ppctl.geometry.layers import Kind, KindName, Layer, count_of, layer_kinds
from ppctl.geometry.recompute import recomputed_modules, recomputed_runs
from ppctl.plan.memory import device_of, setting_of
from ppctl.plan.profile import Measured
from ppctl.plan.stages import precision_of
from ppctl.plan.types import StageCost, StageSpec
from ppctl.schedule.action import Channel
from ppctl.schedule.simulate import Costs
from ppctl.topology import ParallelSizes


def layout_of(config: RunConfig, sizes: ParallelSizes) -> Layout:
    """How the ranks' groups lie on the machine."""
    model = config.model
    grouped = model.moe_router_num_groups and model.moe_router_group_topk
    return Layout(
        *(sizes.tp, sizes.cp, sizes.ep, sizes.etp, sizes.dp, sizes.edp, sizes.pp),
        topk=model.moe_router_topk,
        expert_groups=model.moe_router_group_topk if grouped else None,
    )


def stage_costs(
    config: RunConfig,
    layers: Iterable[Sequence[Layer]],
    sizes: ParallelSizes,
    micro_batch_size: int,
    measured: Measured | None = None,
) -> tuple[StageCost, ...]:
    """The cost of every stage from the layers that it holds, in model order.

    `measured` costs take the place of the preset's, kind of layer by kind of layer.
    """
    price = pricer(config, sizes, micro_batch_size, measured)
    held = [tuple(own) for own in layers]
    return tuple(price(stage, own, stage == len(held) - 1) for stage, own in enumerate(held))


def pricer(
    config: RunConfig, sizes: ParallelSizes, micro_batch_size: int, measured: Measured | None = None
) -> Callable[[int, tuple[Layer, ...], bool], StageCost]:
    """(stage, its layers, whether it is the last) -> its cost. Equal layers are priced once."""
    model, train = config.model, config.train
    setting, device, layout = setting_of(config, sizes, micro_batch_size), device_of(config), layout_of(config, sizes)
    rates = rates_of(device, config.cost.matmul or precision_of(config).dtype)
    hidden = setting.shares.tokens * model.hidden_size * setting.element // setting.shares.sp

    @cache
    def of_kind(kind: KindName, moe: bool, recomputed: tuple[str, ...] | None) -> PartSeconds:
        works = layer_work(model, kind, moe, setting.shares, setting.element, sizes.ep)
        return layer_seconds(works, rates, layout, recomputed)

    scales, sent = _scales(config, measured, of_kind), measured.message if measured else None

    def of_stage(stage: int, held: tuple[Layer, ...], last: bool) -> StageCost:
        modules = recomputed_modules(train, stage)
        runs = {layer for run in recomputed_runs(train, stage, held) for layer in run}
        seconds = []
        for layer, kind in zip(held, layer_kinds(model, held), strict=True):
            forward, inputs, weights = of_kind(*kind, None if layer in runs else modules)
            ahead, back = scales.get(kind, (1.0, 1.0))
            seconds.append(PartSeconds(ahead * forward, back * inputs, back * weights))
        size = 0 if last else hidden * (1 + count_of("mtp", held))
        return StageCost(
            sum(s.forward for s in seconds),
            sum(s.input_gradient for s in seconds),
            sum(s.weight_gradient for s in seconds),
            0.0 if last else (sent or message_seconds(size, device, layout)),
            size,
            stage_activations(model, held, setting, stage).kept,
            _reduction(config, stage_count(model, held), sizes, device, layout),
        )

    return of_stage


def _scales(
    config: RunConfig,
    measured: Measured | None,
    preset: Callable[[KindName, bool, tuple[str, ...] | None], PartSeconds],
) -> dict[Kind, tuple[float, float]]:
    """How many times longer than the preset says a kind of layer takes: forward and backward."""
    if measured is None:
        return {}
    rows = [(Counter(layer_kinds(config.model, layers)), seconds) for layers, seconds in measured.stages]
    modules = recomputed_modules(config.train, 0)
    whole = None if config.train.recompute_granularity == "full" else modules
    prior = {}
    for kind in {kind for counts, _ in rows for kind in counts}:
        one = preset(*kind, whole)
        prior[kind] = LayerSeconds(one.forward, one.input_gradient + one.weight_gradient)
    found = fitted(rows, prior)
    return {
        kind: (found[kind].forward / (before.forward or 1.0), found[kind].backward / (before.backward or 1.0))
        for kind, before in prior.items()
    }


def _reduction(config: RunConfig, count: Count, sizes: ParallelSizes, device: Device, layout: Layout) -> float:
    """Summing fp32 gradients: to every rank, or to those that keep a share and then send the new weights back."""
    precision = precision_of(config)
    each = 2 * precision.gradient
    if config.parallel.data_parallel_sharding != "none":
        each = precision.gradient + precision.weight
    return reduce_seconds(*count.on_device(sizes.tp, sizes.ep, sizes.etp), each, device, layout)


def simulation_costs(costs: Sequence[StageCost], stages: Sequence[StageSpec]) -> Costs:
    """Stage costs as a schedule's simulation takes them.

    Gradients are summed behind the other chunks' work; only what a rank finishes last, its first chunk, is waited for.
    """
    messages: dict[Channel, float] = {}
    for here, there, cost in zip(stages, stages[1:], costs, strict=False):
        for channel in (
            Channel(here.pp_rank, there.pp_rank, "F"),
            Channel(there.pp_rank, here.pp_rank, "B"),
        ):
            messages[channel] = max(messages.get(channel, 0.0), cost.message_s)
    return Costs(
        [cost.forward_s for cost in costs],
        [cost.backward_s for cost in costs],
        [cost.input_grad_s for cost in costs],
        [cost.weight_grad_s for cost in costs],
        [cost.reduce_s if stage.vpp_rank == 0 else 0.0 for cost, stage in zip(costs, stages, strict=True)],
        messages=messages,
    )
