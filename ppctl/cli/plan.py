"""`ppctl plan`: check a config and show what train would do; without torch, and with rich on a terminal only."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppctl.cli import plan_text
from ppctl.cli.console import console, is_live, note, print_problems, width
from ppctl.cli.timeline import add_timeline_argument, obstacle, write_timeline
from ppctl.config.argv import quote
from ppctl.config.compose import Composed
from ppctl.config.name_tables import SYSTEMS
from ppctl.errors import ConfigError, Problem, pasted, visible
from ppctl.host.files import write_atomically
from ppctl.launch.machine import with_overrides
from ppctl.launch.planning import only_memory, planned, refusal
from ppctl.plan import Plan
from ppctl.plan.plan import LIMIT_KEYS
from ppctl.plan.plan_picture import picture
from ppctl.plan.schedule_choice import CSV
from ppctl.plan.violations import ConfigValues
from ppctl.records.json_reader import without_collections
from ppctl.schedule.simulate import to_slots

_NUMBERS = ("name", "world_size", "parallel", "layout", "params_total", "params_mtp", "params_active", "params_hf")
EMPTY: dict[str, Any] = dict.fromkeys((*_NUMBERS, *LIMIT_KEYS, "schedule", "timing"))
EMPTY |= {key: [] for key in ("stages", "pp_ranks", "replicated_params", "tie_groups", "traffic", "derived")}
"""The JSON's keys if there is no plan, only problems."""
_UNREAD = ("PP-E101", "PP-E105", "PP-E107")
"""Codes of unknown words on a command line: a plan without them would be of another config."""

_NOTHING = (
    "no arguments: this is the plan of the defaults, a tiny model on one rank; `ppctl recipes` lists published jobs, "
    "such as `ppctl plan +recipe=llama3_8b`; `ppctl plan model.from=DIR pp=2` plans your own model"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, problems included")
    parser.add_argument("--dump-schedule", metavar="FILE.csv", help="write the schedule in torch's compute-only CSV")
    add_timeline_argument(parser)
    words = "show with which plan a run goes on if so many nodes are lost: 1,2,4 (docs/planning.md)"
    parser.add_argument("--lost", metavar="N,N,...", help=words)
    parser.add_argument(
        "--from", dest="source", metavar="FILE", help="plan another system's config (docs/migrating.md)"
    )
    parser.add_argument("--from-format", choices=SYSTEMS, help="the system of FILE (default: what its content shows)")
    parser.add_argument("--write", metavar="FILE.yaml", help="with --from: write the recipe that means the same")
    parser.add_argument("--force", action="store_true", help="exit 0 even if the memory does not fit")


@without_collections()  # a plan is many small tuples without cycles: looking for cycles takes a tenth of the time
def run(args: argparse.Namespace) -> int:
    """Print the plan. Exit code 0, 2 with problems of the config, 4 if only the memory does not fit."""
    found, lost, below = None, list[dict[str, Any]](), ""
    try:
        if args.source is not None or args.write is not None or args.from_format:
            from ppctl.cli import plan_from  # and with it the tables of other systems' names

            found = plan_from.apply(args)
    except ConfigError as error:
        if args.json:
            print(json.dumps(EMPTY | {"problems": [problem.to_json() for problem in error.problems]}, indent=2))
        raise
    composed, plan, problems = planned(args.line)
    if not args.line.overrides and not problems:
        note(f"note: {_NOTHING}")
    for line in (*composed.notes, *_on_weights(composed)):
        note(f"note: {line}")
    if plan is not None and not any(problem.code.startswith("PP-E3") for problem in problems):
        problems += list(_write(args, composed, plan, problems))
    if any(problem.code in _UNREAD for problem in problems):
        plan = None
    if args.lost is not None and plan is not None and not problems:
        from ppctl.cli.lost import losses  # and with it the search

        lost, below, wrong = losses(args.lost, ConfigValues(composed.config, composed.provenance), plan)
        problems += wrong
    if args.json:
        report = EMPTY if plan is None else plan.report()
        report = report | ({"translation": found[1]} if found else {}) | ({"lost": lost} if lost else {})
        print(json.dumps(report | {"problems": [problem.to_json() for problem in problems]}, indent=2))
    else:
        _show(composed, plan, problems, found[0] if found else "", below)
    print_problems(problems)
    return 0 if not problems or (args.force and only_memory(problems)) else refusal(problems).exit_code


def _on_weights(composed: Composed) -> list[str]:
    source = composed.config.model.from_
    if source is None:
        return []
    from ppctl.launch.weights import find_weights, unread_weights  # imports ppctl.families, rarely needed

    try:
        return unread_weights(find_weights(source))
    except ConfigError:
        return []  # the error is among the problems


def _write(args: argparse.Namespace, composed: Composed, plan: Plan, problems: Sequence[Problem]) -> Iterator[Problem]:
    """Write the files that `--dump-schedule` and `--timeline` name; yields problems of writing."""
    table, drawn = (None if name is None else Path(name) for name in (args.dump_schedule, args.timeline))
    if table is not None:
        try:
            if reason := obstacle(table):
                raise ValueError(reason)
            write_atomically(table, to_slots(plan.schedule))
            again = replace(args.line, overrides=with_overrides(args.line.overrides, f"{CSV}={quote(CSV, str(table))}"))
            runs = {problem.code for problem in planned(again)[2]} <= {problem.code for problem in problems}
            note(f"note: wrote the schedule to {table}" + f"; {pasted(f'{CSV}={table}')} runs it" * runs)
        except (OSError, ValueError) as error:
            message = f"the schedule cannot be written to {table}: {getattr(error, 'strerror', None) or error}"
            yield Problem("PP-E127", message, "--dump-schedule schedule.csv", "command line")
    if table and drawn and table.resolve() == drawn.resolve():
        message = f"--timeline and --dump-schedule both write {drawn}: the picture would replace the schedule"
        yield Problem("PP-E129", message, "--timeline step.html", "command line")
    elif drawn:
        try:
            write_timeline(picture(plan, composed.config), drawn)
        except ConfigError as error:
            yield from error.problems


def _show(composed: Composed, plan: Plan | None, problems: Sequence[Problem], translation: str, lost: str) -> None:
    columns = width()
    blocks: list[tuple[str, str]] = [(translation, "")] if translation else []
    if plan is not None:
        blocks += [(text, "") for text in plan_text.blocks(plan, composed.config, columns)]
    blocks += [(lost, "")] if lost else []
    if problems:
        listed = plan_text.problem_lines(problems, planned=plan is not None)
        below = is_live() and sys.stderr.isatty()  # the same screen will show them in full
        blocks.append((listed.partition("\n")[0].rstrip(":") if below else listed, "red"))
    if is_live():
        _render(blocks)
    else:
        print("\n\n".join(text for text, _ in blocks))


def _render(blocks: Sequence[tuple[str, str]]) -> None:
    """Print blocks of text in colour, with the first line of each in bold."""
    from rich.text import Text

    screen = console()
    for number, (text, style) in enumerate(blocks):
        first, newline, rest = visible(text).partition("\n")
        shown = Text("\n" if number else "").append(first, f"bold {style}").append(newline + rest, style)
        screen.print(shown, soft_wrap=True)
