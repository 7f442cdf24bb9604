"""The answer of a search as data: the best configuration of every division of the ranks, and why others were not taken.

Knows what limits a step, and the least cost of a choice. Must not know the form of text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain, combinations
from typing import Any, NamedTuple

from ppctl.config.checks import check
from ppctl.config.schema import RunConfig
from ppctl.cost.times import Machine, layer_seconds, layer_work
from ppctl.geometry.layers import Layer, layer_kinds, recomputed_modules
from ppctl.plan.build import plan_alone
from ppctl.plan.memory import device_of, setting_of
from ppctl.plan.prices import machine_for, predicted, seconds_after, simulation_costs, stage_costs
from ppctl.plan.violations import ConfigValues, Overrides
from ppctl.schedule.trace import step_time
from ppctl.search.branch import CLOSE, ROWS, Planned, Search
from ppctl.search.space import AXES, CHANGED, Configuration, SearchSpace
from ppctl.topology import ParallelSizes

BAND = 0.105
"""Within this share of the first, plans cannot say which is faster: the median error of `BAND_SOURCE`."""
BAND_SOURCE = "published steps held out by model, 2026-11-26"


class AnswerRow(NamedTuple):
    """One configuration of the answer."""

    planned: Planned
    shares: dict[str, float]
    """Kind of work, other than computing everything once -> its share of a step's time."""
    alike: tuple[Configuration, ...]
    """Other configurations that take as long and differ only in context parallelism and microbatch size."""

    @property
    def limit(self) -> str:
        """The kind of work with the largest share; `compute` if that share is below 5%."""
        name = max(self.shares, key=self.shares.__getitem__)
        return name if self.shares[name] >= 0.05 else "compute"


def rows(search: Search) -> list[AnswerRow]:
    """The fastest configuration of each division of the ranks (`AXES`), at most ROWS, in the order of `search.found`.
    Divisions that differ only in cp and microbatch and take as long share a row."""
    best: dict[tuple[Any, ...], Planned] = {}
    for planned in search.found:
        best.setdefault(planned.configuration[: len(AXES)], planned)
    groups: dict[tuple[Any, ...], list[Planned]] = {}
    for planned in best.values():
        key = planned.configuration._replace(cp=1, micro_batch_size=1)
        groups.setdefault((planned.order[0], key), []).append(planned)
    return [
        AnswerRow(first, shares(search.space, first), tuple(other.configuration for other in more))
        for first, *more in list(groups.values())[:ROWS]
    ]


def shares(space: SearchSpace, planned: Planned) -> dict[str, float]:
    """Kind of work, other than computing everything once -> its share of a step's time."""
    plan, timing, step = planned.plan, planned.plan.timing, planned.plan.step_time_s
    layers = [layer for stage in plan.stages for layer in stage.layers]
    exchanged, again = in_layers(space.values_of(planned.configuration).config, plan.sizes, layers)
    calls = plan.gradient_accumulation_steps * timing.pipeline_s / step
    busy = calls * (1 - plan.bubble_fraction)
    return {
        "bubble": calls * plan.bubble_fraction,
        EXCHANGES: busy * exchanged,
        "recomputation": busy * again,
        "gradients and optimizer": 1 - calls + calls * dict(timing.critical).get("gradients", 0.0) / timing.pipeline_s,
    }


def in_layers(config: RunConfig, sizes: ParallelSizes, layers: Sequence[Layer]) -> tuple[float, float]:
    """The shares of the time of `layers`: (of exchanges between ranks, of recomputation)."""
    setting = setting_of(config, sizes, config.train.micro_batch_size)
    machine, kinds = machine_for(config, setting), Counter(layer_kinds(config.model, layers))
    again = None if config.train.recompute_granularity == "full" else recomputed_modules(config.train, 0)
    free = machine.device._replace(fast_link=float("inf"), network=float("inf"), latency=0.0)

    def spent(on: Machine, recomputed: tuple[str, ...] | None) -> float:
        return sum(
            number * sum(layer_seconds(layer_work(config.model, kind, setting), on, recomputed))
            for kind, number in kinds.items()
        )

    whole = spent(machine, again)
    return 1 - spent(machine._replace(device=free), again) / whole, 1 - spent(machine, ()) / whole


EXCHANGES = "exchanges inside layers"
_LINKS, _PRODUCTS = ("fast_link", "network", "host_link"), ("bf16_flops", "fp8_flops", "fp4_flops")
PRICES = {"links": _LINKS, "memory": ("memory_bandwidth",), "products": _PRODUCTS}
"""Price that is changed -> a device's rates."""


def moved(search: Search, listed: Sequence[AnswerRow]) -> dict[tuple[str, ...], int]:
    """Prices made a tenth slower (one of `PRICES`, or two, as if the third were faster) -> the number of the row that
    is first then. Empty with measured costs, and without rows."""
    if not listed or search.tree.measured is not None:
        return {}
    firsts = {}
    for slower in chain.from_iterable(combinations(PRICES, number) for number in (1, 2)):
        best = step_seconds(search.space, listed[0].planned, slower), 0
        for number, row in enumerate(listed[1:], 1):
            if row.planned.plan.step_time_s < best[0]:  # others are slower already, and nothing gets faster
                best = min(best, (step_seconds(search.space, row.planned, slower), number))
        firsts[slower] = best[1]
    return firsts


def step_seconds(space: SearchSpace, planned: Planned, slower: Sequence[str]) -> float:
    """Seconds of a planned step with the prices `slower` a tenth slower, by a new simulation of its schedule."""
    values, plan = space.values_of(planned.configuration), planned.plan
    device = device_of(values.config)
    rates = {rate: getattr(device, rate) / 1.1 for name in slower for rate in PRICES[name]}
    config = values.overridden({"cost.device": device._replace(**rates)}).config
    costs = stage_costs(config, [each.layers for each in plan.stages], plan.sizes, config.train.micro_batch_size)
    calls = step_time(predicted(plan.schedule, simulation_costs(costs, plan.stages))) * plan.gradient_accumulation_steps
    return calls + seconds_after(config, plan.stages, plan.sizes, plan.pp_ranks)


class Other(NamedTuple):
    """A value of an axis that the first configuration does not have."""

    axis: str
    value: int
    seconds: float | None
    """The least seconds of a step with the value; None if nothing with it fits."""
    planned: bool
    """Whether these are the seconds of a plan, and not a bound."""
    reason: str
    share: float
    """The largest share of the plan's step other than computing, which `reason` names; a bound's: of exchanges."""


def others(search: Search) -> Iterator[Other]:
    """The values next to the first configuration's (there must be one) of tp, cp, pp and ep; and tp over a machine."""
    first = search.found[0].configuration
    for at, axis in enumerate(AXES[:4]):
        taken = int(first[at])
        known = sorted({int(axes[at]) for axes in search.tree.divisions})
        near = [value for value in known if value < taken][-1:] + [value for value in known if value > taken][:1]
        machine = search.space.values["gpus_per_node"]
        near += [value for value in known if axis == "tp" and value == machine and value not in (*near, taken)]
        yield from (_other(search, at, value) for value in near)


def _other(search: Search, at: int, value: int) -> Other:
    """The best known result for a value of an axis."""
    plans = [each for each in search.found if each.configuration[at] == value]
    branches = [branch for branch in search.tree.heap if branch.parts[0][at] == value]
    bound = min(branches, default=None)
    if plans and (bound is None or bound.seconds >= plans[0].plan.step_time_s):
        spent = shares(search.space, plans[0])
        reason = max(spent, key=spent.__getitem__)
        return Other(AXES[at], value, plans[0].plan.step_time_s, True, reason, spent[reason])
    if bound is None:
        return Other(AXES[at], value, None, False, "", 0.0)
    configuration = bound.parts[0]
    sizes, values = search.space.sizes(configuration), search.space.values_of(configuration)
    share = 0.0 if sizes is None else in_layers(values.config, sizes, search.tree.whole.layers[0])[0]
    return Other(AXES[at], value, bound.seconds, False, EXCHANGES, share)


class Change(NamedTuple):
    """A configuration that was asked about, with one change or none."""

    words: Overrides
    step_time_s: float | None
    """None if a rule forbids it."""
    peak: int
    fits: bool


def against(search: Search, asked: ConfigValues) -> list[Change]:
    """The configuration of `asked`, then with each differing value of the fastest configuration in turn."""
    first = search.space.values_of(search.found[0].configuration)
    apart = [{key: first[key] for key in keys if first[key] != asked[key]} for keys in CHANGED]
    return [_changed(asked, {}), *(_changed(asked, words) for words in apart if words)]


def _changed(asked: ConfigValues, words: Overrides) -> Change:
    values = asked.overridden(words)
    plan = None if check(values.config, values.provenance) else plan_alone(values)
    if plan is None:
        return Change(words, None, 0, False)
    fits = plan.limit is None or plan.peak_bytes <= plan.limit.available_bytes
    return Change(words, plan.step_time_s, plan.peak_bytes, fits)


def as_json(search: Search, listed: list[AnswerRow], lines: list[str]) -> dict[str, Any]:
    """The answer as plain data."""
    return {
        "counts": asdict(search.counts),
        "proved": search.proved,
        "close": CLOSE,
        "rows": [_row_json(row, line) for row, line in zip(listed, lines, strict=True)],
        "band": {"share": BAND, "source": BAND_SOURCE},
        "others": [other._asdict() for other in others(search)] if search.found else [],
    }


def _row_json(row: AnswerRow, line: str) -> dict[str, Any]:
    plan = row.planned.plan
    return {
        **row.planned.configuration._asdict(),
        "step_time_s": plan.step_time_s,
        "bound_s": row.planned.bound,
        "tokens_per_s": plan.timing.tokens_per_s,
        "mfu": plan.timing.mfu,
        "bubble_fraction": plan.bubble_fraction,
        "peak_bytes": row.planned.plan.peak_bytes,
        "available_bytes": None if plan.limit is None else plan.limit.available_bytes,
        "layout": plan.layout,
        "limit": row.limit,
        "shares": row.shares,
        "line": line,
    }
