"""`ppctl search`: the fastest configurations of a model on a number of GPUs, with the proof that no other is faster.

Knows what is typed, what is drawn while it searches, and files that it writes. Must not know how the search works
(`ppctl.search`), nor how the answer looks (`search_text`).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

from ppctl.cli import search_text
from ppctl.cli.console import console, note, width
from ppctl.cli.main import INTERRUPTED
from ppctl.config.argv import PLACE
from ppctl.config.checks import check
from ppctl.errors import ConfigError, MemoryPlanError, Problem
from ppctl.launch.planning import composed, is_unread
from ppctl.plan import plan_checked
from ppctl.plan.layout_choice import AUTO
from ppctl.plan.memory_limit import GRANULARITY, LIMIT
from ppctl.plan.profile import KEY as PROFILE
from ppctl.plan.profile import Profile, read_profile
from ppctl.plan.schedule_choice import SCHEDULE
from ppctl.plan.violations import ConfigValues, Violations
from ppctl.search.answer import BAND, as_json, rows
from ppctl.search.branch import Search
from ppctl.search.space import Space

_MEASURED = ("tp", "cp", "ep", "mbs", GRANULARITY)
"""Keys of which a profile has measured one value."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    words = "keys whose value in the recipe stays as well, such as mbs; what is typed always stays"
    parser.add_argument("--keep", nargs="+", default=[], metavar="KEY", help=words)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Search. Exit codes: 0 found, 2 problems of the config, 4 nothing fits the memory, 130 interrupted."""
    gc.disable()
    space, measured = _space(args)
    search = Search(space, measured)
    interrupted = _to_the_end(search)
    if not search.found and not interrupted:
        raise _nothing(search)
    listed = rows(search)
    lines = [search_text.line(args.line.overrides, space, row.planned.configuration) for row in listed]
    if args.json:
        print(json.dumps(as_json(search, listed, lines), indent=1))
    else:
        print(search_text.text(search, listed, lines, width()))
    return INTERRUPTED if interrupted else 0


def _to_the_end(search: Search) -> bool:
    """Search, and draw how far it is. Returns whether it was interrupted."""
    try:
        with _progress() as show:
            for _ in search.run():
                show(search)
            for _ in chain(search.other_divisions(BAND), search.simpler()):
                show(search)
    except KeyboardInterrupt:
        return True
    return False


@contextmanager
def _progress() -> Iterator[Callable[[Search], None]]:
    """Yield a function that draws how many configurations are decided, and the best so far; nothing on a pipe."""
    if not sys.stderr.isatty():
        yield lambda search: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("dividing the ranks", total=None)

        def show(search: Search) -> None:
            done = search.counts.memory + search.counts.rules + search.counts.planned
            bar.update(task, total=search.counts.total or None, completed=done, description=search_text.so_far(search))

        yield show


# What is searched


def _space(args: argparse.Namespace) -> tuple[Space, Profile | None]:
    """The space that the command line describes, and measured costs. Raises ConfigError with all problems."""
    config, problems = composed(args.line)
    values = ConfigValues(config.config, config.provenance)
    for line in config.notes:
        if "layout" not in line:
            note(f"note: {line}")
    if problems and (any(problem.code == "PP-E104" for problem in problems) or is_unread(config)):
        raise ConfigError(problems)
    problems += [problem for problem in _impossible(values, args)]
    keep = [*args.keep, *(_MEASURED if values[PROFILE] is not None else ())]
    space = Space(values, [key for key in keep])
    of_values = {problem.message for problem in check(values.config, values.provenance)}
    least = space.neutral
    problems = [problem for problem in problems if problem.message not in of_values]
    problems += check(least.config, least.provenance)
    violations: Violations = []
    measured = read_profile(values, violations)
    if violations:
        problems += _planned_problems(values)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return space, measured


def _impossible(values: ConfigValues, args: argparse.Namespace) -> Iterator[Problem]:
    """What keeps a search from being made at all."""
    place = PLACE
    if values["nodes"] is None and values["gpus_per_node"] is None:
        message = "a search needs the number of GPUs"
        yield Problem("PP-E228", message, "nodes=1 gpus_per_node=8", place)
    if values[LIMIT] is None:
        message = f"a search needs {LIMIT}, in which a plan must fit"
        yield Problem("PP-E228", message, f"{LIMIT}=80GiB", place)
    for key in ("layout", SCHEDULE):
        if values[key] == AUTO:
            message = f"{key}={AUTO} is a search of its own, of one configuration; take a line of the answer with it"
            yield Problem("PP-E228", message, f"{key}=null" if key == "layout" else f"{key}=1f1b", values.cite(key))


def _planned_problems(values: ConfigValues) -> list[Problem]:
    """The problems of a config's plan."""
    try:
        return list(plan_checked(values.config, values.provenance, []).problems)
    except ConfigError as error:
        return list(error.problems)


def _nothing(search: Search) -> ConfigError | MemoryPlanError:
    """The error of a search that found nothing: what is typed contradicts itself, or does not fit the memory."""
    if search.counts.memory or search.over:
        return MemoryPlanError([Problem("PP-E803", "…")])
    return ConfigError(_planned_problems(search.space.neutral))
