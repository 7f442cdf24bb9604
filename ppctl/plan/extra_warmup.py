"""How far the forwards run ahead: `pipeline.extra_warmup` as set, or chosen by simulating the step.

Knows message times on the devices that plans assume, and the memory that a longer warm-up takes. Must not know how
schedules are made or run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ppctl.errors import ScheduleError
from ppctl.plan.config_values import ConfigValues
from ppctl.plan.memory_limit import LIMIT, device_limit
from ppctl.plan.schedule_choice import OVERLAP, Choice
from ppctl.plan.types import Derived, RankCost
from ppctl.plan.violations import Violation, Violations
from ppctl.schedule.action import Schedule
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.trace import step_time
from ppctl.topology import ParallelSizes

EXTRA = "pipeline.extra_warmup"
AUTO = "auto"

CLOSE = 1.005
"""A step is as good as the best one where it takes at most this much longer: activations are not spent on less."""


def check_warmup(values: ConfigValues, choice: Choice, violations: Violations) -> None:
    """Refuse what cannot take effect: no number, more than a rank can use, or a schedule without a warm-up."""
    extra, pp = values[EXTRA], values["pp"]
    if extra == AUTO or (extra == 0 and not isinstance(extra, bool)):
        return
    place = values.cite(EXTRA, "pp", "pipeline.pp_schedule")
    if not isinstance(extra, int) or isinstance(extra, bool) or extra < 0:
        message = f"{EXTRA}={extra} is neither a number of forwards (0 to pp - 1) nor auto"
        violations.append(Violation("PP-E215", EXTRA, message, place, {EXTRA: AUTO}, {EXTRA: 0}))
    elif choice.searched or choice.policy is None or not choice.policy.extra_warmup:
        name = values["pipeline.pp_schedule"] if choice.searched else choice.name
        message = f"schedule {name} has no warm-up that {EXTRA}={extra} could lengthen"
        violations.append(Violation("PP-E215", EXTRA, message, place, {EXTRA: 0}))
    elif values[OVERLAP]:
        message = f"{EXTRA}={extra}: the pairs of {OVERLAP} run one forward more ahead, and no others"
        violations.append(Violation("PP-E215", EXTRA, message, place, {EXTRA: 0}, {OVERLAP: False}))
    elif extra > pp - 1:
        message = f"{EXTRA}={extra}: rank r of pp {pp} can run at most pp - 1 - r forwards more, here {pp - 1} to 0"
        violations.append(Violation("PP-E215", EXTRA, message, place, {EXTRA: pp - 1}, {EXTRA: AUTO}))


def decide_warmup(
    values: ConfigValues,
    sizes: ParallelSizes,
    choice: Choice,
    costs: Callable[[], Costs],
    make: Callable[[int], Schedule],
    price: Callable[[Schedule], Sequence[RankCost]],
) -> tuple[int, tuple[Derived, ...]]:
    """The extra warm-up, and its equation where it was chosen.

    `auto` simulates the step at `costs()`, messages included, for 0, the powers of two below pp and pp - 1, and takes
    the smallest that is close to the best among those that fit into launch.device_memory. `make` returns the
    compute-only schedule of a warm-up, `price` what its ranks hold.
    """
    if values[EXTRA] != AUTO:
        return values[EXTRA], ()
    if values[OVERLAP]:
        return 0, (Derived("extra_warmup", 0, f"extra_warmup 0: the pairs of {OVERLAP} run one forward more ahead"),)
    if choice.policy is None or not choice.policy.extra_warmup or values["pp"] == 1:
        return 0, (
            Derived("extra_warmup", 0, f"extra_warmup 0: schedule {choice.name} on pp {values['pp']} needs none"),
        )
    limit = device_limit(values.config, sizes)

    def fits(schedule: Schedule) -> bool:
        return limit is None or max(cost.peak_bytes for cost in price(schedule)) <= limit.available_bytes

    prices = costs()
    times = simulated_steps(values["pp"], prices, make, fits)
    chosen = least_warmup(times)
    return chosen, (Derived("extra_warmup", chosen, _equation(chosen, times, prices, limit is not None)),)


def simulated_steps(
    pp: int, costs: Costs, make: Callable[[int], Schedule], fits: Callable[[Schedule], bool] = lambda schedule: True
) -> dict[int, float]:
    """Seconds of a step by extra warm-up, as far as its memory `fits`: none is always there."""
    times: dict[int, float] = {}
    for extra in _candidates(pp):
        schedule = make(extra)
        if extra and not fits(schedule):
            break
        try:
            times[extra] = step_time(simulate(schedule, costs))
        except ScheduleError:
            break  # a group of microbatches leaves no room for more; nor for more than that
    return times


def least_warmup(times: Mapping[int, float]) -> int:
    """The smallest warm-up whose step is close to the best."""
    return next(extra for extra, seconds in times.items() if seconds <= CLOSE * min(times.values()))


def _candidates(pp: int) -> list[int]:
    return sorted({0, pp - 1, *(2**n for n in range(pp.bit_length()) if 2**n < pp)})


def _equation(chosen: int, times: Mapping[int, float], costs: Costs, limited: bool) -> str:
    message = max(costs.messages.values(), default=costs.message)
    tried = ", ".join(f"{extra}: {seconds:.4g} s" for extra, seconds in times.items())
    within = f" within {LIMIT}" if limited else ""
    return (
        f"extra_warmup {chosen}: the least{within} that is close to the best simulated step ({tried}; "
        f"messages of up to {message * 1e3:.3g} ms)"
    )
