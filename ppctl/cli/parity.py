"""`ppctl parity`: compares a job's steps in one process with those in its cut, or compares two runs that exist.

`plan/parity.py` knows what makes jobs comparable. The runs are ordinary, in a directory that is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.checkpoint.step_parity import KeptStep, Side, StepDifferences, compare_step, kept_steps
from ppctl.cli import ckpt_text
from ppctl.cli.console import UNFOLDED, aligned, folded, note, overwrite, prose, width
from ppctl.cli.local_run import accepted, adapt_to_machine, with_paths
from ppctl.cli.runs import add_runs_directory
from ppctl.config.argv import Arguments
from ppctl.config.compose import Composed, override
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem, pasted, some
from ppctl.hang.progress import Limits
from ppctl.host.private_files import own_directory, shared_memory
from ppctl.host.processes import unwinding_on_term
from ppctl.launch.environment import detect
from ppctl.launch.outcome import DONE, INTERRUPTED, STOPPED
from ppctl.launch.planning import plan_of, planned, refuse
from ppctl.launch.run_directory import Launch, new_run, with_value
from ppctl.launch.watch import LocalJob, supervise
from ppctl.plan import Plan
from ppctl.plan.parity import axes_that_differ, in_one_process, kept_as, other_keys, place_of, tolerance, uses_of_shared
from ppctl.records.json_reader import finite
from ppctl.runs import checkpoint_folder
from ppctl.runs.finding import find_run
from ppctl.runs.run_starts import hold
from ppctl.runs.rundir import RunDir

DIFFERENT = 1
_STEPS = 3
_MOST = 99
_BEFORE_A_STEP = "  "
_NAMES = {"one-process": "one process", "cut": "the cut"}
_SHOWN_PARAMETERS = 5


class _Side(NamedTuple):
    run: RunDir
    config: RunConfig
    plan: Plan
    failure: str = ""
    """Why the run did not finish, such as copies that differ, which cannot be saved."""
    stays: bool = True
    """Whether the run's directory still exists when the result is read."""

    def step(self, step: int) -> Side:
        """The gradients and messages that the run has kept of a step."""
        kept = KeptStep(self.run.gradients, step)
        return Side(kept, self.plan.sizes, self.config.parallel.sequence_parallel, len(self.plan.stages) - 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    words = "RUN: repeat this run's config from its first step; A B: compare two existing runs"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=words)
    add_runs_directory(parser)
    parser.add_argument("--steps", type=int, default=_STEPS, metavar="N", help=f"steps to compare (default: {_STEPS})")
    parser.add_argument("--keep", metavar="DIR", help="keep the two runs, with their gradients, in this directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Compare and print. Exit codes: 0 equal, 1 different, 2 usage or config, 3 checkpoint, 75 and 130 for signals."""
    if len(args.runs) > 1:
        return _shown(_two_runs(args), args)
    if not 1 <= args.steps <= _MOST:
        message = f"--steps {args.steps}: it must be 1 to {_MOST}"
        raise ConfigError(Problem("PP-E644", message, f"--steps {_STEPS}", "command line"))
    one, cut = _planned(args)
    with unwinding_on_term(), own_directory() if args.keep is None else nullcontext(Path(args.keep)) as root:
        sides = [_trained(name, *each, root, args) for name, each in (("one-process", one), ("cut", cut))]
        return _shown(_report((sides[0], sides[1])), args)


def _shown(report: dict[str, Any], args: argparse.Namespace) -> int:
    print(json.dumps(report, indent=1) if args.json else _text(report, width(UNFOLDED)))
    return 0 if report["same"] else DIFFERENT


# In one process and in the cut


def _planned(args: argparse.Namespace) -> tuple[tuple[RunConfig, Plan], tuple[RunConfig, Plan]]:
    """(config, plan) in one process, and in the cut. Raises PpctlError with all problems of the first unfit config."""
    if detect(os.environ).is_rank:
        message = "`ppctl parity` starts its ranks itself, but this process was started by another launcher"
        raise ConfigError(Problem("PP-E644", message, "ppctl parity, without torchrun or srun", "environment"))
    if args.runs:
        run = find_run(args.runs[0], args.dir, args.typed)
        config, provenance = run.read_config(), run.read_plan().provenance
        base = Composed(with_value(config, "checkpoint", resume=None, load=None), dict(provenance))
        refuse(args.line.problems)
        # Without the files that the run kept: the steps of these may not exist now.
        base = _over(_over(base, kept_as(args.steps)), args.line)
    else:
        base, plan, problems = planned(args.line, for_training=True)
        accepted(base, plan, problems)
    cut = _over(base, kept_as(args.steps))
    ready = _ready(cut, args)
    if ready[1].sizes.world == 1:
        message = "there is only one rank, so there is nothing to compare it with"
        raise ConfigError(Problem("PP-E644", message, "pp=2", "command line"))
    return _ready(_over(cut, in_one_process(ready[1])), args), ready


def _over(base: Composed, overrides: Sequence[str] | Arguments) -> Composed:
    return override(base.config, base.provenance, overrides, for_training=True)


def _ready(composed: Composed, args: argparse.Namespace) -> tuple[RunConfig, Plan]:
    plan, problems = plan_of(composed, [])
    refuse(problems)
    assert plan is not None  # there were no problems
    command = pasted("parity", *args.runs)
    config, plan, _ = adapt_to_machine(composed.config, plan, args.line.overrides, detect(os.environ), command)
    return with_paths(config), plan


def _show_step(line: str) -> None:
    if line.startswith("step ") or line[:1].isdigit():
        note(_BEFORE_A_STEP + line.removesuffix("\n"))


def _trained(name: str, config: RunConfig, plan: Plan, root: Path, args: argparse.Namespace) -> _Side:
    """Train the run to its end. Raises SystemExit for a signal, ConfigError (PP-E646) if it fails before
    it keeps a step."""
    config = with_value(config, "log", dir=str(root), name=name)
    note(f"{_NAMES[name]}: {_sizes_text(plan)}")
    run = new_run(Launch(config, plan, f"ppctl parity ({name})"), detect(os.environ))
    variables = dict(config.launch.env)
    if sys.stderr.isatty():  # rank 0 prints into a pipe and cannot see how wide its lines may be
        variables["COLUMNS"] = str(shutil.get_terminal_size().columns - len(_BEFORE_A_STEP))
    with hold(run), own_directory(shared_memory()) as directory:
        job = LocalJob(run, plan.sizes.world, directory, variables, limits=Limits.of(config.launch))
        outcome = supervise(job, _show_step)
    if outcome.exit_code == STOPPED or outcome.exit_code >= INTERRUPTED:
        note("interrupted: nothing was compared")
        raise SystemExit(INTERRUPTED if outcome.exit_code == STOPPED else outcome.exit_code)
    # A problem must not name files in a directory that will be removed.
    report = outcome.report if args.keep else outcome.report.replace(str(root), "DIR")
    if outcome.exit_code != DONE and not kept_steps(run.gradients):
        message = f"{_NAMES[name]} failed, so nothing was compared"
        raise ConfigError(Problem("PP-E646", message, "--keep DIR keeps the logs of both", report))
    failure = "" if outcome.exit_code == DONE else report.partition("\n")[0]
    return _Side(run, config, plan, failure, stays=args.keep is not None)


# What is compared


def _two_runs(args: argparse.Namespace) -> dict[str, Any]:
    """The report of `ppctl parity A B`. Raises ConfigError (PP-E644, PP-E645) if the runs cannot be compared."""
    line = args.line
    if len(args.runs) > 2 or line.overrides or line.problems or line.rest:
        message = "two runs are compared as they are: `ppctl parity A B` takes no third one and no overrides"
        raise ConfigError(Problem("PP-E644", message, f"ppctl parity {pasted(*args.runs[:2])}", "command line"))
    runs = [find_run(name, args.dir, args.typed) for name in args.runs]
    first, second = (_Side(run, run.read_config(), run.read_plan()) for run in runs)
    report = _report((first, second))
    if not report["steps"]:
        message = f"runs {runs[0].id} and {runs[1].id} have no step in common"
        raise ConfigError(Problem("PP-E645", message, f"ppctl runs show {pasted(runs[1].id)}", str(runs[1].path)))
    report["keys"] = other_keys(first.config, second.config)
    report["checkpoints"] = checkpoints = _checkpoints(first, second)
    report["same"] = report["same"] and (checkpoints is None or checkpoints["same"])
    return report


def _report(sides: tuple[_Side, _Side]) -> dict[str, Any]:
    first, second = sides
    metrics = [{record["step"]: record for record in side.run.metrics()} for side in sides]
    kept = set(kept_steps(first.run.gradients)) & set(kept_steps(second.run.gradients))
    began = min(metrics[0].keys() & metrics[1].keys(), default=0)
    rows = []
    for step in sorted(metrics[0].keys() & metrics[1].keys()):
        allowed = tolerance(first.plan, second.plan, second.config, first=step == began)
        row: dict[str, Any] = {"step": step, "tolerance": allowed, "same": True}
        for figure in ("loss", "grad_norm"):
            values = [by_step[step].get(figure) for by_step in metrics]
            row[figure] = values
            row["same"] &= _close(values, allowed)
        if step in kept:
            differences = compare_step(
                first.step(step),
                second.step(step),
                tolerance=allowed,
                place_of=place_of(second.plan, second.config),
                messages=first.plan.layout == second.plan.layout,
                uses=uses_of_shared(second.plan, second.config),
                progress=_progress(step),
            )
            row["gradients"] = _gradients(differences)
            row["same"] &= differences.same
        rows.append(row)
    return {
        "runs": [str(side.run.path) if side.stays else None for side in sides],
        "cuts": [_sizes_text(side.plan) for side in sides],
        "axes": axes_that_differ(first.plan, second.plan),
        "failures": [side.failure for side in sides],
        "same": all(row["same"] for row in rows) and not any(side.failure for side in sides),
        "steps": rows,
    }


def _close(values: Sequence[float | None], allowed: float) -> bool:
    one, other = values
    if one is None or other is None:
        return one is other
    return one == other or abs(one - other) <= allowed * abs(one)


def _gradients(differences: StepDifferences) -> dict[str, Any]:
    action = None if differences.action is None else differences.action._asdict()
    different = [each._asdict() for each in differences.parameters]
    found = {"equal": differences.equal, "missing": differences.missing, "unlike": differences.unlike}
    return {"largest": differences.largest, **finite({**found, "action": action, "different": different})}


def _progress(step: int) -> Callable[[str], None]:
    if not sys.stderr.isatty():
        return lambda name: None
    return lambda name: overwrite(f"comparing step {step}: {name}")


def _checkpoints(first: _Side, second: _Side) -> dict[str, Any] | None:
    """Compare the checkpoints of the last step that both runs have saved; None if there is no such step."""
    by_step = [{checkpoint_folder.step_of(path): path for path in checkpoint_folder.kept(side.run.checkpoints)}
             for side in (first, second)]  # fmt: skip
    step = max(by_step[0].keys() & by_step[1].keys(), default=None)
    if step is None:
        return None
    paths = [of[step] for of in by_step]
    compared = ckpt_text.compared_on_screen(paths, f"comparing step {step}")
    allowed = tolerance(first.plan, second.plan, second.config, first=False)
    within = all(each.relative <= allowed for each in compared.different)
    return {
        "step": step,
        **ckpt_text.comparison(paths, compared),
        "same": not (compared.missing or compared.new) and (within if allowed else compared.same),
    }


# The text: two jobs' steps side by side, and where they first differ


def _sizes_text(plan: Plan) -> str:
    """`pp 2 x vpp 2 x dp 2, 4 ranks, 1f1b`, with the axes that divide anything."""
    sizes = plan.sizes
    axes = [
        f"{axis} {size}" for axis in ("pp", "vpp", "tp", "cp", "ep", "etp", "dp") if (size := getattr(sizes, axis)) > 1
    ]
    ranks = f"{sizes.world} rank{'s' * (sizes.world > 1)}"
    return ", ".join([*([" x ".join(axes)] if axes else []), ranks, plan.schedule.name])


def _text(report: Mapping[str, Any], columns: int) -> str:
    """The rule of comparison, a table of steps, the differences, and the verdict, in at most `columns` columns."""
    rows: list[tuple[str, ...]] = [("step", "loss A", "loss B", "", "gradient norm", "gradients")]
    rows += [_row(step) for step in report["steps"]]
    lines = []
    for step in report["steps"]:
        lines += _differences(step)
    lines += [f"{name} did not finish: {why}" for name, why in zip("AB", report["failures"], strict=True) if why]
    if report.get("checkpoints"):
        checkpoints = report["checkpoints"]
        lines += [
            f"checkpoints of step {checkpoints['step']}:",
            *ckpt_text.differences(checkpoints, _SHOWN_PARAMETERS),
            "",
        ]
    table = aligned(folded(rows, columns, ", "), 4)
    return "\n\n".join([prose(_head(report), columns), table, prose([*lines, _verdict(report)], columns)])


def _head(report: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, cut, path in zip("AB", report["cuts"], report["runs"], strict=True):
        lines += [f"{name}  {cut}", *([] if path is None else [f"   {path}"])]
    if keys := report.get("keys"):
        shown = some(keys, _SHOWN_PARAMETERS)
        lines.append(f"the runs compute different things: {shown} (`ppctl runs compare A B`)")
    return [*lines, _law(report)]


def _law(report: Mapping[str, Any]) -> str:
    if not report["axes"]:
        return "the same sums in the same order: every bit must be equal"
    first = report["steps"][0]["tolerance"] if report["steps"] else 0.0
    return (
        f"{', '.join(report['axes'])}: sums in another order; gradients of the first step may differ by {first:.0e} of "
        "their largest value, those of later steps by a thousand times that"
    )


def _apart(values: Sequence[float | None]) -> str:
    one, other = values
    if one is None or other is None:
        return "" if one is other else "one is missing"
    return "equal" if one == other else f"{other - one:+.2e}"


def _row(step: Mapping[str, Any]) -> tuple[str, ...]:
    losses = ["" if loss is None else f"{loss:.7f}" for loss in step["loss"]]
    gradients = step.get("gradients")
    kept = "not kept" if gradients is None else f"{gradients['equal']} equal"
    if gradients is not None:
        if step["tolerance"]:
            kept = f"{gradients['equal']} within, apart at most {gradients['largest']:.1e}"
        if gradients["different"]:
            kept += f", {len(gradients['different'])} differ"
    return (str(step["step"]), *losses, _apart(step["loss"]), _apart(step["grad_norm"]), kept)


def _differences(step: Mapping[str, Any]) -> list[str]:
    gradients, lines = step.get("gradients"), []
    if gradients is None:
        return []
    if gradients["action"] is not None:
        each = gradients["action"]
        difference = "in bits alone" if each["relative"] == 0 else f"by {_share(each['relative'])} of its norm"
        lines.append(f"  first action: {each['action']}, stage {each['stage']} ({_ranks(each['ranks'])}), {difference}")
    for each in gradients["different"][:_SHOWN_PARAMETERS]:
        a, b = each["values"]
        lines.append(
            f"  gradient of {each['name']}, stage {each['stage']} ({_ranks(each['ranks'])} of {each['of']}): apart by "
            f"{_share(each['relative'])} of its largest value; at {list(each['at'])} "
            f"{_number(a)} in A, {_number(b)} in B"
        )
    if len(gradients["different"]) > _SHOWN_PARAMETERS:
        lines.append(f"  and {len(gradients['different']) - _SHOWN_PARAMETERS} more gradients")
    lines += [
        f"  {run}: {name} and {owner} are the same parameter, but their gradients differ"
        for run, name, owner in gradients["unlike"]
    ]
    lines += [f"  only in one of the two: {name}" for name in gradients["missing"][:_SHOWN_PARAMETERS]]
    return [f"step {step['step']}:", *lines, ""] if lines else []


def _share(relative: float | None) -> str:
    return "more than any share" if relative is None else f"{relative:.1e}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {some(ranks, 8)}"


def _verdict(report: Mapping[str, Any]) -> str:
    steps = report["steps"]
    if report["same"]:
        equality = "equal to the bit" if not report["axes"] else "equal within what the order of sums allows"
        count = sum("gradients" in step for step in steps)
        kept = f", and gradients of {count}" if count else "; gradients were not kept (log.gradients=1:4 keeps them)"
        return f"equal: losses and norms of {len(steps)} steps{kept}: {equality}"
    wrong = next((step for step in steps if not step["same"]), None)
    if wrong is None and any(report["failures"]):
        return "different: equal as far as both went, but one of them did not finish"
    if wrong is None:
        return f"different: checkpoints of step {report['checkpoints']['step']}"
    first = f"step {wrong['step']}: loss {_apart(wrong['loss'])}"
    gradients = wrong.get("gradients")
    if gradients and (action := gradients["action"]):
        first += f"; {action['action']} on stage {action['stage']} is the first action that differs"
    if gradients and gradients["different"]:
        each = gradients["different"][0]
        first += f"; gradient of {each['name']} differs, first in stage {each['stage']} ({_ranks(each['ranks'])})"
    elif gradients and gradients["unlike"]:
        _, name, owner = gradients["unlike"][0]
        first += f"; {name} and {owner} are one parameter, but their gradients differ"
    later = [step["step"] for step in steps if step["loss"][0] != step["loss"][1]]
    if later and not report["axes"]:
        first += f"; losses differ from step {later[0]} on"
    return f"different: {first}"
