"""Branch and bound, best first: the fastest configurations that fit, and the proof that no other is faster.

A branch is a set of configurations with a bound. The branch with the least bound is divided, or planned if it is a
single configuration, until no bound is below the best plan by more than `CLOSE`. Knows what is cut off, and why. Must
not know how bounds are computed or plans are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import groupby, product
from operator import itemgetter
from typing import Any, NamedTuple, cast

from ppctl.errors import ScheduleError
from ppctl.layout import PipelineParallelLayerLayout, even_layout
from ppctl.plan import Plan
from ppctl.plan.build import plan_alone
from ppctl.plan.memory_limit import SHARDING, SHARDINGS
from ppctl.plan.profile import Profile
from ppctl.schedule.policies import POLICIES
from ppctl.search.bounds import Division, Pace, PipelineBounds, StagePrices, called, hides, paces
from ppctl.search.rounds import FILLED, STEADY, Cut, Rounds, few_rounds
from ppctl.search.space import AXES, Configuration, SearchSpace
from ppctl.topology import ParallelSizes

CLOSE = 0.02
"""The share of a step's time by which a configuration must be faster for the search to go on."""
ROWS = 10
"""The most divisions of the ranks in an answer."""

SINGLE = ("simulated", "plan")
"""Levels of branches that are a single configuration."""

Batch = tuple[int, int, int]
"""Samples of a microbatch, microbatches of a schedule call, calls of a step."""
Way = tuple[int, str, Rounds]
"""Chunks per rank, a schedule that runs them, and a few rounds of it."""


class Planned(NamedTuple):
    """A configuration with its plan."""

    configuration: Configuration
    plan: Plan
    bound: float
    """The lower bound on its step, in seconds."""

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key: seconds in four digits (more than are certain), then simplicity."""
        point = self.configuration
        simple = point.cp, point.pp, point.ep, SHARDINGS.index(point.data_parallel_sharding), point.vpp, point
        return (float(f"{self.plan.step_time_s:.4g}"), *simple)

    @property
    def fits(self) -> bool:
        """Whether no rank holds more than its device has."""
        return self.plan.limit is None or self.plan.peak_bytes <= self.plan.limit.available_bytes


@dataclass
class Counts:
    """The number of configurations, in total and by outcome."""

    total: int = 0
    memory: int = 0
    """Configurations whose bound needs more memory than there is."""
    rules: int = 0
    """Configurations that a rule forbids."""
    planned: int = 0
    left: int = 0
    """Configurations in branches whose bound is not below the best plan."""

    @property
    def undecided(self) -> int:
        """Configurations still in branches."""
        return self.total - self.memory - self.rules - self.planned


class Branch(NamedTuple):
    """A set of configurations, and the least seconds of a step of any of them."""

    seconds: float
    number: int
    """The order in which branches were made, which decides among equals."""
    size: int
    level: str
    """The method of `Tree` that divides it, or `plan`."""
    parts: tuple[Any, ...]


class Tree:
    """The branches of a space: divisions of the ranks, then microbatch and recomputation, layout, schedule."""

    def __init__(self, space: SearchSpace, measured: Profile | None = None) -> None:
        self.space, self.measured, self.counts = space, measured, Counts()
        self.heap: list[Branch] = []
        self.divisions: list[Configuration] = []
        """Every division of the ranks that the rules allow."""
        self._made, self._least = 0, 0.0
        self._known: dict[Any, Any] = {}
        sharded = {} if SHARDING in space.fixed else {SHARDING: "full"}
        self._config = space.values.overridden(sharded).config
        """The config with the sharding that exchanges least of gradients, unless the sharding is fixed."""
        model = self._config.model
        layout = even_layout(model.num_layers, 1, model.mtp_num_layers or 0)
        self.whole = Cut(space.values, PipelineParallelLayerLayout(layout, 1))
        """The model as one stage."""
        self._samples = max(space.options("mbs", [space.values["gbs"]]))
        names = {name for pp in space.options("pp", (1, 2)) for _, name in space.ways(pp)}
        self._hides = any(hides(self._config, POLICIES[name]) for name in names)

    def divide(self, branch: Branch) -> None:
        """Add the parts of a branch; none takes less than the branch."""
        self._least = branch.seconds
        getattr(self, branch.level)(*branch.parts)

    def _add(self, seconds: float, size: int, level: str, *parts: Any) -> None:
        """Add a branch. Its bound is at least that of the branch that is being divided."""
        self._made += 1
        heappush(self.heap, Branch(max(seconds, self._least), self._made, size, level, parts))

    def open(self, axes: Configuration) -> None:
        """Add a division of the ranks, with the bound of one microbatch and no recomputation; or only count it, if a
        rule forbids it or its state exceeds the memory."""
        space, counts = self.space, self.counts
        sizes = space.sizes(axes)
        if sizes is None:
            counts.rules += 1
            counts.total += 1
            return
        batches = space.batches(sizes.dp)
        size = len(batches) * len(space.recomputations) * space.count(sizes)
        counts.total += size
        if not size:
            return
        self.divisions.append(axes)
        self._least = 0.0
        division, sharding = Division(self._config, sizes), space.shardings(sizes)[-1]
        state = division.state(self.whole, [0], sharding)
        if division.certain(state, sharding) / sizes.pp > division.available:
            counts.memory += size
            return
        point = axes._replace(recomputation=space.recomputations[0], data_parallel_sharding=sharding)
        self._add(self._even(point, sizes), size, "of_axes", point, sizes, division, batches)

    def of_axes(self, point: Configuration, sizes: ParallelSizes, division: Division, batches: list[Batch]) -> None:
        """Add a branch for every recomputation, unless a rule forbids the division itself."""
        space, size = self.space, self.space.count(sizes) * len(batches)
        if not space.obeys(next(space.layouts(point._replace(micro_batch_size=batches[0][0]), sizes))):
            self.counts.rules += size * len(space.recomputations)
            return
        for again in space.recomputations:
            point = point._replace(recomputation=again)
            self._add(self._even(point, sizes), size, "of_batches", point, sizes, division, batches)

    def of_batches(self, point: Configuration, sizes: ParallelSizes, division: Division, batches: list[Batch]) -> None:
        """Add a branch for every microbatch size, with the layouts and schedules that may fit the memory."""
        ways, each = self.space.ways(sizes.pp), len(self.space.shardings(sizes))
        sharding, prices = point.data_parallel_sharding, self._largest(point, sizes)
        paces = self._paces(point, sizes)
        for batch in batches:
            point = point._replace(micro_batch_size=batch[0])
            run, fitting = list[Way](), dict[float, list[Way]]()
            for vpp, name in ways:
                with suppress(ScheduleError):  # too few microbatches, or groups of these that do not fill the pipeline
                    of_way = point._replace(vpp=vpp, schedule=name)
                    run.append((vpp, name, self.rounds(of_way, batch[1], FILLED)))
            for vpp, name, rounds in run:
                if division.least(rounds, batch, sharding, prices) <= division.available:
                    seconds = batch[0] * batch[2] * called(paces[vpp, name], batch[1])
                    fitting.setdefault(seconds, []).append((vpp, name, rounds))
            self.counts.rules += (len(ways) - len(run)) * each
            self.counts.memory += (len(run) - sum(map(len, fitting.values()))) * each
            for seconds, alike in fitting.items():
                self._add(seconds, len(alike) * each, "of_share", point, sizes, division, batch, alike)

    def _paces(self, point: Configuration, sizes: ParallelSizes) -> dict[tuple[int, str], list[Pace]]:
        """(vpp, schedule) -> the paces of one sample, without messages and sums of gradients."""
        prices, known, made = self._largest(point, sizes), {}, {}
        for vpp, name in self.space.ways(sizes.pp):
            cut, row = self._cut(sizes.pp, vpp), POLICIES[name]
            hidden = hides(self._config, row)
            if (key := (vpp, row.placement, row.splits, hidden)) not in known:
                one, none = prices.sample_seconds(hidden=hidden), [0.0] * len(cut.kinds)
                ahead = [sum(number * one[kind][0] for kind, number in held.items()) for held in cut.kinds]
                back = [sum(number * one[kind][1] for kind, number in held.items()) for held in cut.kinds]
                back[: cut.frozen] = [0.0] * cut.frozen
                known[key] = paces(cut, row, ahead, back, none, none, waits=False)
            made[vpp, name] = known[key]
        return made

    def of_share(
        self, point: Configuration, sizes: ParallelSizes, division: Division, batch: Batch, ways: list[Way]
    ) -> None:
        """Add a branch for every layout, schedule and sharding that fits the memory."""
        share = self._share(point, sizes)
        for vpp, group in groupby(ways, key=itemgetter(0)):
            pipeline = self._once(
                point._replace(vpp=vpp), partial(PipelineBounds, share, division, self._cut(point.pp, vpp))
            )
            for (_, name, rounds), sharding in product(group, self.space.shardings(sizes)):
                if pipeline.peak(rounds, batch[1], sharding) > division.available:
                    self.counts.memory += 1
                    continue
                of_one = point._replace(vpp=vpp, schedule=name, data_parallel_sharding=sharding)
                self._add(self._step(0.0, of_one, pipeline, batch), 1, "simulated", of_one, pipeline, batch)

    def simulated(self, of: Configuration, pipeline: PipelineBounds, batch: Batch) -> None:
        """Add one configuration again, bounded by a few rounds of its schedule: closer than the closed form."""
        key = of._replace(data_parallel_sharding=""), "simulated"
        call = self._once(key, lambda: pipeline.simulated(self.rounds(of, batch[1], STEADY), batch[1]))
        self._add(self._step(call, of, pipeline, batch), 1, "plan", of, pipeline, batch)

    @staticmethod
    def _step(call: float, point: Configuration, pipeline: PipelineBounds, batch: Batch) -> float:
        """The least seconds of a step whose schedule call takes `call`, or its closed form if that is longer."""
        placement, sharding = POLICIES[point.schedule].placement, point.data_parallel_sharding
        after = pipeline.division.states(pipeline.cut, placement, sharding)[1]
        return batch[2] * max(call, pipeline.seconds(batch[1], point.schedule)) + after

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _share(self, point: Configuration, sizes: ParallelSizes) -> StagePrices:
        """The costs of stages, which do not depend on vpp, schedule or sharding, and on pp only by where groups lie."""
        key = point._replace(pp=1, vpp=1, schedule="", data_parallel_sharding="")
        values = self._once(key._replace(micro_batch_size=0), lambda: self.space.values_of(point))
        placed = key, *map(sizes.block, AXES)
        made = self._once(placed, lambda: StagePrices(values, sizes, point.micro_batch_size, self.measured, self.whole))
        return cast(StagePrices, made)

    def _largest(self, point: Configuration, sizes: ParallelSizes) -> StagePrices:
        """The costs of stages with the largest microbatch of any division: a sample costs least with that."""
        return self._share(point._replace(micro_batch_size=self._samples), sizes)

    def _even(self, point: Configuration, sizes: ParallelSizes) -> float:
        """Seconds of a step if every rank had an equal part of the model, without the exchanges that pairs may hide."""
        least = self._largest(point, sizes).sample_seconds(hidden=self._hides)
        seconds = sum(number * sum(least[kind]) for kind, number in self.whole.kinds[0].items())
        return float(self.space.values["gbs"] / sizes.dp / sizes.pp * seconds)

    def _cut(self, pp: int, vpp: int) -> Cut:
        """The Cut of the layout with `vpp` chunks per rank; there must be such a layout."""
        layout = cast(PipelineParallelLayerLayout, self.space.layout(pp, vpp))
        return cast(Cut, self._once((pp, vpp), lambda: Cut(self.space.values, layout)))

    def rounds(self, point: Configuration, num_microbatches: int, number: int) -> Rounds:
        """`number` rounds of a configuration's schedule."""
        few = few_rounds(point.schedule, point.pp, num_microbatches, number)
        key = (point.schedule, point.pp, point.vpp, few, point.ep > 1)
        cut = self._cut(point.pp, point.vpp)
        return cast(Rounds, self._once(key, lambda: Rounds(self.space.values_of(point), point.schedule, cut, few)))


class Search:
    """A search under way: `found` has the configurations that were planned and fit, the fastest first."""

    def __init__(self, space: SearchSpace, measured: Profile | None = None) -> None:
        self.space, self.tree = space, Tree(space, measured)
        self.counts, self.found = self.tree.counts, list[Planned]()
        self.over: list[Planned] = []
        """Planned configurations that exceed the device's memory, the fastest first."""
        self.proved = self.compared = self.counted = False
        """Whether: nothing is faster by more than CLOSE; other divisions were planned; every division was counted."""

    @property
    def least(self) -> float:
        """Seconds of the fastest step in `found`, which must not be empty."""
        return min(each.plan.step_time_s for each in self.found)

    def run(self) -> Iterator[Search]:
        """Search; yields itself after every plan and every divided branch. For an early answer, divisions of the ranks
        near the config's own come first, one by one until a configuration fits."""
        tree, divisions = self.tree, iter(self.space.axes())
        for axes in divisions:
            tree.open(axes)
            while tree.heap and not self.found:
                self._go_on(at_once=True)
                yield self
            if self.found:
                break
        for axes in divisions:
            tree.open(axes)
        self.counted = True
        while tree.heap and not (self.found and tree.heap[0].seconds >= (1 - CLOSE) * self.least):
            self._go_on()
            yield self
        self.counts.left = sum(branch.size for branch in tree.heap)
        self.proved = True

    def _go_on(self, *, at_once: bool = False) -> None:
        """Divide the branch of least bound; plan it if it is one configuration without a closer bound, or `at_once`."""
        branch = heappop(self.tree.heap)
        if branch.level == "plan" or (at_once and branch.level in SINGLE):
            self._plan_one(branch)
        else:
            self.tree.divide(branch)

    def other_divisions(self, share: float) -> Iterator[Search]:
        """Plan the fastest configuration of other divisions of the ranks, as long as bounds are within `share` of the
        first, until there are `ROWS`. Yields itself after every plan."""
        tree, known = self.tree, {each.configuration[: len(AXES)] for each in self.found}
        aside: list[Branch] = []
        while tree.heap and self.found and len(known) < ROWS:
            if tree.heap[0].seconds > (1 + share) * self.found[0].plan.step_time_s:
                break
            branch = heappop(tree.heap)
            if branch.parts[0][: len(AXES)] in known:
                aside.append(branch)
            elif branch.level == "plan":
                self.counts.left -= 1
                self._plan_one(branch)
                known = {each.configuration[: len(AXES)] for each in self.found}
                yield self
            else:
                before = self.counts.memory + self.counts.rules
                tree.divide(branch)
                self.counts.left -= self.counts.memory + self.counts.rules - before
        for branch in aside:
            heappush(tree.heap, branch)
        self.compared = True

    def simpler(self) -> Iterator[Search]:
        """Plan the listed configurations with less sharding, too: bounds do not tell them apart. Yields as `run`."""
        waiting = {branch.parts[0]: branch for branch in self.tree.heap if branch.level in SINGLE}
        for point in [each.configuration for each in self.found[: 2 * ROWS]]:
            for sharding in SHARDINGS[: SHARDINGS.index(point.data_parallel_sharding)]:
                if branch := waiting.pop(point._replace(data_parallel_sharding=sharding), None):
                    self.counts.left -= 1
                    self.tree.heap.remove(branch)
                    self._plan_one(branch)
                    yield self

    def _plan_one(self, branch: Branch) -> None:
        """Plan a single configuration, and keep the plan in `found` or `over`, unless a rule forbids it."""
        point = branch.parts[0]
        plan = plan_alone(self.space.values_of(point)) if self.space.obeys(point) else None
        if plan is None or not plan.timing.pipeline_s:
            self.counts.rules += 1
            return
        self.counts.planned += 1
        planned = Planned(point, plan, branch.seconds)
        kept = self.found if planned.fits else self.over
        kept.append(planned)
        kept.sort(key=lambda each: each.order)
