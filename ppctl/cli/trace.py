"""`ppctl trace [RUN]`: steps as they were measured (`log.trace`), where each rank's time went, and their pictures.

Knows a run's traced steps and its plan. Must not know torch.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from ppctl.cli.console import note
from ppctl.cli.runs import add_run_arguments, named_run
from ppctl.cli.table import aligned
from ppctl.cli.timeline import add_timeline_argument, write_timeline
from ppctl.cli.train import program, short_path
from ppctl.config.batch_sizes import BatchSizes, at_size
from ppctl.errors import ConfigError, Problem
from ppctl.files import MOST_READ_OF_A_MODEL, read_text
from ppctl.plan import Plan
from ppctl.plan.plan_picture import picture
from ppctl.rundir import RunDir
from ppctl.schedule.measured_step import Ledger, MeasuredStep, ledgers
from ppctl.schedule.trace import bubble_fraction, step_time
from ppctl.topology import RankGrid


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    add_run_arguments(parser)
    parser.add_argument("--step", type=int, metavar="N", help="the step, of those that were traced; default: the last")
    parser.add_argument(
        "--pipeline", type=int, default=0, metavar="N", help="the pipeline that rank N is in; default: 0"
    )
    add_timeline_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the ledger of a traced step, and draw it."""
    run_dir = named_run(args)
    step, plan = _step(run_dir, args.step)
    pipeline = _pipeline(plan, args.pipeline)
    found = ledgers(step, plan.schedule, pipeline)
    trace = step.trace(plan.schedule, pipeline)
    if args.json:
        rows = [
            {"rank": rank, "pp_rank": pp_rank, "seconds": found[pp_rank].rows()}
            for pp_rank, rank in enumerate(pipeline)
        ]
        print(
            json.dumps(
                {
                    "step": step.step,
                    "step_time_s": found[0].total,
                    "bubble_fraction": bubble_fraction(trace),
                    "ranks": rows,
                }
            )
        )
    else:
        print(
            f"step {step.step} of run {run_dir.id}: {found[0].total:.4f} s, "
            f"from the first action to the last one {step_time(trace):.4f} s"
        )
        print(f"bubble {bubble_fraction(trace):.1%} measured, {plan.bubble_fraction:.1%} planned\n")
        print(aligned(_table(found, pipeline)))
    if args.timeline is not None:
        config = run_dir.read_config()
        planned = picture(plan, at_size(config, BatchSizes.of(config.train).at(step.step - 1)))
        title = f"{plan.name}: step {step.step} as it was measured, ranks {pipeline[0]} to {pipeline[-1]}"
        write_timeline(
            replace(planned, title=title, subtitle=f"layout {plan.layout}", trace=trace), Path(args.timeline)
        )
    elif not args.json:
        note(f"\nto see it: {program()} trace {short_path(run_dir.path)} --step {step.step} --timeline step.html")
    return 0


def _step(run: RunDir, asked: int | None) -> tuple[MeasuredStep, Plan]:
    """The step that was asked for, and the plan that it follows. Raises ConfigError (PP-E643) where the run has none,
    or not this one, or a damaged one."""
    found = run.measured_steps()
    if not found:
        message = f"no step of run {run.id} was traced"
        done = run.status().get("step") or 0
        remedy = f"{program()} resume {short_path(run.path)} steps={done + 3} log.trace={done + 2}:{done + 4}"
        raise ConfigError(Problem("PP-E643", message, remedy, str(run.path)))
    step = max(found) if asked is None else asked
    if step not in found:
        there = ", ".join(map(str, found))
        raise ConfigError(
            Problem(
                "PP-E643", f"step {step} was not traced; traced steps: {there}", f"--step {max(found)}", str(run.path)
            )
        )
    try:
        record = json.loads(read_text(found[step], MOST_READ_OF_A_MODEL))
        measured, plan = MeasuredStep.from_json(record), run.plan_of(record["plan"]).at_step(step - 1)
        _check(measured, step, plan)
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        message = f"the file of step {step} cannot be used: {type(error).__name__}: {why}"
        others = [number for number in found if number != step]
        remedy = f"--step {max(others)}" if others else f"rm -r '{found[step]}'"
        raise ConfigError(Problem("PP-E643", message, remedy, str(found[step]))) from None
    return measured, plan


def _check(measured: MeasuredStep, step: int, plan: Plan) -> None:
    """Raise ValueError or IndexError where the file is not that of `step`, run by `plan`."""
    if measured.step != step:
        raise ValueError(f"it holds step {measured.step!r}")
    if len(measured.ranks) != plan.sizes.world:
        raise ValueError(f"it has {len(measured.ranks)} ranks of {plan.sizes.world}")
    grid = RankGrid(plan.sizes)
    for pipeline in {grid.group_of("pp", rank) for rank in range(plan.sizes.world)}:
        measured.trace(plan.schedule, pipeline)


def _pipeline(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks of the pipeline that `rank` is in, by pp_rank."""
    if not 0 <= rank < plan.sizes.world:
        raise ConfigError(
            Problem(
                "PP-E129", f"--pipeline {rank}: ranks are 0 to {plan.sizes.world - 1}", "--pipeline 0", "command line"
            )
        )
    return RankGrid(plan.sizes).group_of("pp", rank)


def _table(found: list[Ledger], pipeline: tuple[int, ...]) -> list[list[str]]:
    """A row for each part of a step, a column for each pp_rank: milliseconds and shares."""
    names = list(dict.fromkeys(name for ledger in found for name in ledger.rows()))
    waits = sorted(name for name in names if name.startswith("waiting"))
    ordered = [
        "compute",
        "gradients",
        *waits,
        *(name for name in names if name not in ("compute", "gradients", *waits)),
    ]
    table = [["ms", *(f"rank {rank}" for rank in pipeline)]]
    for name in ordered:
        seconds = [ledger.rows().get(name, 0.0) for ledger in found]
        if any(seconds):
            table.append(
                [
                    name,
                    *(
                        f"{1e3 * each:.1f} {each / ledger.total:4.0%}"
                        for each, ledger in zip(seconds, found, strict=True)
                    ),
                ]
            )
    return [*table, ["step", *(f"{1e3 * ledger.total:.1f}     " for ledger in found)]]
