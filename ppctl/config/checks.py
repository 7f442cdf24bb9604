"""Rules on values: what each key may hold, and what this release refuses by name. They report; they never mutate.

Knows relations inside one section, and tells where a value breaks the limit on its field (`limits.py`). Equations
across sizes (world, batch, layout against pp) are the plan's. Sources: the meaning of each key in `schema.py`;
Megatron's constraints in `model_parallel_config.problems`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ppctl.config import batch_job, data_paths, decoder, messages, precision, recompute
from ppctl.config.keys import (
    Finding,
    as_typed,
    did_you_mean,
    limited_keys,
    nearest,
    place_of,
    sections,
    set_value,
    text_keys,
    value_of,
)
from ppctl.config.limits import Bounds, Choice
from ppctl.config.model_parallel_config import problems as parallel_problems
from ppctl.config.schedules import ABSTRACT_SCHEDULES, SCHEDULES, schedule_policy
from ppctl.config.schema import OptimConfig, RunConfig
from ppctl.config.support import not_trained, refused
from ppctl.errors import Problem

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")

_NAME = re.compile(r"(?!\.+$)(?!\s)[^/\\\x00-\x1f\x7f]{1,100}(?<!\s)")
_MEMORY = re.compile(r"([0-9]{1,18}(?:\.[0-9]+)?) ?(KiB|MiB|GiB|TiB|KB|MB|GB|TB|B)?", re.ASCII)
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def check(
    config: RunConfig,
    provenance: Mapping[str, str],
    *,
    for_training: bool = False,
    skip: Collection[str] = (),
    usual: Mapping[str, Any] = MappingProxyType({}),
) -> list[Problem]:
    """Every rule that `config` breaks. `for_training` adds what can be planned but not trained yet, in one sentence.

    `skip` names keys whose value is known to be wrong already: no rule that reads them is told again. `usual` has the
    values that stood where the command line put others: remedies go back to them, and to the default elsewhere.
    """
    found = []
    told = set(skip)

    def tell(findings: Iterable[Finding], silent: Collection[str]) -> None:
        for keys, message, remedy in findings:
            if not set(keys) & set(silent):
                place = "\n".join(place_of(key, value_of(config, key), provenance) for key in keys)
                found.append(Problem("PP-E103", message, remedy, place))
                told.update(keys[:1])

    beyond = list(beyond_limits(config))
    # A value that was derived from a wrong one is wrong too, and told once.
    first = [key for key in beyond if not provenance.get(key, "").startswith("derived")]
    tell((_beyond(key, value_of(config, key), usual) for key in first), skip)
    # Rules between values are for values that are sound on their own: others take no time, and nothing is told twice.
    sound = within_limits(config, beyond, usual)
    tell(_findings(sound, usual), {*skip, *beyond})
    filled = replace(sound.parallel, pipeline_dtype=config.parallel.pipeline_dtype or "float32")
    found += parallel_problems(filled)
    found += refused(config, provenance, told)
    if for_training:
        found += not_trained(config)
    return found


def beyond_limits(config: RunConfig) -> Iterator[str]:
    """The keys whose value is none that their field allows: out of bounds, not one of the choices, or empty."""
    for key in limited_keys():
        if not key.allows(value_of(config, key.name)):
            yield key.name


def is_size(name: str) -> bool:
    """Whether the key of this name holds a number that plans count with."""
    limit = text_keys()[name].limit
    return isinstance(limit, Bounds) and limit.is_size


def within_limits(
    config: RunConfig, beyond: Collection[str], usual: Mapping[str, Any] = MappingProxyType({})
) -> RunConfig:
    """`config` with the usual value, or the default, for the keys in `beyond`."""
    if not beyond:
        return config
    sound = replace(config, **{name: copy(getattr(config, name)) for name in sections()})
    for name in beyond:
        set_value(sound, name, _usual(name, usual))
    return sound


def memory_bytes(text: str) -> int:
    """Bytes of `80GiB`, `141 GB`, `1024`. Raises ValueError for anything else."""
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no amount of memory: a number and a unit, as 80GiB")
    return int(float(match[1]) * _UNITS[match[2] or "B"])


def _findings(config: RunConfig, usual: Mapping[str, Any]) -> Iterator[Finding]:
    yield from _texts(config, usual)
    yield from _environment(config.launch.env, usual)
    yield from decoder.broken_rules(config.model)
    yield from _optim(config.optim)
    yield from precision.broken_rules(config)
    yield from messages.broken_rules(config)
    yield from recompute.broken_rules(config)
    yield from data_paths.broken_rules(config)
    yield from batch_job.broken_rules(config)
    yield from _schedule(config)
    if config.train.micro_batch_size != config.pipeline.pp_microbatch_size != 1:
        keys = ("train.micro_batch_size", "pipeline.pp_microbatch_size")
        yield keys, "the two names of the micro batch size differ", f"mbs={config.train.micro_batch_size}"
    model, data = config.model, config.data
    given = config.pipeline.pp_seq_len
    if given is not None and given != data.seq_length:
        keys = ("pipeline.pp_seq_len", "data.seq_length")
        message = f"messages would be made for sequences of {given}, and the data's have {data.seq_length}"
        yield keys, message, f"pipeline.pp_seq_len={data.seq_length}"
    if data.seq_length > model.max_position_embeddings:
        yield (
            ("data.seq_length", "model.max_position_embeddings"),
            f"a sequence of {data.seq_length} is longer than the model's {model.max_position_embeddings} positions",
            f"model.max_position_embeddings={data.seq_length}",
        )


def _beyond(name: str, value: Any, usual: Mapping[str, Any]) -> Finding:
    """The finding of a value that its field does not allow, and the nearest word or the usual value as its remedy."""
    limit = text_keys()[name].limit
    assert limit is not None
    message, remedy = limit.message(name, value), as_typed(name, _usual(name, usual))
    if isinstance(limit, Choice):
        words = {word.lower(): word for word in limit.names}
        close = nearest(str(value).lower(), words)
        message += did_you_mean(str(value).lower(), words)
        remedy = as_typed(name, words[close[0]]) if close else remedy
    return (name,), message, remedy


def _usual(name: str, usual: Mapping[str, Any]) -> Any:
    """The value that stood before, or else the default."""
    key = text_keys()[name]
    before = usual.get(name, key.default)
    return before if key.allows(before) else key.default


def _back(key: str, usual: Mapping[str, Any], otherwise: Any) -> str:
    """The override that goes back to what stood before, or to the default."""
    before = usual.get(key, text_keys()[key].default)
    return as_typed(key, otherwise if before is None else before)


def _texts(config: RunConfig, usual: Mapping[str, Any]) -> Iterator[Finding]:
    if not _NAME.fullmatch(config.log.name):
        message = "log.name is the name of a directory: up to 100 letters that can be printed, no slashes, not . or .."
        yield ("log.name",), message, _back("log.name", usual, "run")
    if config.launch.device_memory is not None:
        try:
            memory_bytes(config.launch.device_memory)
        except ValueError as error:
            yield ("launch.device_memory",), str(error), "launch.device_memory=80GiB"


def _environment(variables: Mapping[str, str], usual: Mapping[str, Any]) -> Iterator[Finding]:
    for name, value in variables.items():
        if name in RANK_VARIABLES:
            message = f"launch.env cannot set {name}: whoever starts the ranks says it to each of them"
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            message = f"launch.env cannot set {name!r}: letters, digits and _ make the name of a variable"
        else:
            continue
        yield ("launch.env",), message, _back("launch.env", usual, {})


def _optim(optim: OptimConfig) -> Iterator[Finding]:
    if optim.min_lr > optim.lr > 0:
        yield (
            ("optim.min_lr", "optim.lr"),
            "the learning rate falls to min_lr, which is above lr",
            f"optim.min_lr={optim.lr}",
        )


def _schedule(config: RunConfig) -> Iterator[Finding]:
    name = config.pipeline.pp_schedule
    if config.pipeline.pp_schedule_csv is not None and name is None:
        return
    if schedule_policy(name) is None:
        abstract = (name or "").lower() in ABSTRACT_SCHEDULES
        hint = ": that is a kind of schedule" if abstract else did_you_mean(str(name), SCHEDULES)
        chunks = config.parallel.virtual_pipeline_model_parallel_size or 1
        close = [*nearest(str(name), SCHEDULES), "interleaved_1f1b" if chunks > 1 else "1f1b"]
        yield ("pipeline.pp_schedule",), f"there is no schedule {name}{hint}", f"pipeline.pp_schedule={close[0]}"
