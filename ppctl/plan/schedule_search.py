"""`pipeline.pp_schedule=auto`: the schedule that makes the simulated step shortest within the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from ppctl.config.quantities import activations
from ppctl.plan.memory import Held
from ppctl.plan.memory_limit import LIMIT, device_limit
from ppctl.plan.plan import Plan
from ppctl.plan.prices import predicted, simulation_costs
from ppctl.plan.schedule_choice import GROUP, MEMORY, SCHEDULE, Choice, ProvedSchedule, presumed, proved
from ppctl.plan.types import Derived, DeviceLimit, RankCost, StageCost, StageSpec
from ppctl.plan.violations import ConfigValues, Violation, Violations
from ppctl.schedule.action import COMPUTE, Placement, Schedule
from ppctl.schedule.lane_orders import (
    ROUNDING,
    Lanes,
    Task,
    least_limits,
    named_schedules,
    one_by_one,
    placements,
    unit_of_memory,
)
from ppctl.schedule.order_search import ALLOWANCE, FoundSchedule, find_schedule, first_order
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import AUTO
from ppctl.schedule.simulate import simulate
from ppctl.schedule.trace import step_time
from ppctl.topology import ParallelSizes

LESS_THAN_ANY = "PP-E321"

_AGAIN = 3
"""The most searches if results do not fit, since their receives and sums of gradients are known only afterwards. Each
search has less memory and a smaller part of the allowance than the one before it."""

_MARGIN = 0.02
"""Share of a rank's limit that repeated searches leave free: memory that they do not count differs between orders."""

_QUICK = 2
"""The number of orders from which the first limits follow: one microbatch after another, and then a rule's order."""

_NEVER = float("inf")
_GIB = 2**30


class Way(NamedTuple):
    """One placement of the stages, their costs and bytes there, and the ranks' bytes under a schedule."""

    placement: Placement
    stages: tuple[StageSpec, ...]
    costs: tuple[StageCost, ...]
    rank_costs: Callable[[Schedule], Sequence[RankCost]]
    held: Sequence[Held]
    frozen_stages: int


Searched = tuple[Choice, float]
"""The choice of a search, and the seconds of a call under it."""


def check_memory(
    values: ConfigValues, costs: Sequence[StageCost], num_microbatches: int, violations: Violations
) -> None:
    """Add a violation for a `pipeline.schedule_memory` that no schedule keeps."""
    if values[MEMORY] is None:
        return
    pp, kept = values["pp"], [cost.activation_bytes for cost in costs]
    limit, unit = values[MEMORY], unit_of_memory(kept, pp, num_microbatches) or 1.0
    least = min(max(least_limits(placement, kept)) for placement in placements(pp, len(costs) // pp))
    if activations(limit, unit) >= least:
        return
    of_1f1b = f"{least / unit:.3g} of what 1F1B keeps on its first rank"
    message = (
        f"{MEMORY}={limit} is too little: one microbatch on the stages of a rank takes {least / _GIB:.3g} GiB, "
        f"{of_1f1b}, and no schedule needs less"
    )
    enough = f"{ceil(100 * least / _GIB) / 100}GiB" if isinstance(limit, str) else ceil(100 * least / unit) / 100
    place = values.cite(MEMORY, "pp", "vpp", "layout")
    violations.append(Violation(LESS_THAN_ANY, MEMORY, message, place, {MEMORY: enough}, {MEMORY: None}))


def least_held(ways: Sequence[Way], num_microbatches: int) -> Sequence[RankCost]:
    """The least that the pp_ranks can hold: one microbatch after another, on the placement with the lowest peak."""
    return _alone(_smallest(ways, num_microbatches), num_microbatches)


def search_schedule(
    values: ConfigValues, sizes: ParallelSizes, ways: Sequence[Way], num_microbatches: int, share: int = 1
) -> Searched:
    """The fastest schedule that a search of all ways finds. Each way has an equal part of the allowance, which `share`
    such calls divide. If a device has no room even for one microbatch after another, that order is the choice."""
    device = device_limit(values.config, sizes)
    best: Searched | None = None
    for way in ways:
        if device is None or _peak(_alone(way, num_microbatches)) <= device.available_bytes:
            search = _PlacementSearch(values, way, num_microbatches, device)
            best = search.run(ALLOWANCE // len(ways) // share, best) or best
    if best is not None:
        return best
    way = _smallest(ways, num_microbatches)
    schedule = one_by_one(way.placement, num_microbatches)
    equation = f"schedule {AUTO}: one microbatch after another; other orders hold more, and are not searched"
    choice = Choice(AUTO, (Derived("schedule", AUTO, equation),), schedule, least=True)
    return choice, _seconds(way, proved(values, schedule, way.frozen_stages))


def kept_choice(plan: Plan | None, layout: str, sizes: ParallelSizes, num_microbatches: int) -> Choice | None:
    """The searched schedule of a run's earlier plan if the pipeline is the same: a run keeps its schedule. None if
    stages are frozen, since the earlier plan lacks their backwards; a search then finds the same order again."""
    if plan is None or plan.layout != layout or plan.num_microbatches != num_microbatches:
        return None
    if plan.schedule.frozen_stages:
        return None
    if (plan.sizes.pp, plan.sizes.vpp) != (sizes.pp, sizes.vpp):
        return None
    rows = tuple(tuple(action for action in row if action.op in COMPUTE) for row in plan.schedule.actions)
    schedule = replace(plan.schedule, actions=rows, capacities={}, batched=False)
    equation = f"schedule {schedule.name}: kept from the run's earlier start; {SCHEDULE}={AUTO} found it there"
    return Choice(schedule.name, (Derived("schedule", schedule.name, equation),), schedule)


def timed(values: ConfigValues, ways: Sequence[Way], choice: Choice) -> float:
    """Simulated seconds of one schedule call with `choice`, which must hold a schedule; of the compute-only schedule if
    the proof found problems."""
    assert choice.schedule is not None
    way = next(each for each in ways if each.placement == choice.schedule.placement)
    return _seconds(way, proved(values, choice.schedule, way.frozen_stages))


def with_rival(choice: Choice, name: str, layout: str, seconds: float) -> Choice:
    """The choice with one more line: the best named schedule on its best layout, whatever memory it needs."""
    equation = f"beside it {name} {seconds:.4g} s a call: the best named schedule, on its best layout {layout}"
    return choice._replace(derived=(*choice.derived, Derived("named schedule", name, equation)))


def _alone(way: Way, num_microbatches: int) -> Sequence[RankCost]:
    """Bytes of the ranks while microbatches go through one after another; the second one reaches the peak."""
    return way.rank_costs(lower(one_by_one(way.placement, min(num_microbatches, 2))))


def _smallest(ways: Sequence[Way], num_microbatches: int) -> Way:
    return min(ways, key=lambda way: _peak(_alone(way, num_microbatches)))


def _peak(costs: Sequence[RankCost]) -> int:
    return max(cost.peak_bytes for cost in costs)


class _Timed(NamedTuple):
    """A candidate with its seconds in the plan: when lowered, with capacities, messages and gradient sums."""

    seconds: float
    number: int
    """Position among the candidates: of equally fast ones the first is taken."""
    schedule: Schedule


class _PlacementSearch:
    """The search for one placement, with the plan's own bytes: new orders, named ones, one microbatch after another.
    Operands for W count with their bytes; under `pipeline.schedule_memory` activations count whole until W instead."""

    def __init__(self, values: ConfigValues, way: Way, num_microbatches: int, device: DeviceLimit | None) -> None:
        self.values, self.way, self.device = values, way, device
        kept = [float(each.kept) for each in way.held]
        whole = values[MEMORY] is not None or device is None
        deferred = None if whole else [float(each.deferred) for each in way.held]
        least = least_limits(way.placement, kept, deferred)
        group = values[GROUP] if values.is_set(GROUP) else None
        costs = simulation_costs(way.costs, way.stages)
        self.task = Task(way.placement, num_microbatches, costs, kept, least, group, deferred)
        self.proofs: dict[int, ProvedSchedule] = {}
        self.judged: dict[int, _Timed | None] = {}

    def run(self, allowance: int, before: Searched | None) -> Searched | None:
        """The fastest schedule that fits; None if none is faster than `before`, the result of another placement."""
        enough = _NEVER if before is None else before[1]
        bound = Lanes.of(self.task).bound()
        if bound >= enough:
            return None
        results = self._results(allowance)
        named = (
            [each.schedule for each in results[0].named]
            if self.task.deferred is None
            else [*named_schedules(self.task)]
        )
        alone = one_by_one(self.way.placement, self.task.num_microbatches)
        candidates = [*(each.schedule for each in results), *named, alone]
        least = [step_time(simulate(each, self.task.costs)) for each in candidates]
        best = self._fastest(candidates, least, range(len(candidates)), enough)
        if best is None or best.seconds >= enough:
            return None
        names = [number for number, each in enumerate(candidates) if each.name != AUTO]
        rival = self._fastest(candidates, least, names, _NEVER)
        equation = _equation(best, rival, results, bound, self._within())
        choice = Choice(best.schedule.name, (Derived("schedule", best.schedule.name, equation),), best.schedule)
        return choice, best.seconds

    def _results(self, allowance: int) -> list[FoundSchedule]:
        """Search results within the memory for activations, and within less if the plan does not fit."""
        limits, results = self._limits(), list[FoundSchedule]()
        for search in range(1, 1 + _AGAIN):
            within = [max(pair) for pair in zip(limits, self.task.limits, strict=True)]
            result = find_schedule(replace(self.task, limits=within), allowance // search)
            results.append(result)
            room = self._room(self._proof(result.schedule).schedule)
            if min(room) >= 0:
                break
            spent = zip(limits, result.held, room, strict=True)
            limits = [min(limit, held + left - _MARGIN * limit) for limit, held, left in spent]
        return results

    def _within(self) -> str:
        """The limits of the search in words: the memory as typed, and in GiB or in parts of what 1F1B keeps."""
        asked, parts = self.values[MEMORY], [] if self.device is None else [LIMIT]
        if asked is not None:
            unit = unit_of_memory(self.task.sizes, self.task.placement.pp, self.task.num_microbatches)
            size = activations(asked, unit)
            same = f"{size / unit:.3g} of what 1F1B keeps" if isinstance(asked, str) else f"{size / _GIB:.3g} GiB"
            parts.insert(0, f"{MEMORY}={asked} ({same})")
        return " and ".join(parts) or "the activations that 1F1B keeps on its first rank"

    def _limits(self) -> list[float]:
        """Bytes of activations that each rank may hold: what is asked for, else what its device leaves for them."""
        task, asked = self.task, self.values[MEMORY]
        if asked is not None or self.device is None:
            unit = unit_of_memory(task.sizes, task.placement.pp, task.num_microbatches)
            return [activations(1.0 if asked is None else asked, unit)] * task.placement.pp
        order = one_by_one(task.placement, min(task.num_microbatches, 2))
        for _ in range(_QUICK):
            room = self._room(self._proof(order).schedule)
            limits = [held + left for held, left in zip(Lanes.of(task).held_by(order), room, strict=True)]
            quick = first_order(replace(task, limits=limits))
            if quick is None:
                break
            order = quick
        return limits

    def _fastest(
        self, candidates: Sequence[Schedule], least: Sequence[float], numbers: Iterable[int], enough: float
    ) -> _Timed | None:
        """The fastest fitting candidate that may take less than `enough`; `least` has each candidate's least seconds,
        without messages."""
        best: _Timed | None = None
        for number in sorted(numbers, key=least.__getitem__):
            if least[number] > (enough if best is None else best.seconds) * (1 + ROUNDING):
                break
            if number not in self.judged:
                self.judged[number] = self._timed(number, candidates[number])
            timed = self.judged[number]
            best = timed if best is None or (timed is not None and timed < best) else best
        return best

    def _timed(self, number: int, plain: Schedule) -> _Timed | None:
        """A candidate's seconds; None if it does not fit, or hangs at the capacity that is set."""
        if min(self._room(plain)) < 0:
            return None  # it does not fit even without messages
        proof = self._proof(plain)
        if proof.wrong or min(self._room(proof.schedule)) < 0:
            return None
        # rounded, so that equal times compare equal
        return _Timed(float(f"{_seconds(self.way, proof):.9g}"), number, plain)

    def _proof(self, plain: Schedule) -> ProvedSchedule:
        if id(plain) not in self.proofs:
            self.proofs[id(plain)] = presumed(self.values, plain, self.way.frozen_stages)
        return self.proofs[id(plain)]

    def _room(self, schedule: Schedule) -> list[float]:
        """Bytes that a schedule leaves free on every rank; negative if it exceeds the device."""
        if self.device is None:
            return [0.0] * self.way.placement.pp
        return [float(self.device.available_bytes - cost.peak_bytes) for cost in self.way.rank_costs(schedule)]


def _seconds(way: Way, proof: ProvedSchedule) -> float:
    trace = predicted(proof.plain if proof.wrong else proof.schedule, simulation_costs(way.costs, way.stages))
    return step_time(trace)


def _equation(best: _Timed, rival: _Timed | None, results: Sequence[FoundSchedule], bound: float, within: str) -> str:
    """The line on a search in the plan. Seconds are of one schedule call."""
    beside = "no named schedule fits" if rival is None else f"best named {rival.schedule.name} {rival.seconds:.4g} s"
    kind = "V" if best.schedule.placement.kind == "v" else "loop"
    what = "found" if best.schedule.name == AUTO else "as good as any that was found"
    return (
        f"schedule {best.schedule.name} {best.seconds:.4g} s a call, stages placed as a {kind}: {what} among "
        f"{sum(each.tried for each in results):,} orders within {within}; {beside}; no order takes less than "
        f"{bound:.4g} s"
    )
