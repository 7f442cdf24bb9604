"""`ppctl plan`: check a config and show what train would do. Imports no torch, and rich on a terminal only.

`planned` is how every command that takes overrides gets from them to a config and its plan. Knows what a plan looks
like as JSON (as text: `plan_text`). Must not know how it is derived (`ppctl.plan`).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

from ppctl.cli import plan_text
from ppctl.cli.console import console, is_live, note, print_problems, width
from ppctl.cli.table import prose
from ppctl.cli.timeline import add_timeline_argument, write_timeline
from ppctl.config.compose import Composed, RefusedError, compose
from ppctl.errors import ConfigError, Problem, visible
from ppctl.plan import Plan, plan_checked
from ppctl.plan.plan import LIMIT_KEYS
from ppctl.plan.plan_picture import picture
from ppctl.schedule.simulate import to_slots

CONFIG, MEMORY = 2, 4
OVER_MEMORY = "PP-E801"
_PATIENCE_S = 1.0

_NUMBERS = ("name", "world_size", "parallel", "layout", "params_total", "params_mtp", "params_active", "params_hf")
EMPTY: dict[str, Any] = dict.fromkeys((*_NUMBERS, *LIMIT_KEYS, "schedule", "timing"))
EMPTY |= {key: [] for key in ("stages", "pp_ranks", "replicated_params", "tie_groups", "traffic", "derived")}
"""The JSON's keys if there is no plan, only problems."""


_NOTHING = (
    "no arguments: this is the plan of the defaults, a tiny model on one rank; `ppctl recipes` lists published jobs, "
    "such as `ppctl plan +recipe=llama3_8b`; `ppctl plan model.from=DIR pp=2` plans your own model"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, problems included")
    parser.add_argument("--dump-schedule", metavar="FILE.csv", help="write the schedule in torch's compute-only CSV")
    add_timeline_argument(parser)
    parser.add_argument("--force", action="store_true", help="exit 0 even if the memory does not fit")


def run(args: argparse.Namespace) -> int:
    """Print the plan. Exit code 0, 2 with problems of the config, 4 if only the memory does not fit."""
    # A plan is many small tuples without reference cycles; the garbage collector would take a tenth of the time.
    gc.disable()
    try:
        return _run(args)
    finally:
        gc.enable()


def _run(args: argparse.Namespace) -> int:
    composed, plan, problems = planned(args.overrides, args.problems)
    if not args.overrides and not args.problems:
        note(f"note: {_NOTHING}")
    for line in [*composed.notes, *_on_weights(composed)] if composed else ():
        note(f"note: {line}")
    if args.dump_schedule is not None:
        problems += _dump(plan, problems, Path(args.dump_schedule))
    if args.timeline is not None:
        problems += _draw(composed, plan, Path(args.timeline), args.dump_schedule)
    if args.json:
        print(_json(plan, problems))
    else:
        _show(composed, plan, problems)
    print_problems(problems)
    return exit_code(problems, force=args.force)


def _on_weights(composed: Composed) -> list[str]:
    """What is wrong with the weights of `model.from`, which a plan does not need."""
    source = composed.config.model.from_
    if source is None:
        return []
    from ppctl.launch.weights import find_weights, unread_weights  # as in `_read_model`

    try:
        return unread_weights(find_weights(source))
    except ConfigError:
        return []  # it is among the problems


def planned(
    overrides: Sequence[str], problems: Sequence[Problem] = (), *, for_training: bool = False
) -> tuple[Composed | None, Plan | None, list[Problem]]:
    """Compose, check and plan, as far as possible: (config with its history, plan, all problems, each once).

    `problems` are those of the command line.
    """
    composed: Composed | None = None
    found = list(problems)
    try:
        composed = compose(overrides, for_training=for_training, read_model=_read_model, count_tokens=_count_tokens)
    except RefusedError as error:
        found += error.problems
        composed = error.composed
        if any(problem.code == "PP-E104" for problem in found) or (composed is not None and _is_unread(composed)):
            return composed, None, found  # without the recipe or the directory, the plan would be of something else
    except ConfigError as error:
        return None, None, [*found, *error.problems]
    return composed, *plan_of(composed, found)


def _is_unread(composed: Composed) -> bool:
    """Whether `model.from` names a model of which nothing could be taken."""
    given = composed.config.model.from_ is not None
    return given and not any(source.startswith("model.from=") for source in composed.provenance.values())


def plan_of(
    composed: Composed, problems: Sequence[Problem], *, before: Plan | None = None
) -> tuple[Plan | None, list[Problem]]:
    """The plan of a composed config, and all problems: those that were known before, and the plan's.

    `before` is the plan of the run's last start, whose schedule is kept where one was searched for.
    """
    try:
        with _patience_asked():
            plan = plan_checked(composed.config, composed.provenance, problems, before=before)
    except ConfigError as error:
        return None, list(dict.fromkeys(error.problems))
    return plan, list(dict.fromkeys(plan.problems))


@contextmanager
def _patience_asked() -> Iterator[None]:
    """Tell a person after a second that the plan takes longer."""
    if not sys.stderr.isatty():
        yield
        return
    waiting = Timer(_PATIENCE_S, note, ("note: still planning; searching for a layout or a schedule takes seconds",))
    waiting.daemon = True
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


def _read_model(source: str, implementation: str, overrides: Mapping[str, str], lora: Mapping[str, Any]) -> Any:
    """The values that `model.from` sets."""
    from ppctl.launch.weights import values_of  # imports ppctl.families: a tenth of a plan's time, rarely needed

    return values_of(source, implementation, overrides, lora)


def _count_tokens(tokenizer: str) -> int:
    """The rows that an embedding needs for `data.tokenizer`."""
    from ppctl.data.load import load_tokenizer  # numpy

    return load_tokenizer(tokenizer).vocab_size


def _dump(plan: Plan | None, problems: Sequence[Problem], path: Path) -> list[Problem]:
    """Write the schedule if there is a valid one. Returns the problem of writing it, if any."""
    if plan is None or any(problem.code.startswith("PP-E3") for problem in problems):
        return []  # the other problems say why there is nothing to write
    try:
        path.write_text(to_slots(plan.schedule), encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"the schedule cannot be written to {path}: {reason}"
        return [Problem("PP-E127", message, "--dump-schedule schedule.csv", "command line")]
    note(f"note: wrote the schedule to {path}; pipeline.pp_schedule_csv={path} runs it")
    return []


def _draw(composed: Composed | None, plan: Plan | None, path: Path, dumped: str | None) -> list[Problem]:
    """Draw the step if there is a plan whose schedule can run. Returns the problem of drawing it, if any."""
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
    """0; 2; or 4 if the memory is the only problem, which `force` ignores."""
    memory = {problem.code for problem in problems} == {OVER_MEMORY}
    if not problems or (memory and force):
        return 0
    return MEMORY if memory else CONFIG


def summary(plan: Plan) -> str:
    """The first screen of a training run: the letters, the layers of each pp_rank, and the equations."""
    columns = width()
    facts = prose([*plan_text.equations(plan), plan_text.schedule_line(plan)], columns)
    return "\n".join([prose([plan_text.legend(plan)], columns), "", plan_text.drawing(plan), "", facts])


def _json(plan: Plan | None, problems: Sequence[Problem]) -> str:
    report = EMPTY if plan is None else plan.report()
    return json.dumps(report | {"problems": [problem.to_json() for problem in problems]}, indent=2)


def _show(composed: Composed | None, plan: Plan | None, problems: Sequence[Problem]) -> None:
    columns = width()
    blocks: list[tuple[str, str]] = []
    if plan is not None and composed is not None:
        blocks += [(text, "") for text in plan_text.blocks(plan, composed.config, columns)]
    if problems:
        listed = plan_text.problem_lines(problems, planned=plan is not None)
        below = is_live() and sys.stderr.isatty()  # the same screen will show them in full
        blocks.append((listed.partition("\n")[0].rstrip(":") if below else listed, "red"))
    if is_live():
        _render(blocks)
    else:
        print("\n\n".join(text for text, _ in blocks))


def _render(blocks: Sequence[tuple[str, str]]) -> None:
    """Print the same text in colour, with the first line of each block in bold."""
    from rich.text import Text

    screen = console()
    for number, (text, style) in enumerate(blocks):
        first, newline, rest = visible(text).partition("\n")
        shown = Text("\n" if number else "").append(first, f"bold {style}").append(newline + rest, style)
        screen.print(shown, soft_wrap=True)
