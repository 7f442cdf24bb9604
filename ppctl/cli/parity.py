"""`ppctl parity`: compares a job's steps in one process with those in its cut, or compares two runs that exist.

`plan/parity.py` knows what makes them comparable. The runs are ordinary, in a directory that is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.checkpoint.step_parity import KeptStep, Side, StepDifferences, compare_step, kept_steps
from ppctl.cli import ckpt_text, parity_text
from ppctl.cli.console import UNFOLDED, note, overwrite, width
from ppctl.cli.local_run import accepted, adapt_to_machine, with_paths
from ppctl.cli.runs import add_runs_directory
from ppctl.config.argv import Arguments
from ppctl.config.compose import Composed, override
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem, pasted
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


class _Side(NamedTuple):
    run: RunDir
    config: RunConfig
    plan: Plan
    failure: str = ""
    """Why it did not finish: copies that differ, for example, are not saved."""
    stays: bool = True
    """Whether the run's directory still exists when the result is read."""

    def step(self, step: int) -> Side:
        """The gradients and messages that it has kept of a step."""
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
    """Compare. Exit codes: 0 equal, 1 different, 2 usage or config, 3 checkpoint, 75 and 130 for signals."""
    if len(args.runs) > 1:
        return _shown(_two_runs(args), args)
    if not 1 <= args.steps <= _MOST:
        message = f"--steps {args.steps}: 1 to {_MOST} steps are compared"
        raise ConfigError(Problem("PP-E644", message, f"--steps {_STEPS}", "command line"))
    one, cut = _planned(args)
    with unwinding_on_term(), own_directory() if args.keep is None else nullcontext(Path(args.keep)) as root:
        sides = [_trained(name, *each, root, args) for name, each in (("one-process", one), ("cut", cut))]
        return _shown(_report((sides[0], sides[1])), args)


def _shown(report: dict[str, Any], args: argparse.Namespace) -> int:
    print(json.dumps(report, indent=1) if args.json else parity_text.text(report, width(UNFOLDED)))
    return 0 if report["same"] else DIFFERENT


# In one process and in the cut


def _planned(args: argparse.Namespace) -> tuple[tuple[RunConfig, Plan], tuple[RunConfig, Plan]]:
    """Both configs and plans. Raises PpctlError with all problems of the first that cannot be run."""
    if detect(os.environ).is_rank:
        message = "`ppctl parity` starts its ranks itself, but this process was started by another launcher"
        raise ConfigError(Problem("PP-E644", message, "ppctl parity, without torchrun or srun", "environment"))
    if args.runs:
        run = find_run(args.runs[0], args.dir, args.typed)
        config, provenance = run.read_config(), run.read_plan().provenance
        base = Composed(with_value(config, "checkpoint", resume=None, load=None), dict(provenance))
        refuse(args.line.problems)
        # Without what the run kept, of whose steps there may be fewer now.
        base = _over(_over(base, kept_as(args.steps)), args.line)
    else:
        base, plan, problems = planned(args.line, for_training=True)
        accepted(base, plan, problems)
    cut = _over(base, kept_as(args.steps))
    ready = _ready(cut, args)
    if ready[1].sizes.world == 1:
        message = "there is one rank: there is nothing to compare it with"
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
    """Train the run to its end. Raises SystemExit for a signal, ConfigError (PP-E646) if it keeps no step."""
    config = with_value(config, "log", dir=str(root), name=name)
    note(f"{parity_text.NAMES[name]}: {parity_text.sizes_text(plan)}")
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
    # What is named below a directory that is removed could not be read.
    report = outcome.report if args.keep else outcome.report.replace(str(root), "DIR")
    if outcome.exit_code != DONE and not kept_steps(run.gradients):
        message = f"{parity_text.NAMES[name]} failed, and nothing was compared"
        raise ConfigError(Problem("PP-E646", message, "--keep DIR keeps the logs of both", report))
    failure = "" if outcome.exit_code == DONE else report.partition("\n")[0]
    return _Side(run, config, plan, failure, stays=args.keep is not None)


# What is compared


def _two_runs(args: argparse.Namespace) -> dict[str, Any]:
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
            values = [of[step].get(figure) for of in metrics]
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
        "cuts": [parity_text.sizes_text(side.plan) for side in sides],
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
    """The newest checkpoints of one step that both runs have, compared; None if there are none."""
    there = [{checkpoint_folder.step_of(path): path for path in checkpoint_folder.kept(side.run.checkpoints)}
             for side in (first, second)]  # fmt: skip
    step = max(there[0].keys() & there[1].keys(), default=None)
    if step is None:
        return None
    paths = [of[step] for of in there]
    compared = ckpt_text.compared_on_screen(paths, f"comparing step {step}")
    allowed = tolerance(first.plan, second.plan, second.config, first=False)
    within = all(each.relative <= allowed for each in compared.different)
    return {
        "step": step,
        **ckpt_text.comparison(paths, compared),
        "same": not (compared.missing or compared.new) and (within if allowed else compared.same),
    }
