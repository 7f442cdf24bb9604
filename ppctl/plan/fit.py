"""Does the plan fit the device's memory, and what would make it fit.

Knows peaks and the device's size. Must not know how a peak comes about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ppctl.config.checks import memory_bytes
from ppctl.errors import Problem
from ppctl.plan.findings import REMEDIES
from ppctl.plan.said import Override, Said, command
from ppctl.plan.types import RankCost

LIMIT = "launch.device_memory"
GIB = 2**30


def memory_problems(said: Said, costs: Sequence[RankCost], peak: Callable[[Said], int | None]) -> list[Problem]:
    """The pp_rank with the highest peak, if that is more than the device has.

    `peak` tells the highest peak in bytes of something else that might be said, None where that is no plan.
    """
    if said[LIMIT] is None:
        return []
    try:
        available = memory_bytes(said[LIMIT])
    except ValueError as error:
        return [Problem("PP-E802", str(error), f"{LIMIT}=80GiB", said.told(LIMIT))]
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
    return [Problem("PP-E801", message, "\n".join(_remedies(said, worst.peak_bytes, available, peak)), place)]


def _remedies(said: Said, needed: int, available: int, peak: Callable[[Said], int | None]) -> list[str]:
    """Smaller microbatches, a longer pipeline, or a larger device: those that do fit."""
    found = []
    for candidate in _smaller(said):
        other = peak(said.typed(candidate))
        if other is not None and other <= available:
            found.append(command(candidate))
        if len(found) == REMEDIES:
            return found
    return [*found, f"{LIMIT}={-(-needed // GIB)}GiB"]


def _smaller(said: Said) -> Iterator[tuple[Override, ...]]:
    pp, mbs = said["pp"], said["mbs"]
    if said["pipeline.extra_warmup"] not in (0, "auto"):
        yield (("pipeline.extra_warmup", "auto"),)
    if mbs > 1:
        yield (("mbs", mbs // 2),)
        yield (("mbs", 1),)
    yield (("pp", 2 * pp), ("layout", None))
    yield (("pp", 4 * pp), ("layout", None))
