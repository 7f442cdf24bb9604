"""Turns the words of a command line into overrides: full key names, values quoted for Hydra, lists kept apart.

`normalise` turns each word into `KEY=VALUE`; if several words set one key, the last word counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ppctl.config.flags import TAKEN, TranslatedFlag, flag_problem, flags_problem, takes_several, translated
from ppctl.config.keys import Key, as_typed, keys, mapping_with, names_of_keys, sections
from ppctl.config.resources import YAML
from ppctl.errors import Problem, pasted

LAYOUT = "parallel.pipeline_model_parallel_layout"

ALIASES = {name: key for name, key in names_of_keys("names").items() if "-" not in name and "." not in name}
"""Short name of a key -> key."""

SHORT = {key: name for name, key in reversed(ALIASES.items())}
"""Key -> the first of its short names."""

PLACE = "command line"

_BATCH = "train.global_batch_size"
_GROWS = ("--rampup-batch-size", "train.batch_rampup")

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)


def full_name(name: str) -> str:
    """The key that an alias or another system's name stands for; other names unchanged."""
    return name if name.startswith("-") else names_of_keys("names").get(name, name)


@dataclass(slots=True)
class Arguments:
    """A command line, sorted."""

    overrides: list[str] = field(default_factory=list)
    """`KEY=VALUE` with full names and Hydra's quoting, one for each key."""
    rest: list[str] = field(default_factory=list)
    """The command's own flags and positional arguments: words that are neither overrides nor Megatron's flags."""
    problems: list[Problem] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    """Key -> provenance, for keys to which an earlier word gave another value."""
    directories: tuple[str, ...] = ()
    """The directories of --recipes-dir, which remedies repeat."""
    lists: dict[str, str] = field(default_factory=dict)
    """Key -> its values as typed (`1,2`), one run for each value; empty without -m. `hydra_source` reads the text."""


def normalise(tokens: Sequence[str], own: Mapping[str, bool] | None = None, command: str = "train") -> Arguments:
    """Sort and rewrite the words after `command`; `own` maps the command's flags to whether they take a value."""
    sorter = _Sorter(tokens, own or {}, command)
    while sorter.queue:
        sorter.take(sorter.queue.pop(0))
    sorter.merge_translated_flags()
    sorter.take_lists()
    sorter.arguments.overrides = [f"{key}={value}" for key, (value, _) in sorter.values.items()]
    return sorter.arguments


class _Sorter:
    """The state of one pass over a command line."""

    def __init__(self, tokens: Sequence[str], own: Mapping[str, bool], command: str) -> None:
        self.queue = list(tokens)
        self.tokens = tokens
        self.own = own
        self.command = command
        self.arguments = Arguments()
        self.values: dict[str, tuple[str, str]] = {}
        """Key -> its quoted value, and the word as it was typed."""
        self.lists: dict[str, tuple[str, str, str, list[str]]] = {}
        """Key -> (its values as typed, the whole word, a variable for a shell loop, that loop's values)."""
        self.translated: list[tuple[TranslatedFlag, Problem]] = []
        """Megatron's flags that ppctl understands but does not accept, each with its problem."""
        self.multirun = False
        self.line: list[str] = []
        """The command line again as shell text, with a loop variable where a list stood."""

    def take(self, token: str) -> None:
        """Sort one token, together with the values that follow it: these are taken from the queue."""
        name, equals, value = token.partition("=")
        if token in ("-m", "--multirun"):  # Hydra's, for one run of each combination of listed values
            self.multirun = True
        elif name in self.own:
            self._own_flag([token], needs_value=self.own[name] and not equals)
        elif name in TAKEN and (equals or TAKEN[name].is_switch or self._value_follows()):
            self._taken_flag(token, TAKEN[name])
        elif name in ("--config", "--recipe") and (equals or self._value_follows()):
            self._recipe(value if equals else self.queue.pop(0))
        elif token.startswith("-") and len(token) > 1:
            if not equals:
                words = self._words(None if takes_several(name) else 1)
                value = "".join(words) if len(words) < 2 else f"[{','.join(words)}]"
            self._untaken_flag(name, value)
        else:
            self._positional(token)

    def _value_follows(self) -> bool:
        return bool(self.queue) and (not self.queue[0].startswith("-") or self.queue[0][1:2].isdigit())

    def _words(self, most: int | None = None) -> list[str]:
        """Take the values that follow a flag from the queue: at most `most`, up to the next flag or override."""
        words: list[str] = []
        while len(words) != most and self._value_follows() and "=" not in self.queue[0]:
            words.append(self.queue.pop(0))
        return words

    def _own_flag(self, words: list[str], needs_value: bool) -> None:
        if needs_value and self.queue:
            words.append(self.queue.pop(0))
        self.arguments.rest += words
        self.line += map(pasted, words)

    def _taken_flag(self, token: str, key: Key) -> None:
        name, equals, value = token.partition("=")
        words = [] if equals or key.is_switch else self._words() if key.is_list else [self.queue.pop(0)]
        value = value if equals else "true" if key.is_switch else ",".join(words)
        self._add(name, key.name, f"[{value}]" if key.is_list else value, pasted(token, *words))

    def _untaken_flag(self, flag: str, value: str) -> None:
        batch = self._global_batch()
        self.arguments.problems.append(flag_problem(flag, value, self.own, batch, self.command))
        known = translated(flag, value, batch)
        if known is not None:
            known = known.without({key for one, _ in self.translated for key, _ in one.pairs})
            self.translated.append((known, self.arguments.problems[-1]))
            self.line += (pasted(f"{key}={text}") for key, text in known.pairs)

    def _global_batch(self) -> str:
        """The global batch size that the line sets; empty if it sets none, or lets the batch grow."""
        if any(token.partition("=")[0] in _GROWS for token in self.tokens):
            return ""
        words = (word for token in self.tokens for word in token.split("=", 1))
        names = {_BATCH, *(name for name, key in names_of_keys("names").items() if key == _BATCH)}
        return next((next(words, "") for word in words if word in names), "")

    def merge_translated_flags(self) -> None:
        """Replace the problems of several Megatron flags by one, whose remedy is a whole command line."""
        if len(self.translated) > 1:
            single = [problem for _, problem in self.translated]
            flags = [known for known, _ in self.translated]
            given = {key: value for key, (value, _) in self.values.items()}
            given |= dict(pair for known in flags for pair in known.pairs)
            merged = flags_problem(flags, " ".join(["ppctl", self.command, *self.line]), given)
            self.arguments.problems = [merged, *(one for one in self.arguments.problems if one not in single)]

    def _positional(self, token: str) -> None:
        match = _OVERRIDE.fullmatch(token)
        if match is None or (match[3] is None and not match[1]):
            if token.endswith(YAML):
                return self._recipe(token)
            self.arguments.rest.append(token)
            self.line.append(pasted(token))
        elif match[1] == "~":
            message = f"{token}: nothing can be deleted from a closed config"
            self.arguments.problems.append(Problem("PP-E121", message, _reset(match[2]), PLACE))
        elif match[3] is None:
            self.arguments.problems.append(
                Problem("PP-E105", f"{token} has no value", _where_explained(match[2]), PLACE)
            )
        else:
            self._add(match[2], full_name(match[2]), match[3], pasted(token))

    def _recipe(self, file: str) -> None:
        self._add("recipe", "recipe", file, pasted(f"+recipe={file}"))

    def _add(self, name: str, key: str, value: str, typed: str) -> None:
        """Add one override in place of an earlier one of its key; a list of values is kept in `lists` instead."""
        values = sweep_values(key, value)
        earlier = self.values.pop(key, None)  # so that the key also gets the last word's place
        self.lists.pop(key, None)
        if values is not None:
            variable = f"value{len(self.line) + 1}"
            self.lists[key] = value, typed, variable, values
            self.line.append(f'{name}="${variable}"')
            return
        self.line.append(typed)
        quoted = quote(key, value)
        if earlier is not None and earlier[0] != quoted:
            self.arguments.sources[key] = f"{PLACE}, replacing {earlier[1]}"
        self.values[key] = quoted, typed

    def take_lists(self) -> None:
        """Give lists of values to `arguments` if -m is typed and is a flag of the command; else report a problem."""
        typed, several = [word for _, word, *_ in self.lists.values()], "-m" in self.own
        if several and self.multirun and typed:
            self.arguments.lists = {key: value for key, (value, *_) in self.lists.items()}
        elif several and typed:
            message = f"{', '.join(typed)} lists several values, one for each run, which needs -m"
            remedy = pasted("ppctl", self.command, "-m", *self.tokens)
            self.arguments.problems.append(Problem("PP-E106", message, remedy, PLACE))
        elif typed or self.multirun:
            line = " ".join(["ppctl", self.command, *self.line])
            for *_, variable, values in reversed(self.lists.values()):
                line = f"for {variable} in {pasted(*values)}; do {line}; done"
            message = f"ppctl {self.command} takes one config, but {', '.join(typed)} lists several values"
            message = message if typed else "-m asks for several runs, but no key lists several values"
            self.arguments.problems.append(Problem("PP-E106", message, line, PLACE))


def _reset(name: str) -> str:
    """The override to type instead of deleting a key: its default."""
    key = full_name(name)
    if key == "recipe":
        return "recipe=null"
    return as_typed(key, keys()[key].default) if key in keys() else "ppctl explain"


def _where_explained(name: str) -> str:
    key = full_name(name)
    if key == "recipe":
        return "ppctl recipes"
    return f"ppctl explain {key}" if key in keys() or key in sections() else "ppctl explain"


def typed_again(command: str, line: Arguments | Sequence[str]) -> str:
    """A whole command line of ppctl's, to paste."""
    known = line if isinstance(line, Arguments) else Arguments(list(line))
    recipes = [word for directory in known.directories for word in ("--recipes-dir", directory)]
    return " ".join(filter(None, ["ppctl", command, pasted(*recipes), retyped(known.overrides)]))


def retyped(overrides: Sequence[str]) -> str:
    """Normalised overrides as a person types them in a shell: no quotes for Hydra, a plus before recipe and scale."""
    words = []
    for override in overrides:
        key, _, value = override.partition("=")
        plain = unquoted(value) if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
        same = quote(key, plain) == value and sweep_values(key, plain) is None
        words.append(f"{'+' * (key in ('recipe', 'scale'))}{key}={plain if same else value}")
    return pasted(*words)


# One value in Hydra's grammar

_SWEEP = re.compile(r"(?:choice|range|interval|glob|sort|shuffle|tag)\((.*)\)", re.DOTALL)
_RANGE = re.compile(r"range\(((?: *-?[0-9]{1,4} *,?){1,3})\)")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def _is_verbatim(key: str) -> bool:
    """Whether the value is taken letter by letter (layouts, paths, environment variables, any free value)."""
    info = keys().get(key)
    if info is None:
        return mapping_with(key) is not None
    return info.facts.verbatim or (info.is_container and not info.is_dtype)


def quote(key: str, value: str) -> str:
    """`value` as Hydra's grammar needs it: text is quoted unless it already is, or is null, a list or a mapping."""
    text, info = value.strip(), keys().get(key)
    is_text = "." in key and info is not None and info.is_text
    if not (is_text or _is_verbatim(key)) or text in ("", "null") or _is_quoted(text):
        return value
    has_lists = info is not None and info.is_container and not info.facts.verbatim
    if has_lists and (_is_literal(text) or text.lstrip("+-").isdigit()):
        return value
    return in_quotes(value)


def in_quotes(text: str) -> str:
    """`text` as a quoted value of Hydra's grammar."""
    body = re.sub(r"(\\*)'", lambda match: match[1] * 2 + "\\'", text)
    body += "\\" * (len(body) - len(body.rstrip("\\")))
    return f"'{body}'"


def unquoted(value: str) -> str:
    """The inverse of `in_quotes`."""
    body = re.sub(r"(\\*)\\'", lambda match: match[1][::2] + "'", value[1:-1])
    ends = len(body) - len(body.rstrip("\\"))
    return body[: len(body) - ends // 2]


def _is_quoted(text: str) -> bool:
    return (
        len(text) > 1
        and text[0] == text[-1]
        and text[0] in "'\""
        and text[0] not in text[1:-1].replace("\\" + text[0], "")
    )


def _is_literal(text: str) -> bool:
    """Whether the brackets around `text` are one list or mapping (and not, say, `[0]*3+[1]`)."""
    if text[:1] + text[-1:] not in ("[]", "{}"):
        return False
    depth = 0
    for column, letter in enumerate(text):
        depth += _BRACKETS.get(letter, 0)
        if depth == 0:
            return column == len(text) - 1
    return False


def sweep_values(key: str, value: str) -> list[str] | None:
    """The values of a sweep (`1,2,3`, `choice(a,b)`, `range(1,4)`), or None if `value` is one value."""
    text = value.strip()
    if _is_verbatim(key) or _is_quoted(text):
        return None
    numbers = _RANGE.fullmatch(text)
    if numbers is not None:
        return _range(numbers[1])
    function = _SWEEP.fullmatch(text)
    if function is not None:
        return [item for item in _split(function[1]) if "=" not in item]
    values = _split(text)
    return values if len(values) > 1 else None


def _range(text: str) -> list[str]:
    bounds = [int(part) for part in text.split(",") if part.strip()]
    if len(bounds) == 3 and bounds[2] == 0:
        bounds.pop()
    return list(map(str, range(*bounds)))


def _split(text: str) -> list[str]:
    """`text` split at its outermost commas."""
    parts, depth, quote_mark = [""], 0, ""
    for letter in text:
        if quote_mark:
            quote_mark = "" if letter == quote_mark else quote_mark
        elif letter in "'\"":
            quote_mark = letter
        depth += _BRACKETS.get(letter, 0)
        if letter == "," and depth == 0 and not quote_mark:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
