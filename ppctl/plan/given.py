"""A schedule that the user gives as a file (`pipeline.pp_schedule_csv`), and what it says of the sizes.

The one file that planning reads. Knows that rows are pp_ranks, and how a file may disagree with the config. Must not
know the text form (`ppctl.schedule.action`) or what makes a schedule sound (`verify`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ppctl.config.schema import RunConfig
from ppctl.errors import Problem, ScheduleError
from ppctl.files import read_text
from ppctl.plan.cut import Cut
from ppctl.plan.findings import Finding, Findings
from ppctl.plan.plan import Plan
from ppctl.plan.said import Said
from ppctl.plan.sizes import CALL, Batch
from ppctl.plan.timing import CSV, GIVEN, SCHEDULE, Choice
from ppctl.plan.types import Derived
from ppctl.schedule.action import MESSAGES, Op, Schedule
from ppctl.schedule.policies import POLICIES, schedule_policy

CODE = "PP-E216"
_MOST_READ = 2**22
"""Bytes of a file: 4 MiB, twice what as many actions take as a plan holds."""
_WITHOUT = ((CSV, None),)


def read_given(said: Said, findings: Findings) -> Schedule | None:
    """The schedule in the file; None where none is given or, with findings, where it cannot be used."""
    if said[CSV] is None:
        return None
    try:
        text = read_text(said[CSV], _MOST_READ)
        schedule = Schedule.from_csv(text, name=GIVEN)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"the schedule file {said[CSV]} cannot be read: {reason}"
        findings.append(Finding(CODE, CSV, message, said.told(CSV), _WITHOUT))
        return None
    except ScheduleError as error:
        for problem in error.problems:
            place = f"{said[CSV]}, {problem.place}" if problem.place else said.told(CSV)
            findings.append(Finding(problem.code, f"{CSV} {problem.place}", problem.message, place, _WITHOUT))
        return None
    if any(action.op in MESSAGES for row in schedule.actions for action in row):
        message = f"{said[CSV]} holds messages; ppctl places its own: give the forwards and backwards alone"
        findings.append(Finding(CODE, CSV, message, said.told(CSV), _WITHOUT))
        return None
    rows = tuple(tuple(action for action in row if action.op is not Op.REDUCE_GRAD) for row in schedule.actions)
    return replace(schedule, actions=rows)


def chunks_wanted(said: Said, given: Schedule | None) -> tuple[int, str] | None:
    """How many chunks per rank the schedule asks for, where it does; and why."""
    if given is not None:
        stages, pp = given.placement.num_stages, given.placement.pp
        return max(1, stages // pp), f"{said[CSV]} has {stages} stages on {pp} rows"
    policy = POLICIES.get(schedule_policy(said[SCHEDULE]) or "")
    if said[CSV] is None and policy is not None and policy.placement == "v":
        return policy.chunks, f"schedule {said[SCHEDULE]} goes down a V and back up"
    return None


def take_given(said: Said, given: Schedule, cut: Cut | None, batch: Batch | None, findings: Findings) -> Choice | None:
    """The given schedule, if its rows, stages and microbatches are those of the run."""
    wrong = list(_disagreements(said, given, cut, batch))
    findings += wrong
    if wrong:
        return None
    kind = "V" if given.placement.kind == "v" else "loop"
    stages, pp = given.placement.num_stages, given.placement.pp
    equation = f"schedule {said[CSV]}: {stages} stages placed as a {kind} over pp {pp}"
    return Choice(GIVEN, (Derived("schedule", GIVEN, equation),), given)


def _disagreements(said: Said, given: Schedule, cut: Cut | None, batch: Batch | None) -> Iterator[Finding]:
    place, path = given.placement, said[CSV]
    if place.pp != said["pp"]:
        message = f"{path} has {place.pp} rows, one for each pp_rank, and pp is {said['pp']}"
        yield Finding(CODE, "pp", message, said.told(CSV, "pp"), (("pp", place.pp),), _WITHOUT)
        return
    if cut is not None and place.num_stages != cut.vpp * place.pp:
        message = f"{path} runs {place.num_stages} stages, and pp {place.pp} x vpp {cut.vpp} = {place.pp * cut.vpp}"
        ways = ((("vpp", place.num_stages // place.pp),), (("vpp", None), ("layout", None)), _WITHOUT)
        yield Finding(CODE, "vpp", message, said.told(CSV, "vpp", "layout"), *ways)
    count = given.num_microbatches
    if batch is not None and count != batch.num_microbatches:
        message = f"{path} runs {count} microbatches, and the batch has {batch.num_microbatches}"
        gbs = said["gbs"] // batch.num_microbatches * count
        told = said.told(CSV, "gbs", "mbs", "dp", *[CALL] * said.given(CALL))
        part = ((CALL, batch.micro_batch_size * count),)
        yield Finding(CODE, "gbs", message, told, part, (("gbs", gbs),), _WITHOUT)


def not_trained(config: RunConfig, plan: Plan) -> list[Problem]:
    """What keeps a given schedule that can be planned from being trained: split backwards, and overlapped pairs."""
    path = config.pipeline.pp_schedule_csv
    if path is None:
        return []
    missing = []
    if plan.schedule.split:
        stage, mb = min(plan.schedule.split)
        missing.append(f"backwards split into I and W ({stage}I{mb}, {stage}W{mb}, ...)")
    if "OVERLAP_F_B" in read_text(path, _MOST_READ):
        missing.append("OVERLAP_F_B cells")
    if not missing:
        return []
    message = f"this release plans {CSV}={path} but cannot train it yet: missing are {' and '.join(missing)}"
    return [Problem("PP-E118", message, f"{CSV}=null")]
