"""A growing batch: the steps of each size, and whether every ramp-up size can be run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import gcd

from ppctl.config.batch_sizes import BatchSizes, Segment, last_steps
from ppctl.config.pieces import MOST_SIZES, read_rampup
from ppctl.config.schema import RunConfig
from ppctl.errors import some
from ppctl.plan.schedule_choice import CSV, MOST_ACTIONS, SCHEDULE, Choice
from ppctl.plan.sizes import CALL, BatchSplit, derive_batch, nearest_divisors
from ppctl.plan.types import Derived
from ppctl.plan.violations import ConfigValues, Overrides, Violation, Violations

RAMPUP = "train.batch_rampup"

GrowingBatch = tuple[Segment, int, BatchSplit]
"""A ramp-up size, below the global batch size: its segment, its number of steps, and how it is cut."""


def derive_sizes(values: ConfigValues, dp: int) -> tuple[GrowingBatch, ...]:
    """The ramp-up sizes of a run from its first step; none if one does not fit (`check_sizes`)."""
    if values[RAMPUP] is None:
        return ()
    ramp = []
    for segment, after in pairwise(BatchSizes.of(values.config.train).segments):
        batch = derive_batch(values.overridden({"gbs": segment.size, RAMPUP: None}), dp, [])
        if batch is None:
            return ()
        ramp.append((segment, after.step - segment.step, batch))
    return tuple(ramp)


def check_sizes(
    values: ConfigValues, dp: int, batch: BatchSplit, choice: Choice, num_stages: int, violations: Violations
) -> None:
    """Add a violation for ramp-up sizes that are no whole number of microbatches, or that the schedule cannot run."""
    if values[RAMPUP] is None or violations:
        return
    rampup, full = read_rampup(values[RAMPUP]), values["gbs"]
    sizes = rampup.sizes(full)
    if len(sizes) > MOST_SIZES or not len(sizes) or (full - rampup.start) % rampup.increment:
        return  # `batch_sizes.broken_rules` reports it
    pp, mbs, call = values["pp"], batch.micro_batch_size, values[CALL] if values.is_set(CALL) else None
    least = 1 if choice.policy is None or choice.searched or call else choice.policy.needs_microbatches(pp)
    unit = dp * (call or mbs)
    unfit = {size: f"{size} samples" for size in sizes if size % unit}
    few = {s: f"{s} samples, {s // unit} microbatches" for s in sizes if s not in unfit and s // unit < least}
    place = values.cite(RAMPUP, "gbs", "mbs", *[CALL] * (call is not None), "dp", SCHEDULE, CSV)
    if unfit or few:
        bad = list((unfit | few).values())
        what = f"a multiple of dp {dp} x {f'{CALL} {call}' if call else f'micro_batch_size {mbs}'} = {unit}"
        what += f", at least {least} microbatches for {choice.name}" * (least > 1)
        message = f"a batch that grows takes sizes that do not fit: {some(bad, 3, '; ')}; each must be {what}"
        violations.append(Violation("PP-E138", RAMPUP, message, place, *_fitting(values, unit, least)))
        return
    if call is None and (choice.searched or choice.schedule is not None):
        kind = "auto, which is searched for one number of microbatches" if choice.searched else "of one length"
        message = f"a batch that grows runs more and more microbatches, but the schedule is {kind}"
        part = gcd(rampup.start, rampup.increment, full) // dp
        ways: list[Overrides] = [{CALL: part}] if part % mbs == 0 and choice.schedule is None else []
        violations.append(Violation("PP-E139", RAMPUP, message, place, *ways, {RAMPUP: None}))
        return
    actions = 2 * num_stages * sum(size // unit for size in sizes) if call is None else 0
    if actions > MOST_ACTIONS:
        message = (
            f"the schedules of a growing batch's {len(sizes)} sizes have {actions:,} forwards and backwards, but "
            f"a plan holds at most {MOST_ACTIONS:,}"
        )
        fewer = _fitting(values, unit * -(-actions // MOST_ACTIONS), 1)
        violations.append(Violation("PP-E138", RAMPUP, message, place, *fewer, {RAMPUP: None}))


def _fitting(values: ConfigValues, unit: int, least: int) -> Iterator[Overrides]:
    """Overrides: a ramp like the asked one with sizes of `least` or more whole `unit`s, and then no ramp."""
    rampup, full = read_rampup(values[RAMPUP]), values["gbs"]
    start = max(-(-rampup.start // unit), least) * unit
    if start < full:  # one is enough: judging a candidate needs a plan
        increment = nearest_divisors((full - start) // unit, max(1, rampup.increment // unit))[0]
        yield {RAMPUP: [start, increment * unit, rampup.samples]}
    yield {RAMPUP: None}


def in_words(config: RunConfig) -> tuple[Derived, ...]:
    """Lines on the growth of the batch and on the length of the run; none if the config says nothing of these."""
    train, sizes = config.train, BatchSizes.of(config.train)
    lines: list[Derived] = []
    reached = last_steps(sizes.segments, train.steps)
    if train.batch_rampup is not None:
        start, increment, samples = read_rampup(train.batch_rampup)
        count = len(sizes.segments) - 1
        until = sizes.segments[-1].step
        equation = (
            f"the batch grows from {start:,} by {increment:,} to {train.global_batch_size:,} samples while "
            f"{samples:,} are consumed: {count} size{'s' if count > 1 else ''} in {until:,} steps"
        )
        if len(reached) <= count:
            equation += f"; the run ends before, after {train.steps:,}"
        lines.append(Derived("batch_rampup", [each.size for each in sizes.segments], equation))
    if train.batch_rampup is not None or train.samples is not None or train.tokens is not None:
        total = sizes.position(train.steps)
        equation = f"{train.steps:,} steps take {total:,} samples, {total * config.data.seq_length:,} tokens"
        lines.append(Derived("steps", train.steps, equation))
    return tuple(lines)
