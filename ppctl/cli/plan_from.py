"""`ppctl plan --from FILE`: the translation of all settings of another system's file, and a recipe."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from datetime import date
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ppctl import __version__
from ppctl.cli.console import aligned, folded, note, width
from ppctl.cli.recipes import comment, lines_of, write_new
from ppctl.config.argv import retyped
from ppctl.config.flags import answered
from ppctl.config.hydra_source import parse
from ppctl.config.mapping import nested
from ppctl.config.name_tables import SYSTEMS
from ppctl.config.other_systems import NO_MODEL, OF_THE_MODEL
from ppctl.config.resources import groups
from ppctl.config.translate import VOCABULARY_ALONE, Translation, translation
from ppctl.errors import ConfigError, Problem, pasted, visible
from ppctl.host.files import expanded
from ppctl.launch.planning import composed

_LONGEST = 2000
"""The most characters of a setting's translation on the screen."""


def apply(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Put the settings of `--from` into `args.line`, where typed words override them; add a problem if some are lost
    and no recipe is written. Write the recipe of `--write`. Returns each setting's translation, as text and as data.

    Raises ConfigError for a file that cannot be read or whose model has to be typed, for `--write` without a file, and
    for a recipe that cannot be written.
    """
    if args.source is None:
        message = "--write and --from-format need a file that --from names"
        raise ConfigError(Problem("PP-E107", message, "ppctl plan --from config.yaml --write my.yaml", "command line"))
    names = {override.partition("=")[0] for override in args.line.overrides}
    layers = composed(args.line)[0].config.model.num_layers if names & {*OF_THE_MODEL} else None
    found = translation(expanded(args.source), args.from_format, args.line, layers)
    if unknown := [row.why for row in found.rows if row.code == NO_MODEL]:
        message = f"{args.source}: {unknown[0]}"
        raise ConfigError(Problem("PP-E107", message, "ppctl recipes", _table(found, args.source)))
    if found.lost and args.write is None:
        message = (
            f"{args.source}: {len(found.lost)} not carried over; --write makes a recipe of the others, and lists these"
        )
        rows = aligned([(row.shown(), answered(row)[:_LONGEST]) for row in found.lost])
        found.line.problems.append(Problem("PP-E107", message, f"{_again(args)} --write my.yaml", rows))
    for line in found.notes:
        note(f"note: {line}")
    if args.write is not None:
        note(f"note: wrote {args.write}; use it with: {_write_recipe(found, args)}")
    args.line = found.line
    return _table(found, args.source), [row._asdict() for row in found.rows]


def _again(args: argparse.Namespace) -> str:
    chosen = ["--from-format", args.from_format] if args.from_format else []
    return f"{pasted('ppctl', 'plan', '--from', args.source, *chosen)} {retyped(args.line.overrides)}".rstrip()


def _table(found: Translation, file: str) -> str:
    """All settings as a table: those that are translated, those that are lost, and those left out, by reason."""
    lost = found.lost
    rest = [row for row in found.rows if not row.override and row not in lost]
    reasons: dict[str, list[str]] = {}
    for row in rest:
        reasons.setdefault(row.why, []).append(row.typed.partition("=")[0])
    kept = [row for row in found.rows if row.override]
    head = (
        f"{file}: {SYSTEMS[found.system]}, {len(kept)} translated, {len(rest)} left out, {len(lost)} not carried over"
    )
    rows = [(row.shown(_LONGEST), answered(row)) for row in (*kept, *lost)]
    rows += [("left out", f"{why}: {', '.join(names)}") for why, names in reasons.items()]
    most = min(max(width() // 2 - 10, 20), 60)
    names = [textwrap.wrap(visible(name, ""), most, subsequent_indent="  ", break_on_hyphens=False) for name, _ in rows]
    ahead = " " * max(len(line) for lines in names for line in lines)
    table: list[tuple[str, str]] = []
    for wrapped, (_, text) in zip(names, rows, strict=True):
        folds = folded([(ahead, visible(text[:_LONGEST], ""))], width(), " ")
        table += zip_longest(wrapped, [fold for _, fold in folds], fillvalue="")
    return f"{head}\n{aligned(table)}"


def _write_recipe(found: Translation, args: argparse.Namespace) -> str:
    """Write the recipe; returns the command that uses it. Raises ConfigError (PP-E103, PP-E126)."""
    target = Path(args.write)
    if target.suffix not in (".yaml", ".yml"):
        message = f"the name of a recipe's file must end with .yaml or .yml, not as {target} does"
        raise ConfigError(Problem("PP-E126", message, f"{_again(args)} --write my.yaml", "command line"))
    lines = "\n".join(_recipe(found, args))
    write_new(target, f"{lines}\n".encode(), f"{_again(args)} --write")
    return pasted("ppctl", "plan", target)


def _recipe(found: Translation, args: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of a recipe with the translated values. Raises ConfigError (PP-E103)."""
    pairs = [override.partition("=") for override in found.line.overrides]
    chosen = {key: text.strip("'\"") for key, _, text in pairs if key in groups() or key == "scale"}
    if unfit := {"recipe", "scale"} & {*chosen}:
        message = f"{unfit.pop()} is chosen on the command line, not in a recipe"
        raise ConfigError(Problem("PP-E103", message, _again(args), "command line"))
    yield comment(f"{Path(args.source).name}, translated from {SYSTEMS[found.system]}.")
    yield comment(f"Source: {args.source}, read on {date.today()} by ppctl {__version__}. Behind a value: its setting.")
    left = [*found.lost, *(row for row in found.rows if row.why == VOCABULARY_ALONE)]
    yield from (comment(f"Not carried over: {row.typed}: {answered(row)}") for row in left)
    if chosen:
        yield "defaults:"
        yield from (f"  - override /{group}: {option}" for group, option in chosen.items())
        yield "  - _self_"
    values = {key: parse(f"{key}={text}").value() for key, _, text in pairs if key not in chosen}
    yield from lines_of(nested(values), found.line.sources)
