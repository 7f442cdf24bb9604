"""`ppctl recipes list | show NAME | copy NAME [FILE]`: ppctl's recipes and the user's own."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ppctl.cli.console import aligned, folded, width
from ppctl.config.keys import did_you_mean, nearest
from ppctl.config.resources import YAML, Recipe, recipes
from ppctl.errors import ConfigError, Problem, pasted, visible
from ppctl.host.files import unused


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    listing = actions.add_parser("list", help="list all recipes (the default)")
    show = actions.add_parser("show", help="print a recipe, and its table of published values as comments")
    copy = actions.add_parser("copy", help="copy a recipe, to edit it; never overwrites a file")
    for parser_of_action in (show, copy):
        parser_of_action.add_argument("name", metavar="NAME", help="the name of a recipe")
    for parser_of_action in (listing, show, copy):
        parser_of_action.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object"
        )
    copy.add_argument("to", metavar="FILE", nargs="?", help="the new file, or its directory (default: NAME.yaml here)")


def run(args: argparse.Namespace) -> int:
    """Do one action; the default is list."""
    if args.action == "copy":
        copied = copy_to(find(args.name), args.to)
        use = f"ppctl plan {pasted(f'+recipe={copied}')}"
        print(json.dumps({"path": str(copied), "use": use}) if args.json else f"{copied}\nuse it with: {use}")
    elif args.action == "show":
        _show(find(args.name), args.json)
    else:
        known = [recipe for _, recipe in sorted(recipes().items())]
        rows = [(recipe.name, recipe.description) for recipe in known]
        listed = {"recipes": [_facts(recipe) for recipe in known]}
        print(json.dumps(listed, indent=1) if args.json else aligned(folded(rows, width(), " ")))
    return 0


def _show(recipe: Recipe, as_json: bool) -> None:
    from ppctl.config.yaml_file import YamlFile  # PyYAML

    file = YamlFile(recipe.path, recipe.label)
    if as_json:
        print(json.dumps({**_facts(recipe), "values": file.values}, indent=1, default=str))
        return
    print(file.text, end="")
    rows = file.values.get("published")
    if isinstance(rows, list):
        print("\n" + "\n".join(f"# {line}" for line in published(recipe.name, rows, width() - 2).splitlines()))


def _facts(recipe: Recipe) -> dict[str, Any]:
    return {"name": recipe.name, "description": recipe.description, "path": str(recipe.path)}


def find(name: str) -> Recipe:
    """The recipe of that name. Raises ConfigError with the nearest names."""
    known = recipes()
    if name in known:
        return known[name]
    close = nearest(name, known)
    message = f"there is no recipe {name}{did_you_mean(name, known)}"
    remedy = f"ppctl recipes show {pasted(close[0])}" if close else "ppctl recipes"
    raise ConfigError(Problem("PP-E104", message, remedy, "command line"))


def published(name: str, table: Sequence[Mapping[str, Any]], columns: int) -> str:
    """A recipe's table: the published value, the value here, and why they differ."""
    header = ["what", "published", "here", "why"]
    rows = [header, *([str(row.get(key, "")) for key in header] for row in table if isinstance(row, Mapping))]
    natural = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = max(columns - natural[0] - 6, 45) // 3
    limits = [natural[0], *(min(size, room) for size in natural[1:])]
    lines: list[tuple[str, ...]] = []
    for row in rows:
        lines += zip_longest(*(textwrap.wrap(*cell) or [""] for cell in zip(row, limits, strict=True)), fillvalue="")
    return f"recipe {name}, published and here\n{aligned(lines)}"


def copy_to(recipe: Recipe, to: str | None) -> Path:
    """Copy the recipe's file; returns the new path. Raises ConfigError if that exists already or cannot be written."""
    target = Path(to or ".")
    if target.suffix not in YAML:
        target = target / recipe.path.name
    write_new(target, recipe.path.read_bytes(), pasted("ppctl", "recipes", "copy", recipe.name))
    return target


def write_new(target: Path, content: bytes, again: str) -> None:
    """Write a new file; `again` is the command line without the file's name. Raises ConfigError (PP-E126) if the file
    exists already or cannot be written."""
    if target.exists():
        message = f"{target} exists already, and is not overwritten"
        raise ConfigError(Problem("PP-E126", message, f"{again} {pasted(unused(target))}", "command line"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    except OSError as error:
        message = f"{target} cannot be written: {error.strerror}"
        raise ConfigError(Problem("PP-E126", message, place="command line")) from None


def lines_of(values: Mapping[str, Any], sources: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    """The lines of a recipe with these values, each with its source as a comment (`typed` if it has none)."""
    indent = "  " * prefix.count(".")
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in sources:
            yield f"{indent}{key}:"
            yield from lines_of(value, sources, f"{name}.")
        else:
            text = visible(json.dumps(value, ensure_ascii=False), "")
            yield f"{indent}{key}: {text}  {comment(sources.get(name, 'typed'))}"


def comment(text: str) -> str:
    """`text` as a comment of one line."""
    return f"# {visible(' '.join(text.split()))}"
