"""Configurations as values, and the enumeration of all that the rules allow for a model and a number of GPUs.

Keys that are typed, or named to be kept, keep their values; of the other keys in `SEARCHED`, every value is tried,
whatever a recipe says. If nothing is left to search, a problem names the fewest typed values that contradict each
other. Knows which keys are searched, and which follow from them. Must not know prices. The rules are the plan's
(`plan/sizes.py`, `plan/layout_choice.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import chain, product
from math import gcd, log2, prod
from typing import Any, NamedTuple

from ppctl.config.argv import ALIASES, PLACE, full_name
from ppctl.config.checks import check
from ppctl.config.keys import text_keys
from ppctl.errors import ConfigError, Problem
from ppctl.geometry.layers import DEFAULT_MODULES
from ppctl.host.devices import machines
from ppctl.layout import PipelineParallelLayerLayout
from ppctl.plan import plan_checked
from ppctl.plan.layout_choice import derive_cut
from ppctl.plan.memory_limit import GRANULARITY, MODULES, PUT_OFF, SHARDING
from ppctl.plan.schedule_choice import CSV, SCHEDULE
from ppctl.plan.sizes import SEQUENCE, derive_batch, derive_world, divide_model
from ppctl.plan.violations import ConfigValues, Overrides, Violations, overrides_text
from ppctl.schedule.policies import POLICIES, fitting_policy, schedule_policy
from ppctl.topology import ParallelSizes

AXES = ("tp", "cp", "pp", "ep", "etp")
SEARCHED = (*AXES, "vpp", SHARDING, "mbs", GRANULARITY, SCHEDULE)
"""The keys that are searched unless they are typed."""
_OF_LAYERS = ("train.recompute_method", "train.recompute_num_layers")
_RECOMPUTED = (GRANULARITY, MODULES, *_OF_LAYERS, "train.recompute_stages")
CHANGED = (("tp", SEQUENCE), ("cp",), ("pp",), ("ep", "etp"), ("mbs",), _RECOMPUTED, ("vpp", SCHEDULE), (SHARDING,))
"""Groups of keys that change together."""
GROUPS = {key: (key,) for key in SEARCHED} | {GRANULARITY: _RECOMPUTED, SCHEDULE: (SCHEDULE, CSV)}
"""Searched key -> keys. If one of these (but CSV, which is null in a search) is typed or kept, the searched key is
fixed."""
GIVEN = "as given"
"""The config's own recomputation, where it is not searched."""


class Configuration(NamedTuple):
    """One configuration, in the values that are searched; `recomputation` is `none`, `modules`, `full` or GIVEN."""

    tp: int
    cp: int
    pp: int
    ep: int
    etp: int
    micro_batch_size: int
    recomputation: str
    vpp: int
    schedule: str
    data_parallel_sharding: str


class SearchSpace:
    """All configurations for the model, the batch and the GPUs of a config; `keep` are keys that are not searched."""

    def __init__(self, values: ConfigValues, keep: Collection[str] = ()) -> None:
        self.values = values
        names = {ALIASES.get(key, key) for key in keep}
        fixing = {key: [each for each in group if each != CSV] for key, group in GROUPS.items()}  # no search has a file
        self.fixed = {key for key, group in fixing.items() if any(self._is_fixed(each, names) for each in group)}
        nodes, gpus = values["nodes"], values["gpus_per_node"]
        self.world = 1 if nodes is None and gpus is None else prod(machines(nodes, gpus, 1))
        self.chunks, self.layout = cache(self._chunks), cache(self._layout)
        self.ways = cache(self._way_list)
        self.batches, self._divides = cache(self._batches), cache(self._divide)

    def _is_fixed(self, key: str, kept: Collection[str]) -> bool:
        return self.values.source(key).startswith(PLACE) or ALIASES.get(key, key) in kept

    def freed(self, keys: Iterable[str]) -> SearchSpace:
        """The space in which these keys are searched as well."""
        other = SearchSpace(self.values)
        other.fixed = self.fixed - {*keys}
        return other

    @cached_property
    def first(self) -> Configuration | None:
        """A configuration that no rule on sizes or between values forbids; None if there is none. Such rules see
        whether a size is above 1, not the size: of each pattern of these one configuration is tried."""
        broken = set()
        for axes in self.axes():
            sizes, point = self.sizes(axes), axes._replace(recomputation=self.recomputations[0])
            for batch, each in product(self.batches(sizes.dp), self.layouts(point, sizes)) if sizes is not None else ():
                kind = *(size > 1 for size in (*axes[:5], each.vpp)), each.schedule, each.data_parallel_sharding
                if kind not in broken and batch[1] >= POLICIES[each.schedule].needs_microbatches(each.pp):
                    if self.obeys(one := each._replace(micro_batch_size=batch[0])):
                        return one
                    broken.add(kind)
        return None

    @property
    def neutral(self) -> ConfigValues:
        """The config with the least value of every searched key: its problems are problems of all configurations."""
        tp, cp, pp, ep, mbs = (self.options(key, [1])[0] for key in ("tp", "cp", "pp", "ep", "mbs"))
        etp = self._etps(tp)[0]
        vpp = self.values["vpp"] or 1 if "vpp" in self.fixed else 1
        name = next(iter(self.schedules(1, vpp)), "")
        sharding = self.values[SHARDING] if SHARDING in self.fixed else "none"
        return self.values_of(Configuration(tp, cp, pp, ep, etp, mbs, self.recomputations[0], vpp, name, sharding))

    def options(self, key: str, values: Sequence[int]) -> Sequence[int]:
        """The config's value alone if the key is fixed; else, or if it is null, `values`."""
        return [self.values[key]] if key in self.fixed and self.values[key] is not None else values

    def _etps(self, tp: int) -> Sequence[int]:
        """The values of etp to try; null follows tp."""
        many = divisors(tp) if self.values["model.num_moe_experts"] else [1]
        return self.options("etp", [tp] if "etp" in self.fixed else many)

    def axes(self) -> list[Configuration]:
        """Every division of the ranks with a decoder layer on each rank, as configurations whose other values mean
        nothing. First come those with the fewest doublings between their sizes and the config's own."""
        own = [self.values[key] or self.values["tp"] for key in AXES]
        return sorted(
            self._all_axes(),
            key=lambda point: sum(abs(log2(a / b)) for a, b in zip(point[: len(AXES)], own, strict=True)),
        )

    def _all_axes(self) -> Iterator[Configuration]:
        world, experts = self.world, self.values["model.num_moe_experts"] or 0
        ways = divisors(world)
        for tp, cp in product(self.options("tp", ways), self.options("cp", ways)):
            for pp in self.options("pp", [size for size in ways if size <= self.values["model.num_layers"]]):
                if world % (tp * cp * pp) and not {"tp", "cp", "pp"} <= self.fixed:
                    continue
                for etp in self._etps(tp):
                    dense = world // pp
                    for ep in self.options("ep", divisors(gcd(experts, dense // etp)) if experts else [1]):
                        yield Configuration(tp, cp, pp, ep, etp, 1, GIVEN, 1, "", "")

    def sizes(self, axes: Configuration) -> ParallelSizes | None:
        """The sizes of all axes; None if a rule forbids these, as where they do not divide the ranks or the model."""
        if not self._divides(axes.tp, axes.cp, axes.etp):
            return None
        violations: Violations = []
        sizes, _ = derive_world(self.values.overridden(self._axis_words(axes)), violations)
        return None if violations else sizes

    def _divide(self, tp: int, cp: int, etp: int) -> bool:
        violations: Violations = []
        values = self.values.overridden({"tp": tp, "cp": cp, SEQUENCE: self._sequence(tp)})
        divide_model(values, violations, etp)
        return not violations

    def _batches(self, dp: int) -> list[tuple[int, int, int]]:
        """Every (microbatch size, microbatches of a schedule call, calls of a step) with `dp` replicas."""
        each = []
        for size in self.options("mbs", divisors(max(1, self.values["gbs"] // dp))):
            split = derive_batch(self.values.overridden({"mbs": size}), dp, [])
            if split is not None:
                each.append((size, split.num_microbatches, split.accumulation))
        return each

    @property
    def recomputations(self) -> tuple[str, ...]:
        """The kinds of recomputation to try."""
        return (GIVEN,) if GRANULARITY in self.fixed else ("none", "modules", "full")

    def _chunks(self, pp: int) -> tuple[int, ...]:
        """The numbers of chunks per rank to try: the layout's if it is typed or vpp follows, 1 for a single rank, else
        those with at least one decoder layer per stage; none without a layout."""
        layers = self.values["model.num_layers"]
        most = 1 if pp == 1 else max(1, layers // pp)
        # Of the numbers with the same largest stage only the least: more chunks only add messages.
        ways = sorted({-(-layers // (pp * -(-layers // (pp * vpp)))) for vpp in range(1, most + 1)})
        if self._is_fixed("layout", ()) or self._vpp_follows:
            typed = self.layout(pp, None)
            ways = [] if typed is None else [typed.virtual_pipeline_model_parallel_size]
        return tuple(vpp for vpp in self.options("vpp", ways) if self.layout(pp, vpp) is not None)

    @property
    def _vpp_follows(self) -> bool:
        """Whether null is typed or kept for vpp, which then follows from the layout."""
        return "vpp" in self.fixed and self.values["vpp"] is None

    def _layout(self, pp: int, vpp: int | None) -> PipelineParallelLayerLayout | None:
        """The config's layout if it is typed or made for these sizes, else the even split; None if neither is sound."""
        cut = derive_cut(self.values.overridden({"pp": pp, "vpp": vpp}), [])
        return None if cut is None else cut.layout

    def schedules(self, pp: int, vpp: int) -> tuple[str, ...]:
        """The policies that run `vpp` chunks; on one rank, where all are the same, only the first."""
        if SCHEDULE in self.fixed:
            typed = POLICIES.get(schedule_policy(self.values[SCHEDULE]) or "", POLICIES[fitting_policy(vpp)])
            return (typed.name,) if typed.runs(vpp) else ()
        rows = [row for row in POLICIES.values() if row.trains and row.runs(vpp) and (vpp > 1 or row.chunks == 1)]
        return tuple(row.name for row in (rows[:1] if pp == 1 else rows))

    def shardings(self, sizes: ParallelSizes) -> tuple[str, ...]:
        """The kinds of sharding to try; only `none` if there are no replicas, whatever was typed."""
        if sizes.dp * sizes.cp == 1:
            return ("none",)
        return (self.values[SHARDING],) if SHARDING in self.fixed else ("none", "optimizer_gradients", "full")

    def _way_list(self, pp: int) -> list[tuple[int, str]]:
        """Every number of chunks with every schedule that runs it."""
        return [(vpp, name) for vpp in self.chunks(pp) for name in self.schedules(pp, vpp)]

    def count(self, sizes: ParallelSizes) -> int:
        """The number of configurations with these axes, one microbatch size and one recomputation."""
        return len(self.ways(sizes.pp)) * len(self.shardings(sizes))

    def layouts(self, point: Configuration, sizes: ParallelSizes) -> Iterator[Configuration]:
        """The configuration with every number of chunks, schedule and sharding."""
        for (vpp, name), sharding in product(self.ways(sizes.pp), self.shardings(sizes)):
            yield point._replace(vpp=vpp, schedule=name, data_parallel_sharding=sharding)

    # Configurations as words

    def _sequence(self, tp: int) -> bool:
        """Whether to use sequence parallelism: with any tensor parallelism, unless it was typed."""
        return self.values[SEQUENCE] if self._is_fixed(SEQUENCE, ()) else tp > 1

    def _axis_words(self, point: Configuration) -> dict[str, Any]:
        words: dict[str, Any] = {
            "tp": point.tp,
            "cp": point.cp,
            "pp": point.pp,
            "ep": point.ep,
            SEQUENCE: self._sequence(point.tp),
        }
        if self.values["model.num_moe_experts"]:
            words |= {"etp": None if point.etp == point.tp and not self.values.is_set("etp") else point.etp}
        return words

    def words(self, point: Configuration) -> Overrides:
        """The overrides that make a configuration of the config, without those that change nothing."""
        words = self._axis_words(point) | {
            "vpp": point.vpp,
            "mbs": point.micro_batch_size,
        }
        if SHARDING not in self.fixed:
            words[SHARDING] = point.data_parallel_sharding
        if not self._is_fixed("dp", ()):
            words["dp"] = None
        if SCHEDULE not in self.fixed and point.schedule != schedule_policy(self.values[SCHEDULE]):
            words |= {SCHEDULE: point.schedule, PUT_OFF: None, "pipeline.schedule_memory": None}
        words |= self._recompute_words(point.recomputation)
        if self._vpp_follows or (point.vpp == 1 and self.values["vpp"] is None and self.values["layout"] is None):
            del words["vpp"]
        return {key: value for key, value in words.items() if self.values[key] != value}

    def _recompute_words(self, recomputation: str) -> Overrides:
        if recomputation == GIVEN:
            return {}
        words: dict[str, Any] = dict.fromkeys(_RECOMPUTED)
        if recomputation == "modules":
            return words | {GRANULARITY: "selective", MODULES: self.modules}
        if recomputation == "full":
            words[GRANULARITY] = "full"
            if self.values["train.recompute_num_layers"] == 1 and self.values["train.recompute_method"] == "uniform":
                words |= {key: self.values[key] for key in _OF_LAYERS}  # means the same as null
        return words

    @cached_property
    def modules(self) -> list[str] | None:
        """The modules that `modules` recomputes: the config's own, else for a model with experts the default ones and
        the experts, as the plan advises when memory is short."""
        own: list[str] | None = self.values[MODULES]
        if own or not self.values["model.num_moe_experts"]:
            return own
        return [*DEFAULT_MODULES, "experts"]

    def values_of(self, point: Configuration) -> ConfigValues:
        """The config with the configuration's words at the end of its command line."""
        return self.values.overridden(self.words(point))

    def obeys(self, point: Configuration) -> bool:
        """Whether a configuration breaks no rule between values."""
        values = self.values_of(point)
        return not check(values.config, values.provenance)


def divisors(number: int) -> list[int]:
    """All divisors, in rising order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def contradictions(space: SearchSpace) -> list[Problem]:
    """A problem for each smallest set of typed values that no configuration has; sets are found until some
    configuration has all other typed values. If none is to blame, one problem of keys that are not searched."""
    sets: list[list[str]] = []
    while space.freed(chain(*sets)).first is None and [] not in sets:
        kept = [key for key in SEARCHED if key in space.fixed - {*chain(*sets)}]
        for key in list(kept):
            if space.freed(space.fixed - {*kept} | {key}).first is None:
                kept.remove(key)
        sets.append(kept)
    return [_problem(space, kept, {*chain(*sets)} - {*kept}) for kept in sets or [[]]]


def _problem(space: SearchSpace, kept: list[str], others: set[str]) -> Problem:
    """The problem of the values `kept`, with the message of the least configuration that has them. Each remedy is
    another value for one of them, found while `others`, which have problems of their own, are searched, too."""
    values, ways = space.values, {}
    for key in kept:
        free = space.freed({key, *others})
        if free.first is not None:
            ways[key] = free.values_of(free.first)[key]
    typed = [each for key in kept for each in GROUPS[key] if values.source(each).startswith(PLACE)] or kept
    nothing = Problem("PP-E229", "together they leave nothing to search", "", values.cite(*typed))
    own = next(iter(planned_problems(space.freed(space.fixed - {*kept}).neutral)), nothing)
    searched = {full_name(each) for key in SEARCHED if key not in kept for each in GROUPS[key]} | {SEQUENCE}
    lines = dict.fromkeys([*own.place.splitlines(), *nothing.place.splitlines()])
    cited = [line for line in lines if line.split(" ")[0] in text_keys().keys() - searched]
    start = f"no configuration has {overrides_text({key: values[key] for key in typed})}: " if kept else ""
    remedy = "\n".join(overrides_text({key: way}) for key, way in ways.items())
    return replace(own, message=start + own.message, remedy=remedy, place="\n".join(cited))


def planned_problems(values: ConfigValues) -> list[Problem]:
    """The problems of a config's plan, without memory problems."""
    try:
        plan_checked(values.config, values.provenance, [])
    except ConfigError as error:
        return list(error.problems)
    return []
