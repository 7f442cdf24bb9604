"""The schedule that a program asks for by a policy's name, as `auto` or in a file, made for given stages.

`ppctl.adopt` and `ppctl.TorchSchedule` take requests; schedules in files are read here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Any

from ppctl.errors import ConfigError, Problem, ScheduleError, pasted
from ppctl.host.files import read_text
from ppctl.schedule.action import MESSAGES, Op, Placement, Schedule
from ppctl.schedule.lane_orders import Task, unit_of_memory
from ppctl.schedule.order_search import find_schedule
from ppctl.schedule.policies import AUTO, POLICIES, make_schedule, schedule_policy
from ppctl.schedule.simulate import Costs
from ppctl.schedule.verify import verify

CODE = "PP-E216"
_MOST_READ = 2**22
"""The most bytes of a file: 4 MiB, twice the text of as many actions as a plan may have."""
_MOST_WANTED = 2**20
"""The most forwards whose absence from a file is listed one by one: more than a file can hold."""


@dataclass(frozen=True, eq=False)
class ScheduleRequest:
    """A schedule by its policy, one to search for, or a file's; with none of these, the caller's own choice."""

    policy: str | None = None
    """A policy's name, or AUTO."""
    given: Schedule | None = None
    """The compute-only schedule of a file, named after the file."""
    memory: float = 1.0
    """For AUTO: the activations that a rank may hold, in multiples of what 1F1B holds on its first rank."""
    costs: Costs | None = None
    """For AUTO: the stages' costs; None if all are alike and F, I and W take the same time."""
    argument: str = "schedule"
    """The argument that names the schedule, for remedies."""

    @property
    def asks(self) -> bool:
        """Whether the request is for anything else than the caller's own choice."""
        return self.policy is not None or self.given is not None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The possible placements of stages, `loop` or `v`; the first is taken if nothing else decides."""
        if self.given is not None:
            return (self.given.placement.kind,)
        return ("loop", "v") if self.policy in (None, AUTO) else (POLICIES[self.policy].placement,)

    def __str__(self) -> str:
        if self.given is not None:
            return self.given.name
        return f"auto within {self.memory:g} of 1F1B's memory" if self.policy == AUTO else self.policy or "its own"

    def check(self, pp: int, vpp: int) -> None:
        """Raise ScheduleError (PP-E216, PP-E305) if no number of microbatches lets the request fit these sizes."""
        place = None if self.given is None else self.given.placement
        if place is not None and (place.pp, place.num_stages) != (pp, pp * vpp):
            message = f"the schedule file has {place.num_stages} stages on {place.pp} rows, but pp {pp} x vpp {vpp}"
            raise ScheduleError(Problem(CODE, f"{message} = {pp * vpp}", f"{self.argument}=None"))
        policy = POLICIES.get(self.policy or "")
        if policy is not None and not policy.runs(vpp):
            fitting = policy.for_more_chunks or next(name for name in _training() if POLICIES[name].runs(vpp))
            message = f"{policy.name} runs {policy.chunks_in_words}, but there are {vpp}"
            raise ScheduleError(Problem("PP-E305", message, f'{self.argument}="{fitting}"'))

    def made(self, place: Placement, num_microbatches: int, group: int | None = None) -> Schedule:
        """The verified compute-only schedule of a step; `group` as in `make_schedule`. Raises ScheduleError."""
        vpp = place.num_stages // place.pp
        self.check(place.pp, vpp)
        if self.given is not None:
            if self.given.num_microbatches != num_microbatches:
                count = self.given.num_microbatches
                message = f"the schedule file runs {count} microbatches, but the call has {num_microbatches}"
                raise ScheduleError(Problem(CODE, message, f"{count} microbatches"))
            made = self.given
        elif self.policy == AUTO:
            made = self._found(place, num_microbatches, group)
        else:
            sizes: dict[str, Any] = {"num_microbatches": num_microbatches, "microbatch_group_size": group}
            made = make_schedule(self.policy or "", pp=place.pp, vpp=vpp, **sizes)
        if problems := verify(made):
            raise ScheduleError(problems)
        return made

    def _found(self, place: Placement, num_microbatches: int, group: int | None) -> Schedule:
        """The best schedule that a search finds. Raises ScheduleError (PP-E304) for costs of other stages."""
        stages = place.num_stages
        costs = self.costs or Costs.uniform(stages, message=0.05)
        if len(costs.forward) != stages:
            message = f"costs has {len(costs.forward)} stages, but there are {stages}"
            raise ScheduleError(Problem("PP-E304", message, f"{stages} values each"))
        sizes = [1.0] * stages
        limits = [self.memory * unit_of_memory(sizes, place.pp, num_microbatches)] * place.pp
        return find_schedule(Task(place, num_microbatches, costs, sizes, limits, group)).schedule


def _training() -> list[str]:
    return [name for name, policy in POLICIES.items() if policy.trains]


def requested(schedule: str | PathLike[str] | None, memory: float | None, costs: Costs | None) -> ScheduleRequest:
    """The request that a program's arguments mean; a file (a path, or a text that ends with .csv) is read. Raises
    ScheduleError for an unknown name (PP-E304) and a file without a schedule (PP-E216), and ConfigError (PP-E396) for
    memory or costs without a search and for a memory that is not above 0."""
    policy = schedule_policy(schedule) if isinstance(schedule, str) else None
    for name, value in (("memory", memory), ("costs", costs)):
        if value is not None and policy != AUTO:
            message = f"{name} is only for a schedule that is searched for"
            raise ConfigError(Problem("PP-E396", message, f'schedule="auto", {name}=...'))
    if memory is not None and not (isinstance(memory, int | float) and memory > 0):
        message = f"memory must be above 0 (1.0: the activations of 1F1B's first rank), not {memory!r}"
        raise ConfigError(Problem("PP-E396", message, "memory=1.0"))
    if schedule is None or policy is not None:
        return ScheduleRequest(policy, memory=1.0 if memory is None else memory, costs=costs)
    if not isinstance(schedule, PathLike) and not (isinstance(schedule, str) and schedule.lower().endswith(".csv")):
        message = f"there is no schedule {schedule!r}: {AUTO}, a file named *.csv, {', '.join(_training())}"
        raise ScheduleError(Problem("PP-E304", message, 'schedule="zb_h1"'))
    path = fspath(schedule)
    return ScheduleRequest(given=replace(read_schedule(path), name=path))


def read_schedule(path: str) -> Schedule:
    """The schedule of `schedule_in`; raises ScheduleError (PP-E216) also for a file that cannot be read."""
    try:
        return schedule_in(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"the schedule file {path} cannot be read: {reason}"
        raise ScheduleError(Problem(CODE, message, f"ls -l {pasted(path)}")) from error


def schedule_in(path: str) -> Schedule:
    """The compute-only schedule in a file, REDUCE_GRADs left out. Raises ScheduleError, OSError, UnicodeDecodeError."""
    text = read_text(path, _MOST_READ).removeprefix("\ufeff")  # a byte order mark, which spreadsheets write
    schedule = Schedule.from_csv(text)
    if any(action.op in MESSAGES for row in schedule.actions for action in row):
        message = f"{path} holds messages, but ppctl places its own: give the forwards and backwards alone"
        raise ScheduleError(Problem(CODE, message))
    present = sum(map(len, schedule.actions))
    wanted = schedule.placement.num_stages * schedule.num_microbatches
    if wanted > max(present, _MOST_WANTED):  # a mistake in one number: the missing actions cannot be listed
        largest = max((action for row in schedule.actions for action in row), key=lambda each: max(each.mb, each.stage))
        message = (
            f"{path} lacks forwards: {schedule.placement.num_stages:,} stages and {schedule.num_microbatches:,} "
            f"microbatches, as in {largest}, need {wanted:,}, but it has {present:,} actions"
        )
        raise ScheduleError(Problem("PP-E310", message))
    rows = tuple(tuple(action for action in row if action.op is not Op.REDUCE_GRAD) for row in schedule.actions)
    return replace(schedule, actions=rows)
