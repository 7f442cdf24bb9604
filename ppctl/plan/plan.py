"""The Plan, one rank's part of it, and plan.json, a superset of the output of `ppctl plan --json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NotRequired, TypedDict

from ppctl.errors import Problem
from ppctl.plan.types import Derived, DeviceLimit, Exchange, RankCost, SmallerBatch, StageSpec, Timing, fields_of
from ppctl.records.json_reader import Count, read
from ppctl.schedule.action import Action, Channel, Pair, Placement, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import forwards_alone
from ppctl.topology import ParallelSizes, RankGrid

LIMIT_KEYS = ("limit_bytes", "reserve_bytes", "ranks_per_device", "tight")
"""Entries of plan.json that do not change what ranks run."""
_NOT_DIGESTED = ("name", "provenance", "derived", "problems", "timing", "traffic", *LIMIT_KEYS)
_TIMES = ("bubble_fraction", "step_time_s", "time_calibrated")
_NUMBERS = ("params_total", "params_mtp", "params_active", "params_hf", "p2p_capacity")
_AS_THEY_ARE = (*_NUMBERS, "name", "layout", "stages", "pp_ranks", "derived", "provenance", "problems")
_CALLS = "gradient_accumulation_steps"


@dataclass(frozen=True)
class Plan:
    """A run, derived. Frozen; `to_json` and `from_json` are inverses; `digest` names it."""

    name: str
    sizes: ParallelSizes
    layout: str
    """Canonical layout string."""
    stages: tuple[StageSpec, ...]
    pp_ranks: tuple[RankCost, ...]
    schedule: Schedule
    """Lowered: with messages, gradient sync and capacities."""
    num_microbatches: int
    """Microbatches of one schedule call."""
    bubble_fraction: float
    step_time_s: float
    time_calibrated: bool
    params_total: int
    params_mtp: int
    params_active: int
    params_hf: int
    timing: Timing = field(default_factory=Timing)
    gradient_accumulation_steps: int = 1
    """Schedule calls per optimizer step."""
    tie_groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(canonical parameter name, stages that hold a use of it, in canonical order of uses)."""
    p2p_capacity: int | None = None
    """The capacity that the config sets for every channel; None lets `lower` choose."""
    limit: DeviceLimit | None = None
    """Bytes that a rank may hold; None if the config does not give the device's memory."""
    traffic: tuple[tuple[Exchange, ...], ...] = ()
    """pp_rank -> the exchanges of a rank with that pp_rank in a step."""
    smaller: tuple[SmallerBatch, ...] = ()
    """The ramp-up sizes of a batch that grows, in their order."""
    derived: tuple[Derived, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Dotted config key -> the source of its value."""
    problems: tuple[Problem, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Bytes of the rank that holds most."""
        return max(cost.peak_bytes for cost in self.pp_ranks)

    @property
    def tight(self) -> bool:
        """Whether all ranks fit, but some rank has less than 5 % of its memory free."""
        return self.limit is not None and self.limit.is_tight(self.peak_bytes)

    @property
    def routed(self) -> bool:
        """Whether tokens go to some of the experts only, so that experts' numbers of rows depend on the data."""
        return self.params_active < self.params_total

    def at_step(self, step: int) -> Plan:
        """The plan of the step that follows `step` completed ones, counted from the run's first step."""
        sizes = (each.size for each in self.smaller if each.step <= step < each.step + each.steps)
        return self.of_batch(next(sizes, 0))

    def of_batch(self, size: int) -> Plan:
        """The plan of a step of `size` samples: a ramp-up size's, or the global batch's."""
        of_size = next((each for each in self.smaller if each.size == size), None)
        if of_size is None:
            return self
        return replace(
            self,
            schedule=of_size.schedule,
            num_microbatches=of_size.num_microbatches,
            gradient_accumulation_steps=of_size.gradient_accumulation_steps,
            bubble_fraction=of_size.bubble_fraction,
            step_time_s=of_size.step_time_s,
            smaller=(),
        )

    @cached_property
    def forward_schedule(self) -> Schedule:
        """The forward-only twin of the schedule (evaluation, generation), lowered. Derived, and not in plan.json."""
        return self.forward_only(self.num_microbatches)

    def forward_only(self, num_microbatches: int) -> Schedule:
        """The lowered forward-only schedule of these stages for any number of microbatches."""
        plain = forwards_alone(self.schedule.placement, num_microbatches)
        return lower(plain, capacity=self.p2p_capacity, batched=self.schedule.batched)

    @cached_property
    def digest(self) -> str:
        """sha256 of all that the run executes: sizes, stages, schedule, costs; not sources, texts, predicted times."""
        return _digest_of(self._executed())

    def for_rank(self, rank: int) -> RankPlan:
        """The part of the plan that one global rank needs. Raises IndexError for a rank outside the world."""
        position = RankGrid(self.sizes).coordinates(rank)
        pp_rank = position["pp"]
        stages = tuple(stage for stage in self.stages if stage.pp_rank == pp_rank)
        first = all(position[axis] == 0 for axis in ("tp", "cp", "dp"))
        places = rank, pp_rank, position["dp"], position["tp"], position["cp"]
        return RankPlan(*places, stages, self.schedule.actions[pp_rank], first)

    def report(self) -> dict[str, Any]:
        """The JSON that `ppctl plan --json` prints: all but the schedule's rows, the provenance and the digest."""
        sizes = asdict(self.sizes)
        world = sizes.pop("world")
        times = {name: getattr(self, name) for name in _TIMES}
        smaller = [{**each._asdict(), "schedule": _without_rows(each.schedule, {}, {})} for each in self.smaller]
        return {
            "name": self.name,
            "world_size": world,
            "parallel": sizes,
            "layout": self.layout,
            "stages": [stage.to_json() for stage in self.stages],
            "pp_ranks": [fields_of(cost) for cost in self.pp_ranks],
            **dict(zip(LIMIT_KEYS, (*(self.limit or (None, None, 1)), self.tight), strict=True)),
            **{name: getattr(self, name) for name in _NUMBERS},
            "replicated_params": [stage.replicated_params for stage in self.stages],
            "tie_groups": [{"name": name, "stages": list(stages)} for name, stages in self.tie_groups],
            "schedule": _without_rows(self.schedule, {_CALLS: self.gradient_accumulation_steps}, times),
            # Earlier plans have no such key, and most plans have one batch size.
            **({"smaller": smaller} if smaller else {}),
            "timing": self.timing.to_json(),
            "traffic": [[each._asdict() for each in rank] for rank in self.traffic],
            "derived": [fields_of(derived) for derived in self.derived],
            "problems": [problem.to_json() for problem in self.problems],
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data from which `from_json` makes an equal plan; a superset of `report`."""
        return {**self._executed(), "provenance": dict(self.provenance), "digest": self.digest}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan of data from `to_json`. Raises ValueError for any other data."""
        fields = read(_PlanFile, data)
        if fields["digest"] != _digest_of({key: value for key, value in data.items() if key != "digest"}):
            raise ValueError("its digest does not match its content")
        schedule = fields["schedule"]
        sizes = read(ParallelSizes, {"world": fields["world_size"], **fields["parallel"]})
        return cls(
            **{name: fields[name] for name in _AS_THEY_ARE},  # type: ignore[literal-required]
            sizes=sizes,
            schedule=_schedule(schedule, sizes),
            num_microbatches=schedule["microbatches"],
            **{name: schedule[name] for name in (*_TIMES, _CALLS)},  # type: ignore[literal-required]
            tie_groups=tuple((group["name"], group["stages"]) for group in fields["tie_groups"]),
            timing=Timing.from_json(fields["timing"]),
            traffic=fields.get("traffic", ()),
            limit=_limit(fields),
            smaller=tuple(
                SmallerBatch(
                    schedule=_schedule(each["schedule"], sizes),
                    **{name: each[name] for name in SmallerBatch._fields[:-1]},  # type: ignore[literal-required]
                )
                for each in fields.get("smaller", ())
            ),
        )

    def _executed(self) -> dict[str, Any]:
        """The entries of `report`, each rank's actions, and the pairs among them."""
        data = self.report()
        data["schedule"] |= _rows(self.schedule)
        for each, schedule in zip(data.get("smaller", ()), (each.schedule for each in self.smaller), strict=True):
            each["schedule"] |= _rows(schedule)
        return data


def _without_rows(schedule: Schedule, calls: Mapping[str, int], times: Mapping[str, float]) -> dict[str, Any]:
    """The entries of a schedule; `calls` and `times` are the further entries of a plan's global batch."""
    return {
        "name": schedule.name,
        "microbatches": schedule.num_microbatches,
        **calls,
        "actions_per_rank": [len(row) for row in schedule.actions],
        **times,
        "placement": schedule.placement.kind,
        "batched": schedule.batched,
        "capacities": {str(channel): size for channel, size in schedule.capacities.items()},
    }


def _rows(schedule: Schedule) -> dict[str, Any]:
    """Each rank's actions, the pairs among them, and how many stages have no backward."""
    rows: dict[str, Any] = {"actions": [" ".join(map(str, row)) for row in schedule.actions]}
    if schedule.pairs:  # most plans have no pairs, and earlier plans no such key
        rows["pairs"] = [str(pair) for pair in sorted(schedule.pairs)]
    if schedule.frozen_stages:
        rows["frozen_stages"] = schedule.frozen_stages
    return rows


class _Rows(TypedDict):
    name: str
    placement: str
    microbatches: Count
    batched: bool
    actions: list[str]
    capacities: dict[Channel, Count]
    pairs: NotRequired[list[Pair]]
    frozen_stages: NotRequired[Count]


class _Run(_Rows):
    """The schedule of a plan's global batch, and its times."""

    gradient_accumulation_steps: Count
    bubble_fraction: float
    step_time_s: float
    time_calibrated: bool


class _Smaller(TypedDict):
    step: Count
    steps: Count
    sample: Count
    size: Count
    num_microbatches: Count
    gradient_accumulation_steps: Count
    bubble_fraction: float
    step_time_s: float
    schedule: _Rows


class _TieGroup(TypedDict):
    name: str
    stages: tuple[Count, ...]


class _PlanFile(TypedDict):
    """plan.json; older ones lack some entries."""

    name: str
    world_size: Count
    parallel: dict[str, int | str]
    layout: str
    stages: tuple[StageSpec, ...]
    pp_ranks: tuple[RankCost, ...]
    schedule: _Run
    params_total: int
    params_mtp: int
    params_active: int
    params_hf: int
    p2p_capacity: Count | None
    tie_groups: list[_TieGroup]
    timing: dict[str, Any]
    derived: tuple[Derived, ...]
    provenance: dict[str, str]
    problems: tuple[Problem, ...]
    digest: str
    traffic: NotRequired[tuple[tuple[Exchange, ...], ...]]
    limit_bytes: NotRequired[Count | None]
    reserve_bytes: NotRequired[int | None]
    ranks_per_device: NotRequired[Count]
    smaller: NotRequired[list[_Smaller]]


def _digest_of(executed: Mapping[str, Any]) -> str:
    data = {key: value for key, value in executed.items() if key not in _NOT_DIGESTED}
    data["schedule"] = {key: value for key, value in data["schedule"].items() if key not in _TIMES}
    if data.get("smaller"):
        data["smaller"] = [{k: v for k, v in each.items() if k not in _TIMES} for each in data["smaller"]]
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _schedule(data: _Rows, sizes: ParallelSizes) -> Schedule:
    """The schedule of one entry in plan.json. Raises ValueError if it does not fit `sizes`."""
    if len(data["actions"]) != sizes.pp:
        raise ValueError(f"it has actions of {len(data['actions'])} pp_ranks, but pp is {sizes.pp}")
    return Schedule(
        data["name"],
        Placement(data["placement"], sizes.pp, sizes.num_stages),
        data["microbatches"],
        tuple(tuple(map(Action.parse, text.split())) for text in data["actions"]),
        data["capacities"],
        data["batched"],
        frozenset(data.get("pairs", ())),
        data.get("frozen_stages", 0),
    )


def _limit(data: _PlanFile) -> DeviceLimit | None:
    """The limit in a plan's JSON; None also for plans from before limits existed."""
    limit, reserve = data.get("limit_bytes"), data.get("reserve_bytes")
    return None if limit is None or reserve is None else DeviceLimit(limit, reserve, data["ranks_per_device"])


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part of the plan."""

    rank: int
    pp_rank: int
    dp_rank: int
    tp_rank: int
    cp_rank: int
    stages: tuple[StageSpec, ...]
    """In chunk order."""
    actions: tuple[Action, ...]
    """The rank's list in the lowered training schedule."""
    in_first_pipeline: bool
    """Whether the rank is in rank 0's pipeline, which reports for all pipelines."""
