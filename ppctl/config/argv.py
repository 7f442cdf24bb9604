"""What people type, made into plain overrides: aliases, Megatron's flags, sweeps refused.

Pure: knows names and text, never values or files; Hydra's grammar is `quoting`'s. `normalise` turns tokens into
`KEY=VALUE` with full key names, and its result is a fixed point of itself.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ppctl.config.flags import (
    LISTS,
    MEGATRON,
    SWITCHES,
    Foreign,
    flag_problem,
    flags_problem,
    foreign,
    takes_several,
)
from ppctl.config.keys import as_typed, keys, names_of_keys, sections
from ppctl.config.quoting import quote, sweep_values, unquoted
from ppctl.errors import Problem, pasted

LAYOUT = "parallel.pipeline_model_parallel_layout"

ALIASES = {name: key for name, key in names_of_keys("names").items() if "-" not in name and "." not in name}
"""Short name of a key -> key."""

SYNONYMS = {name: key for name, key in names_of_keys("names").items() if "." in name}
"""Another system's name of a key, with its section -> key."""

PLACE = "command line"

_BATCH = "train.global_batch_size"
_GROWS = ("--rampup-batch-size", "train.batch_rampup")

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)


def full_name(name: str) -> str:
    """The key that an alias, or another system's name, stands for; any other name as it is."""
    return ALIASES.get(name) or SYNONYMS.get(name, name)


@dataclass(slots=True)
class Arguments:
    """A command line, sorted."""

    overrides: list[str] = field(default_factory=list)
    """`KEY=VALUE` with full names and Hydra's quoting."""
    rest: list[str] = field(default_factory=list)
    """What is neither an override nor a Megatron flag: the command's own flags and positional arguments."""
    problems: list[Problem] = field(default_factory=list)


def normalise(tokens: Sequence[str], own: Mapping[str, bool] | None = None, command: str = "train") -> Arguments:
    """Sort and rewrite `tokens`, the command line after the command's name.

    `own` maps each flag of the command itself to whether it takes a value. Nothing is raised: problems are collected.
    """
    sorter = _Sorter(list(tokens), own or {})
    while sorter.queue:
        sorter.take(sorter.queue.pop(0))
    sorter.merge_foreign_flags(command)
    if sorter.sweeps or sorter.multirun:
        sorter.found.problems.append(sorter.sweep_problem(command))
    return sorter.found


class _Sorter:
    """The state of one pass over a command line."""

    def __init__(self, queue: list[str], own: Mapping[str, bool]) -> None:
        self.queue = queue
        self.tokens = tuple(queue)
        self.own = own
        self.found = Arguments()
        self.typed: dict[str, tuple[str, str, str]] = {}
        """Key -> its quoted value, and how it was typed."""
        self.sweeps: list[tuple[str, list[str]]] = []
        """For each list of values: how it was typed, and the values."""
        self.foreign: list[tuple[Foreign, Problem]] = []
        """Flags of Megatron's that are keys here, and the problem of each alone."""
        self.multirun = False
        self.line: list[str] = []
        """The command line again as shell text, with a loop variable where a list stood."""

    def take(self, token: str) -> None:
        """Sort one token (and the value that follows it)."""
        name, equals, value = token.partition("=")
        if token in ("-m", "--multirun"):
            self.multirun = True
        elif name in self.own:
            self._own_flag([token], needs_value=self.own[name] and not equals)
        elif name in MEGATRON and (equals or self._value_follows()):
            words = [] if equals else [self.queue.pop(0)]
            self._add(name, MEGATRON[name], value if equals else words[0], pasted(token, *words))
        elif name in LISTS and (equals or self._value_follows()):
            words = [] if equals else self._words()
            self._add(name, LISTS[name], f"[{value or ','.join(words)}]", pasted(token, *words))
        elif name in SWITCHES:
            self._add(name, SWITCHES[name], value if equals else "true", pasted(token))
        elif token.startswith("-") and len(token) > 1:
            if not equals:
                words = self._words(None if takes_several(name) else 1)
                value = "".join(words) if len(words) < 2 else f"[{','.join(words)}]"
            self._foreign_flag(name, value)
        else:
            self._positional(token)

    def _value_follows(self) -> bool:
        return bool(self.queue) and (not self.queue[0].startswith("-") or self.queue[0][1:2].isdigit())

    def _words(self, most: int | None = None) -> list[str]:
        """The values that follow a flag, up to the next flag or override."""
        words: list[str] = []
        while len(words) != most and self._value_follows() and "=" not in self.queue[0]:
            words.append(self.queue.pop(0))
        return words

    def _own_flag(self, words: list[str], needs_value: bool) -> None:
        if needs_value and self.queue:
            words.append(self.queue.pop(0))
        self.found.rest += words
        self.line += map(pasted, words)

    def _foreign_flag(self, flag: str, value: str) -> None:
        batch = self._global_batch()
        self.found.problems.append(flag_problem(flag, value, self.own, batch))
        known = foreign(flag, value, batch)
        if known is not None:
            self.foreign.append((known, self.found.problems[-1]))
            self.line += map(pasted, shlex.split(known.override))

    def _global_batch(self) -> str:
        """The global batch size wherever it stands on the line; empty where it does not, or where it is grown to."""
        if any(token.partition("=")[0] in _GROWS for token in self.tokens):
            return ""
        words = (word for token in self.tokens for word in token.split("=", 1))
        names = {name for name, key in {**ALIASES, **MEGATRON}.items() if key == _BATCH} | {_BATCH}
        return next((next(words, "") for word in words if word in names), "")

    def merge_foreign_flags(self, command: str) -> None:
        """Make one problem of several flags of Megatron's: a pasted command line is answered with a command line."""
        if len(self.foreign) > 1:
            single = [problem for _, problem in self.foreign]
            flags = [known for known, _ in self.foreign]
            given = {key: value for key, (value, _, _) in self.typed.items()}
            words = [word for known in flags for word in shlex.split(known.override)]
            given |= {key: value for key, _, value in (word.partition("=") for word in words)}
            merged = flags_problem(flags, " ".join(["ppctl", command, *self.line]), given)
            self.found.problems = [merged, *(one for one in self.found.problems if one not in single)]

    def _positional(self, token: str) -> None:
        match = _OVERRIDE.fullmatch(token)
        if match is None or (match[3] is None and not match[1]):
            self.found.rest.append(token)
            self.line.append(pasted(token))
        elif match[1] == "~":
            message = f"{token}: nothing can be deleted from a closed config"
            self.found.problems.append(Problem("PP-E121", message, _reset(match[2]), PLACE))
        elif match[3] is None:
            self.found.problems.append(Problem("PP-E105", f"{token} has no value", _where_explained(match[2]), PLACE))
        else:
            self._add(match[2], full_name(match[2]), match[3], pasted(token))

    def _add(self, name: str, key: str, value: str, typed: str) -> None:
        """Add one override, unless it is a list of values or contradicts an earlier one."""
        values = sweep_values(key, value)
        if values is not None:
            variable = f"value{len(self.sweeps) + 1}"
            self.sweeps.append((typed, values))
            self.line.append(f'{name}="${variable}"')
            return
        self.line.append(typed)
        quoted = quote(key, value)
        before, first, again = self.typed.setdefault(key, (quoted, typed, value))
        if before != quoted:
            message = f"{key} has two values, {first} and {typed}; keep one of them"
            self.found.problems.append(Problem("PP-E124", message, pasted(f"{key}={again}"), PLACE))
        elif first is typed:
            self.found.overrides.append(f"{key}={quoted}")

    def sweep_problem(self, command: str) -> Problem:
        """The shell loop that does what a sweep would."""
        line = " ".join(["ppctl", command, *self.line])
        if not self.sweeps:
            return Problem("PP-E106", "ppctl starts one run at a time: there is no multirun", line, PLACE)
        for n, (_, values) in reversed(list(enumerate(self.sweeps, start=1))):
            line = f"for value{n} in {pasted(*values)}; do {line}; done"
        message = (
            f"ppctl starts one run at a time, and {', '.join(typed for typed, _ in self.sweeps)} lists several values"
        )
        return Problem("PP-E106", message, line, PLACE)


def _reset(name: str) -> str:
    """The override to type instead of deleting a key: its default."""
    key = full_name(name)
    if key == "recipe":
        return "recipe=null"
    return as_typed(key, keys()[key].default) if key in keys() else "ppctl explain"


def _where_explained(name: str) -> str:
    """The command that shows what `name` may be set to."""
    key = full_name(name)
    if key == "recipe":
        return "ppctl recipes"
    return f"ppctl explain {key}" if key in keys() or key in sections() else "ppctl explain"


def typed_again(command: str, overrides: Sequence[str]) -> str:
    """A whole command line of ppctl's, to paste."""
    return " ".join(filter(None, ["ppctl", command, retyped(overrides)]))


def retyped(overrides: Sequence[str]) -> str:
    """Normalised overrides as a person types them in a shell: without Hydra's quotes, recipe and scale with a plus."""
    words = []
    for override in overrides:
        key, _, value = override.partition("=")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        plain = f"{key}={unquoted(value)}" if quoted else override
        word = plain if normalise([plain]).overrides == [override] else override
        words.append(f"+{word}" if key in ("recipe", "scale") else word)
    return pasted(*words)
