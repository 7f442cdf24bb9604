"""Flags in Megatron's spelling: which of them ppctl takes, and the error about each of the rest.

Flags among a key's `names` are taken; of all others the error says what to write. The flags of a key are
metadata of its field (`names`, `known_as`); here are those that do not mean one key.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ppctl.config.keys import Key, as_typed, did_you_mean, names_of_keys, text_keys, value_text
from ppctl.errors import Problem

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
}
"""Flags of other systems that mean one value of a key -> the override."""

LATER = ("--overlap-grad-reduce", "--overlap-param-gather")
"""Flags of features that come in a later release."""

_ATTENTION = "model.attention_backend alone decides which kernel computes attention"

MEANINGLESS = {
    "--use-mcore-models": "ppctl has one implementation of its model",
    "--transformer-impl": "ppctl has one implementation of its model",
    "--group-query-attention": "model.num_query_groups alone decides it",
    "--use-flash-attn": _ATTENTION,
    "--attention-softmax-in-fp32": _ATTENTION,
    "--no-masked-softmax-fusion": _ATTENTION,
    "--lr-decay-style": "the learning rate warms up linearly and decays as a cosine",
    "--tokenizer-type": "data.tokenizer alone decides it",
    "--distributed-backend": "the device decides: nccl on cuda, gloo on cpu",
    "--log-interval": "every step is logged",
    "--save": "checkpoints are in the run directory: log.dir",
    "--node-rank": "ranks that ppctl does not start find it in their environment",
    "--rdzv-backend": "ranks that ppctl does not start find it in their environment",
    "--rdzv-endpoint": "ranks that ppctl does not start find it in their environment",
}
"""Flags that have no meaning here, and why."""


def _keys_of(flag: str) -> list[Key]:
    """The keys that a flag of Megatron's means, else those of its name."""
    key = names_of_keys("known_as").get(flag) or FIXED.get(flag, "").partition("=")[0]
    field = flag.lstrip("-").replace("-", "_")
    return [text_keys()[key]] if key else [key for key in text_keys().values() if field in (key.field, key.name)]


def meant_by(name: str) -> str | None:
    """The key that other systems call `name` (the last part of a key, or a flag); None unless it is exactly one."""
    known = names_of_keys("known_as").get(name)
    found = _keys_of("--" + name.replace("_", "-"))
    return known or (found[0].name if len(found) == 1 else None)


class Foreign(NamedTuple):
    """A flag of Megatron's that ppctl understands and does not take."""

    typed: str
    override: str
    """What means the same; empty where nothing is needed."""
    why: str
    """Why it is left out."""


def foreign(flag: str, value: str) -> Foreign | None:
    """What `flag value` means, or None where ppctl does not know the flag."""
    typed = shlex.join([flag, value] if value else [flag])
    if flag in LATER:
        return Foreign(typed, "", "it comes in a later release")
    if flag in MEANINGLESS:
        return Foreign(typed, "", MEANINGLESS[flag])
    if flag in FIXED:
        return Foreign(typed, FIXED[flag], "")
    same = _keys_of(flag)
    if not same:
        return None
    override = _override(same[0], _TRANSLATED.get(flag, str)(value))
    return Foreign(typed, f"{_SWITCHED_ON[flag]} {override}" if flag in _SWITCHED_ON else override, "")


def takes_several(flag: str) -> bool:
    """Whether a flag that ppctl does not take has one value or more."""
    return any(key.is_list for key in _keys_of(flag))


def _validation_share(split: str) -> str:
    """The share of the second of Megatron's three numbers (training, validation, test), such as `949,50,1`."""
    try:
        shares = [float(part) for part in split.split(",")]
        return f"{shares[1] / sum(shares):.4g}"
    except (ValueError, IndexError, ZeroDivisionError):
        return split


def _sharding(strategy: str) -> str:
    """parallel.data_parallel_sharding by Megatron-FSDP's names."""
    names = {"no_shard": "none", "optim": "optimizer_gradients", "optim_grads": "optimizer_gradients"}
    return {**names, "optim_grads_params": "full"}.get(strategy, strategy)


_TRANSLATED = {"--split": _validation_share, "--data-parallel-sharding-strategy": _sharding}
"""Flags whose values have other names here."""


_SWITCHED_ON = {"--cpu-offloading-num-layers": "parallel.cpu_offloading=true"}
"""Flags that switch something else on as well."""


def flags_problem(flags: Sequence[Foreign], line: str) -> Problem:
    """One problem for several flags at once; `line` is the command line with keys instead of these flags."""
    width = max(len(one.typed) for one in flags)
    rows = [f"{one.typed:<{width}}  {one.override or f'left out: {one.why}'}" for one in flags]
    message = f"{len(flags)} flags are keys here or mean nothing here; the remedy is the whole line with keys"
    return Problem("PP-E107", message, line, "\n".join(rows))


def flag_problem(flag: str, value: str = "", own: Iterable[str] = ()) -> Problem:
    """What is wrong with a flag that ppctl does not take; `value` is what was typed for it."""
    place = "command line"
    if flag in MEGATRON:
        usual = value_text(text_keys()[MEGATRON[flag]].default)
        return Problem("PP-E107", f"{flag} needs a value", f"{flag} {usual}", place)
    if flag in LISTS:
        return Problem("PP-E107", f"{flag} needs a value", f"ppctl explain {LISTS[flag]}", place)
    found = foreign(flag, value)
    if found is not None and found.override:
        return Problem("PP-E107", f"{flag} is no flag of ppctl; the setting is a key", found.override, place)
    if flag in LATER:
        return Problem("PP-E108", f"{flag} comes in a later release; leave it out", place=place)
    if flag in MEANINGLESS:
        return Problem("PP-E109", f"{flag} means nothing here: {MEANINGLESS[flag]}; leave it out", place=place)
    names = [*names_of_keys("names"), *names_of_keys("known_as"), *FIXED]
    names += [f"--{key.field.replace('_', '-')}" for key in text_keys().values()]
    known = [*own, *(name for name in dict.fromkeys(names) if name.startswith("--"))]
    return Problem("PP-E107", f"there is no flag {flag}{did_you_mean(flag, known)}", "ppctl --help", place)


def _override(key: Key, value: str) -> str:
    """`key=value`; of a flag without a value, what it switches on, or the key's default."""
    if key.is_switch and value not in ("true", "false"):
        return as_typed(key.name, True)
    return as_typed(key.name, value or key.default)
