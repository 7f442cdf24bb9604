"""Where conf/ and recipes are: in the checkout, the installed package (`ppctl._conf`, `ppctl._recipes`),
PPCTL_RECIPES_PATH, or a file that a command line names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ppctl.host.files import expanded, is_file, read_text

RECIPES_PATH = "PPCTL_RECIPES_PATH"
"""Directories of the user's own recipes, separated as in PATH; searched before the shipped ones."""

_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Recipe:
    """One recipe file."""

    name: str
    path: Path
    label: str
    """The path as messages show it: for a shipped recipe as `shown` makes it, else as it was found."""

    @property
    def description(self) -> str:
        """The first comment line with text."""
        try:
            lines = read_text(self.path).splitlines()
        except (OSError, ValueError):  # of another user, or not in UTF-8: other recipes are listed all the same
            return "cannot be read"
        for line in lines:
            text = line.lstrip("#").strip()
            if line.startswith("#") and text and not text.startswith("@"):
                return text
        return ""


def _shipped(installed: str, checkout: str) -> Path:
    packaged = _PACKAGE / installed
    return packaged if packaged.is_dir() else _PACKAGE.parent / checkout


def shown(path: Path) -> str:
    """A shipped file's path in messages: relative to the directory of the package or of the checkout."""
    return str(path.relative_to(_PACKAGE.parent))


def conf_directory() -> Path:
    """Hydra's configuration root."""
    return _shipped("_conf", "conf")


def recipes_directory() -> Path:
    """The shipped recipes."""
    return _shipped("_recipes", "recipes")


def recipes() -> dict[str, Recipe]:
    """Name -> recipe; the user's own come first and hide shipped ones of the same name."""
    by_name: dict[str, Recipe] = {}
    for directory in filter(None, os.environ.get(RECIPES_PATH, "").split(os.pathsep)):
        for path in sorted(expanded(directory).glob("*.yaml")):
            by_name.setdefault(path.stem, Recipe(path.stem, path, str(path)))
    for path in sorted(recipes_directory().glob("*.yaml")):
        by_name.setdefault(path.stem, Recipe(path.stem, path, shown(path)))
    return by_name


YAML = (".yaml", ".yml")
"""The endings of recipe files."""


def is_file_name(option: str) -> bool:
    """Whether the value of `recipe=` is a file, not a recipe's name."""
    return "/" in option or option.endswith(YAML)


def find_recipe(option: str) -> Recipe | None:
    """The recipe of `recipe=OPTION`, a recipe's name or a file's path (`mine.yaml`, `../runs/mine.yaml`). An unknown
    name may be that of a file in the working directory, without its ending. None if there is none."""
    known = None if is_file_name(option) else recipes().get(option)
    if known or not option:
        return known
    path = expanded(option if is_file_name(option) else f"{option}{YAML[0]}")
    return Recipe(path.stem, path, option) if is_file(path) else None


def groups() -> dict[str, list[str]]:
    """Config group -> its options: the directories of conf/ and `recipe`."""
    options = {
        folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
        for folder in sorted(conf_directory().iterdir())
        if folder.is_dir() and not folder.name.startswith("_")
    }
    return options | {"recipe": sorted(recipes())}
