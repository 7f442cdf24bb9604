"""`ppctl trace [RUN]`: a step as it was measured (`log.trace`) and its picture; `ppctl trace A B`: two runs' steps."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.checkpoint.tensor_parts import spans
from ppctl.cli.console import UNFOLDED, aligned, in_blocks, note, prose, width
from ppctl.cli.longer import longer
from ppctl.cli.runs import add_run_arguments, named_run, program, short_path
from ppctl.cli.timeline import add_timeline_argument, write_timeline
from ppctl.config.batch_sizes import BatchSizes, at_size
from ppctl.config.quantities import steps_of
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.host.files import read_json
from ppctl.plan import Plan
from ppctl.plan.plan_picture import picture
from ppctl.records.json_reader import read
from ppctl.runs.finding import find_run
from ppctl.runs.rundir import RunDir
from ppctl.schedule.action import TIMED
from ppctl.schedule.measured_step import SHARE, MeasuredStep, TimeLedger, ledgers, measured_costs, stage_changes
from ppctl.schedule.simulate import critical_path, seconds_by_kind
from ppctl.schedule.trace import Trace, bubble_fraction, step_time
from ppctl.topology import RankGrid

_MOST_BYTES_OF_A_STEP = 2**27


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
    """Print a traced step's ledger, critical path and what a stage would change, and draw it; or compare two runs."""
    run_dir = named_run(args)
    shown = _seen(run_dir, args)
    if args.other is not None:
        if args.timeline is not None:
            one = f"ppctl trace {pasted(args.run)} --timeline step.html"
            raise ConfigError(Problem("PP-E129", "--timeline draws one run", one, "command line"))
        other = _seen(find_run(args.other, args.dir, args.typed), args)
        compared = both(shown, other)
        print(json.dumps(compared) if args.json else compared_text(compared))
        return 0
    print(json.dumps(report(shown)) if args.json else text(shown, width(UNFOLDED)))
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
    """The step that the arguments name, with one pipeline's trace. Raises ConfigError (PP-E129)."""
    step, plan = _step(run, args.step)
    if not 0 <= args.pipeline < plan.sizes.world:
        message = f"--pipeline {args.pipeline} is no rank of the run: the ranks are 0 to {plan.sizes.world - 1}"
        raise ConfigError(Problem("PP-E129", message, "--pipeline 0", "command line"))
    pipeline = RankGrid(plan.sizes).group_of("pp", args.pipeline)
    trace = step.trace(plan.schedule, pipeline)
    return SeenStep(run.id, step.step, plan, pipeline, trace, ledgers(step, plan.schedule, pipeline))


def _step(run: RunDir, asked: int | None) -> tuple[MeasuredStep, Plan]:
    """The step `asked` (None: the last), and its plan. Raises ConfigError (PP-E643) without an intact trace."""
    files = run.measured_steps()
    if not files:
        raise ConfigError(_none_traced(run))
    step = max(files) if asked is None else asked
    if step not in files:
        steps = ", ".join(map(str, files))
        message = f"step {step} was not traced; traced steps: {steps}"
        raise ConfigError(Problem("PP-E643", message, f"--step {max(files)}", str(run.path)))
    try:
        record = read_json(files[step], dict[str, Any], _MOST_BYTES_OF_A_STEP)
        measured = MeasuredStep.from_json(record)
        plan = run.plan_of(read(str, record.get("plan"))).at_step(step - 1)
        _check(measured, step, plan)
    except (OSError, ValueError, LookupError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        message = f"the file of step {step} cannot be used: {type(error).__name__}: {why}"
        others = [number for number in files if number != step]
        remedy = f"--step {max(others)}" if others else f"rm -r {pasted(files[step])}"
        raise ConfigError(Problem("PP-E643", message, remedy, str(files[step]))) from None
    return measured, plan


def _none_traced(run: RunDir) -> Problem:
    done, config = run.status().get("step") or 0, run.read_config()
    message, remedy = f"no step of run {run.id} was traced", f"{program()} resume {pasted(short_path(run.path))}"
    asked = config.log.trace
    if asked is not None and steps_of(asked)[0] > done:
        message += f": log.trace={asked}, but it has done {done} step{'s' * (done != 1)}"
    else:
        wanted = f"log.trace={done + 2}:{done + 4}"
        ends = config.train.steps < done + 3
        remedy = longer(short_path(run.path), config, done, done + 3, wanted) if ends else f"{remedy} {wanted}"
    return Problem("PP-E643", message, remedy, str(run.path))


def _check(measured: MeasuredStep, step: int, plan: Plan) -> None:
    """Raise ValueError or IndexError if the file is not of `step`, run by `plan`."""
    if measured.step != step:
        raise ValueError(f"it holds step {measured.step!r}")
    if len(measured.ranks) != plan.sizes.world:
        raise ValueError(f"it has {len(measured.ranks)} ranks of {plan.sizes.world}")
    grid = RankGrid(plan.sizes)
    for pipeline in {grid.group_of("pp", rank) for rank in range(plan.sizes.world)}:
        if any(span.action.op not in TIMED for span in measured.trace(plan.schedule, pipeline).spans):
            raise ValueError("it has times of messages, but only computations have times")


# The text: each rank's ledger of time, and the critical path


class SeenStep(NamedTuple):
    """One pipeline's step of a run."""

    run: str
    step: int
    plan: Plan
    pipeline: tuple[int, ...]
    trace: Trace
    ledgers: list[TimeLedger]

    @property
    def named_ranks(self) -> str:
        """The pipeline's ranks, which are not neighbours if other ranks share its stages: `ranks 0-3`, `ranks 0, 2`."""
        return f"rank{'s' * (len(self.pipeline) > 1)} {', '.join(spans(self.pipeline))}"

    @property
    def seconds(self) -> float:
        """Seconds from the first rank's begin to the last rank's end."""
        return self.ledgers[0].total


def report(seen: SeenStep) -> dict[str, Any]:
    """The step as `--json` prints it, with times in seconds."""
    path = critical_path(seen.trace)
    simulated, changes = stage_changes(seen.plan.schedule, measured_costs(seen.trace, seen.plan.schedule))
    return {
        "step": seen.step,
        "step_time_s": seen.seconds,
        "bubble_fraction": bubble_fraction(seen.trace),
        "ranks": [
            {"rank": rank, "pp_rank": pp_rank, "seconds": seen.ledgers[pp_rank].rows()}
            for pp_rank, rank in enumerate(seen.pipeline)
        ],
        "critical_path": {
            "actions": [str(span.action) for span in path],
            "messages": sum(a.pp_rank != b.pp_rank for a, b in pairwise(path)),
            "seconds": seconds_by_kind(path),
        },
        "simulated_s": simulated,
        "stages": [change._asdict() for change in changes],
    }


def text(seen: SeenStep, columns: int) -> str:
    """The ledger, the critical path, and the effect of each stage on the step, in at most `columns` columns."""
    figures, pipeline_s = report(seen), step_time(seen.trace)
    path = figures["critical_path"]
    kinds = ", ".join(
        f"{'between them' if kind == 'messages' else kind} {_ms(seconds)}"
        for kind, seconds in path["seconds"].items()
        if seconds
    )
    head = [
        f"step {seen.step} of run {seen.run}: {seen.seconds:.4f} s, from the first action to the last one "
        f"{pipeline_s:.4f} s",
        f"bubble {bubble_fraction(seen.trace):.1%} measured, {seen.plan.bubble_fraction:.1%} planned",
    ]
    if (others := seen.plan.sizes.world // len(seen.pipeline) - 1) > 0:
        more = "another pipeline has" if others == 1 else f"{others} other pipelines have"
        head.append(f"the pipeline of {seen.named_ranks}; {more} the same stages: --pipeline RANK shows it")
    rows = [
        f"critical path: {len(path['actions'])} actions, {path['messages']} messages between ranks: {kinds}",
        f"simulated from what was measured: {_ms(figures['simulated_s'])} of {_ms(pipeline_s)}",
    ]
    ledger = in_blocks(_ledger_table(seen.ledgers, seen.pipeline), columns)
    stages = [["stage", "forward ms", "backward ms", f"step if {SHARE:.0%} faster", f"if {SHARE:.0%} slower"]]
    for stage, forward, backward, *changes in map(dict.values, figures["stages"]):
        times = [f"{1e3 * forward:.2f}", f"{1e3 * backward:.2f}", *(f"{1e3 * change:+.2f} ms" for change in changes)]
        stages.append([str(stage), *times])
    return "\n\n".join([prose(head, columns), ledger, prose(rows, columns), aligned(stages)])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _ledger_table(ledgers: Sequence[TimeLedger], pipeline: tuple[int, ...]) -> list[list[str]]:
    shown = [_by_rank(ledger, pipeline) for ledger in ledgers]
    names = list(dict.fromkeys(name for rows in shown for name in rows))
    waits = [name for name in (f"waiting for rank {rank}" for rank in pipeline) if name in names]
    table = [["ms", *(f"rank {rank}" for rank in pipeline)]]
    for name in dict.fromkeys(("compute", "gradients", *waits, *names)):
        seconds = [rows.get(name, 0.0) for rows in shown]
        if any(seconds):
            parts = zip(seconds, ledgers, strict=True)
            table.append([name, *(f"{1e3 * each:.1f} {each / ledger.total:4.0%}" for each, ledger in parts)])
    return [*table, ["step", *(f"{1e3 * ledger.total:.1f}     " for ledger in ledgers)]]


def _by_rank(ledger: TimeLedger, pipeline: tuple[int, ...]) -> dict[str, float]:
    """Name -> seconds of a ledger's rows; ranks waited for are named as the columns are."""
    renamed = {f"waiting for pp_rank {pp_rank}": f"waiting for rank {rank}" for pp_rank, rank in enumerate(pipeline)}
    return {renamed.get(name, name): seconds for name, seconds in ledger.rows().items()}


# Two runs


def both(first: SeenStep, second: SeenStep) -> dict[str, Any]:
    """Two steps side by side, in seconds: means over the ranks of a pipeline, and over the microbatches of a stage."""
    sides = (first, second)
    rows = [_means(seen.ledgers) for seen in sides]
    names = dict.fromkeys([*rows[0], *rows[1]])
    changes = [report(seen)["stages"] for seen in sides]
    stages = None
    if len(changes[0]) == len(changes[1]):
        parts = ("forward", "backward")
        pairs = zip(*changes, strict=True)
        stages = [{"stage": a["stage"], **{part: [a[part], b[part]] for part in parts}} for a, b in pairs]
    return {
        "runs": [seen.run for seen in sides],
        "steps": [seen.step for seen in sides],
        "step_time_s": [seen.seconds for seen in sides],
        "bubble_fraction": [bubble_fraction(seen.trace) for seen in sides],
        "ledger": {name: [row.get(name, 0.0) for row in rows] for name in names},
        "stages": stages,
    }


def _means(ledgers: Sequence[TimeLedger]) -> dict[str, float]:
    """The rows of a ledger, averaged over ranks; waits are not split by the rank waited for."""
    sums: dict[str, float] = {}
    for ledger in ledgers:
        for name, seconds in ledger.rows().items():
            key = "waiting" if name.startswith("waiting") else name
            sums[key] = sums.get(key, 0.0) + seconds / len(ledgers)
    return sums


def compared_text(both_steps: Mapping[str, Any]) -> str:
    """Two steps in tables with columns A and B."""
    sides = zip("AB", both_steps["runs"], both_steps["steps"], strict=True)
    heads = list("AB")
    rows = [["ms, mean of the ranks", *heads, "difference"]]
    rows += [_pair(name, pair) for name, pair in both_steps["ledger"].items() if any(pair)]
    rows.append(_pair("step", both_steps["step_time_s"]))
    bubbles = both_steps["bubble_fraction"]
    rows.append(["bubble", *(f"{each:.1%}" for each in bubbles), f"{100 * (bubbles[1] - bubbles[0]):+.1f} points"])
    lines = [*(f"{name}  run {run}, step {step}" for name, run, step in sides), "", aligned(rows), ""]
    if both_steps["stages"] is None:
        return "\n".join([*lines, "the runs have different stages, which are not compared"])
    table = [["ms, mean", *heads, "difference"]]
    for stage in both_steps["stages"]:
        table += [_pair(f"stage {stage['stage']} {part}", stage[part], 2) for part in ("forward", "backward")]
    return "\n".join([*lines, aligned(table)])


def _pair(name: str, pair: Sequence[float], digits: int = 1) -> list[str]:
    first, second = pair
    share = f" ({second / first - 1:+.0%})" if first else ""
    return [name, *(f"{1e3 * each:.{digits}f}" for each in pair), f"{1e3 * (second - first):+.{digits}f}{share}"]
