"""A batch that grows, against Megatron's own loop, and its rules."""

import random
from pathlib import Path

import pytest

from ppctl.checkpoint.verification import misplaced
from ppctl.config.batch_sizes import BatchSizes, as_from_the_start, run_length
from ppctl.config.checks import check
from ppctl.config.compose import RefusedError, compose
from ppctl.config.pieces import Rampup
from ppctl.config.schema import RunConfig


def by_megatron(full, rampup, consumed):
    """RampupBatchsizeNumMicroBatchesCalculator.update, with whole numbers."""
    if consumed > rampup.samples:
        return full
    increments = (full - rampup.start) // rampup.increment
    return min(full, rampup.start + consumed * increments // rampup.samples * rampup.increment)


def drawn(count):
    draw = random.Random(17)
    for _ in range(count):
        start, increment = draw.randint(1, 9), draw.randint(1, 6)
        yield start + increment * draw.randint(1, 7), Rampup(start, increment, draw.randint(1, 400))


def test_every_step_takes_what_megatrons_loop_takes_and_counts_as_many_samples():
    for full, rampup in drawn(200):
        sizes, consumed = BatchSizes(full, rampup), 0
        for step in range(120):
            size = by_megatron(full, rampup, consumed)
            assert (sizes.at(step), sizes.position(step)) == (size, consumed), (full, rampup, step)
            assert sizes.steps_for(consumed) == step
            assert sizes.steps_for(consumed + 1) == step + 1
            consumed += size


def test_a_run_that_goes_on_from_any_step_takes_the_same_batches():
    for full, rampup in drawn(40):
        whole = BatchSizes(full, rampup)
        for begin in (0, 1, 5, 17, 60):
            later = BatchSizes(full, rampup, begin, whole.position(begin))
            for step in range(begin, begin + 50):
                assert (later.at(step), later.position(step)) == (whole.at(step), whole.position(step))


def test_a_position_that_a_ramp_does_not_pass_is_told_from_one_that_it_does():
    config = RunConfig()
    train = config.train
    train.global_batch_size, train.batch_rampup = 12, [4, 4, 24]
    whole = BatchSizes.of(train)
    assert [each.size for each in whole.segments] == [4, 8, 12]
    for step in range(40):
        assert as_from_the_start(train, step, whole.position(step)), step
        assert as_from_the_start(train, step, 12 * step) == (step in (0, *range(5, 40))), step
    state = {"step": 3, "consumed_samples": 36, "seq_length": config.data.seq_length, "seed": train.seed}
    (problem,) = misplaced(Path("step-3"), state, config, None)
    assert (problem.code, problem.remedy) == ("PP-E423", "train.batch_rampup=null")
    train.batch_rampup = None
    assert misplaced(Path("step-3"), state, config, None) == []


@pytest.mark.parametrize(
    ("typed", "steps", "source"),
    [
        (["train.samples=100", "gbs=8"], 12, "derived: train.samples"),
        (["train.samples=3", "gbs=8"], 1, "derived: train.samples"),
        (["--train-samples", "100", "gbs=8"], 12, "derived: train.samples"),
        (["train.tokens=25600", "gbs=8", "seq=256"], 12, "derived: train.tokens"),
        (["train.samples=100", "gbs=8", "--rampup-batch-size", "4", "2", "24"], 14, "derived: train.samples"),
    ],
)
def test_samples_and_tokens_say_how_long_a_run_is(typed, steps, source):
    from ppctl.config.argv import normalise

    found = compose(normalise(typed).overrides)
    assert (found.config.train.steps, found.provenance["train.steps"]) == (steps, source)
    sizes = BatchSizes.of(found.config.train)
    limit = found.config.train.samples or found.config.train.tokens / found.config.data.seq_length
    assert sizes.position(steps) <= max(limit, sizes.at(0)) < sizes.position(steps + 1)


def test_steps_of_the_command_line_stand_above_a_recipes_length_and_beside_none_of_its_own():
    assert run_length(RunConfig()) is None
    scaled = compose(["train.tokens=1e9", "+recipe=quickstart", "+scale=smoke"]).config.train
    assert scaled.tokens in (None, 1e9)
    with pytest.raises(RefusedError) as caught:
        compose(["train.steps=7", "train.samples=100", "train.global_batch_size=8"])
    (problem,) = caught.value.problems
    assert (problem.code, problem.remedy) == ("PP-E103", "train.samples=null")


@pytest.mark.parametrize(
    ("rampup", "full", "said", "remedy"),
    [
        ([8, 2, 100], 8, "cannot grow to 8", "train.batch_rampup=null"),
        ([2, 4, 100], 8, "is never 8", "'train.batch_rampup=[2, 3, 100]'"),
        ([1, 1, 100], 1000, "999 sizes", "'train.batch_rampup=[1, 9, 100]'"),
    ],
)
def test_a_ramp_that_does_not_end_at_the_global_batch_is_told_with_one_that_does(rampup, full, said, remedy):
    config = RunConfig()
    config.train.batch_rampup, config.train.global_batch_size = rampup, full
    (problem,) = check(config, {})
    assert said in problem.message
    assert problem.remedy == remedy


def test_no_step_reads_a_sample_of_a_span_that_is_passed_by_and_nothing_else_is_left_out_but_a_part_of_a_batch():
    draw = random.Random(3)
    for _ in range(2000):
        full, consumed = draw.randint(1, 7), draw.randint(0, 40)
        firsts = [draw.randint(0, 90) for _ in range(draw.randint(1, 3))]
        passed = [(first, first + draw.randint(1, 30)) for first in firsts]
        sizes, position = BatchSizes(full, None, 5, consumed), consumed
        sizes.pass_by(passed)
        for step in range(5, 60):
            while over := [end for first, end in passed if first < position + full and position < end]:
                position = min(over)
            assert (sizes.position(step), sizes.at(step)) == (position, full)
            position += full
