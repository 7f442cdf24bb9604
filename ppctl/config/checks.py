"""Limits of single keys and rules between keys, applied to a config: all problems together, with remedies that work.

The rules are in files by subject (`RULES`); equations between sizes (world, batch, layout against pp) are the plan's.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ppctl.config import (
    batch_sizes,
    data_paths,
    learning_rate,
    model_rules,
    parallel_rules,
    precision,
    run_rules,
    scale,
)
from ppctl.config.keys import Finding, Key, as_typed, keys_with, place_of, sections, text_keys, value_text
from ppctl.config.mapping import converted_value
from ppctl.config.metadata import IGNORED, LATER, NEEDS, Bounds, Form
from ppctl.config.model_parallel_config import problems as parallel_problems
from ppctl.config.schema import RunConfig
from ppctl.errors import Problem, pasted


def details(config: RunConfig) -> Iterator[Finding]:
    """Findings about keys that have no effect because another key does not have the value needed (`Facts.needs`)."""
    for name, key in keys_with("needs").items():
        owner, _, values = key.facts.needs.partition("=")
        given = value_text(config[owner])
        if config[name] != key.default and not (given in values.split(",") if values else config[owner]):
            needed = [f"{owner}={value}" for value in values.split(",")] if values else [owner]
            message = f"{name} has an effect only with {' or '.join(needed)}, but {owner} is {given}"
            yield (name, owner), message, "\n".join([as_typed(name, key.default), *needed[: bool(values)]])


RULES: tuple[Callable[[RunConfig], Iterator[Finding]], ...] = (
    details,
    run_rules.environment,
    model_rules.decoder,
    batch_sizes.broken_rules,
    learning_rate.broken_rules,
    learning_rate.broken_mtp_rules,
    parallel_rules.muon,
    precision.broken_rules,
    parallel_rules.messages,
    parallel_rules.recompute,
    parallel_rules.offloading,
    model_rules.foreign,
    data_paths.broken_rules,
    run_rules.submission,
    parallel_rules.schedule,
    run_rules.samples,
    run_rules.watched_steps,
    parallel_rules.exchanging_layers,
    run_rules.local_copies,
    run_rules.best_checkpoints,
    run_rules.guards,
)
"""The rules between values, in the order in which their findings are reported."""

_UNCHANGED: Mapping[str, Any] = MappingProxyType({})


def check(
    config: RunConfig,
    provenance: Mapping[str, str],
    *,
    for_training: bool = False,
    skip: Collection[str] = (),
    usual: Mapping[str, Any] = _UNCHANGED,
) -> list[Problem]:
    """A problem for each rule that `config` breaks. `for_training` adds, as one problem, what can be planned but not
    trained yet. `skip` names keys that have a problem already: rules that read them are left out. `usual` has the
    values that the command line replaced; remedies go back to these, else to defaults."""
    problems = []
    reported = set(skip)

    def report(findings: Iterable[Finding], silent: Collection[str]) -> None:
        for keys, message, remedy in findings:
            if not set(keys) & set(silent):
                place = "\n".join(place_of(key, config[key], provenance) for key in keys)
                problems.append(Problem("PP-E103", message, remedy, place))
                reported.update(keys[:1])

    beyond = beyond_limits(config)
    # A value derived from a wrong value is wrong, too: one problem is enough.
    first = [key for key in beyond if not provenance.get(key, "").startswith("derived")]
    # Rules between values see only values within their limits: they stay fast, and no value has two problems.
    sound = within_limits(config, usual)
    report((_beyond(key, config[key], usual, sound) for key in first), skip)
    report(_with_working_remedies(sound, usual), {*skip, *beyond})
    filled = replace(sound.parallel, pipeline_dtype=config.parallel.pipeline_dtype or "float32")
    problems += parallel_problems(filled)
    problems += refused(config, provenance, reported)
    return problems + (not_trained(config) if for_training else [])


def _with_working_remedies(config: RunConfig, usual: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the findings, each with only those lines of its remedy that mend it and break no other rule; if no line
    does, with a key's usual value. A remedy that is only a key stands for its usual value."""
    findings = _findings(config)
    before = {(keys, message) for keys, message, _ in findings}

    def works(line: str, finding: tuple[tuple[str, ...], str]) -> bool:
        mended = _mended(config, line)
        if mended is not None and beyond_limits(mended):
            return False
        broken = set() if mended is None else {each[:2] for each in _findings(mended)}
        return not broken - before | broken & {finding}

    for keys, message, remedy in findings:
        if remedy in text_keys():
            remedy = as_typed(remedy, _usual(remedy, usual))
        named = [key for key in keys if key in text_keys() and config[key] != _usual(key, usual)]
        for candidate in (remedy, *(as_typed(key, _usual(key, usual)) for key in named)) if remedy else ():
            lines = [line for line in candidate.splitlines() if works(line, (keys, message))]
            if lines:
                remedy = "\n".join(lines)
                break
        yield keys, message, remedy


def _findings(config: RunConfig) -> list[Finding]:
    return [finding for rule in RULES for finding in rule(config)]


def _copied(config: RunConfig) -> RunConfig:
    """A config whose keys can be set without changing `config`."""
    copied = copy(config)
    for name in sections():
        copied[name] = copy(copied[name])
    return copied


def _mended(config: RunConfig, remedy: str) -> RunConfig | None:
    """The config after a remedy that sets keys; None for other remedies, such as `ppctl explain`."""
    from ppctl.config.yaml_file import ConfigLoader, read_yaml

    mended = _copied(config)
    for override in shlex.split(remedy):
        key, _, text = override.partition("=")
        if key not in text_keys():
            return None
        try:
            mended[key] = converted_value(key, read_yaml(text, ConfigLoader)[0])
        except ValueError:  # a value in a form that YAML reads differently
            return None
    return mended


def beyond_limits(config: RunConfig) -> list[str]:
    """The keys whose value is out of bounds, not one of the choices, of the wrong form, or has control characters."""
    return [name for name, key in text_keys().items() if not key.allows(config[name])]


def is_size(name: str) -> bool:
    """Whether the key of this name holds a number that plans count with."""
    limit = text_keys()[name].limit
    return isinstance(limit, Bounds) and limit.is_size


def within_limits(config: RunConfig, usual: Mapping[str, Any] = _UNCHANGED) -> RunConfig:
    """`config` with the usual value, or the default, of each key whose value is beyond its limit."""
    beyond = beyond_limits(config)
    sound = _copied(config) if beyond else config
    for name in beyond:
        sound[name] = _usual(name, usual)
    return sound


def notes(config: RunConfig, provenance: Mapping[str, str]) -> list[str]:
    """Notes on settings that are allowed but probably not meant, and on the length of a miniature."""
    return [*scale.steps_in_words(config, provenance), *learning_rate.unreached_peak(config)]


def _beyond(name: str, value: Any, usual: Mapping[str, Any], sound: RunConfig) -> Finding:
    """The finding of a value beyond its limit. Its remedy is the word that was meant, else the usual value. If that is
    null, it is an example instead, unless a rule refuses the example together with `sound`, the other values."""
    key = text_keys()[name]
    message, meant = key.misfit(value)
    fitting = _usual(name, usual) if meant is None else meant
    remedy = as_typed(name, fitting)
    if fitting is None and isinstance(key.limit, Form):
        example = as_typed(name, key.limit.example)
        mended = _mended(sound, example)
        if mended is None or not any(name in keys for keys, _, _ in _findings(mended)):
            remedy = example
    return (name,), message, remedy


def _usual(name: str, usual: Mapping[str, Any]) -> Any:
    key = text_keys()[name]
    before = usual.get(name, key.default)
    return before if key.allows(before) else key.default


# What this release supports: a setting that cannot take effect is refused by name, never ignored


def _set_to_another(config: RunConfig, *states: str) -> Iterator[tuple[Key, object]]:
    for name, key in text_keys().items():
        value = config[name]
        if key.facts.support.state in states and value != key.default:
            yield key, value


def refused(config: RunConfig, provenance: Mapping[str, str], skip: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each value that this release does not support; keys in `skip` have a problem already."""
    for key, value in _set_to_another(config, LATER, NEEDS):
        note = key.facts.support.note
        if key.facts.support.state == LATER:
            code, reason = "PP-E110", f"comes in a later release{f' ({note})' if note else ''}"
        else:
            code, reason = "PP-E111", f"needs {note}, which ppctl does not use"
        if key.name not in skip:
            message, remedy = f"{key.name}={value_text(value)} {reason}", as_typed(key.name, key.default)
            yield Problem(code, message, remedy, place_of(key.name, value, provenance))


def ignored(config: RunConfig, provenance: Mapping[str, str]) -> list[str]:
    """One note that names all the settings that have no effect, if there are any."""
    settings = [
        f"{key.name}={value_text(value)} ({provenance.get(key.name, 'default')}; {key.facts.support.note})"
        for key, value in _set_to_another(config, IGNORED)
    ]
    return [f"without effect: {', '.join(settings)}"] if settings else []


def not_trained(config: RunConfig) -> list[Problem]:
    """One problem that names all features that this config needs and this release cannot train yet; none otherwise."""
    missing = [f"{what} ({', '.join(keys)})" for what, keys in _models_without_modules(config)]
    if not missing:
        return []
    listed = ", ".join(missing)
    message = f"this release can plan this config but not train it yet; missing: {listed}"
    recipe = [f"+recipe={config.recipe}"] if config.recipe else []
    return [Problem("PP-E118", message, pasted("ppctl", "plan", *recipe))]


def _models_without_modules(config: RunConfig) -> Iterator[tuple[str, Collection[str]]]:
    model, width = config.model, config.model.qk_head_dim + config.model.qk_pos_emb_head_dim
    if model.multi_latent_attention and model.attention_backend == "flash" and width != model.v_head_dim:
        what = f"flash attention with keys and values of different widths, {width} and {model.v_head_dim}"
        yield what, ["model.attention_backend=flash"]
    if model.attention_dropout and model.attention_backend in ("fused", "flash"):
        what = "attention dropout in fused kernels, whose draws depend on the cut"
        yield what, [f"model.attention_backend={model.attention_backend}"]
    if model.add_bias_linear:
        for what, held in (("experts", model.num_moe_experts), ("latent attention", model.multi_latent_attention)):
            if held:
                yield f"biases of {what}", ["model.add_bias_linear=true"]
    by_rows = model.fp8 is None or (model.fp8, model.fp8_recipe) == ("e4m3", "rowwise")
    if not by_rows and model.num_moe_experts is not None and config.launch.device == "cuda":
        keys = [f"model.fp8={model.fp8}", f"model.fp8_recipe={model.fp8_recipe}"]
        yield "products of experts in 8 bits on a GPU, other than rowwise in e4m3", keys
