"""Rules on values: limits of single keys, relations between keys, and what this release refuses. Nothing is changed.

Here limits (metadata of the fields) are applied and the rules that need no file of their own. Equations between sizes
(world, batch, layout against pp) are the plan's. Sources: the meaning of each key in `schema.py`; Megatron's
constraints in `model_parallel_config.problems`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ppctl.config import (
    batch_sizes,
    data_paths,
    foreign_rules,
    launch_rules,
    learning_rate,
    model_rules,
    mtp_weight,
    muon_rules,
    offloading_rules,
    precision,
    recompute_rules,
)
from ppctl.config.batch_sizes import steps_for_tokens
from ppctl.config.keys import (
    Finding,
    as_typed,
    did_you_mean,
    nearest,
    place_of,
    sections,
    set_value,
    text_keys,
    value_of,
)
from ppctl.config.limits import Bounds, Form, OneOf
from ppctl.config.mapping import converted_value
from ppctl.config.model_parallel_config import problems as parallel_problems
from ppctl.config.quantities import steps_of
from ppctl.config.schema import CheckpointConfig, ParallelConfig, RunConfig
from ppctl.config.support import not_trained, refused
from ppctl.errors import Problem
from ppctl.schedule.policies import AUTO, POLICIES, SPELLINGS, fitting_policy, schedule_policy

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")

_BATCH, _OVERLAP = "parallel.batch_p2p_comm", "parallel.overlap_p2p_comm"


def check(
    config: RunConfig,
    provenance: Mapping[str, str],
    *,
    for_training: bool = False,
    skip: Collection[str] = (),
    usual: Mapping[str, Any] = MappingProxyType({}),
) -> list[Problem]:
    """Every rule that `config` breaks. `for_training` adds, as one problem, what can be planned but not trained yet.

    `skip` names keys that have a problem already: rules that read them are left out. `usual` has the values that the
    command line replaced: remedies go back to them, else to the default.
    """
    found = []
    reported = set(skip)

    def report(findings: Iterable[Finding], silent: Collection[str]) -> None:
        for keys, message, remedy in findings:
            if not set(keys) & set(silent):
                place = "\n".join(place_of(key, value_of(config, key), provenance) for key in keys)
                found.append(Problem("PP-E103", message, remedy, place))
                reported.update(keys[:1])

    beyond = list(beyond_limits(config))
    # A value that was derived from a wrong one is wrong too: one problem is enough.
    first = [key for key in beyond if not provenance.get(key, "").startswith("derived")]
    report((_beyond(key, value_of(config, key), usual) for key in first), skip)
    # Rules between values see only values within their limits: they stay fast, and no value has two problems.
    sound = within_limits(config, beyond, usual)
    report(_with_working_remedies(sound, usual), {*skip, *beyond})
    filled = replace(sound.parallel, pipeline_dtype=config.parallel.pipeline_dtype or "float32")
    found += parallel_problems(filled)
    found += refused(config, provenance, reported)
    if for_training:
        found += not_trained(config)
    return found


def _with_working_remedies(config: RunConfig, usual: Mapping[str, Any]) -> Iterator[Finding]:
    """The findings, each with the first remedy that breaks no other rule: its own, or that of a key's usual value."""
    findings = list(_findings(config, usual))
    before = {(keys, message) for keys, message, _ in findings}
    for keys, message, remedy in findings:
        named = [key for key in keys if key in text_keys() and value_of(config, key) != _usual(key, usual)]
        for candidate in (remedy, *(as_typed(key, _usual(key, usual)) for key in named)) if remedy else ():
            mended = _mended(config, candidate)
            if mended is not None and next(beyond_limits(mended), None) is not None:
                continue
            broken = set() if mended is None else {found[:2] for found in _findings(mended, usual)}
            if not broken - before | broken & {(keys, message)}:
                remedy = candidate
                break
        yield keys, message, remedy


def _mended(config: RunConfig, remedy: str) -> RunConfig | None:
    """The config with a remedy that sets keys; None for one that does something else, such as to explain."""
    from ppctl.config.yaml_file import ConfigLoader, read_yaml

    mended = replace(config, **{name: copy(getattr(config, name)) for name in sections()})
    for word in shlex.split(remedy.partition("\n")[0]):
        key, _, text = word.partition("=")
        if key not in text_keys():
            return None
        try:
            set_value(mended, key, converted_value(key, read_yaml(text, ConfigLoader)[0]))
        except ValueError:  # a value that the command line spells otherwise than YAML
            return None
    return mended


def beyond_limits(config: RunConfig) -> Iterator[str]:
    """The keys whose value is beyond their limit: out of bounds, not one of the choices, or of the wrong form; and
    those whose text has control characters."""
    for name, key in text_keys().items():
        if not key.allows(value_of(config, name)):
            yield name


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


def in_batches(parallel: ParallelConfig) -> bool:
    """Whether a rank waits for neighbouring messages as one batch, instead of computing while they travel."""
    return parallel.batch_p2p_comm or not parallel.overlap_p2p_comm


def _findings(config: RunConfig, usual: Mapping[str, Any]) -> Iterator[Finding]:
    yield from _environment(config.launch.env, usual)
    yield from model_rules.broken_rules(config.model)
    yield from batch_sizes.broken_rules(config)
    yield from learning_rate.broken_rules(config)
    yield from mtp_weight.broken_rules(config)
    yield from muon_rules.broken_rules(config)
    yield from precision.broken_rules(config)
    yield from _messages(config)
    yield from recompute_rules.broken_rules(config)
    yield from offloading_rules.broken_rules(config)
    yield from foreign_rules.broken_rules(config)
    yield from data_paths.broken_rules(config)
    yield from launch_rules.broken_rules(config)
    yield from _schedule(config)
    yield from _samples(config)
    yield from _watched_steps(config)
    yield from _exchanging_layers(config)
    yield from _local_copies(config.checkpoint)


def _exchanging_layers(config: RunConfig) -> Iterator[Finding]:
    tensor, context = "parallel.tensor_model_parallel_size", "parallel.context_parallel_size"
    if config.pipeline.loss_fn is not None and config.parallel.tensor_model_parallel_size > 1:
        message = (
            "loss_fn needs the logits of the whole vocabulary, and each tensor-parallel rank has only a part of them"
        )
        yield ("pipeline.loss_fn", tensor), message, "tp=1"
    over = [key for key in (tensor, context) if getattr(config.parallel, key.partition(".")[2]) > 1]
    if config.train.compile and over:
        message = "layers that communicate with other ranks cannot be compiled: collectives would break their graphs"
        yield ("train.compile", *over), message, "train.compile=false"


def _local_copies(checkpoint: CheckpointConfig) -> Iterator[Finding]:
    if (checkpoint.local is not None) != (checkpoint.local_every > 0):
        message = "set both the directory and the interval of copies in memory, or neither"
        remedy = "checkpoint.local_every=10" if checkpoint.local is not None else "checkpoint.local=/dev/shm/ppctl"
        yield ("checkpoint.local", "checkpoint.local_every"), message, remedy
    if checkpoint.local is not None and not checkpoint.async_:
        message = "copies in memory are made by background saves"
        yield ("checkpoint.local", "checkpoint.async"), message, "checkpoint.async=true"

    if checkpoint.local_replicas and checkpoint.local is None:
        message = "a neighbour's host can only hold copies in memory, and there are none"
        yield ("checkpoint.local_replicas", "checkpoint.local"), message, "checkpoint.local_replicas=0"


def _samples(config: RunConfig) -> Iterator[Finding]:
    """Rules on the size of a sample and of a microbatch."""
    if config.train.micro_batch_size != config.pipeline.pp_microbatch_size != 1:
        keys = ("train.micro_batch_size", "pipeline.pp_microbatch_size")
        yield keys, "the two names of the micro batch size differ", f"mbs={config.train.micro_batch_size}"
    length, positions = config.data.seq_length, config.model.max_position_embeddings
    if config.pipeline.pp_seq_len not in (None, length):
        message = f"messages would be made for sequences of {config.pipeline.pp_seq_len}, and the data's have {length}"
        yield ("pipeline.pp_seq_len", "data.seq_length"), message, f"pipeline.pp_seq_len={length}"
    if length > positions:
        message = f"a sequence of {length} is longer than the model's {positions} positions"
        # A model whose code is transformers' has the positions of its own config.json.
        foreign = config.model.transformers is not None
        remedy = f"data.seq_length={positions}" + ("" if foreign else f"\nmodel.max_position_embeddings={length}")
        yield ("data.seq_length", "model.max_position_embeddings"), message, remedy


WATCHED = ("log.trace", "log.torch_profile", "log.gradients")
"""Keys that name steps of which more is kept."""


def _watched_steps(config: RunConfig) -> Iterator[Finding]:
    """Steps that the run does not have: nothing would be kept, without a word."""
    last = config.train.steps
    for name in WATCHED:
        asked = value_of(config, name)
        if asked is not None and (steps := steps_of(asked))[-1] > last:
            there = max(last - len(steps) + 1, 1)
            message = f"{name}={asked} ends with step {steps[-1]}, but the run ends with step {last}"
            yield (name, "train.steps"), message, f"{name}={there}:{last + 1}"


def notes(config: RunConfig) -> Iterator[str]:
    """What is no mistake, and hardly meant."""
    steps, warmup = config.train.steps, learning_rate.warmup_steps(config.optim, steps_for_tokens(config))
    if warmup > steps:
        yield (
            f"the warm-up takes {warmup:,} steps and the run ends after {steps:,}: the rate never reaches optim.lr; "
            "optim.warmup_steps and train.steps set them"
        )


def _messages(config: RunConfig) -> Iterator[Finding]:
    """Rules on how messages between stages travel."""
    parallel, backend = config.parallel, "parallel.pipeline_model_parallel_comm_backend"
    if parallel.overlap_p2p_comm and parallel.batch_p2p_comm:
        message = "a rank waits for each batch of messages: they cannot overlap with computation"
        yield (_BATCH, _OVERLAP), message, f"{_OVERLAP}=false"
    if parallel.batch_p2p_sync and not parallel.batch_p2p_comm:
        message = "batch_p2p_sync synchronises after the batches of batch_p2p_comm, which is off"
        yield ("parallel.batch_p2p_sync", _BATCH), message, "parallel.batch_p2p_sync=false"
    if config.pipeline.p2p_capacity is not None and in_batches(parallel):
        message = "with batch_p2p_comm no message overlaps with computation, so a capacity has no effect"
        yield ("pipeline.p2p_capacity", _BATCH, _OVERLAP), message, "pipeline.p2p_capacity=null"
    if parallel.pipeline_model_parallel_comm_backend == "nccl" and config.launch.device == "cpu":
        message = "NCCL sends tensors of GPUs, but the device is the CPU"
        yield (backend, "launch.device"), message, f"{backend}=null"


def _beyond(name: str, value: Any, usual: Mapping[str, Any]) -> Finding:
    """The finding of a value beyond its limit; the remedy is the nearest of some words, else the usual value,
    and instead of null an example: who typed a value meant to have one.
    """
    key = text_keys()[name]
    limit, bad = key.limit, key.controls(value)
    message, remedy = f"{name} must be {limit.words if limit else ''}", as_typed(name, _usual(name, usual))
    if bad:
        message = f"{name} has control characters, which scripts and terminals obey: {' '.join(dict.fromkeys(bad))}"
    elif isinstance(limit, OneOf):
        words = {word.lower(): word for word in limit.names}
        close = nearest(str(value).lower(), words)
        message += did_you_mean(str(value).lower(), words)
        remedy = as_typed(name, words[close[0]]) if close else remedy
    elif isinstance(limit, Form) and limit.example is not None and _usual(name, usual) is None:
        remedy = as_typed(name, limit.example)
    return (name,), message, remedy


def _usual(name: str, usual: Mapping[str, Any]) -> Any:
    """The value that stood before, or else the default."""
    key = text_keys()[name]
    before = usual.get(name, key.default)
    return before if key.allows(before) else key.default


def _environment(variables: Iterable[str], usual: Mapping[str, Any]) -> Iterator[Finding]:
    for name in variables:
        if name in RANK_VARIABLES:
            message = f"launch.env cannot set {name}: it differs between ranks, and the launcher sets it for each"
        elif name == "PPCTL_SECRET":
            message = "launch.env cannot set PPCTL_SECRET: others can read config.yaml and the job script; use export"
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            message = f"launch.env cannot set {name!r}: letters, digits and _ make the name of a variable"
        else:
            continue
        yield ("launch.env",), message, as_typed("launch.env", _usual("launch.env", usual))


def _put_off_limit(config: RunConfig) -> Iterator[Finding]:
    limit, file = config.pipeline.put_off_limit, config.pipeline.pp_schedule_csv
    policy = POLICIES.get(schedule_policy(config.pipeline.pp_schedule) or "") if file is None else None
    if limit is not None and (policy is None or not policy.splits):
        name = config.pipeline.pp_schedule if file is None else "of a file"
        named = ", ".join(name for name, policy in POLICIES.items() if policy.splits)
        message = f"pipeline.put_off_limit={limit} is for schedules that split backwards ({named}), not schedule {name}"
        yield ("pipeline.put_off_limit", "pipeline.pp_schedule"), message, "pipeline.put_off_limit=null"


def _schedule(config: RunConfig) -> Iterator[Finding]:
    name, memory = config.pipeline.pp_schedule, config.pipeline.schedule_memory
    if memory is not None and (config.pipeline.pp_schedule_csv is not None or schedule_policy(name) != AUTO):
        message = f"pipeline.schedule_memory={memory:g} is a limit for a search, and no schedule is searched for"
        remedy = f"pipeline.pp_schedule={AUTO}" if config.pipeline.pp_schedule_csv is None else None
        unset = "pipeline.schedule_memory=null"
        yield ("pipeline.schedule_memory", "pipeline.pp_schedule"), message, "\n".join(filter(None, (remedy, unset)))
    yield from _put_off_limit(config)
    if config.pipeline.pp_schedule_csv is not None and name is None:
        return
    if schedule_policy(name) is None:
        abstract = (name or "").lower() in ("pipelineschedulesingle", "pipelineschedulemulti")  # torch's base classes
        hint = ": that is a kind of schedule" if abstract else did_you_mean(str(name), SPELLINGS)
        fitting = fitting_policy(config.parallel.virtual_pipeline_model_parallel_size or 1)
        begun = [each for each in SPELLINGS if name and each.startswith(name.lower())]
        close = [*nearest(str(name), SPELLINGS), *begun, fitting]
        yield ("pipeline.pp_schedule",), f"there is no schedule {name}{hint}", f"pipeline.pp_schedule={close[0]}"
