"""How many samples each step takes: one global batch size, or a batch that grows with the samples consumed.

Pure functions of the config: no cut and no resume changes them.
Source: Megatron-core's RampupBatchsizeNumMicroBatchesCalculator, in whole numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from ppctl.config.keys import Finding
from ppctl.config.pieces import MOST_SIZES, Rampup, read_rampup
from ppctl.config.schema import RunConfig, TrainConfig

STEPS, LENGTHS = "train.steps", ("train.samples", "train.tokens")
"""The keys that give the length of a run: in steps, and in other units."""
MICRO_BATCH = ("train.micro_batch_size", "pipeline.pp_microbatch_size")
"""Two names of one value."""


class Segment(NamedTuple):
    """Steps of one size that follow each other; the last segment has no end."""

    step: int
    """Completed steps before the segment."""
    sample: int
    """Samples consumed before the segment."""
    size: int
    """Samples of each of its steps."""


Spans = Sequence[tuple[int, int]]
"""Ranges (begin, end) of positions in the data."""


class BatchSizes:
    """The size of every step from a position on, in segments: a step's size depends on the samples consumed before."""

    def __init__(self, full: int, rampup: Rampup | None = None, step: int = 0, consumed: int = 0) -> None:
        self.segments = list(_segments(full, rampup, step, consumed))

    @classmethod
    def of(cls, train: TrainConfig, step: int = 0, consumed: int = 0) -> BatchSizes:
        """The sizes of a config, after `step` completed steps that took `consumed` samples."""
        return cls(train.global_batch_size, rampup_of(train), step, consumed)

    def pass_by(self, spans: Spans) -> None:
        """Change the segments so that no step reads a sample of `spans`: one that would begins at the span's end."""
        for first, end in sorted(spans):
            begin = self.segments[-1]  # the last: no run goes back while its batch grows
            if begin.sample < end:
                steps = max(0, (first - begin.sample) // begin.size)
                self.segments[len(self.segments) - (not steps) :] = [Segment(begin.step + steps, end, begin.size)]

    def at(self, step: int) -> int:
        """Samples of the step that follows `step` completed ones."""
        return self._of_step(step).size

    def position(self, step: int) -> int:
        """Samples consumed by `step` completed steps."""
        begin = self._of_step(step)
        return begin.sample + (step - begin.step) * begin.size

    def steps_for(self, samples: float) -> int:
        """The fewest completed steps that have consumed `samples` samples."""
        begin = self.segments[max(bisect_right(self.segments, samples, key=lambda segment: segment.sample) - 1, 0)]
        return max(0, begin.step - int((begin.sample - samples) // begin.size))

    def _of_step(self, step: int) -> Segment:
        return self.segments[max(bisect_right(self.segments, step, key=lambda segment: segment.step) - 1, 0)]


def rampup_of(train: TrainConfig) -> Rampup | None:
    """How the batch grows; None if it does not."""
    return None if train.batch_rampup is None else read_rampup(train.batch_rampup)


def _segments(full: int, rampup: Rampup | None, step: int, consumed: int) -> Iterator[Segment]:
    """Yield the segments: size k of n (from 0) holds while less than (k + 1) / n of the ramp's samples is consumed."""
    sizes: range | list[int] = [] if rampup is None else rampup.sizes(full)
    sizes = sizes if len(sizes) <= MOST_SIZES else []  # `broken_rules` reports it
    for number, size in enumerate(sizes, start=1):
        assert rampup is not None
        steps = -((consumed * len(sizes) - number * rampup.samples) // (size * len(sizes)))
        if steps > 0:
            yield Segment(step, consumed, size)
            step, consumed = step + steps, consumed + steps * size
    yield Segment(step, consumed, full)


def as_from_the_start(train: TrainConfig, step: int, consumed: int) -> bool:
    """Whether each step from this position on is as large as in a run that begins with the plan's first step."""
    whole = BatchSizes.of(train).segments
    ends = [*(after.step for _, after in pairwise(whole)), None]
    planned = [
        (max(each.step, step), each.size) for each, end in zip(whole, ends, strict=True) if (end or step + 1) > step
    ]
    return planned == [(each.step, each.size) for each in BatchSizes.of(train, step, consumed).segments]


StepsFor = Callable[[float], int]
"""A number of tokens -> the fewest completed steps that have consumed as many."""


def steps_for_tokens(config: RunConfig) -> StepsFor:
    """Return a function from tokens to steps, counted from the run's first step even if the run was resumed."""
    sizes, length = BatchSizes.of(config.train), config.data.seq_length
    return lambda tokens: sizes.steps_for(tokens / length)


def at_size(config: RunConfig, size: int) -> RunConfig:
    """A copy of `config` in which every step takes `size` samples."""
    return replace(config, train=replace(config.train, global_batch_size=size, batch_rampup=None))


def run_length(config: RunConfig) -> int | None:
    """The whole steps that `train.samples` or `train.tokens` fill, at least 1; None if neither is set."""
    train = config.train
    if train.samples is None and train.tokens is None:
        return None
    samples = int(train.samples if train.samples is not None else (train.tokens or 0) // config.data.seq_length)
    sizes = BatchSizes.of(train)
    steps = sizes.steps_for(samples)
    return max(1, steps if sizes.position(steps) == samples else steps - 1)


def broken_rules(config: RunConfig) -> Iterator[Finding]:
    """Findings about a run length that is given twice, and about a batch ramp-up that no plan can follow."""
    train, key, full = config.train, "train.batch_rampup", "train.global_batch_size"
    if train.samples is not None and train.tokens is not None:
        message = "the length of the run is given twice: in samples and in tokens"
        yield ("train.samples", "train.tokens"), message, "train.tokens=null"
    elif (steps := run_length(config)) not in (None, train.steps):
        given = "train.tokens" if train.samples is None else "train.samples"
        message = f"train.steps is {train.steps:,}, but {given} fills {steps:,} steps"
        yield ("train.steps", given), message, f"{given}=null"
    if (rampup := rampup_of(train)) is None:
        return
    grows = train.global_batch_size - rampup.start
    if grows <= 0:
        message = f"the batch begins with {rampup.start} samples and cannot grow to {train.global_batch_size}"
        yield (key, full), message, f"{key}=null"
    elif grows % rampup.increment:
        message = f"{rampup.start} + n x {rampup.increment} is never {train.global_batch_size}"
        # The largest divisor up to the increment that gives at most MOST_SIZES sizes, else the whole distance.
        smaller = range(min(rampup.increment, grows), grows // MOST_SIZES, -1)
        fitting = next((n for n in smaller if grows % n == 0), grows)
        yield (key, full), message, f"'{key}=[{rampup.start}, {fitting}, {rampup.samples}]'"
    elif grows // rampup.increment > MOST_SIZES:
        message = f"the batch takes {grows // rampup.increment:,} sizes on its way; a plan holds at most {MOST_SIZES}"
        fitting = next(n for n in range(-(-grows // MOST_SIZES), grows + 1) if grows % n == 0)
        yield (key,), message, f"'{key}=[{rampup.start}, {fitting}, {rampup.samples}]'"


def last_steps(segments: list[Segment], steps: int) -> list[tuple[Segment, int]]:
    """Each segment that a run of `steps` steps reaches, with the segment's last step (counted from 1)."""
    ends = [after.step for _, after in pairwise(segments)] + [steps]
    return [(each, min(end, steps)) for each, end in zip(segments, ends, strict=True) if each.step < steps]
