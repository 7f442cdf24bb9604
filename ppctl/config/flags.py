"""Flags in Megatron's spelling: which of them ppctl takes, and the error about each of the rest.

The flags of a key are metadata of its field: `names`, which are accepted, and `known_as`. The page `megatron_flags` has
flags that mean one value of a key, or no key, and values that have other names here.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ppctl.config import name_tables
from ppctl.config.keys import Key, as_typed, did_you_mean, misspelt, names_of_keys, nearest, text_keys, value_text
from ppctl.config.metadata import LATER, NEEDS
from ppctl.config.name_tables import MEGATRON, NameTables, tables
from ppctl.errors import Problem, pasted

TAKEN = {name: text_keys()[key] for name, key in names_of_keys("names").items() if name.startswith("--")}
"""Flag -> key. A switch takes no value, a list one or more (`--flag VALUE VALUE`), any other flag one."""


def _key_of(flag: str) -> Key | None:
    """The key that a flag of Megatron's means, or whose short name it is, else the first that ends with its name."""
    field, named = flag.lstrip("-").replace("-", "_"), names_of_keys("names")
    if name := named.get(flag) or names_of_keys("known_as").get(flag) or named.get(field):
        return text_keys()[name]
    return next((key for key in text_keys().values() if field in (key.field, key.name)), None)


def meant_by(name: str) -> str | None:
    """The key that another system calls `name` (a flag, or the last part of a key), by the tables; None if there is
    none. A key of ours called so does not count: `eval_steps` and `dtype` mean something else in other systems."""
    flag = "--" + name.replace("_", "-")
    tables = [names_of_keys("known_as"), names_of_keys("names")]
    return next((table[each] for each in (name, flag) for table in tables if each in table), None)


class TranslatedFlag(NamedTuple):
    """A flag of Megatron's that ppctl understands but does not accept."""

    typed: str
    override: str = ""
    """The override with the same meaning; empty if there is none, or none is needed."""
    why: str = ""
    """Why the flag is left out, how to get a similar effect, or a remark on the override."""
    code: str = "PP-E107"
    """PP-E108 for what this release does not have, PP-E109 for what has no meaning here."""
    place: str = ""
    """The file of a setting, with the line if known; empty for a typed flag."""

    def without(self, given: Collection[str]) -> TranslatedFlag:
        """This flag without those of its several keys that are `given` beside it: a flag of their own is more exact."""
        left = [f"{key}={text}" for key, text in self.pairs if key not in given]
        return self._replace(override=pasted(*left)) if left and len(left) < len(self.pairs) else self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The keys and texts of the override."""
        words = (word.partition("=") for word in shlex.split(self.override))
        return [(key, text) for key, _, text in words]

    def shown(self, most: int = 60) -> str:
        """The flag or setting in at most `most` characters."""
        return self.typed if len(self.typed) <= most else f"{self.typed[: most - 3]}..."


def translated(flag: str, value: str, batch: str = "") -> TranslatedFlag | None:
    """The meaning of `flag value`; None for an unknown flag. `batch` is the global batch size, if any."""
    table, typed = tables(MEGATRON), pasted(*filter(None, (flag, value)))
    if fixed := table.entry(name_tables.SAME, flag):
        return TranslatedFlag(typed, fixed)
    if steps := table.entry(name_tables.SAMPLES, flag):
        return _in_steps(typed, steps, value, batch)
    if table.is_idle(flag, value):
        return TranslatedFlag(typed, why="ppctl always does so", code="PP-E109")
    if (key := _key_of(flag)) is None:
        return valueless(table, flag, typed)
    if flag == "--split":
        value = _validation_share(value)
    elif words := table.entry(name_tables.VALUES, flag):
        ((_, value),) = name_tables.overrides_of(words, value)
    if flag == "--optimizer" and value and not key.allows(value):
        return TranslatedFlag(typed, why=table.entry(name_tables.LATER, "--sgd-momentum") or "", code="PP-E108")
    if flag == "--tokenizer-model":
        value = value.removesuffix("/tokenizer.json")
        if value.endswith(_NO_TOKENIZERS):
            return TranslatedFlag(typed, why=f"{key.name} takes the model's directory with a tokenizer.json")
    return _as_key(typed, key, value)


def valueless(table: NameTables, name: str, typed: str) -> TranslatedFlag | None:
    """Why `name` sets no key, by a system's tables; None for a name that they do not list."""
    if later := table.entry(name_tables.LATER, name):
        return TranslatedFlag(typed, why=later, code="PP-E108")
    if reason := table.entry(name_tables.MEANINGLESS, name):
        return TranslatedFlag(typed, why=reason, code="PP-E109")
    if similar := table.entry(name_tables.OTHERWISE, name):
        return TranslatedFlag(typed, why=f"{similar} has a similar meaning")
    return None


def _in_steps(typed: str, key: str, samples: str, batch: str) -> TranslatedFlag:
    """A number of samples as steps, rounded up; Megatron's own schedule counts samples, and rounds nothing."""
    if samples.isdigit() and batch.isdigit() and int(batch):
        steps, rest = divmod(int(samples), int(batch))
        rounded = f"{int(samples) / int(batch):g} steps, rounded up: a schedule counts whole steps" if rest else ""
        return TranslatedFlag(typed, f"{key}={steps + bool(rest)}", rounded)
    in_tokens = key.replace("_steps", "_tokens")
    tokens = f": {in_tokens} = samples x data.seq_length" if in_tokens in text_keys() else ""
    why = f"{key} counts steps: divide by train.global_batch_size (where it grows, use tokens{tokens})"
    return TranslatedFlag(typed, why=why)


def _as_key(typed: str, key: Key, value: str) -> TranslatedFlag:
    """`key=value` as an override; a flag without a value sets a switch to true, another key to its default."""
    is_on = key.is_switch and value not in ("true", "false")
    override, support = as_typed(key.name, True if is_on else value or key.default), key.facts.support
    if support.state in (LATER, NEEDS) and override != as_typed(key.name, key.default):
        return TranslatedFlag(typed, why=support.note or key.name, code="PP-E108")
    return TranslatedFlag(typed, f"{key.facts.needs} {override}" if key.name in _SWITCHED_ON else override)


def takes_several(flag: str) -> bool:
    """Whether a flag that ppctl does not accept takes a list of values."""
    key = _key_of(flag)
    return key.is_list if key else tables(MEGATRON).entry(name_tables.SEVERAL, flag) is not None


def _validation_share(split: str) -> str:
    """The share of validation in Megatron's three numbers (training, validation, test), such as `949,50,1`."""
    try:
        shares = [float(part) for part in split.split(",")]
        return f"{shares[1] / sum(shares):.4g}"
    except (ValueError, IndexError, ZeroDivisionError):
        return split


_NO_TOKENIZERS = (".model", ".json", ".vocab", ".tiktoken", ".txt")
"""File name endings of tokenizers that ppctl does not read."""

_SWITCHED_ON = ("parallel.cpu_offloading_num_layers", "log.tensorboard_dir", "log.wandb_project")
"""Keys whose flags also switch on what the keys need."""


def flags_problem(flags: Sequence[TranslatedFlag], line: str, given: Mapping[str, str]) -> Problem:
    """One problem for several flags; `line` is the command line with keys in their places, `given` has its keys and
    values. The problem's place ends with those of Megatron's defaults that differ from what `line` leaves."""
    width = max(len(one.typed) for one in flags)
    rows = [f"{one.typed:<{width}}  {answered(one)}" for one in flags]
    message = f"{len(flags)} flags are keys in ppctl or have no meaning in it; the remedy is the whole command line"
    return Problem("PP-E107", message, line, "\n".join([*rows, *_other_defaults(given)]))


def answered(flag: TranslatedFlag) -> str:
    """The answer to a flag: its override with a remark, or why it has none."""
    if flag.override:
        return f"{flag.override}{flag.why and f'  ({flag.why})'}"
    words = {"PP-E108": "not in this release:", "PP-E109": "left out:"}
    return f"{words.get(flag.code, 'in other terms:')} {flag.why}"


def defaults_left(given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (key, Megatron's default) of the listed keys that a command line with the values `given` does not set."""
    for entry, theirs in tables(MEGATRON).entries[name_tables.DEFAULTS].items():
        key, _, where = entry.partition(" ")
        if key not in given and (not where or where in given):
            value = _feed_forward(given) if theirs == "computed" else theirs
            if value:
                yield key, value


def _feed_forward(given: Mapping[str, str]) -> str:
    """Megatron's default width of a feed-forward: four times the hidden size; with a gate two thirds of that, rounded
    down to a multiple of 64. Empty if the hidden size is no number."""
    width, gated = given["model.hidden_size"], given.get("model.gated_linear_unit") == "true"
    if not width.isdigit():
        return ""
    return str(int(4 * int(width) * 2 / 3) // 64 * 64 if gated else 4 * int(width))


def _other_defaults(given: Mapping[str, str]) -> list[str]:
    """A table of the keys that a command line leaves to defaults other than Megatron's, and overrides to paste."""
    differing = [(key, value_text(text_keys()[key].default), theirs) for key, theirs in defaults_left(given)]
    differing = [row for row in differing if row[1] != row[2]]
    if not differing or "recipe" in given or "model.from" in given:
        return []
    rows = [("not given", "here", "Megatron"), *differing]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    table = [f"{key:<{widths[0]}}  {ours:<{widths[1]}}  {theirs}" for key, ours, theirs in rows]
    paste = pasted(*(f"{key}={theirs}" for key, _, theirs in differing))
    return ["", "not given, and Megatron's default differs from ours:", *table, "for Megatron's:", f"  {paste}"]


def flag_problem(
    flag: str, value: str = "", own: Iterable[str] = (), batch: str = "", command: str = "plan"
) -> Problem:
    """The problem of a flag that ppctl does not accept; `value` is its typed value, `own` are flags of `command`."""
    place = "command line"
    if flag == "--from":
        message = "--from is a flag of ppctl plan, whose --write makes a recipe that every command takes"
        return Problem("PP-E107", message, f"ppctl plan --from {pasted(value or 'FILE')} --write my.yaml", place)
    if flag == "--resume":
        way = ["ppctl", "requeue" if command == "submit" else "resume"]
        message = f"--resume is a flag of ppctl node; a run goes on with {' '.join(way)}"
        return Problem("PP-E107", message, pasted(*way, *filter(None, [value])), place)
    if key := TAKEN.get(flag):
        remedy = f"ppctl explain {key.name}" if key.is_list else f"{flag} {value_text(key.default)}"
        return Problem("PP-E107", f"{flag} needs a value", remedy, place)
    known_flag = translated(flag, value, batch)
    if known_flag is None:
        return _unknown_flag(flag, value, own, command)
    why, remedy = known_flag.why, known_flag.override
    message = f"{flag} is no flag of ppctl; {why or 'the setting is a key'}"
    if known_flag.code == "PP-E108":
        message = f"{flag} asks for a feature that this release does not have ({why}); leave it out"
    elif known_flag.code == "PP-E109":
        message = f"{flag} has no meaning in ppctl: {why}; leave it out"
    elif not remedy:
        remedy = f"ppctl explain {why.split()[0]}"
    return Problem(known_flag.code, message, remedy, place)


def _unknown_flag(flag: str, value: str, own: Iterable[str], command: str) -> Problem:
    fixed = " ".join(tables(MEGATRON).entries[name_tables.SAME].values()).split()
    names = [*names_of_keys("names"), *names_of_keys("known_as"), *fixed]
    names += [f"--{key.field.replace('_', '-')}" for key in text_keys().values()]
    close = nearest(flag, [*own, *(name for name in dict.fromkeys(names) if name.startswith("--"))])
    remedy, taken = f"ppctl {command} --help", {*own, *TAKEN}
    if close and close[0] in taken:  # what this command does not take is no use then
        close = [name for name in close if name in taken]
    if close and (close[0] in own or misspelt(flag, close[0])):
        meant = None if close[0] in taken else translated(close[0], value)
        remedy = pasted(close[0], *filter(None, [value])) if meant is None else meant.override or remedy
    elif close and (key := _key_of(close[0])):  # it may mean something else: the value is not carried over
        remedy = f"ppctl explain {key.name}"
    return Problem("PP-E107", f"there is no flag {flag}{did_you_mean(flag, close)}", remedy, "command line")
