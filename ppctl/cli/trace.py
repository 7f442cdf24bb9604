"""`ppctl trace [RUN]`: a step as it was measured (`log.trace`) and its picture; `ppctl trace A B`: two runs' steps.

Knows a run's traced steps and its plan. Must not know the words (`trace_text`) nor torch.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppctl.cli import trace_text
from ppctl.cli.console import UNFOLDED, note, width
from ppctl.cli.longer import longer
from ppctl.cli.runs import add_run_arguments, named_run, program, short_path
from ppctl.cli.timeline import add_timeline_argument, write_timeline
from ppctl.cli.trace_text import SeenStep
from ppctl.config.batch_sizes import BatchSizes, at_size
from ppctl.config.quantities import steps_of
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.files import read_json
from ppctl.json_reader import read
from ppctl.plan import Plan
from ppctl.plan.plan_picture import picture
from ppctl.rundir import RunDir
from ppctl.runs import find_run
from ppctl.schedule.action import TIMED
from ppctl.schedule.measured_step import MeasuredStep, ledgers
from ppctl.topology import RankGrid

_MOST_OF_A_STEP = 2**27
"""Bytes of its file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    add_run_arguments(parser)
    words = "a second run, to show both side by side"
    parser.add_argument("other", nargs="?", metavar="B", help=words)
    parser.add_argument("--step", type=int, metavar="N", help="which of the traced steps (default: the last)")
    parser.add_argument(
        "--pipeline", type=int, default=0, metavar="N", help="the pipeline that contains rank N (default: 0)"
    )
    add_timeline_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the ledger of a traced step, its critical path and what a stage would change, and draw it; or compare."""
    run_dir = named_run(args)
    shown = _seen(run_dir, args)
    if args.other is not None:
        if args.timeline is not None:
            message = "--timeline draws one run"
            raise ConfigError(
                Problem("PP-E129", message, f"ppctl trace {pasted(args.run)} --timeline step.html", "command line")
            )
        other = _seen(find_run(args.other, args.dir), args)
        found = trace_text.both(shown, other)
        print(json.dumps(found) if args.json else trace_text.compared(found))
        return 0
    print(json.dumps(trace_text.report(shown)) if args.json else trace_text.text(shown, width(UNFOLDED)))
    if args.timeline is not None:
        plan = shown.plan
        config = run_dir.read_config()
        planned = picture(plan, at_size(config, BatchSizes.of(config.train).at(shown.step - 1)))
        title = f"{plan.name}: step {shown.step} as it was measured, {shown.named_ranks}"
        timed = "measured" if plan.time_calibrated else "preset"
        subtitle = f"layout {plan.layout}; below it the step as planned, from {timed} costs, on the same axis"
        drawn = replace(planned, title=title, subtitle=subtitle, trace=shown.trace, planned=planned.trace)
        write_timeline(drawn, Path(args.timeline))
    elif not args.json:
        where = pasted(short_path(run_dir.path))
        note(f"\nto see it:\n  {program()} trace {where} --step {shown.step} --timeline step.html")
    return 0


def _seen(run: RunDir, args: argparse.Namespace) -> SeenStep:
    """The step of a run that the command line names. Raises ConfigError (PP-E643)."""
    step, plan = _step(run, args.step)
    pipeline = _pipeline(plan, args.pipeline)
    trace = step.trace(plan.schedule, pipeline)
    return SeenStep(run.id, step.step, plan, pipeline, trace, ledgers(step, plan.schedule, pipeline))


def _step(run: RunDir, asked: int | None) -> tuple[MeasuredStep, Plan]:
    """The step that was asked for, and the plan that it follows. Raises ConfigError (PP-E643) where the run has none,
    or not this one, or a damaged one."""
    found = run.measured_steps()
    if not found:
        raise ConfigError(_none_traced(run))
    step = max(found) if asked is None else asked
    if step not in found:
        there = ", ".join(map(str, found))
        raise ConfigError(
            Problem(
                "PP-E643", f"step {step} was not traced; traced steps: {there}", f"--step {max(found)}", str(run.path)
            )
        )
    try:
        record = read_json(found[step], dict[str, Any], _MOST_OF_A_STEP)
        measured = MeasuredStep.from_json(record)
        plan = run.plan_of(read(str, record.get("plan"))).at_step(step - 1)
        _check(measured, step, plan)
    except (OSError, ValueError, LookupError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        message = f"the file of step {step} cannot be used: {type(error).__name__}: {why}"
        others = [number for number in found if number != step]
        remedy = f"--step {max(others)}" if others else f"rm -r {pasted(found[step])}"
        raise ConfigError(Problem("PP-E643", message, remedy, str(found[step]))) from None
    return measured, plan


def _none_traced(run: RunDir) -> Problem:
    """The problem of steps that a run has not reached yet: resuming it is enough."""
    done, config = run.status().get("step") or 0, run.read_config()
    message, remedy = f"no step of run {run.id} was traced", f"{program()} resume {pasted(short_path(run.path))}"
    asked = config.log.trace
    if asked is not None and steps_of(asked)[0] > done:
        message += f": log.trace={asked}, and it has done {done} step{'s' * (done != 1)}"
    else:
        wanted = f"log.trace={done + 2}:{done + 4}"
        ends = config.train.steps < done + 3
        remedy = longer(short_path(run.path), config, done, done + 3, wanted) if ends else f"{remedy} {wanted}"
    return Problem("PP-E643", message, remedy, str(run.path))


def _check(measured: MeasuredStep, step: int, plan: Plan) -> None:
    """Raise ValueError or IndexError where the file is not that of `step`, run by `plan`."""
    if measured.step != step:
        raise ValueError(f"it holds step {measured.step!r}")
    if len(measured.ranks) != plan.sizes.world:
        raise ValueError(f"it has {len(measured.ranks)} ranks of {plan.sizes.world}")
    grid = RankGrid(plan.sizes)
    for pipeline in {grid.group_of("pp", rank) for rank in range(plan.sizes.world)}:
        if any(span.action.op not in TIMED for span in measured.trace(plan.schedule, pipeline).spans):
            raise ValueError("it has times of messages, which take none")


def _pipeline(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks of the pipeline that `rank` is in, by pp_rank."""
    if not 0 <= rank < plan.sizes.world:
        raise ConfigError(
            Problem(
                "PP-E129", f"--pipeline {rank}: ranks are 0 to {plan.sizes.world - 1}", "--pipeline 0", "command line"
            )
        )
    return RankGrid(plan.sizes).group_of("pp", rank)
