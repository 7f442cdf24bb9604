"""Does the plan fit the device's memory, and what would make it fit.

Knows peaks and the device's size. Must not know how a peak comes about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ppctl.config.checks import memory_bytes
from ppctl.plan.findings import Finding
from ppctl.plan.said import Override, Said
from ppctl.plan.types import RankCost

LIMIT = "launch.device_memory"
GIB = 2**30
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
    except ValueError as error:
        return [Finding("PP-E802", LIMIT, str(error), said.told(LIMIT), ((LIMIT, "80GiB"),))]
    costs = ranks()
    worst = max(costs, key=lambda cost: cost.peak_bytes)
    if worst.peak_bytes <= available:
        return []
    over = sum(cost.peak_bytes > available for cost in costs)
    message = (
        f"pp_rank {worst.pp_rank} is planned to need {worst.peak_bytes / GIB:.2f} GiB at its peak, and a device has "
        f"{available / GIB:.2f} GiB ({over} of {len(costs)} pp_ranks are over)"
    )
    place = (
        f"weights {worst.weight_bytes / GIB:.2f} + gradients {worst.gradient_bytes / GIB:.2f} + optimizer "
        f"{worst.optimizer_bytes / GIB:.2f} + activations {worst.activation_bytes / GIB:.2f} GiB "
        f"({worst.in_flight} in flight)\n{said.told(LIMIT, 'pp', 'mbs')}"
    )
    larger = ((LIMIT, f"{-(-worst.peak_bytes // GIB)}GiB"),)
    return [Finding("PP-E801", LIMIT, message, place, *_smaller(said), larger)]


def _smaller(said: Said) -> Iterator[tuple[Override, ...]]:
    pp, mbs, ep = said["pp"], said["mbs"], said["ep"]
    if said["pipeline.extra_warmup"] not in (0, "auto"):
        yield (("pipeline.extra_warmup", "auto"),)
    if mbs > 1:
        yield (("mbs", mbs // 2),)
        yield (("mbs", 1),)
    if said["train.recompute_granularity"] is None:
        yield (("train.recompute_granularity", "full"),)
    if said["parallel.data_parallel_sharding"] == "none":
        yield (("parallel.data_parallel_sharding", "optimizer_gradients"),)
    if said["model.num_moe_experts"]:
        for doubling in range(1, _DOUBLINGS + 1):
            yield (("ep", ep << doubling),)
    yield (("pp", 2 * pp), ("layout", None))
    yield (("pp", 4 * pp), ("layout", None))
