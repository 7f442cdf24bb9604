"""A slow rank is named soon, and none in quiet steps, whatever the noise of single steps."""

from __future__ import annotations

import json

import numpy as np
import pytest
from recorded_stamps import BY, FILE, FROM, QUIET, RANK

from ppctl.launch.planning import planned
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.trace import step_time
from ppctl.train.stragglers import WINDOW, Stragglers

SIZES = ("+recipe=quickstart", "pp=4", "vpp=1", "layout=null", "dp=8", "gbs=64", "mbs=1", "model.num_layers=4")


def ranks() -> tuple[object, np.ndarray]:
    plan = planned(SIZES, for_training=False)[1]
    own = [[spec.stage for spec in plan.for_rank(rank).stages] for rank in range(plan.sizes.world)]
    return plan, np.array(own)


def steps_of(rng: np.random.Generator, stages: np.ndarray, noise: float) -> np.ndarray:
    """Seconds of one step [ranks, chunks]: a stage's work, noise of all ranks alike and of each, and hiccups."""
    work = 1.0 + 0.3 * stages
    hiccups = np.where(rng.random(stages.shape) < 0.01, rng.uniform(1.5, 6.0, stages.shape), 1.0)
    return work * rng.lognormal(0, noise) * rng.lognormal(0, noise, stages.shape) * hiccups


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03, 0.05])
def test_no_rank_is_named_in_a_thousand_quiet_steps(noise: float) -> None:
    plan, stages = ranks()
    watch, rng = Stragglers(plan, stages), np.random.default_rng(7)
    assert [watch.note(step, steps_of(rng, stages, noise)) for step in range(1000)] == [None] * 1000


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("rank", [0, 13, 31])
def test_a_rank_that_is_ten_per_cent_slower_is_named_within_twenty_steps_with_what_it_costs(rank, noise) -> None:
    plan, stages = ranks()
    watch, rng, named = Stragglers(plan, stages), np.random.default_rng(rank), {}
    for step in range(60):
        seconds = steps_of(rng, stages, noise)
        seconds[rank] *= 1.1 if step >= 30 else 1.0
        if (problem := watch.note(step, seconds)) is not None:
            named[step] = problem
    (step, problem), *more = named.items()
    assert not more and 30 < step < 30 + WINDOW
    assert problem.code == "PP-E825" and f"rank {rank} (stage {stages[rank, 0]})" in problem.message
    assert "nvidia-smi" in problem.remedy
    if not noise:
        work = [1.0 + 0.3 * stage for stage in range(4)]
        slow = [each * (1.1 if stage == stages[rank, 0] else 1.0) for stage, each in enumerate(work)]
        base, longer = (step_time(simulate(plan.schedule, Costs(each, [2 * x for x in each]))) for each in (work, slow))
        assert f"{longer / base - 1:.1%} longer" in problem.message


# As ranks have stamped them (tests/helpers/recorded_stamps.py)


def recorded(which: str) -> tuple[object, np.ndarray, np.ndarray]:
    """(plan, stages, seconds [steps, ranks, chunks]) of a recorded run."""
    sizes = ("+recipe=quickstart", "pp=2", "vpp=1", "layout=null", "dp=4", "gbs=16", "mbs=2", "model.num_layers=4")
    plan = planned(sizes, for_training=False)[1]
    own = [[spec.stage for spec in plan.for_rank(rank).stages] for rank in range(8)]
    return plan, np.array(own), np.array(json.loads(FILE.read_text())[which]) / 1e6


def quieter(seconds: np.ndarray, stages: np.ndarray) -> np.ndarray:
    """The same stamps with half of the noise (in logarithms): 3.7 % between a rank and its peers."""
    usual = np.stack([np.median(seconds[:, stages[:, 0] == stage[0]]) for stage in stages])[:, None]
    return np.sqrt(seconds * usual)


def test_no_rank_is_named_in_a_thousand_recorded_quiet_steps_with_half_of_a_busy_machines_noise() -> None:
    plan, stages, seconds = recorded("quiet")
    assert len(seconds) == QUIET == 1000
    watch = Stragglers(plan, stages)
    assert [watch.note(step, each) for step, each in enumerate(quieter(seconds, stages))] == [None] * QUIET


@pytest.mark.parametrize("half", [False, True])
def test_a_rank_that_really_computed_ten_per_cent_longer_is_named_within_twenty_steps(half: bool) -> None:
    """In the whole noise of a machine that others use, and in half of it; there no other rank is named."""
    plan, stages, seconds = recorded("slow")
    factor = np.where((np.arange(len(seconds)) >= FROM)[:, None, None] & (np.arange(8) == RANK)[:, None], BY, 1.0)
    seconds = quieter(seconds / factor, stages) * factor if half else seconds
    watch = Stragglers(plan, stages)
    named = [(step, problem) for step, each in enumerate(seconds) if (problem := watch.note(step, each)) is not None]
    found = [step for step, problem in named if f"rank {RANK} (stage 1)" in problem.message]
    assert len(found) == 1 and FROM < found[0] < FROM + WINDOW
    assert len(named) == 1 or not half


def test_of_two_ranks_the_slower_one_is_named_and_a_rank_without_peers_never() -> None:
    two = planned([*SIZES[:4], "dp=2", "gbs=16", *SIZES[6:]], for_training=False)[1]
    for sizes, has_peers in ((two, True), (planned([*SIZES[:4], "gbs=8", *SIZES[6:]], for_training=False)[1], False)):
        own = np.array([[spec.stage for spec in sizes.for_rank(rank).stages] for rank in range(sizes.sizes.world)])
        watch, said = Stragglers(sizes, own), []
        for step in range(WINDOW + 1):
            seconds = np.ones(own.shape)
            seconds[-1] = 1.2
            said += filter(None, [watch.note(step, seconds)])
        assert [f"rank {len(own) - 1} " in problem.message for problem in said] == [True] * has_peers


def test_a_step_without_times_is_no_step() -> None:
    """On a GPU the times of the first step are not read yet."""
    plan, stages = ranks()
    watch = Stragglers(plan, stages)
    assert watch.note(1, np.zeros(stages.shape)) is None and watch.steps == 0
