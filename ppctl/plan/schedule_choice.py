"""Which schedule runs, how far its forwards run ahead of its backwards, and the proof that it ends in no deadlock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ppctl.config.argv import PLACE
from ppctl.config.metadata import MOST_STAGES
from ppctl.config.parallel_rules import in_batches, is_plain
from ppctl.errors import Problem, ScheduleError
from ppctl.plan.memory_limit import LIMIT, device_limit
from ppctl.plan.sizes import CALL, TOO_MUCH, BatchSplit, nearest_divisors
from ppctl.plan.types import Derived, RankCost
from ppctl.plan.violations import ConfigValues, Overrides, Violation, Violations
from ppctl.schedule.action import Schedule
from ppctl.schedule.batching import shorter
from ppctl.schedule.executor import Execution
from ppctl.schedule.pairs import deferred_weights, pair_up
from ppctl.schedule.passes import lower, run_weights_sooner, without_frozen
from ppctl.schedule.policies import (
    AUTO,
    POLICIES,
    Policy,
    fitting_policy,
    forwards_alone,
    make_schedule,
    schedule_policy,
    too_few_microbatches,
)
from ppctl.schedule.simulate import Costs, attempted, simulate
from ppctl.schedule.trace import step_time
from ppctl.schedule.verify import verify
from ppctl.topology import ParallelSizes

MOST_ACTIONS = 200_000
"""The most forwards and backwards of one schedule call; planning these takes about 3 s on one core."""

_SETTLED = 4
"""Rounds of the pipeline after which no rank holds more than before."""

SCHEDULE = "pipeline.pp_schedule"
GROUP = "parallel.microbatch_group_size_per_vp_stage"
OVERLAP = "parallel.overlap_moe_expert_parallel_comm"
DELAY = "parallel.delay_wgrad_compute"
CAPACITY = "pipeline.p2p_capacity"
MEMORY = "pipeline.schedule_memory"
PUT_OFF = "pipeline.put_off_limit"
CSV = "pipeline.pp_schedule_csv"
FROM_FILE = "csv"
"""The name of a schedule from a file."""


class Choice(NamedTuple):
    """A policy's name, with the equation if ppctl chose it; or a schedule from a file or a search."""

    name: str
    derived: tuple[Derived, ...] = ()
    schedule: Schedule | None = None
    searched: bool = False
    """Whether a search will replace this policy (`schedule_search`); until then it stands for the result."""
    least: bool = False
    """Whether a search chose the order that holds least because none fits."""

    @property
    def policy(self) -> Policy | None:
        """The row of the policy in POLICIES; None for a schedule from a file or a search."""
        return POLICIES[self.name] if self.schedule is None else None

    @property
    def placement(self) -> str:
        """How stages are placed: `loop` or `v`."""
        return POLICIES[self.name].placement if self.schedule is None else self.schedule.placement.kind


def choose_schedule(values: ConfigValues, vpp: int, violations: Violations) -> Choice | None:
    """The config's schedule; by default 1F1B for one chunk per rank, interleaved 1F1B for more. None for an invalid
    name and, with a violation, for a schedule that cannot run this many chunks."""
    asked = values[SCHEDULE]
    name = schedule_policy(asked)
    if name is None:
        return None  # `config.checks` reports it
    if name == AUTO:
        return Choice(fitting_policy(vpp), searched=True)
    policy = POLICIES[name]
    if not policy.runs(vpp):
        if not values.is_set(SCHEDULE):
            return Choice(fitting_policy(vpp), (_chosen(vpp, "no schedule was given"),))
        message = f"schedule {asked} runs {policy.chunks_in_words}, but vpp is {vpp}"
        chunks: Overrides = {"vpp": policy.chunks, **({} if values["layout"] is None else {"layout": None})}
        ways: list[Overrides] = [chunks, {SCHEDULE: policy.for_more_chunks or fitting_policy(vpp)}]
        ways = ways[::-1] if policy.for_more_chunks else ways
        violations.append(Violation("PP-E213", SCHEDULE, message, values.cite(SCHEDULE, "vpp", "layout"), *ways))
        return None
    source = values.source(SCHEDULE)
    if (
        name == fitting_policy(2)
        and vpp == 1
        and values.source("vpp").startswith(PLACE)
        and not source.startswith(PLACE)
    ):
        return Choice(fitting_policy(1), (_chosen(vpp, f"{asked} ({source}) was given for more chunks"),))
    return Choice(name)


def check_compiled(values: ConfigValues, choice: Choice, vpp: int, violations: Violations) -> None:
    """Add a violation for torch.compile with split backwards: a compiled layer computes all its gradients together."""
    splits = POLICIES[choice.name].splits if choice.schedule is None else bool(choice.schedule.split)
    splits = splits or choice.searched or values[DELAY]
    if splits and values.config.train.compile:
        name = AUTO if choice.searched else choice.name
        message = f"schedule {name} splits backwards into I and W, but compiled layers compute both at once"
        ways: list[Overrides] = [{"train.compile": False}, {SCHEDULE: fitting_policy(vpp), CSV: None}]
        violations.append(Violation("PP-E392", SCHEDULE, message, values.cite(SCHEDULE, CSV, "train.compile"), *ways))


def check_overlap(values: ConfigValues, choice: Choice, vpp: int, violations: Violations) -> None:
    """Add a violation for hiding the exchange of experts if none is to be hidden, or if the schedule has no pairs."""
    asked = [key for key in (OVERLAP, DELAY) if values[key]]
    if not asked:
        return

    def refuse(message: str, *ways: Overrides) -> None:
        off: Overrides = dict.fromkeys(asked, False)
        changes = [{key: value for key, value in way.items() if values[key] != value} for way in (*ways, off)]
        violations.append(Violation("PP-E219", asked[0], message, values.cite(*asked, SCHEDULE, CSV), *changes))

    if not values[OVERLAP]:
        refuse(f"{DELAY} needs the pairs that {OVERLAP} makes: weight gradients go behind them", {OVERLAP: True})
    elif values["ep"] == 1:
        refuse(f"{OVERLAP} hides what experts on other ranks are sent, but ep is 1")
    elif choice.searched or choice.policy is None or not choice.policy.pairs:
        named = ", ".join(name for name, policy in POLICIES.items() if policy.pairs)
        name = AUTO if choice.searched else choice.name
        message = f"{OVERLAP} runs a forward beside a backward, as {named} can; schedule {name} cannot"
        refuse(message, {SCHEDULE: fitting_policy(vpp), CSV: None})
    elif in_batches(values.config) and not is_plain(values.config):  # plain transport runs without pairs, and says so
        message = f"{OVERLAP} needs a forward and a backward with no batch of messages between the two"
        refuse(message, {"parallel.overlap_p2p_comm": True, "parallel.batch_p2p_comm": False})


def settled(values: ConfigValues, choice: Choice, num_microbatches: int) -> int:
    """The least number of microbatches with which ranks hold as much as with all; less than all for 1F1B, plain or
    interleaved, which repeats itself."""
    if choice.policy is None or not choice.policy.settles or values["pipeline.extra_warmup"] == "auto":
        return num_microbatches
    pp: int = values["pp"]
    unit: int = values[GROUP] if values.is_set(GROUP) else pp
    return min(num_microbatches, num_microbatches % unit + unit * _SETTLED * -(-pp // unit))


def check_length(values: ConfigValues, num_stages: int, num_microbatches: int, violations: Violations) -> None:
    """Add a violation for a step with too many actions to plan: some size must be a mistake."""
    if num_stages > MOST_STAGES:
        message = f"the layout has {num_stages:,} stages; a plan holds at most {MOST_STAGES:,}"
        ways: tuple[Overrides, ...] = ({"layout": None}, {"layout": None, "vpp": 1})
        violations.append(Violation(TOO_MUCH, "stages", message, values.cite("pp", "vpp"), *ways))
        return
    policy = POLICIES.get(schedule_policy(values[SCHEDULE]) or "")
    least = policy.least_microbatches(values["pp"]) if policy is not None else 1
    if least > 1 and 2 * num_stages * least > MOST_ACTIONS:
        message = (
            f"{values[SCHEDULE]} is made for at least {least:,} microbatches at pp {values['pp']}; through "
            f"{num_stages:,} stages these are {2 * num_stages * least:,} forwards and backwards, but a plan holds at "
            f"most {MOST_ACTIONS:,}"
        )
        ways = ({SCHEDULE: fitting_policy(2)}, {SCHEDULE: fitting_policy(2), "layout": None})
        violations.append(Violation(TOO_MUCH, SCHEDULE, message, values.cite(SCHEDULE, "pp"), *ways))
        return
    if 2 * num_stages * num_microbatches <= MOST_ACTIONS:
        return
    most = max(1, MOST_ACTIONS // 2 // num_stages)
    message = (
        f"{num_microbatches:,} microbatches through {num_stages:,} stages are {2 * num_stages * num_microbatches:,} "
        f"forwards and backwards in a step, but a plan holds at most {MOST_ACTIONS:,}"
    )
    gbs, mbs = values["gbs"], values["mbs"]
    parts = [size for size in nearest_divisors(num_microbatches, most) if size <= most]
    calls = [{CALL: mbs * size} for size in parts[:1]]
    fewer = {"gbs": gbs // num_microbatches * most}
    larger = {"mbs": mbs * -(-num_microbatches // most), "gbs": gbs // num_microbatches * -(-num_microbatches // most)}
    violations.append(
        Violation(TOO_MUCH, "gbs", message, values.cite("gbs", "mbs", "dp", "pp", "vpp"), *calls, fewer, larger)
    )


def check_filled(values: ConfigValues, choice: Choice, vpp: int, batch: BatchSplit, violations: Violations) -> None:
    """Add a violation if a schedule call has fewer microbatches than its policy needs."""
    policy, pp, count, mbs = choice.policy, values["pp"], batch.num_microbatches, batch.micro_batch_size
    if policy is None or choice.searched or count >= (least := policy.needs_microbatches(pp)):
        return
    share = mbs * count * batch.accumulation  # samples of a step on a dp rank
    enough: Overrides = {"gbs": values["gbs"] // share * least * mbs}
    ways: list[Overrides] = [enough]
    if values.is_set(CALL):
        ways = [{CALL: least * mbs, **({} if share % (least * mbs) == 0 else enough)}]
    elif smaller := [size for size in range(1, share // least + 1) if share % size == 0]:
        ways = [{"mbs": smaller[-1]}, enough]
    place = values.cite(SCHEDULE, "gbs", "mbs", *[CALL] * values.is_set(CALL), "dp", "pp")
    message = too_few_microbatches(policy, pp, count)
    violations.append(Violation("PP-E304", "gbs", message, place, *ways, {SCHEDULE: fitting_policy(vpp)}))


def _chosen(vpp: int, why: str) -> Derived:
    chunks = "one chunk" if vpp == 1 else f"{vpp} chunks"
    return Derived("schedule", fitting_policy(vpp), f"schedule {fitting_policy(vpp)}: {chunks} per rank, and {why}")


def compute_only(
    values: ConfigValues, choice: Choice, vpp: int, num_microbatches: int, extra_warmup: int = 0
) -> Schedule:
    """The chosen policy's schedule, changed as options for pairs and Ws ask; or the file's. The group size is pp unless
    the user set it. Pairs stay only to hide exchanges of experts; else they would just wait for two messages."""
    if choice.schedule is not None:
        return choice.schedule
    schedule = make_schedule(
        choice.name,
        pp=values["pp"],
        vpp=vpp,
        num_microbatches=num_microbatches,
        microbatch_group_size=values[GROUP] if values.is_set(GROUP) else None,
        extra_warmup=extra_warmup,
    )
    if values["ep"] == 1:
        schedule = replace(schedule, pairs=frozenset())
    elif values[OVERLAP] and not schedule.pairs and not in_batches(values.config):
        schedule = pair_up(schedule)
    if values[DELAY]:
        schedule = deferred_weights(schedule)
    return schedule if values[PUT_OFF] is None else run_weights_sooner(schedule, values[PUT_OFF])


class ProvedSchedule(NamedTuple):
    """A compute-only schedule, its lowered form, and the lowered form's problems."""

    plain: Schedule
    schedule: Schedule
    wrong: list[Problem]
    run: Execution | None = None
    """The execution of the lowered schedule at the given costs."""


def proved(
    values: ConfigValues,
    plain: Schedule,
    frozen_stages: int = 0,
    costs: Costs | None = None,
    like: ProvedSchedule | None = None,
) -> ProvedSchedule:
    """The lowered schedule, without actions that frozen stages do not need, and all its problems; if a capacity is set,
    also the problems of its forward-only twin. `plain` must have all backwards; only a file may lack those of the
    frozen stages. The proof runs the schedule, at `costs` if these are given. Lists that were proved in `like` are not
    proved again.
    """
    capacity = values[CAPACITY]
    if plain.name == FROM_FILE and frozen_stages and verify(plain):
        plain = without_frozen(plain, frozen_stages)
    if plain.name == FROM_FILE and (wrong := verify(plain)):
        unset, place = f"{CSV}=null", values.cite(CSV)
        of_file = [replace(each, remedy=each.remedy or unset, place=f"{each.place}\n{place}".strip()) for each in wrong]
        return ProvedSchedule(plain, plain, of_file)
    try:
        free = lower(plain, batched=in_batches(values.config))
    except ScheduleError:  # among policies, only a too long warm-up hangs at any capacity
        wrong = [replace(each, remedy="pipeline.extra_warmup=auto") for each in verify(plain)]
        return ProvedSchedule(plain, plain, wrong)
    schedule = free if capacity is None or free.batched else lower(plain, capacity=capacity)
    schedule = without_frozen(schedule, frozen_stages)
    run = None if costs is None else attempted(schedule, costs)
    wrong = verify(schedule, run, None if like is None or like.wrong else shorter(like.schedule))
    if capacity is None or schedule.batched:
        return ProvedSchedule(plain, schedule, wrong, run)
    twin = forwards_alone(schedule.placement, plain.num_microbatches)
    wrong = wrong or verify(lower(twin, capacity=capacity))
    enough = max([*free.capacities.values(), *lower(twin).capacities.values()], default=1)
    remedy = f"{CAPACITY}={enough}\n{CAPACITY}=null"
    place = values.cite(CAPACITY)
    wrong = [replace(each, remedy=remedy, place=f"{each.place}\n{place}".strip()) for each in wrong]
    return ProvedSchedule(plain, schedule, wrong, run)


def presumed(values: ConfigValues, plain: Schedule, frozen_stages: int) -> ProvedSchedule:
    """`proved` for a schedule that a policy or a search made, which is sound by construction. The full check runs only
    if a capacity is set, which may block a send, if the order is from a user's file, or if `lower` finds a deadlock;
    otherwise the lowered schedule is taken without a check."""
    if values[CAPACITY] is not None or plain.name == FROM_FILE:
        return proved(values, plain, frozen_stages)
    try:
        lowered = lower(plain, batched=in_batches(values.config))
    except ScheduleError:
        return proved(values, plain, frozen_stages)
    return ProvedSchedule(plain, without_frozen(lowered, frozen_stages), [])


EXTRA = "pipeline.extra_warmup"

CLOSE = 1.005
"""A step counts as good as the best if it takes at most this much longer: smaller gains are not worth activations."""


def check_warmup(values: ConfigValues, choice: Choice, violations: Violations) -> None:
    """Add a violation for an extra warm-up that is no number, is more than ranks can use, or does nothing here."""
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
        message = f"{EXTRA}={extra}: the pairs of {OVERLAP} already run one more forward ahead"
        violations.append(Violation("PP-E215", EXTRA, message, place, {EXTRA: 0}, {OVERLAP: False}))
    elif extra > pp - 1:
        message = f"{EXTRA}={extra}: rank r of pp {pp} can run at most pp - 1 - r forwards more, here {pp - 1} to 0"
        violations.append(Violation("PP-E215", EXTRA, message, place, {EXTRA: pp - 1}, {EXTRA: AUTO}))


def decide_warmup(
    values: ConfigValues,
    sizes: ParallelSizes,
    choice: Choice,
    costs: Callable[[], Costs],
    make: Callable[[int], ProvedSchedule],
    price: Callable[[Schedule], Sequence[RankCost]],
) -> tuple[int, tuple[Derived, ...]]:
    """The extra warm-up in forwards, and the equation if ppctl chose it.

    `auto` simulates the step as it runs at `costs()`, for 0, the powers of two below pp and pp - 1, and takes the
    smallest that is close to the best among those that fit into launch.device_memory. `make` returns the schedule of a
    warm-up, `price` the memory of its ranks.
    """
    if values[EXTRA] != AUTO:
        return values[EXTRA], ()
    if values[OVERLAP]:
        return 0, (
            Derived("extra_warmup", 0, f"extra_warmup 0: the pairs of {OVERLAP} already run one more forward ahead"),
        )
    if choice.policy is None or not choice.policy.extra_warmup or values["pp"] == 1:
        return 0, (
            Derived("extra_warmup", 0, f"extra_warmup 0: schedule {choice.name} on pp {values['pp']} needs none"),
        )
    limit = device_limit(values.config, sizes)

    def fits(schedule: Schedule) -> bool:
        return limit is None or max(cost.peak_bytes for cost in price(schedule)) <= limit.available_bytes

    def lowered(extra: int) -> Schedule:
        proof = make(extra)
        if proof.wrong:
            raise ScheduleError(proof.wrong)
        return proof.schedule

    prices = costs()
    times = simulated_steps(values["pp"], prices, lowered, fits)
    chosen = least_warmup(times)
    return chosen, (Derived("extra_warmup", chosen, _equation(chosen, times, prices, limit is not None)),)


def simulated_steps(
    pp: int, costs: Costs, make: Callable[[int], Schedule], fits: Callable[[Schedule], bool] = lambda schedule: True
) -> dict[int, float]:
    """Extra warm-up -> seconds of a step, for 0, powers of 2 and pp - 1, until the memory no longer `fits` or the
    schedule hangs (for none where that of 0 does)."""
    times: dict[int, float] = {}
    for extra in sorted({0, pp - 1, *(2**n for n in range(pp.bit_length()) if 2**n < pp)}):
        try:
            schedule = make(extra)
            if extra and not fits(schedule):
                break
            times[extra] = step_time(simulate(schedule, costs))
        except ScheduleError:
            break
    return times


def least_warmup(times: Mapping[int, float]) -> int:
    """The smallest warm-up whose step is close to the best; 0 if none was simulated."""
    return next((extra for extra, seconds in times.items() if seconds <= CLOSE * min(times.values())), 0)


def _equation(chosen: int, times: Mapping[int, float], costs: Costs, limited: bool) -> str:
    message = max(costs.messages.values(), default=costs.message)
    tried = ", ".join(f"{extra}: {seconds:.4g} s" for extra, seconds in times.items())
    within = f" within {LIMIT}" if limited else ""
    return (
        f"extra_warmup {chosen}: the least{within} that is close to the best simulated step ({tried}; "
        f"messages of up to {message * 1e3:.3g} ms)"
    )
