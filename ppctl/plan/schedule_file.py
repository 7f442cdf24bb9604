"""The schedule from a CSV file (`pipeline.pp_schedule_csv`), and its disagreements with the sizes.

One of the two files that planning reads (`profile` reads the other).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ppctl.errors import ScheduleError
from ppctl.plan.layout_choice import LayoutCut
from ppctl.plan.schedule_choice import CSV, FROM_FILE, SCHEDULE, Choice
from ppctl.plan.sizes import CALL, BatchSplit
from ppctl.plan.types import Derived
from ppctl.plan.violations import ConfigValues, Violation, Violations
from ppctl.schedule.action import Schedule
from ppctl.schedule.policies import POLICIES, schedule_policy
from ppctl.schedule.schedule_request import CODE, read_schedule
from ppctl.schedule.verify import out_of_order

_WITHOUT = {CSV: None}


def read_schedule_file(values: ConfigValues, violations: Violations) -> Schedule | None:
    """The schedule in the file; None if no file is set or, with violations, if it cannot be used."""
    if values[CSV] is None:
        return None
    try:
        return replace(read_schedule(values[CSV]), name=FROM_FILE)
    except ScheduleError as error:
        for problem in error.problems:
            place = f"{values[CSV]}, {problem.place}" if problem.place else values.cite(CSV)
            violations.append(
                Violation(problem.code, f"{CSV} {problem.place}".rstrip(), problem.message, place, _WITHOUT)
            )
    return None


def chunks_wanted(values: ConfigValues, schedule: Schedule | None) -> tuple[int, str] | None:
    """(the number of chunks per rank that the schedule needs, why); None if it needs no particular number."""
    if schedule is not None:
        stages, pp = schedule.placement.num_stages, schedule.placement.pp
        return max(1, stages // pp), f"{values[CSV]} has {stages} stages on {pp} rows"
    policy = POLICIES.get(schedule_policy(values[SCHEDULE]) or "")
    if values[CSV] is None and policy is not None and policy.placement == "v":
        return policy.chunks, f"schedule {values[SCHEDULE]} goes down a V and back up"
    return None


def choose_file(
    values: ConfigValues, schedule: Schedule, cut: LayoutCut | None, batch: BatchSplit | None, violations: Violations
) -> Choice | None:
    """The schedule of the file; None, with violations, if its rows, stages or microbatches do not fit the run."""
    wrong = list(_disagreements(values, schedule, cut, batch))
    violations += wrong
    if wrong:
        return None
    kind = "V" if schedule.placement.kind == "v" else "loop"
    stages, pp = schedule.placement.num_stages, schedule.placement.pp
    equation = f"schedule {values[CSV]}: {stages} stages placed as a {kind} over pp {pp}"
    derived = [Derived("schedule", FROM_FILE, equation)]
    if late := out_of_order(schedule):
        stage, (before, action) = min(late.items())
        equation = (
            f"bits are not promised: {len(late)} of {stages} stages add up gradients in another order than that of the "
            f"microbatches: stage {stage}, for one, adds those of {before} before those of {action}"
        )
        derived.append(Derived("order of sums", "not by microbatch", equation))
    return Choice(FROM_FILE, tuple(derived), schedule)


def _disagreements(
    values: ConfigValues, schedule: Schedule, cut: LayoutCut | None, batch: BatchSplit | None
) -> Iterator[Violation]:
    """Yield violations if pp, the stages or the microbatches of a file's schedule differ from the config's; if pp
    differs, only that one."""
    path, rows, stages = values[CSV], schedule.placement.pp, schedule.placement.num_stages
    if rows != values["pp"]:
        message = f"{path} has {rows} rows, one for each pp_rank, but pp is {values['pp']}"
        yield Violation(CODE, "pp", message, values.cite(CSV, "pp"), {"pp": rows}, _WITHOUT)
        return
    if cut is not None and stages != cut.vpp * rows:
        message = f"{path} runs {stages} stages, but pp {rows} x vpp {cut.vpp} = {rows * cut.vpp}"
        ways = ({"vpp": stages // rows}, {"vpp": None, "layout": None}, _WITHOUT)
        yield Violation(CODE, "vpp", message, values.cite(CSV, "vpp", "layout"), *ways)
    count = schedule.num_microbatches
    if batch is not None and count != batch.num_microbatches:
        message = f"{path} runs {count} microbatches, but the batch has {batch.num_microbatches}"
        gbs = values["gbs"] // batch.num_microbatches * count
        place = values.cite(CSV, "gbs", "mbs", "dp", *[CALL] * values.is_set(CALL))
        part = {CALL: batch.micro_batch_size * count}
        yield Violation(CODE, "gbs", message, place, part, {"gbs": gbs}, _WITHOUT)
