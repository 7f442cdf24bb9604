"""Which schedule runs, the proof that it can, and what it would take.

Knows how a schedule is chosen, proved and priced. Must not know how schedules work (`ppctl.schedule`) or layouts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ppctl.config.argv import PLACE
from ppctl.config.checks import in_batches
from ppctl.config.limits import MOST_STAGES
from ppctl.errors import Problem, ScheduleError
from ppctl.plan.findings import Finding, Findings
from ppctl.plan.said import Said
from ppctl.plan.sizes import CALL, TOO_MUCH, nearest_divisors
from ppctl.plan.types import Derived
from ppctl.schedule.action import Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import POLICIES, Policy, fitting_policy, forwards_alone, make_schedule, schedule_policy
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.trace import Trace
from ppctl.schedule.verify import verify

MOST_ACTIONS = 200_000
"""Forwards and backwards of one schedule call: about 3 s of planning on one core."""

_SETTLED = 4
"""Rounds of the pipeline after which no rank holds more than before."""

SCHEDULE = "pipeline.pp_schedule"
GROUP = "parallel.microbatch_group_size_per_vp_stage"
CAPACITY = "pipeline.p2p_capacity"
CSV = "pipeline.pp_schedule_csv"
GIVEN = "csv"
"""The name of a schedule that was given as a file."""


class Choice(NamedTuple):
    """A policy's name, and the equation where ppctl chose it; or a schedule that was given as a file."""

    name: str
    derived: tuple[Derived, ...] = ()
    given: Schedule | None = None

    @property
    def policy(self) -> Policy | None:
        """What is known about the policy; None for a schedule that was given as a file."""
        return POLICIES[self.name] if self.given is None else None

    @property
    def placement(self) -> str:
        """How stages are placed: `loop` or `v`."""
        return POLICIES[self.name].placement if self.given is None else self.given.placement.kind


def choose_schedule(said: Said, vpp: int, findings: Findings) -> Choice | None:
    """1F1B for one chunk per rank, interleaved 1F1B for more, unless a schedule was given."""
    asked = said[SCHEDULE]
    name = schedule_policy(asked)
    if name is None:
        return None  # told by `config.checks`
    policy = POLICIES[name]
    if not policy.runs(vpp):
        if not said.given(SCHEDULE):
            return Choice(fitting_policy(vpp), (_chosen(vpp, "no schedule was given"),))
        message = f"schedule {asked} runs {policy.chunks_in_words}, and vpp is {vpp}"
        chunks = ("vpp", policy.chunks)
        ways = [(chunks,) if said["layout"] is None else (chunks, ("layout", None)), ((SCHEDULE, fitting_policy(vpp)),)]
        ways = ways[::-1] if policy.for_more_chunks else ways
        findings.append(Finding("PP-E213", SCHEDULE, message, said.told(SCHEDULE, "vpp", "layout"), *ways))
        return None
    if name == "interleaved_1f1b" and vpp == 1 and said.source("vpp") == PLACE != said.source(SCHEDULE):
        return Choice("1f1b", (_chosen(vpp, f"{asked} ({said.source(SCHEDULE)}) was given for more chunks"),))
    return Choice(name)


def settled(said: Said, choice: Choice, num_microbatches: int) -> int:
    """So few microbatches that ranks hold as much as with all of them: 1F1B, plain or interleaved, repeats itself."""
    if choice.policy is None or not choice.policy.settles or said["pipeline.extra_warmup"] == "auto":
        return num_microbatches
    pp: int = said["pp"]
    unit: int = said[GROUP] if said.given(GROUP) else pp
    return min(num_microbatches, num_microbatches % unit + unit * _SETTLED * -(-pp // unit))


def check_length(said: Said, num_stages: int, num_microbatches: int, findings: Findings) -> None:
    """Refuse a step with more actions than anyone can plan: some size is not what was meant."""
    if num_stages > MOST_STAGES:
        message = f"the layout has {num_stages:,} stages; a plan holds at most {MOST_STAGES:,}"
        ways = ((("layout", None),), (("layout", None), ("vpp", 1)))
        findings.append(Finding(TOO_MUCH, "stages", message, said.told("pp", "vpp"), *ways))
        return
    least = 2 * said["pp"] - 1
    if schedule_policy(said[SCHEDULE]) == "zbv_zero_bubble" and 2 * num_stages * least > MOST_ACTIONS:
        message = (
            f"{said[SCHEDULE]} is made for at least {least:,} microbatches (2 x pp - 1), through {num_stages:,} stages "
            f"{2 * num_stages * least:,} forwards and backwards; a plan holds at most {MOST_ACTIONS:,}"
        )
        interleaved = (SCHEDULE, fitting_policy(2))
        place = said.told(SCHEDULE, "pp")
        findings.append(Finding(TOO_MUCH, SCHEDULE, message, place, (interleaved,), (interleaved, ("layout", None))))
        return
    if 2 * num_stages * num_microbatches <= MOST_ACTIONS:
        return
    most = max(1, MOST_ACTIONS // 2 // num_stages)
    message = (
        f"{num_microbatches:,} microbatches through {num_stages:,} stages are {2 * num_stages * num_microbatches:,} "
        f"forwards and backwards in a step; a plan holds at most {MOST_ACTIONS:,}"
    )
    gbs, mbs = said["gbs"], said["mbs"]
    parts = [size for size in nearest_divisors(num_microbatches, most) if size <= most]
    calls = [((CALL, mbs * size),) for size in parts[:1]]
    fewer = (("gbs", gbs // num_microbatches * most),)
    larger = (
        ("mbs", mbs * -(-num_microbatches // most)),
        ("gbs", gbs // num_microbatches * -(-num_microbatches // most)),
    )
    findings.append(
        Finding(TOO_MUCH, "gbs", message, said.told("gbs", "mbs", "dp", "pp", "vpp"), *calls, fewer, larger)
    )


def _chosen(vpp: int, why: str) -> Derived:
    chunks = "one chunk" if vpp == 1 else f"{vpp} chunks"
    return Derived("schedule", fitting_policy(vpp), f"schedule {fitting_policy(vpp)}: {chunks} per rank, and {why}")


def compute_only(said: Said, choice: Choice, vpp: int, num_microbatches: int, extra_warmup: int = 0) -> Schedule:
    """The chosen policy's schedule, or the given one. A group size counts only where it was given: else it is pp."""
    if choice.given is not None:
        return choice.given
    return make_schedule(
        choice.name,
        pp=said["pp"],
        vpp=vpp,
        num_microbatches=num_microbatches,
        microbatch_group_size=said[GROUP] if said.given(GROUP) else None,
        extra_warmup=extra_warmup,
    )


class Proof(NamedTuple):
    """A compute-only schedule, what it was lowered to, and what is wrong with that."""

    plain: Schedule
    schedule: Schedule
    wrong: list[Problem]


def proved(said: Said, plain: Schedule) -> Proof:
    """The lowered schedule, and all that is wrong with it, or with its forward-only twin where a capacity was given."""
    capacity, batched = said[CAPACITY], in_batches(said.config.parallel)
    if plain.name == GIVEN and (wrong := verify(plain)):
        return Proof(plain, plain, [replace(each, place=f"{each.place}\n{said.told(CSV)}".strip()) for each in wrong])
    try:
        free = lower(plain, batched=batched)
    except ScheduleError:  # of the policies' schedules, only one with too long a warm-up hangs whatever the capacity
        return Proof(plain, plain, [replace(each, remedy="pipeline.extra_warmup=auto") for each in verify(plain)])
    schedule = free if capacity is None else lower(plain, capacity=capacity, batched=batched)
    wrong = verify(schedule)
    if capacity is None or batched:
        return Proof(plain, schedule, wrong)
    twin = forwards_alone(schedule.placement, plain.num_microbatches)
    wrong = wrong or verify(lower(twin, capacity=capacity))
    enough = max([*free.capacities.values(), *lower(twin).capacities.values()], default=1)
    remedy = f"{CAPACITY}={enough}\n{CAPACITY}=null"
    place = said.told(CAPACITY)
    told = [replace(each, remedy=remedy, place=f"{each.place}\n{place}".strip()) for each in wrong]
    return Proof(plain, schedule, told)


def predicted(schedule: Schedule, costs: Costs) -> Trace:
    """The step as it would run at these costs. Empty for a schedule that hangs."""
    try:
        return simulate(schedule, costs)
    except ScheduleError:
        return Trace(schedule.placement.pp, ())
