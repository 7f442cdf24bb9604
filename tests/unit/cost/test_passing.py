"""What sharding of gradients and weights holds only at times, against lists counted by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from ppctl.cost.state import PRECISIONS, Most, Passing, most, passing
from ppctl.schedule.action import Action
from ppctl.topology import ParallelSizes

FIRST, THIRD = Passing(10, 100, 50, 0, 0), Passing(20, 200, 100, 0, 0)


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        # At the end: whole gradients on their way, and the part that they become.
        ("0F0 0B0", (10, 100, 150)),
        ("0F0 0F1 0B0 0B1", (10, 100, 150)),
        ("0F0 0I0 0W0", (10, 100, 150)),
        # Breadth first: stage 2 is through before stage 0 begins with its gradients, whose sums are under way then.
        ("0F0 2F0 2B0 0B0", (30, 300, 410)),
        ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", (30, 300, 411)),
        # All stages are open at once; then stage 2 leaves, beside stage 0 and a microbatch of it.
        ("0F0 2F0 2B0 0F1 0B0 2F1 2B1 0B1", (30, 300, 10 + 300 + 100 + 1)),
        ("", (0, 0, 0)),
    ],
)
def test_weights_live_from_first_forward_to_last_backward_and_gradients_until_they_are_parts(actions, expected) -> None:
    found = most(list(map(Action.parse, actions.split())), [1, 0, 1], [1, 0, 1], [0, 0, 0], {0: FIRST, 2: THIRD})
    assert found == expected


def test_weights_begin_to_travel_beside_the_forward_before() -> None:
    actions = list(map(Action.parse, ["0F0", "0F1", "2F0"]))
    alone = most(actions[:1], [1, 0, 1], [1, 0, 1], [0, 0, 0], {0: FIRST, 2: THIRD})
    beside = most(actions, [1, 0, 0], [1, 0, 0], [0, 0, 0], {0: FIRST, 2: THIRD})
    # Without a backward a stage keeps nothing for one: the third forward has its own microbatch alone.
    assert (alone.weights, beside.weights, beside.total) == (10, 30, 31)


def test_what_travels_is_counted_beside_what_it_becomes() -> None:
    stage = Passing(10, 100, 50, 7, 70)
    assert most([Action.parse("0F0")], [1], [1], [0], {0: stage}).total == 17
    assert most(list(map(Action.parse, ["0F0", "0B0"])), [1], [1], [0], {0: stage}).total == 170


@pytest.mark.parametrize(
    ("limit", "arriving", "leaving"),
    [
        # One copy of all 60 dense parameters; that of 40 of experts comes when the dense ones are a part of 15.
        (1000, (60 // 4 + 40 // 2 + 60) * 2, max(60, 15 + 40) * 4),
        # Dense parts are there (15), and experts' but for the last 30 of 40 (5). Beside the copy of 30 is its part (15)
        # before the last tensor of 20 is free.
        (30, (60 // 4 + 40 // 2 + 30) * 2, (15 + 5 + 20 + 15) * 4),
        # Experts' only tensor is larger than what travels at once.
        (7, (60 // 4 + 40 // 2 + 40) * 2, (15 + 40 + 20) * 4),
    ],
)
def test_a_stage_holds_its_part_and_sends_a_bucket_of_one_group_at_a_time(limit, arriving, leaving) -> None:
    count = Counter({("tp",): 40, (): 20, ("ep", "etp"): 80})
    matrices = 20, 20 if limit > 7 else 40
    found = passing(count, ParallelSizes(4, dp=4, ep=2, edp=2), PRECISIONS["bfloat16"], matrices, limit)
    assert found[:5] == (100 * 2, 100 * 4, (60 // 4 + 40 // 2) * 4, arriving, leaving)


def most_of(actions: str, **more: Any) -> Most:
    """Of a rank whose weights are whole all the time, and whose microbatches have one byte on stage 0."""
    stages = {0: FIRST._replace(weights=0, leaving=70), 2: THIRD._replace(weights=0, leaving=70)}
    row = list(map(Action.parse, actions.split()))
    return most(row, [1, 0, 0], [1, 0, 0], [30, 0, 0], stages, **more)


@pytest.mark.parametrize(
    ("actions", "gradients", "total"),
    [
        ("0F0 0B0", 100, 100 + 70),
        # Stage 2's gradients (200) are freed before stage 0's leave, and are a part (100) by then.
        ("2F0 0F0 2B0 0B0", 300, max(200 + 70, 200 + 100 + 100)),
        # Stage 2's wait for stage 0's sums, which come behind another microbatch of it.
        ("2F0 0F0 0F1 2B0 0B0 0B1", 300, 200 + 100 + 100 + 1 + 30),
    ],
)
def test_gradients_that_are_parts_already_are_not_beside_those_of_later_chunks(actions, gradients, total) -> None:
    assert most_of(actions) == (0, gradients, total)


@pytest.mark.parametrize(
    ("calls", "total"),
    [
        (1, max(1 + 200 + 70, 200 + 100 + 100)),
        # Stage 0's from the first call are there beside stage 2's sums and their parts, in its own backward.
        (2, 200 + 100 + 100 + 1 + 30),
        (3, 200 + 100 + 100 + 1 + 30),
    ],
)
def test_no_call_but_the_last_gives_gradients_back(calls, total) -> None:
    assert most_of("2F0 0F0 2B0 0B0", calls=calls) == (0, 300, total)


def test_memory_of_messages_is_not_given_back() -> None:
    actions = "0F0 0F1 0F2 0B0 0B1 0B2"
    fresh, again = (most_of(actions, received=[size, 0, 0]).total for size in (0, 1))
    assert (fresh, again) == (100 + 70, 3 + 100 + 70)
