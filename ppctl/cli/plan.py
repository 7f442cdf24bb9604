"""`ppctl plan`: show what train would do, and check it. Imports no torch, and rich on a terminal only.

Knows what a person or a program sees of a plan. Must not know how it is derived (`ppctl.plan`).
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppctl.cli import plan_text
from ppctl.cli.console import PIPE_WIDTH, console, is_live
from ppctl.cli.timeline import write_timeline
from ppctl.config.compose import Composed, RefusedError, compose
from ppctl.errors import ConfigError, Problem
from ppctl.plan import Plan, plan_checked
from ppctl.plan.plan_picture import picture
from ppctl.plan.schedule_file import not_trained
from ppctl.schedule.simulate import to_slots

TELLS_PROBLEMS = True
"""Asks the front for its own problems: they are in the JSON, too."""

CONFIG, MEMORY = 2, 4
OVER_MEMORY = "PP-E801"

_NUMBERS = ("name", "world_size", "parallel", "layout", "params_total", "params_mtp", "params_active", "params_hf")
EMPTY: dict[str, Any] = dict.fromkeys((*_NUMBERS, "schedule", "timing"))
EMPTY |= {key: [] for key in ("stages", "pp_ranks", "replicated_params", "tie_groups", "derived")}
"""The JSON's keys where there is no plan, only problems."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, problems included")
    parser.add_argument("--dump-schedule", metavar="FILE.csv", help="write the schedule as torch's compute-only CSV")
    parser.add_argument("--timeline", metavar="FILE", help="draw the step: .html, .txt, or .json for Perfetto")
    parser.add_argument("--force", action="store_true", help="exit 0 even if memory does not fit")


def run(args: argparse.Namespace) -> int:
    """Print the plan. Exit code 0, 2 with problems of the config, 4 where only the memory does not fit."""
    # A plan is many small tuples and no cycles, and this process is short: looking for garbage is a tenth of its time.
    gc.disable()
    try:
        return _run(args)
    finally:
        gc.enable()


def _run(args: argparse.Namespace) -> int:
    composed, plan, problems = planned(args.overrides, args.problems)
    for note in composed.notes if composed else ():
        print(f"note: {note}", file=sys.stderr)
    if args.dump_schedule is not None:
        problems += _dump(plan, problems, Path(args.dump_schedule))
    if args.timeline is not None:
        problems += _draw(composed, plan, Path(args.timeline), args.dump_schedule)
    if args.json:
        print(_json(plan, problems))
    else:
        _show(composed, plan, problems)
    for problem in problems:
        print(f"error {problem}", file=sys.stderr)
    return exit_code(problems, force=args.force)


def planned(
    overrides: Sequence[str], problems: Sequence[Problem] = (), *, for_training: bool = False
) -> tuple[Composed | None, Plan | None, list[Problem]]:
    """(config with its history, plan, all problems): compose, check and plan, as far as each will go.

    `problems` are those of the command line. All are reported at once, each one time.
    """
    composed: Composed | None = None
    found = list(problems)
    try:
        composed = compose(overrides, for_training=for_training, read_model=_read_model)
    except RefusedError as error:
        found += error.problems
        composed = error.composed
        if any(problem.code == "PP-E104" for problem in found):
            return composed, None, found  # without the recipe that was meant a plan would be of something else
    except ConfigError as error:
        return None, None, [*found, *error.problems]
    plan = None
    try:
        plan = plan_checked(composed.config, composed.provenance, found)
        found = list(plan.problems)
        found += not_trained(composed.config, plan) if for_training else []
    except ConfigError as error:
        found = list(error.problems)
    return composed, plan, list(dict.fromkeys(found))


def _read_model(source: str) -> Any:
    """What `model.from` says of the run."""
    from ppctl.launch.weights import values_of  # brings the room of families, a tenth of a plan's time; few plans ask

    return values_of(source)


def _dump(plan: Plan | None, problems: Sequence[Problem], path: Path) -> list[Problem]:
    """Write the schedule, if there is a sound one; what kept it from being written."""
    if plan is None or any(problem.code.startswith("PP-E3") for problem in problems):
        return []  # there is nothing to write, and it has been told why
    try:
        path.write_text(to_slots(plan.schedule), encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"the schedule cannot be written to {path}: {reason}"
        return [Problem("PP-E127", message, "--dump-schedule schedule.csv", "command line")]
    print(f"note: wrote the schedule to {path}; pipeline.pp_schedule_csv={path} runs it", file=sys.stderr)
    return []


def _draw(composed: Composed | None, plan: Plan | None, path: Path, dumped: str | None) -> list[Problem]:
    """Draw the step, if there is a plan whose schedule can run; what kept it from being drawn."""
    if plan is None or composed is None or any(problem.code.startswith("PP-E3") for problem in plan.problems):
        return []
    if dumped is not None and path.resolve() == Path(dumped).resolve():
        message = f"--timeline and --dump-schedule both write {path}: the picture would replace the schedule"
        return [Problem("PP-E129", message, "--timeline step.html", "command line")]
    try:
        write_timeline(picture(plan, composed.config), path)
    except ConfigError as error:
        return list(error.problems)
    return []


def exit_code(problems: Sequence[Problem], *, force: bool = False) -> int:
    """0, 2, or 4 where nothing but memory is wrong; `force` lets memory pass."""
    memory = {problem.code for problem in problems} == {OVER_MEMORY}
    if not problems or (memory and force):
        return 0
    return MEMORY if memory else CONFIG


def summary(plan: Plan) -> str:
    """The first screen of a training run: its letters explained, who holds what, and the equations."""
    width = shutil.get_terminal_size().columns if is_live() else PIPE_WIDTH
    told = plan_text.prose([*plan_text.equations(plan), plan_text.schedule_line(plan)], width)
    return "\n".join([plan_text.prose([plan_text.legend(plan)], width), "", plan_text.drawing(plan), "", told])


def _json(plan: Plan | None, problems: Sequence[Problem]) -> str:
    told: dict[str, Any] = {"problems": [problem.to_json() for problem in problems]}
    if plan is None:
        return json.dumps(EMPTY | told, indent=2)
    return json.dumps(plan.report() | told, indent=2)


def _show(composed: Composed | None, plan: Plan | None, problems: Sequence[Problem]) -> None:
    terminal = is_live()
    width = shutil.get_terminal_size().columns if terminal else PIPE_WIDTH
    blocks: list[tuple[str, str]] = []
    if plan is not None and composed is not None:
        blocks += [(text, "") for text in plan_text.blocks(plan, composed.config, width)]
    if problems:
        listed = plan_text.problem_lines(problems, planned=plan is not None)
        below = terminal and sys.stderr.isatty()  # the same screen shows them in full in a moment
        blocks.append((listed.partition("\n")[0].rstrip(":") if below else listed, "red"))
    if plan is not None and composed is not None and composed.config.published:
        blocks.append((plan_text.published(composed.config, width), "dim"))
    if terminal:
        _render(blocks)
    else:
        print("\n\n".join(text for text, _ in blocks))


def _render(blocks: Sequence[tuple[str, str]]) -> None:
    """The same text, with the first line of each block set off and the colours that a terminal shows."""
    from rich.text import Text

    screen = console()
    for number, (text, style) in enumerate(blocks):
        first, newline, rest = text.partition("\n")
        shown = Text("\n" if number else "").append(first, f"bold {style}").append(newline + rest, style)
        screen.print(shown, soft_wrap=True)
