"""`ppctl recipes list | show NAME | copy NAME [FILE]`: ppctl's recipes and the user's own.

Knows files. Must not know what is in a recipe. Imports no torch, no Hydra and no rich.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

from ppctl.cli.table import aligned
from ppctl.config.keys import did_you_mean, nearest
from ppctl.config.resources import Recipe, recipes
from ppctl.errors import ConfigError, Problem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    listing = actions.add_parser("list", help="list all recipes (the default)")
    show = actions.add_parser("show", help="print a recipe")
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
        use = f"ppctl plan {shlex.quote(f'+recipe={copied}')}"
        print(json.dumps({"path": str(copied), "use": use}) if args.json else f"{copied}\nuse it with: {use}")
    elif args.json:
        print(json.dumps(_as_data(args), indent=1, default=str))
    elif args.action == "show":
        print(find(args.name).path.read_text(encoding="utf-8"), end="")
    else:
        print(aligned((name, recipe.description) for name, recipe in sorted(recipes().items())))
    return 0


def _as_data(args: argparse.Namespace) -> dict[str, Any]:
    """One recipe with its values, or all of them, in the order of their names."""
    if args.action != "show":
        return {"recipes": [_facts(recipe) for _, recipe in sorted(recipes().items())]}
    from ppctl.config.yaml_file import YamlFile

    recipe = find(args.name)
    return {**_facts(recipe), "values": YamlFile(recipe.path, recipe.label).values}


def _facts(recipe: Recipe) -> dict[str, Any]:
    return {"name": recipe.name, "description": recipe.description, "path": str(recipe.path)}


def find(name: str) -> Recipe:
    """The recipe of that name. Raises ConfigError with the nearest names."""
    found = recipes()
    if name in found:
        return found[name]
    close = nearest(name, found)
    message = f"there is no recipe {name}{did_you_mean(name, found)}"
    remedy = f"ppctl recipes show {close[0]}" if close else "ppctl recipes"
    raise ConfigError(Problem("PP-E104", message, remedy, "command line"))


def copy_to(recipe: Recipe, to: str | None) -> Path:
    """Copy the file; returns the new one. Raises ConfigError if a file would be overwritten or cannot be written."""
    target = Path(to or ".")
    if target.suffix != ".yaml":
        target = target / recipe.path.name
    if target.exists():
        free = next(f for n in range(2, 1000) if not (f := target.with_stem(f"{target.stem}-{n}")).exists())
        message = f"{target} exists, and a copy never overwrites"
        again = f"ppctl recipes copy {recipe.name} {shlex.quote(str(free))}"
        raise ConfigError(Problem("PP-E126", message, again, "command line"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(recipe.path, target)
    except OSError as error:
        message = f"{target} cannot be written: {error.strerror}"
        raise ConfigError(Problem("PP-E126", message, place="command line")) from None
    return target
