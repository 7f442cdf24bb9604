"""The schedule of a call: Megatron's own, or the one that a program has asked for with `ppctl.adopt`.

Knows policies, files of schedules, the search and sizes. Must not know models, groups or how a call runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from os import PathLike, fspath

from ppctl.errors import ConfigError, Problem, ScheduleError
from ppctl.megatron.models import misuse
from ppctl.schedule.action import Placement, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import AUTO, POLICIES, forwards_alone, make_schedule, schedule_policy
from ppctl.schedule.simulate import Costs
from ppctl.schedule.verify import verify


@dataclass(frozen=True, eq=False)
class Wish:
    """A schedule by name, or from a file; without either Megatron's own: 1F1B, or interleaved 1F1B."""

    policy: str | None = None
    """A policy's name, or AUTO."""
    given: Schedule | None = None
    """The compute-only schedule of a file."""
    memory: float = 1.0
    """For AUTO: what a rank may hold of activations, in multiples of what 1F1B holds on its first rank."""
    costs: Costs = field(default_factory=lambda: Costs((), ()))
    """For AUTO: the stages' costs; without any, all are alike and F, I and W take the same time."""

    @property
    def kind(self) -> str:
        """How the schedule's stages are placed: `loop` or `v`. A search makes a loop, because Megatron builds models
        so."""
        if self.given is not None:
            return self.given.placement.kind
        return "loop" if self.policy in (None, AUTO) else POLICIES[self.policy].placement

    def __str__(self) -> str:
        if self.given is not None:
            return self.given.name
        return f"auto within {self.memory:g} of 1F1B's memory" if self.policy == AUTO else self.policy or "Megatron's"


def wish_of(schedule: str | PathLike[str] | None, memory: float | None, costs: Costs | None) -> Wish:
    """The wish that the arguments of `adopt` mean. Raises ScheduleError or ConfigError if they mean none."""
    policy = schedule_policy(schedule) if isinstance(schedule, str) else None
    for name, value in (("memory", memory), ("costs", costs)):
        if value is not None and policy != AUTO:
            raise misuse(f"{name} is for the schedule that is searched for", f'schedule="auto", {name}=...')
    if memory is not None and not memory > 0:
        raise misuse(f"memory is {memory!r}: a multiple of the activations of 1F1B's first rank", "memory=1.0")
    if schedule is None or policy is not None:
        return Wish(policy, memory=1.0 if memory is None else memory, costs=costs or Costs((), ()))
    path = fspath(schedule)
    if not path.lower().endswith(".csv"):
        message = f"there is no schedule {path!r}: auto, a file of the name ...csv, {', '.join(_trained())}"
        raise ScheduleError(Problem("PP-E304", message, 'ppctl.adopt(schedule="zb_h1")'))
    return Wish(given=_read(path))


def _trained() -> list[str]:
    return [name for name, policy in POLICIES.items() if policy.trains]


def _read(path: str) -> Schedule:
    """The schedule in a file. Raises ConfigError (PP-E216) for a file that cannot be read, ScheduleError for others."""
    from ppctl.plan.schedule_file import CODE, schedule_in

    try:
        return schedule_in(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"the schedule file {path} cannot be read: {reason}"
        raise ConfigError(Problem(CODE, message, "ppctl.adopt()", path)) from error


def check_wish(wish: Wish, pp: int, vpp: int) -> None:
    """Raise ScheduleError for a wish that no number of microbatches makes fit these sizes. A wish for pp 1 is idle."""
    given = wish.given
    if given is not None and pp > 1 and (given.placement.pp, given.placement.num_stages) != (pp, pp * vpp):
        rows, stages = given.placement.pp, given.placement.num_stages
        message = f"the schedule file has {stages} stages on {rows} rows, and pp {pp} x vpp {vpp} = {pp * vpp}"
        raise ScheduleError(Problem("PP-E216", message, "ppctl.adopt()"))
    policy = POLICIES.get(wish.policy or "")
    if policy is None or pp == 1 or policy.runs(vpp):
        return
    fitting = policy.for_more_chunks or next(name for name in _trained() if POLICIES[name].runs(vpp))
    message = f"{policy.name} runs {policy.chunks_in_words}, and Megatron's virtual pipeline has {vpp} chunks per rank"
    raise ScheduleError(Problem("PP-E305", message, f'ppctl.adopt(schedule="{fitting}")'))


@lru_cache(maxsize=32)
def lowered_schedule(
    wish: Wish,
    pp: int,
    vpp: int,
    num_microbatches: int,
    group: int | None,
    *,
    trains: bool,
    interleaved: bool,
    batched: bool,
) -> Schedule:
    """The schedule of a call, verified. It is a value: every step with the same arguments uses the same one.

    Raises ScheduleError for sizes that it does not fit.
    """
    check_wish(wish, pp, vpp)
    if not trains:
        schedule = make_schedule(
            "forward_only", pp=pp, vpp=vpp, num_microbatches=num_microbatches, microbatch_group_size=group
        )
        if wish.kind == "v" and pp > 1:
            schedule = forwards_alone(Placement("v", pp, pp * vpp), num_microbatches)
    else:
        schedule = _training_schedule(wish, pp, vpp, num_microbatches, group, interleaved)
    lowered = lower(schedule, batched=batched)
    if problems := verify(lowered):
        raise ScheduleError(problems)
    return lowered


def _training_schedule(wish: Wish, pp: int, vpp: int, m: int, group: int | None, interleaved: bool) -> Schedule:
    """The schedule of a training call, by strength: found by a search, from the wish's file, or made by a policy."""
    own = "interleaved_1f1b" if interleaved else "1f1b"
    name = own if pp == 1 else wish.policy or own
    if name == AUTO:
        return _searched(wish, pp, vpp, m, group)
    if wish.given is None or pp == 1:
        return make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m, microbatch_group_size=group)
    if wish.given.num_microbatches != m:
        message = f"the schedule file runs {wish.given.num_microbatches} microbatches, and the call has {m}"
        raise ScheduleError(Problem("PP-E216", message, f"num_microbatches={wish.given.num_microbatches}"))
    return wish.given


def _searched(wish: Wish, pp: int, vpp: int, m: int, group: int | None) -> Schedule:
    """The schedule with the shortest step for the wish's costs and memory: the same one on every rank."""
    from ppctl.schedule.lane_orders import Task, unit_of_memory
    from ppctl.schedule.search import find_schedule

    costs = wish.costs if wish.costs.forward else Costs.uniform(pp * vpp, message=0.05)
    if len(costs.forward) != pp * vpp:
        raise misuse(f"costs has {len(costs.forward)} stages, and there are {pp * vpp}", f"{pp * vpp} values each")
    sizes = [1.0] * (pp * vpp)
    limits = [wish.memory * unit_of_memory(sizes, pp, m)] * pp
    return find_schedule(Task(Placement("loop", pp, pp * vpp), m, costs, sizes, limits, group)).schedule
