"""Flags in Megatron's spelling: which of them ppctl takes, and the error about each of the rest.

The flags of a key are metadata of its field: `names`, which are taken, and `known_as`. Here are those that mean one
value of a key, or a value in other units, and in `megatron_flags` those that mean no key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ppctl.config.keys import Key, as_typed, did_you_mean, names_of_keys, text_keys, value_text
from ppctl.config.metadata import LATER, NEEDS
from ppctl.errors import Problem, pasted

_TAKEN = {name: text_keys()[key] for name, key in names_of_keys("names").items() if name.startswith("--")}

MEGATRON = {flag: key.name for flag, key in _TAKEN.items() if not (key.is_list or key.is_switch)}
"""Flag -> key. Each takes one value, as `--flag VALUE` or `--flag=VALUE`."""

LISTS = {flag: key.name for flag, key in _TAKEN.items() if key.is_list}
"""Flag -> key. Each takes one value or more, as `--flag VALUE VALUE`."""

SWITCHES = {flag: key.name for flag, key in _TAKEN.items() if key.is_switch}
"""Flag -> key that it sets to true. They take no value."""

FIXED = {
    "--recompute-activations": "train.recompute_granularity=selective",
    "--use-distributed-optimizer": "parallel.data_parallel_sharding=optimizer_gradients",
    "--use-torch-fsdp2": "parallel.data_parallel_sharding=full",
    "--use-tp-pp-dp-mapping": "parallel.order=tp-cp-ep-pp-dp",
    "--disable-bias-linear": "model.add_bias_linear=false",
    "--use-rotary-position-embeddings": "model.position_embedding_type=rope",
    "--untie-embeddings-and-output-weights": "model.share_embeddings_and_output_weights=false",
    "--no-overlap-p2p-communication": "parallel.overlap_p2p_comm=false",
    "--overlap-p2p-communication-warmup-flush": "parallel.overlap_p2p_comm_warmup_flush=true",
    "--use-rope-scaling": (
        "model.rotary_scaling_type=llama3 model.beta_fast=4 model.original_max_position_embeddings=8192"
    ),
    "--checkpoint-activations": "train.recompute_granularity=full",
    "--moe-layer-recompute": "train.recompute_granularity=selective train.recompute_modules=[moe]",
    "--mock-data": "data.path=null",
    "--sft": "data.format=chat",
}
"""Flags of other systems that mean one value of a key -> the override; of several keys, with blanks between."""

AGREED = {"--lr-warmup-init": "0.0", "--rope-type": "rope"}
"""Flags one value of which is what ppctl does in any case."""

ELSEWHERE = {word: "model.lora trains adapters" for word in ("lora", "peft", "adapter")}
"""Parts of names by which people look for what ppctl has under another one, and what to say."""
ADAPTERS = "model.lora.rank=16 'model.lora.targets=[q_proj,v_proj]'"


def _keys_of(flag: str) -> list[Key]:
    """The keys that one of Megatron's flags means, else the keys that have the flag's name."""
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
    """Why it is left out, or how to say something like it."""
    code: str = "PP-E107"
    """PP-E108 of what this release does not have, PP-E109 of what means nothing here."""


def translated(flag: str, value: str, batch: str = "") -> TranslatedFlag | None:
    """The meaning of `flag value`; None for an unknown flag. `batch` is the global batch size, if any."""
    from ppctl.config import megatron_flags as table  # long, and few command lines need it

    typed = pasted(*filter(None, (flag, value)))
    if flag in FIXED:
        return TranslatedFlag(typed, FIXED[flag])
    if (in_steps := _IN_SAMPLES.get(flag)) is not None:
        if value.isdigit() and batch.isdigit() and int(batch):
            return TranslatedFlag(typed, f"{in_steps}={-(-int(value) // int(batch))}")
        in_tokens = in_steps.replace("_steps", "_tokens")
        tokens = f": {in_tokens} = samples x data.seq_length" if in_tokens in text_keys() else ""
        why = f"{in_steps} counts steps: divide by train.global_batch_size (where it grows, use tokens{tokens})"
        return TranslatedFlag(typed, why=why)
    if AGREED.get(flag) == value:
        return TranslatedFlag(typed, why="it is so in any case", code="PP-E109")
    if same := _keys_of(flag):
        meant = _TRANSLATED.get(flag, str)(value)
        if flag == "--optimizer" and value and not same[0].allows(meant):
            return TranslatedFlag(typed, why=table.found_in(table.LATER, "--sgd-momentum") or "", code="PP-E108")
        return _as_key(typed, same[0], meant)
    if later := table.found_in(table.LATER, flag):
        return TranslatedFlag(typed, why=later, code="PP-E108")
    if similar := table.found_in(table.WRITE, flag):
        return TranslatedFlag(typed, why=f"{similar} says something like it")
    if reason := table.found_in(table.MEANINGLESS, flag):
        return TranslatedFlag(typed, why=reason, code="PP-E109")
    return _switched_off(typed, flag)


def _as_key(typed: str, key: Key, value: str) -> TranslatedFlag:
    override = _override(key, value)
    support = key.facts.support
    if support.state in (LATER, NEEDS) and override != as_typed(key.name, key.default):
        return TranslatedFlag(typed, why=support.note or key.name, code="PP-E108")
    flag = typed.partition(" ")[0].partition("=")[0]
    return TranslatedFlag(typed, f"{_SWITCHED_ON[flag]} {override}" if flag in _SWITCHED_ON else override)


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
}
"""Flags whose values have other names here."""

_IN_SAMPLES = {
    "--lr-warmup-samples": "optim.warmup_steps",
    "--lr-decay-samples": "optim.lr_decay_steps",
    "--lr-wsd-decay-samples": "optim.lr_wsd_decay_steps",
}
"""Flags that count samples -> the key that counts steps."""

_SWITCHED_ON = {"--cpu-offloading-num-layers": "parallel.cpu_offloading=true"}
"""Flags that switch something else on as well."""


def flags_problem(flags: Sequence[TranslatedFlag], line: str, given: Mapping[str, str]) -> Problem:
    """One problem for several flags; `line` is the command line with keys instead, `given` its keys and values. Its
    place ends with Megatron's defaults if the line leaves others."""
    width = max(len(one.typed) for one in flags)
    rows = [f"{one.typed:<{width}}  {one.override or _left_out(one)}" for one in flags]
    message = f"{len(flags)} flags are keys in ppctl or have no meaning in it; the remedy is the whole command line"
    return Problem("PP-E107", message, line, "\n".join([*rows, *_other_defaults(given)]))


def _left_out(flag: TranslatedFlag) -> str:
    words = {"PP-E108": "not in this release:", "PP-E109": "left out:"}
    return f"{words.get(flag.code, 'in other terms:')} {flag.why}"


def _other_defaults(given: Mapping[str, str]) -> list[str]:
    """A table of the keys that a command line leaves to defaults other than Megatron's, and overrides to paste."""
    from ppctl.config.megatron_flags import defaults_left

    differing = [
        (key, value_text(text_keys()[key].default), value_text(theirs)) for key, theirs in defaults_left(given)
    ]
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
    if flag in MEGATRON:
        usual = value_text(text_keys()[MEGATRON[flag]].default)
        return Problem("PP-E107", f"{flag} needs a value", f"{flag} {usual}", place)
    if flag in LISTS:
        return Problem("PP-E107", f"{flag} needs a value", f"ppctl explain {LISTS[flag]}", place)
    known_flag = translated(flag, value, batch)
    if known_flag is None:
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
