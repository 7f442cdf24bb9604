"""Does the plan fit the device's memory, and what would make it fit.

Knows peaks and the device's size. Must not know how a peak comes about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ppctl.config.quantities import memory_bytes
from ppctl.plan.amounts import GIB, amount, unit_for
from ppctl.plan.findings import Finding
from ppctl.plan.said import Override, Said
from ppctl.plan.types import RankCost

LIMIT = "launch.device_memory"
SHARDING = "parallel.data_parallel_sharding"
_SHARDINGS = ("none", "optimizer_gradients", "full")
"""Each holds less between steps than the one before."""
_DOUBLINGS = 6
"""How many times expert parallelism is doubled in search of a size that fits."""


def memory_findings(said: Said, ranks: Callable[[], Sequence[RankCost]]) -> list[Finding]:
    """The pp_rank with the highest peak, if that is more than the device has. `ranks` is asked where there is a limit.

    Candidates are what leaves a device less to hold, the least change first, and at last a larger device.
    """
    if said[LIMIT] is None:
        return []
    try:
        available = memory_bytes(said[LIMIT])
    except ValueError:
        return []  # told by `config.checks`
    costs = ranks()
    worst = max(costs, key=lambda cost: cost.peak_bytes)
    if worst.peak_bytes <= available:
        return []
    over = sum(cost.peak_bytes > available for cost in costs)
    message = (
        f"pp_rank {worst.pp_rank} is planned to need {amount(worst.peak_bytes)} at its peak, and a device has "
        f"{amount(available)} ({over} of {len(costs)} pp_ranks are over)"
    )
    held = f"{parts(worst)} {unit_for(worst.peak_bytes).name} ({worst.in_flight} in flight)"
    larger = ((LIMIT, f"{-(-worst.peak_bytes // GIB.size)}GiB"),)
    return [Finding("PP-E801", LIMIT, message, f"{held}\n{said.told(LIMIT, 'pp', 'mbs')}", *_smaller(said), larger)]


def parts(cost: RankCost) -> str:
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
    together = " + " if sum(sizes.values()) == cost.peak_bytes else ", "
    return together.join(f"{name} {unit.of(size)}" for name, size in sizes.items())


def _smaller(said: Said) -> Iterator[tuple[Override, ...]]:
    pp, mbs, ep = said["pp"], said["mbs"], said["ep"]
    if said["pipeline.extra_warmup"] not in (0, "auto"):
        yield (("pipeline.extra_warmup", "auto"),)
    if mbs > 1:
        yield (("mbs", mbs // 2),)
        yield (("mbs", 1),)
    again = [("train.recompute_granularity", "full")] if said["train.recompute_granularity"] is None else []
    weaker = _SHARDINGS[_SHARDINGS.index(said[SHARDING]) + 1 :]
    if again:
        yield (again[0],)
    for sharding in weaker:
        yield ((SHARDING, sharding),)
    if said["model.num_moe_experts"]:
        for doubling in range(1, _DOUBLINGS + 1):
            yield (("ep", ep << doubling),)
    for sharding in weaker if again else ():
        yield (again[0], (SHARDING, sharding))
    yield (("pp", 2 * pp), ("layout", None))
    yield (("pp", 4 * pp), ("layout", None))
