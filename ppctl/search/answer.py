"""The answer of a search as data: the best configuration of every division of the ranks, and why others were not taken.

Knows what limits a step, and what a choice would cost at least. Must not know how text looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from ppctl.cost.times import Machine, layer_seconds, layer_work
from ppctl.geometry.layers import layer_kinds, recomputed_modules
from ppctl.plan.memory import setting_of
from ppctl.plan.prices import machine_for
from ppctl.search.branch import CLOSE, Planned, Search
from ppctl.search.space import AXES, Configuration, Space

BAND = 0.1
"""Within this share of the first, plans do not say which is faster: predicted steps were off by about as much."""
ROWS = 10
"""Divisions of the ranks in an answer, at most."""


class Row(NamedTuple):
    """One configuration of the answer."""

    planned: Planned
    shares: dict[str, float]
    """Share of a step's time by what it is spent on beside computing everything once."""

    @property
    def limit(self) -> str:
        """What a step would gain most from without."""
        name = max(self.shares, key=self.shares.__getitem__)
        return name if self.shares[name] >= 0.05 else "compute"


def rows(search: Search) -> list[Row]:
    """The fastest configuration of each division of the ranks, the fastest first."""
    best: dict[tuple[int, ...], Planned] = {}
    for planned in search.found:
        best.setdefault(shape(planned.configuration), planned)
    listed = list(best.values())[:ROWS]
    return [Row(each, shares(search.space, each)) for each in listed]


def shape(of: Configuration) -> tuple[int, ...]:
    """How the ranks are divided."""
    return of[: len(AXES)]


def shares(space: Space, planned: Planned) -> dict[str, float]:
    """Share of a step's time by what it is spent on."""
    plan, of = planned.plan, planned.configuration
    config, step = space.values_of(of).config, planned.plan.step_time_s
    setting = setting_of(config, plan.sizes, of.micro_batch_size)
    machine = machine_for(config, setting)
    modules = recomputed_modules(config.train, 0)
    again = None if config.train.recompute_granularity == "full" else modules
    quick = machine._replace(device=machine.device._replace(fast_link=float("inf"), network=float("inf"), latency=0.0))
    layers = [layer for stage in plan.stages for layer in stage.layers]

    def spent(on: Machine, recomputed: tuple[str, ...] | None) -> float:
        kinds = layer_kinds(config.model, layers)
        each = {
            kind: sum(layer_seconds(layer_work(config.model, kind, setting), on, recomputed)) for kind in set(kinds)
        }
        return sum(each[kind] for kind in kinds)

    whole, busy = spent(machine, again), 1 - plan.bubble_fraction
    calls = plan.gradient_accumulation_steps * plan.timing.pipeline_s / step
    parts = dict(plan.timing.critical)
    return {
        "bubble": calls * plan.bubble_fraction,
        "exchanges inside layers": calls * busy * (1 - spent(quick, again) / whole),
        "recomputation": calls * busy * (1 - spent(machine, ()) / whole),
        "gradients and optimizer": 1 - calls + calls * parts.get("gradients", 0.0) / plan.timing.pipeline_s,
    }


LINKS = ("exchanges inside layers", "gradients and optimizer")
"""What takes longer over slower links and memory."""


def first_if(listed: list[Row], factor: float) -> int:
    """The row that is first if links and memory take `factor` times as long, to first order."""
    moved = [
        row.planned.plan.step_time_s * (1 + (factor - 1) * sum(row.shares[name] for name in LINKS)) for row in listed
    ]
    return moved.index(min(moved))


class Other(NamedTuple):
    """A value of an axis that the first configuration does not have."""

    axis: str
    value: int
    seconds: float | None
    """The least that a step takes with it; None if nothing with it fits."""
    planned: bool
    """Whether these are the seconds of a plan, and not a bound."""
    exchanges: float | None
    """The share of exchanges inside layers in its fastest plan; None without a plan."""


def others(search: Search) -> Iterator[Other]:
    """The values next to the first configuration's on every axis, and tensor parallelism over a whole machine."""
    space, first = search.space, search.found[0].configuration
    for axis in AXES[:4]:
        at = AXES.index(axis)
        known = sorted({axes[at] for axes in search.tree.divisions})
        taken = first[at]
        near = [v for v in known if v < taken][-1:] + [v for v in known if v > taken][:1]
        near += [v for v in known if axis == "tp" and v == space.values["gpus_per_node"] != taken and v not in near]
        for value in near:
            plans = [each for each in search.found if each.configuration[at] == value]
            bounds = [branch.seconds for branch in search.tree.heap if branch.parts[0][at] == value]
            best = plans[0].plan.step_time_s if plans else float("inf")
            least = min([best, *bounds])
            share = shares(space, plans[0])["exchanges inside layers"] if plans else None
            none = least == float("inf")
            yield Other(axis, value, None if none else least, bool(plans) and least >= best, share)


def as_json(search: Search, listed: list[Row], lines: list[str]) -> dict[str, Any]:
    """The answer as plain data."""
    return {
        "counts": asdict(search.counts),
        "proved": search.proved,
        "close": CLOSE,
        "rows": [_row_json(row, line) for row, line in zip(listed, lines, strict=True)],
        "others": [other._asdict() for other in others(search)] if search.found else [],
    }


def _row_json(row: Row, line: str) -> dict[str, Any]:
    plan = row.planned.plan
    return {
        **row.planned.configuration._asdict(),
        "step_time_s": plan.step_time_s,
        "bound_s": row.planned.bound,
        "tokens_per_s": plan.timing.tokens_per_s,
        "mfu": plan.timing.mfu,
        "bubble_fraction": plan.bubble_fraction,
        "peak_bytes": row.planned.peak,
        "available_bytes": None if plan.limit is None else plan.limit.available_bytes,
        "layout": plan.layout,
        "limit": row.limit,
        "shares": row.shares,
        "line": line,
    }
