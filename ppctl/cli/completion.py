"""`ppctl completion bash | zsh | fish`: the script that lets a shell complete commands, keys, recipes, runs and codes.

The scripts ask `ppctl completion words -- WORD ...` what may stand in place of the last word. Imports no torch, Hydra,
rich or yaml, because a person waits for the answer; only flags need the module of their command.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ppctl.cli import main as front_door
from ppctl.cli.explain import pages, summary
from ppctl.config.argv import ALIASES
from ppctl.config.flags import TAKEN
from ppctl.config.keys import docstring, keys, sections, text_keys
from ppctl.config.metadata import OneOf
from ppctl.config.resources import recipes
from ppctl.config.scale import KEEPS
from ppctl.runs.finding import list_runs
from ppctl.schedule.policies import POLICIES

Word = tuple[str, str]
"""A completion, and a line about it; no blank follows a completion that ends with `=`."""

_FILES = ("--timeline", "--page", "--dir", "--recipes-dir", "--dump-schedule", "--tokenizer", "--html", "--template")
"""Flags followed by a file or a directory, which shells complete by themselves."""

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "shell", choices=(*SHELLS, "words"), metavar=f"{{{','.join(SHELLS)}}}", help="print the script of this shell"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="WORD", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Print a shell's script, or words with a tab and a line about each."""
    if args.shell in SHELLS:
        print(Path(__file__).with_suffix(f".{args.shell}").read_text(encoding="utf-8"), end="")
    else:
        typed = args.words[1:] if args.words[:1] == ["--"] else args.words
        print("".join(f"{word}\t{text}\n" for word, text in candidates(typed or [""])), end="")
    return 0


def candidates(words: Sequence[str]) -> list[Word]:
    """The completions of the last of the words after `ppctl`; none if the shell itself should complete a file name."""
    *before, word = words
    if not before:
        offered: Iterable[Word] = ((name, command.summary) for name, command in front_door.COMMANDS.items())
    elif before[0] not in front_door.COMMANDS or before[-1] in _FILES:
        offered = ()
    elif before[-1] == "--schedule":
        offered = _schedules()
    elif word.startswith("-"):
        offered = _flags(before)
    elif _takes_keys(before, word):
        offered = _overrides(word)
    else:
        offered = _arguments(*before)
    return [each for each in offered if each[0].startswith(word)]


def _takes_keys(before: Sequence[str], word: str) -> bool:
    """Whether KEY=VALUE may stand here: not in place of a run, but after `ckpt verify RUN --for`."""
    if front_door.COMMANDS[before[0]].overrides:
        return "=" in word or len(before) > 1 or before[0] != "resume"
    return "--for" in before


def _overrides(word: str) -> Iterator[Word]:
    name, given, _ = word.partition("=")
    if given:
        for value, text in _values(name):
            yield f"{name}={value}", text
        return
    yield from ((f"{prefix}{key}=", text) for key, text in _GROUPS.items() for prefix in ("+", ""))
    yield from ((f"{alias}=", key) for alias, key in ALIASES.items())
    yield from ((f"{name}=", docstring(key).partition("\n")[0]) for name, key in text_keys().items())


_GROUPS = {"recipe": "the recipe to begin with", "scale": "the recipe as a miniature"}


def _values(name: str) -> Iterator[Word]:
    plain = name.lstrip("+")
    key = text_keys().get(ALIASES.get(plain, plain))
    if plain == "recipe":
        yield from _recipes()
    elif plain == "scale":
        yield from ((scale, f"keeps {kept}") for scale, kept in KEEPS.items())
    elif key is not None and key.name == "pipeline.pp_schedule":
        yield from _schedules()
    elif key is not None and key.is_switch:
        yield from (("true", ""), ("false", ""))
    elif key is not None and isinstance(key.limit, OneOf):
        yield from ((value, "") for value in key.limit.names)


def _flags(before: Sequence[str]) -> Iterator[Word]:
    command = front_door.COMMANDS[before[0]]
    module = importlib.import_module(f"ppctl.cli.{(command.place or before[0]).partition('.')[0]}")
    parser = front_door.parser_of(before[0], module)
    for action in list(parser._actions):
        if isinstance(action, argparse._SubParsersAction):
            parser = next((action.choices[word] for word in before[1:] if word in action.choices), parser)
    for action in parser._actions:
        yield from ((flag, action.help or "") for flag in action.option_strings)
    if command.overrides:
        yield from ((flag, key.name) for flag, key in TAKEN.items() if not (key.is_list or key.is_switch))


def _recipes() -> Iterator[Word]:
    return ((name, recipe.description) for name, recipe in sorted(recipes().items()))


def _schedules() -> Iterator[Word]:
    return ((name, policy.use) for name, policy in POLICIES.items() if policy.trains)


_ACTIONS: dict[str, tuple[str, ...]] = {
    "recipes": ("list", "show", "copy"),
    "runs": ("list", "show", "compare", "delete"),
    "ckpt": ("inspect", "verify", "diff", "average", "prune", "import", "export"),
    "data": ("tokenize", "show"),
    "completion": SHELLS,
}
_OF_A_RUN = ("resume", "generate", "status", "logs", "cancel", "requeue")


def _arguments(command: str, *after: str) -> Iterator[Word]:
    """Completions of a command's words other than keys and flags."""
    if not after and command in _ACTIONS:
        yield from ((name, "") for name in _ACTIONS[command])
    elif command == "explain":
        yield from ((code, title) for code, (title, _) in pages().items())
        yield from ((name, summary(name)) for name in sections())
        yield from ALIASES.items()
        yield from ((name, docstring(key).partition("\n")[0]) for name, key in keys().items())
    elif command == "recipes" and after in (("show",), ("copy",)):
        yield from _recipes()
    elif command in _OF_A_RUN or _takes_runs(command, *after):
        root = next((after[i + 1] for i, word in enumerate(after[:-1]) if word == "--dir"), "runs")
        runs = list_runs(Path(root))
        yield from ((run.id, run.name) for run in runs)
        if after[:1] in (("compare",), ("delete",)):
            yield from ((name, "all runs of this name") for name in dict.fromkeys(run.name for run in runs))


def _takes_runs(command: str, action: str = "", *after: str) -> bool:
    """Whether runs may follow the action of a command."""
    if command == "ckpt" and action == "export":
        return after[-1:] in (("--hf",), ("--dcp",), ("--torch-dist",))
    if command == "ckpt":
        return action in ("inspect", "verify", "diff", "average", "prune") and after[-1:] != ("--out",)
    return command == "runs" and action in ("show", "compare", "delete")
