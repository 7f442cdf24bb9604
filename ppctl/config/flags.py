"""Flags in Megatron's spelling: which of them ppctl takes, and the error about each of the rest.

The flags of a key are metadata of its field: `names`, which are taken, and `known_as`. Here are those whose values have
other units or names, and in `megatron_flags` those that mean one value of a key, or no key.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ppctl.config.keys import Key, as_typed, did_you_mean, names_of_keys, text_keys, value_text
from ppctl.config.metadata import LATER, NEEDS
from ppctl.config.name_tables import LATER as LATER_PAGE
from ppctl.config.name_tables import MEANINGLESS, OTHERWISE, NameTables
from ppctl.errors import Problem, pasted

_TAKEN = {name: text_keys()[key] for name, key in names_of_keys("names").items() if name.startswith("--")}

MEGATRON = {flag: key.name for flag, key in _TAKEN.items() if not (key.is_list or key.is_switch)}
"""Flag -> key. Each takes one value, as `--flag VALUE` or `--flag=VALUE`."""

LISTS = {flag: key.name for flag, key in _TAKEN.items() if key.is_list}
"""Flag -> key. Each takes one value or more, as `--flag VALUE VALUE`."""

SWITCHES = {flag: key.name for flag, key in _TAKEN.items() if key.is_switch}
"""Flag -> key that it sets to true. They take no value."""

ELSEWHERE = {word: "model.lora trains adapters" for word in ("lora", "peft", "adapter")}
"""Parts of names by which people look for what ppctl has under another one, and what to say."""
ADAPTERS = "model.lora.rank=16 'model.lora.targets=[q_proj,v_proj]'"


def _keys_of(flag: str) -> list[Key]:
    """The keys that one of Megatron's flags means, else the keys that have the flag's name."""
    from ppctl.config.megatron_flags import FIXED

    key = names_of_keys("known_as").get(flag) or FIXED.get(flag, "").partition("=")[0]
    field = flag.lstrip("-").replace("-", "_")
    return [text_keys()[key]] if key else [key for key in text_keys().values() if field in (key.field, key.name)]


def meant_by(name: str) -> str | None:
    """The key that a table lists as what other systems call `name`, the last part of a key or a flag. A field of ours
    that has this name proves nothing: `eval_steps` and `dtype` mean something else elsewhere."""
    flag = "--" + name.replace("_", "-")
    tables = [names_of_keys("known_as"), names_of_keys("names")]
    return next((table[each] for each in (name, flag) for table in tables if each in table), None)


class TranslatedFlag(NamedTuple):
    """A flag of Megatron's that ppctl understands and does not take."""

    typed: str
    override: str = ""
    """The override that means the same; empty if none does, or none is needed."""
    why: str = ""
    """Why it is left out, how to say something like it, or a remark on the override."""
    code: str = "PP-E107"
    """PP-E108 of what this release does not have, PP-E109 of what means nothing here."""
    place: str = ""
    """The file of a setting, and the line where it is known; empty for a typed flag."""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The keys and texts of the override."""
        words = (word.partition("=") for word in shlex.split(self.override))
        return [(key, text) for key, _, text in words]

    def shown(self, most: int = 60) -> str:
        """The flag or setting in at most so many letters."""
        return self.typed if len(self.typed) <= most else f"{self.typed[: most - 3]}..."


def translated(flag: str, value: str, batch: str = "") -> TranslatedFlag | None:
    """The meaning of `flag value`; None for an unknown flag. `batch` is the global batch size, if any."""
    from ppctl.config.megatron_flags import FIXED, TABLES  # long, and few command lines need it

    typed = pasted(*filter(None, (flag, value)))
    if flag in FIXED:
        return TranslatedFlag(typed, FIXED[flag])
    if flag in _IN_SAMPLES:
        return _in_steps(typed, _IN_SAMPLES[flag], value, batch)
    if TABLES.is_idle(flag, value):
        return TranslatedFlag(typed, why="it is so in any case", code="PP-E109")
    if same := _keys_of(flag):
        meant = _TRANSLATED.get(flag, str)(value)
        if flag == "--optimizer" and value and not same[0].allows(meant):
            return TranslatedFlag(typed, why=TABLES.entry(LATER_PAGE, "--sgd-momentum") or "", code="PP-E108")
        if flag == "--tokenizer-model" and meant.endswith(_NO_TOKENIZERS):
            return TranslatedFlag(typed, why=f"{same[0].name} takes the model's directory with a tokenizer.json")
        return _as_key(typed, same[0], meant)
    return valueless(TABLES, flag, typed) or _switched_off(typed, flag)


def valueless(table: NameTables, name: str, typed: str) -> TranslatedFlag | None:
    """Why `name` sets no key, by a system's tables; None for a name that they do not list."""
    if later := table.entry(LATER_PAGE, name):
        return TranslatedFlag(typed, why=later, code="PP-E108")
    if reason := table.entry(MEANINGLESS, name):
        return TranslatedFlag(typed, why=reason, code="PP-E109")
    if similar := table.entry(OTHERWISE, name):
        return TranslatedFlag(typed, why=f"{similar} says something like it")
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
    override = _override(key, value)
    support = key.facts.support
    if support.state in (LATER, NEEDS) and override != as_typed(key.name, key.default):
        return TranslatedFlag(typed, why=support.note or key.name, code="PP-E108")
    flag = typed.partition(" ")[0].partition("=")[0]
    before = f"{_SWITCHED_ON[flag]} " if flag in _SWITCHED_ON else ""
    return TranslatedFlag(typed, f"{before}{override}")


def _switched_off(typed: str, flag: str) -> TranslatedFlag | None:
    """`--no-X` and `--disable-X` of a switch X."""
    field = flag.removeprefix("--no-").removeprefix("--disable-").replace("-", "_")
    switches = [key for key in text_keys().values() if key.field == field and key.is_switch]
    if field == flag.replace("-", "_") or not switches:
        return None
    return TranslatedFlag(typed, as_typed(switches[0].name, False))


def takes_several(flag: str) -> bool:
    """Whether a flag that ppctl does not take has one value or more."""
    from ppctl.config.megatron_flags import SEVERAL

    return flag in SEVERAL.split() or any(key.is_list for key in _keys_of(flag))


def _validation_share(split: str) -> str:
    """The share of the second of Megatron's three numbers (training, validation, test), such as `949,50,1`."""
    try:
        shares = [float(part) for part in split.split(",")]
        return f"{shares[1] / sum(shares):.4g}"
    except (ValueError, IndexError, ZeroDivisionError):
        return split


_OPTIMIZERS = {"adam": "adamw", "dist_muon": "muon"}
_SHARDINGS = {
    "no_shard": "none",
    "optim": "optimizer_gradients",
    "optim_grads": "optimizer_gradients",
    "optim_grads_params": "full",
}
_TRANSLATED: Mapping[str, Callable[[str], str]] = {
    "--optimizer": lambda name: _OPTIMIZERS.get(name, name),
    "--split": _validation_share,
    "--data-parallel-sharding-strategy": lambda name: _SHARDINGS.get(name, name),
    "--exit-duration-in-mins": "{}m".format,
    "--distributed-timeout-minutes": "{}m".format,
    "--tokenizer-model": lambda file: file.removesuffix("/tokenizer.json"),
}
"""Flags whose values have other names here."""

_NO_TOKENIZERS = (".model", ".json", ".vocab", ".tiktoken", ".txt")
"""Ends of names of tokenizers' files that ppctl does not read."""

_IN_SAMPLES = {
    "--lr-warmup-samples": "optim.warmup_steps",
    "--lr-decay-samples": "optim.lr_decay_steps",
    "--lr-wsd-decay-samples": "optim.lr_wsd_decay_steps",
}
"""Flags that count samples -> the key that counts steps."""

_SWITCHED_ON = {
    "--cpu-offloading-num-layers": "parallel.cpu_offloading=true",
    "--tensorboard-dir": "log.tensorboard=true",
    "--wandb-project": "log.wandb=true",
}
"""Flags that switch something else on as well."""


def flags_problem(flags: Sequence[TranslatedFlag], line: str, given: Mapping[str, str]) -> Problem:
    """One problem for several flags; `line` is the command line with keys instead, `given` its keys and values. Its
    place ends with Megatron's defaults if the line leaves others."""
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


def _other_defaults(given: Mapping[str, str]) -> list[str]:
    """A table of the keys that a command line leaves to defaults other than Megatron's, and overrides to paste."""
    from ppctl.config.megatron_flags import defaults_left

    differing = [(key, value_text(text_keys()[key].default), theirs) for key, theirs in defaults_left(given)]
    differing = [row for row in differing if row[1] != row[2]]
    if not differing or "recipe" in given or "model.from" in given:
        return []
    rows = [("not given", "here", "Megatron"), *differing]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    table = [f"{key:<{widths[0]}}  {ours:<{widths[1]}}  {theirs}" for key, ours, theirs in rows]
    paste = pasted(*(f"{key}={theirs}" for key, _, theirs in differing))
    return ["", "not given, and Megatron's default differs from ours:", *table, "for Megatron's:", f"  {paste}"]


def flag_problem(flag: str, value: str = "", own: Iterable[str] = (), batch: str = "") -> Problem:
    """The problem of a flag that ppctl does not take; `value` is what was typed for it."""
    place = "command line"
    if flag == "--from":
        message = "--from is a flag of ppctl plan, whose --write makes a recipe that every command takes"
        return Problem("PP-E107", message, f"ppctl plan --from {pasted(value or 'FILE')} --write my.yaml", place)
    if flag in MEGATRON:
        usual = value_text(text_keys()[MEGATRON[flag]].default)
        return Problem("PP-E107", f"{flag} needs a value", f"{flag} {usual}", place)
    if flag in LISTS:
        return Problem("PP-E107", f"{flag} needs a value", f"ppctl explain {LISTS[flag]}", place)
    known_flag = translated(flag, value, batch)
    if known_flag is None:
        from ppctl.config.megatron_flags import FIXED

        names = [*names_of_keys("names"), *names_of_keys("known_as"), *FIXED]
        names += [f"--{key.field.replace('_', '-')}" for key in text_keys().values()]
        known = [*own, *(name for name in dict.fromkeys(names) if name.startswith("--"))]
        return Problem("PP-E107", f"there is no flag {flag}{did_you_mean(flag, known)}", "ppctl --help", place)
    why, remedy = known_flag.why, known_flag.override
    message = f"{flag} is no flag of ppctl; {why or 'the setting is a key'}"
    if known_flag.code == "PP-E108":
        message = f"{flag} asks for a feature that this release does not have ({why}); leave it out"
    elif known_flag.code == "PP-E109":
        message = f"{flag} has no meaning in ppctl: {why}; leave it out"
    elif not remedy:
        remedy = f"ppctl explain {why.split()[0]}"
    return Problem(known_flag.code, message, remedy, place)


def _override(key: Key, value: str) -> str:
    """`key=value`; of a flag without a value, what it switches on, or the key's default."""
    if key.is_switch and value not in ("true", "false"):
        return as_typed(key.name, True)
    return as_typed(key.name, value or key.default)
