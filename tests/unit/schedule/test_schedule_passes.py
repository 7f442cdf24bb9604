"""Lowering: where messages, receives and gradient sync stand, and how large the channels are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from pairwise import pairwise
from schedule_sizes import made, out_of_order, sample, v_shaped

from ppctl.errors import ScheduleError
from ppctl.schedule.action import (
    COMPUTE,
    MESSAGES,
    RECEIVES,
    Action,
    Channel,
    Op,
    Schedule,
    deps,
    receive_slots,
    send_slots,
)
from ppctl.schedule.passes import (
    BACKWARD_SECONDS,
    FORWARD_SECONDS,
    MESSAGE_SECONDS,
    add_messages,
    least_capacities,
    lower,
    place_gradient_sync,
)
from ppctl.schedule.policies import POLICIES, make_schedule
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.verify import verify

SAMPLE = [*map(made, sample(60)), v_shaped(), out_of_order()]


def default_costs(schedule: Schedule) -> Costs:
    return Costs.uniform(schedule.placement.num_stages, FORWARD_SECONDS, BACKWARD_SECONDS, MESSAGE_SECONDS)


def test_a_small_schedule_is_lowered_as_on_paper() -> None:
    lowered = lower(make_schedule("1f1b", pp=2, num_microbatches=3), capacity=3)
    assert lowered.to_csv().splitlines() == [
        "0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0F2,0SEND_F2,0RECV_B2,0B1,0B2,0REDUCE_GRAD",
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1RECV_F2,1F1,1B1,1SEND_B1,1F2,1B2,1SEND_B2,1REDUCE_GRAD",
    ]
    assert lowered.capacities == {Channel(0, 1, "F"): 3, Channel(1, 0, "B"): 3}


@pytest.mark.parametrize("schedule", SAMPLE, ids=lambda s: f"{s.name}-{s.placement.num_stages}-{s.num_microbatches}")
def test_lowering_adds_and_never_reorders(schedule: Schedule) -> None:
    for row, full in zip(schedule.actions, lower(schedule).actions, strict=True):
        assert tuple(action for action in full if action.op in COMPUTE) == row


@pytest.mark.parametrize("schedule", SAMPLE, ids=lambda s: f"{s.name}-{s.placement.num_stages}-{s.num_microbatches}")
def test_a_lowered_schedule_has_nothing_wrong_with_it(schedule: Schedule) -> None:
    assert verify(lower(schedule)) == []


@pytest.mark.parametrize("schedule", SAMPLE, ids=lambda s: f"{s.name}-{s.placement.num_stages}-{s.num_microbatches}")
def test_at_the_default_capacities_nothing_runs_later_than_without_limits(schedule: Schedule) -> None:
    free, limited = (simulate(s, default_costs(schedule)).spans for s in (schedule, lower(schedule)))
    assert [span for span in limited if span.action.op in COMPUTE] == list(free)


def _early(schedule: Schedule) -> list[str]:
    """Receives that are posted before something that their message comes of on the same rank, by `deps` alone."""
    place, found = schedule.placement, []
    comes_of: dict[Action, frozenset[Action]] = {}

    def ancestors(action: Action) -> frozenset[Action]:
        """Every forward and backward that an action follows from. Chains are followed from their beginnings."""
        chain = [action]
        while chain:
            needs = [before for before in deps(chain[-1], schedule) if before not in comes_of]
            if needs:
                chain += needs
                continue
            last = chain.pop()
            before = deps(last, schedule)
            own = {last} if last.op in COMPUTE else set()
            comes_of[last] = frozenset(own).union(*(comes_of[each] for each in before))
        return comes_of[action]

    for pp_rank, row in enumerate(schedule.actions):
        passed: set[Action] = set()
        for action in row:
            passed.add(action)
            if action.op in (Op.RECV_F, Op.RECV_B):
                own = {each for each in ancestors(action) if place.rank_of(each.stage) == pp_rank}
                found += [f"rank {pp_rank} posts {action} before {later}" for later in own - passed]
    return found


class _Lists:
    """A lowered schedule whose ranks run as far as they can, but for one that stops where it is told."""

    def __init__(self, schedule: Schedule, held: int) -> None:
        self.schedule, self.held = schedule, held
        self.at = [0] * len(schedule.actions)
        self.done: set[Action] = set()
        self.sent: Counter[Channel] = Counter()
        self.posted: Counter[Channel] = Counter()

    def advance(self, stop: int) -> None:
        while any(
            [self._run(r, row, stop if r == self.held else len(row)) for r, row in enumerate(self.schedule.actions)]
        ):
            pass

    def _run(self, pp_rank: int, row: tuple[Action, ...], end: int) -> bool:
        began = self.at[pp_rank]
        while self.at[pp_rank] < end and self._ready(row[self.at[pp_rank]]):
            action = row[self.at[pp_rank]]
            self.done.add(action)
            if action.op in MESSAGES:
                ledger = self.posted if action.op in RECEIVES else self.sent
                ledger[self.schedule.placement.channel(action)] += 1
            self.at[pp_rank] += 1
        return self.at[pp_rank] > began

    def _ready(self, action: Action) -> bool:
        if action.op in RECEIVES:
            return True
        if action.op in MESSAGES:
            channel = self.schedule.placement.channel(action)
            return self.sent[channel] < self.posted[channel] + send_slots(self.schedule.capacities[channel])
        for need in deps(action, self.schedule):
            ends = deps(need, self.schedule) if need.op in MESSAGES else (need,)
            if not self.done.issuperset(ends):
                return False
        return True


def _never_drained(schedule: Schedule) -> list[str]:
    """Where a rank's device could not drain although all others go on: posted receives that wait for later work."""
    found = []
    for held, own in enumerate(schedule.actions):
        lists = _Lists(schedule, held)
        for index, action in enumerate(own):
            if action.op not in MESSAGES:
                lists.advance(index)
                assert lists.at[held] == index, "the schedule hangs"
                late = [c for c in lists.posted if c.target == held and lists.posted[c] > lists.sent[c]]
                found += [f"rank {held} in front of {action}: {channel}" for channel in late]
    return found


def every_policy() -> Iterator[tuple[tuple[str, int, int, int], Schedule]]:
    """Each policy at the sizes where its lists differ in shape, and every way of using more channels or fewer."""
    for pp in range(2, 9):
        for vpp in range(1, 5):
            for m in sorted({1, pp - 1, pp, pp + 1, 2 * pp + 1}):
                for name in POLICIES:
                    with suppress(ScheduleError):
                        made = make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m, microbatch_group_size=pp)
                        yield (name, pp, vpp, m), made
                if vpp == 1:
                    made = make_schedule("1f1b", pp=pp, vpp=1, num_microbatches=m, extra_warmup=pp - 1)
                    yield ("1f1b, warmed up", pp, 1, m), made


@pytest.mark.parametrize("capacity", [None, 2, 5])
@pytest.mark.parametrize(
    "design",
    [
        pytest.param(pairwise, marks=pytest.mark.whole, id="pairs"),
        pytest.param(list, marks=[pytest.mark.soak, pytest.mark.timeout(480)], id="grid"),
    ],
)
def test_no_receive_is_posted_before_what_its_message_comes_of(design: Callable, capacity: int | None) -> None:
    seen, schedules = set(), dict(every_policy())
    for sizes in design(schedules):
        schedule = schedules[sizes]
        lowered = lower(schedule, capacity=capacity)
        if not verify(lowered):
            seen.add(schedule.name)
            assert _early(lowered) == [] == _never_drained(lowered), (schedule.name, schedule.placement)
    assert seen == POLICIES.keys()


@pytest.mark.parametrize("batched", [False, True])
def test_no_receive_is_posted_before_what_its_message_comes_of_in_a_sample(batched: bool) -> None:
    sampled = [s for _, s in every_policy() if s.placement.pp in (2, 3, 5) and s.num_microbatches <= 6]
    assert {schedule.name for schedule in sampled} == POLICIES.keys()
    for schedule in [*random.Random(7).sample(sampled, 40), *SAMPLE]:
        lowered = lower(schedule, batched=batched)
        assert _early(lowered) == []
        assert batched or schedule.placement.num_stages > 12 or _never_drained(lowered) == []


def test_one_less_on_any_channel_makes_something_late() -> None:
    for sizes in (
        ("1f1b", 4, 1, 9, 4),
        ("interleaved_1f1b", 3, 2, 8, 3),
        ("interleaved_1f1b", 3, 3, 11, 5),
        ("gpipe", 3, 2, 9, 3),
    ):
        schedule = made(sizes)
        costs = default_costs(schedule)
        free = simulate(schedule, costs)
        for channel, capacity in least_capacities(schedule).items():
            if capacity > 2:
                tight = lower_with(schedule, {**least_capacities(schedule), channel: capacity - 1})
                spans = [span for span in simulate(tight, costs).spans if span.action.op in COMPUTE]
                assert spans != list(free.spans), (sizes, channel)


def lower_with(schedule: Schedule, capacities: dict[Channel, int]) -> Schedule:
    return add_messages(place_gradient_sync(schedule), capacities)


@pytest.mark.parametrize(("pp", "vpp", "group"), [(2, 2, 2), (4, 2, 4), (4, 4, 4), (8, 2, 8), (8, 3, 11), (16, 2, 24)])
@pytest.mark.parametrize("rounds", [2, 8])
def test_capacity_does_not_grow_with_the_number_of_microbatches(pp: int, vpp: int, group: int, rounds: int) -> None:
    for name, chunks in (("1f1b", 1), ("interleaved_1f1b", vpp)):
        schedule = made((name, pp, chunks, rounds * group, group))
        assert max(least_capacities(schedule).values()) <= 2 * (group - pp) + 4


def test_a_channel_never_has_more_receives_posted_than_slots() -> None:
    for capacity in (1, 2, 3, 6):
        lowered = lower(make_schedule("interleaved_1f1b", pp=3, vpp=2, num_microbatches=7), capacity=capacity)
        for row in lowered.actions:
            posted: dict[Channel, int] = {}
            for op, stage, mb in row:
                used = Action({Op.F: Op.RECV_F, Op.B: Op.RECV_B}.get(op, op), stage, mb)
                if op in (Op.RECV_F, Op.RECV_B):
                    channel = lowered.placement.channel(used)
                    posted[channel] = posted.get(channel, 0) + 1
                    assert posted[channel] <= receive_slots(capacity)
                elif op in COMPUTE and used in row:
                    posted[lowered.placement.channel(used)] -= 1


def test_every_stage_reduces_its_gradients_once_after_its_last_backward() -> None:
    for schedule in SAMPLE:
        for row in lower(schedule).actions:
            for stage in {action.stage for action in row}:
                own = [a.op for a in row if a.stage == stage and a.op not in MESSAGES]
                backward = Op.B in own or Op.W in own
                assert own.count(Op.REDUCE_GRAD) == backward
                assert not backward or own[-1] is Op.REDUCE_GRAD


def test_receives_follow_the_order_of_the_sends_even_if_they_are_used_in_another() -> None:
    lowered = lower(out_of_order())
    receives = [action.mb for action in lowered.actions[1] if action.op is Op.RECV_F]
    assert receives == [0, 1, 2]
    assert lowered.actions[1].index(next(a for a in lowered.actions[1] if a.op is Op.F)) == 3  # all three stand before


def test_local_edges_carry_no_messages() -> None:
    assert not any(a.op in MESSAGES for row in lower(made(("gpipe", 1, 3, 4, 1))).actions for a in row)
    turning = [a for row in lower(v_shaped()).actions for a in row if a.op in (Op.SEND_F, Op.RECV_B) and a.stage == 1]
    assert turning == []


@pytest.mark.parametrize(
    ("schedule", "capacity", "code"),
    [
        (lower(made(("1f1b", 2, 1, 2, 2))), None, "PP-E307"),
        (lower(made(("1f1b", 1, 1, 2, 1))), None, "PP-E307"),
        (made(("1f1b", 2, 1, 2, 2)), 0, "PP-E308"),
    ],
)
def test_what_cannot_be_lowered_is_refused(schedule: Schedule, capacity: int | None, code: str) -> None:
    with pytest.raises(ScheduleError, match=code):
        lower(schedule, capacity=capacity)


def test_a_hanging_order_has_no_capacities() -> None:
    hanging = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(ScheduleError, match="PP-E317"):
        lower(hanging)
