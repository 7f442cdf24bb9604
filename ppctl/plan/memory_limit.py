"""Whether the plan fits the device's memory, and what would make it fit.

Knows peaks, the device's size and how many ranks share it. Must not know how a peak comes about. Amounts as
text are made here, too; data (`--json`, plan.json) keeps bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ppctl.config.quantities import memory_bytes
from ppctl.config.schema import RunConfig
from ppctl.devices import machines
from ppctl.plan.config_values import ConfigValues, Overrides
from ppctl.plan.memory_reserve import AUTO, RESERVE, reserve_bytes
from ppctl.plan.types import DeviceLimit, RankCost
from ppctl.plan.violations import Violation
from ppctl.schedule.policies import POLICIES, schedule_policy
from ppctl.topology import ParallelSizes

LIMIT = "launch.device_memory"
SHARING = "launch.share_gpu"
PUT_OFF = "pipeline.put_off_limit"
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


def device_limit(config: RunConfig, sizes: ParallelSizes) -> DeviceLimit | None:
    """The memory of its device that one rank may use; None where `launch.device_memory` is none, or cannot be read.

    Ranks that share GPUs are counted as if all ranks of a machine shared a single one: how many it has is not known.
    """
    launch = config.launch
    if launch.device_memory is None:
        return None
    ranks = machines(launch.nodes, launch.gpus_per_node, sizes.world)[1] if launch.share_gpu else 1
    try:
        return DeviceLimit(memory_bytes(launch.device_memory) // ranks, reserve_bytes(config, sizes), ranks)
    except ValueError:
        return None  # `config.checks` reports it


def memory_violations(
    values: ConfigValues, sizes: ParallelSizes, ranks: Callable[[], Sequence[RankCost]], least: bool = False
) -> list[Violation]:
    """The pp_rank with the highest peak, if that is more than the device has. `ranks` is asked where there is a limit.

    `least` says that they run in the order that holds least.
    Candidates are what leaves a device less to hold, the least change first, and at last a larger device.
    """
    limit = device_limit(values.config, sizes)
    if limit is None:
        return []
    costs = ranks()
    worst = max(costs, key=lambda cost: cost.peak_bytes)
    if worst.peak_bytes <= limit.available_bytes:
        return []
    over = sum(cost.peak_bytes > limit.available_bytes for cost in costs)
    alone = ", also with one microbatch after another, the order that holds least" if least else ""
    message = (
        f"pp_rank {worst.pp_rank} is planned to need {amount(worst.peak_bytes)} at its peak{alone}, and a "
        f"{'rank' if limit.ranks > 1 else 'device'} has {available_text(limit)} "
        f"({over} of {len(costs)} pp_ranks are over)"
    )
    held = f"{peak_terms(worst)} {unit_for(worst.peak_bytes).name} ({worst.in_flight} in flight)"
    needed = (worst.peak_bytes + limit.reserve_bytes) * limit.ranks
    larger: Overrides = {LIMIT: f"{-(-needed // GIB.size)}GiB"}
    smaller = _smaller(values)
    place = f"{held}\n{values.cite(LIMIT, RESERVE, 'pp', 'mbs')}"
    return [Violation("PP-E801", LIMIT, message, place, *_usual(values), *smaller, larger)]


def available_text(limit: DeviceLimit) -> str:
    """The memory that a rank may use, and how it is computed: `77.50 GiB (80.00 GiB - 2.50 GiB kept for ...)`."""
    whole = amount(limit.limit_bytes)
    share = f" of a device that {limit.ranks} ranks share" if limit.ranks > 1 else ""
    if not limit.reserve_bytes:
        return f"{whole}{share}"
    kept = f"{amount(limit.reserve_bytes)} kept for CUDA's context and communicators"
    return f"{amount(max(limit.available_bytes, 0))} ({whole}{share} - {kept})"


def _usual(values: ConfigValues) -> Iterator[Overrides]:
    """Without settings of the user's that leave a rank less."""
    if values[RESERVE] != AUTO:
        yield {RESERVE: AUTO}
    if values[SHARING]:
        yield {SHARING: False}


def peak_terms(cost: RankCost) -> str:
    """The terms of a pp_rank's peak, in the unit of the peak.

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
    yield from ({PUT_OFF: limit} for limit in _put_off_limits(values))
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


def _put_off_limits(values: ConfigValues) -> list[int]:
    """Fewer weight gradients that wait than now: of a V in 1F1B's memory a rank puts up to pp off."""
    policy = POLICIES.get(schedule_policy(values["pipeline.pp_schedule"]) or "")
    if policy is None or not policy.splits or values["pipeline.pp_schedule_csv"] is not None:
        return []
    now, pp = values[PUT_OFF], values["pp"]
    return [limit for limit in dict.fromkeys((pp // 2, pp // 4, 1, 0)) if now is None or limit < now]
