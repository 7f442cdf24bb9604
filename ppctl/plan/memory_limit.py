"""Whether the plan fits the device's memory, what would make it fit, and amounts of memory as text.

Knows peaks and the device's size. Must not know how a peak comes about. Data (`--json`, plan.json) keeps bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ppctl.config.quantities import memory_bytes
from ppctl.plan.config_values import ConfigValues, Overrides
from ppctl.plan.types import RankCost
from ppctl.plan.violations import Violation

LIMIT = "launch.device_memory"
SHARDING = "parallel.data_parallel_sharding"
_SHARDINGS = ("none", "optimizer_gradients", "full")
"""Each holds less between steps than the one before."""
_DOUBLINGS = 6
"""How many times expert parallelism is doubled in search of a size that fits."""


class Unit(NamedTuple):
    """A unit of memory."""

    name: str
    size: int

    def of(self, size: int) -> str:
        """How many of this unit `size` bytes are."""
        return f"{size / self.size:.2f}"


MIB = 2**20
GIB = Unit("GiB", 2**30)
_SMALLER = (Unit("MiB", MIB), Unit("KiB", 2**10))


def unit_for(largest: int) -> Unit:
    """The unit of a sum or a column: the largest one of which its largest number is at least one."""
    return next((unit for unit in (GIB, *_SMALLER) if largest >= unit.size), _SMALLER[-1])


def amount(size: int) -> str:
    """One number with its unit."""
    unit = unit_for(size)
    return f"{unit.of(size)} {unit.name}"


def memory_violations(values: ConfigValues, ranks: Callable[[], Sequence[RankCost]]) -> list[Violation]:
    """The pp_rank with the highest peak, if that is more than the device has. `ranks` is asked where there is a limit.

    Candidates are what leaves a device less to hold, the least change first, and at last a larger device.
    """
    if values[LIMIT] is None:
        return []
    try:
        available = memory_bytes(values[LIMIT])
    except ValueError:
        return []  # `config.checks` reports it
    costs = ranks()
    worst = max(costs, key=lambda cost: cost.peak_bytes)
    if worst.peak_bytes <= available:
        return []
    over = sum(cost.peak_bytes > available for cost in costs)
    message = (
        f"pp_rank {worst.pp_rank} is planned to need {amount(worst.peak_bytes)} at its peak, and a device has "
        f"{amount(available)} ({over} of {len(costs)} pp_ranks are over)"
    )
    held = f"{peak_terms(worst)} {unit_for(worst.peak_bytes).name} ({worst.in_flight} in flight)"
    larger = {LIMIT: f"{-(-worst.peak_bytes // GIB.size)}GiB"}
    return [
        Violation("PP-E801", LIMIT, message, f"{held}\n{values.cite(LIMIT, 'pp', 'mbs')}", *_smaller(values), larger)
    ]


def peak_terms(cost: RankCost) -> str:
    """What the peak of a pp_rank is made of, in the unit of the peak.

    Listed and not added up where they are not there at the same time: with `full` sharding weights and gradients are
    the most that is whole at once.
    """
    unit = unit_for(cost.peak_bytes)
    sizes = {
        "weights": cost.weight_bytes,
        "gradients": cost.gradient_bytes,
        "optimizer": cost.optimizer_bytes,
        "activations": cost.activation_bytes,
        "buffers": cost.buffer_bytes + cost.message_bytes,
    }
    joint = " + " if sum(sizes.values()) == cost.peak_bytes else ", "
    return joint.join(f"{name} {unit.of(size)}" for name, size in sizes.items())


def _smaller(values: ConfigValues) -> Iterator[Overrides]:
    pp, mbs, ep = values["pp"], values["mbs"], values["ep"]
    if values["pipeline.extra_warmup"] not in (0, "auto"):
        yield {"pipeline.extra_warmup": "auto"}
    if mbs > 1:
        yield {"mbs": mbs // 2}
        yield {"mbs": 1}
    recompute = {"train.recompute_granularity": "full"} if values["train.recompute_granularity"] is None else {}
    weaker = _SHARDINGS[_SHARDINGS.index(values[SHARDING]) + 1 :]
    if recompute:
        yield recompute
    for sharding in weaker:
        yield {SHARDING: sharding}
    if values["model.num_moe_experts"]:
        for doubling in range(1, _DOUBLINGS + 1):
            yield {"ep": ep << doubling}
    for sharding in weaker if recompute else ():
        yield {**recompute, SHARDING: sharding}
    yield {"pp": 2 * pp, "layout": None}
    yield {"pp": 4 * pp, "layout": None}
