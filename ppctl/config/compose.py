"""From overrides to a RunConfig, with the source of every value and every problem at once.

Knows the order of strength: defaults, conf/, recipe, command line. Must not know what values mean: types are
`mapping.py`'s, rules `checks.py`'s. Imports Hydra, through `hydra_source`, only when it composes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ppctl.config.argv import ALIASES, PLACE, Arguments, normalise, typed_again
from ppctl.config.checks import beyond_limits, check, notes, within_limits
from ppctl.config.draft import DEFAULT, GLOBAL_BATCH, Draft, flat
from ppctl.config.flags import ABSENT, meant_by
from ppctl.config.foreign_rules import READ, without_effect
from ppctl.config.keys import (
    as_typed,
    did_you_mean,
    keys,
    mapping_with,
    nearest,
    sections,
    text_keys,
    value_of,
    value_text,
)
from ppctl.config.mapping import convert, not_a_section, to_mapping, unknown_key
from ppctl.config.metadata import LATER
from ppctl.config.quoting import quote
from ppctl.config.resources import find_recipe, groups, is_file_name, recipes
from ppctl.config.scale import KEEPS, SCALES, miniature, steps_in_words
from ppctl.config.schema import RunConfig
from ppctl.config.support import ignored
from ppctl.errors import ConfigError, PpctlError, Problem

if TYPE_CHECKING:
    from ppctl.config.hydra_source import ConfigLayer


class RefusedError(ConfigError):
    """Problems, with the config as far as it could be composed, so that a plan of it can find more problems."""

    def __init__(self, problems: Sequence[Problem], composed: Composed) -> None:
        super().__init__(problems)
        self.composed = composed


@dataclass(frozen=True, slots=True)
class Composed:
    """A config and its history."""

    config: RunConfig
    provenance: dict[str, str]
    """Dotted key -> where its value came from: `default`, a file and line, `command line`, `derived: ...`."""
    notes: tuple[str, ...] = ()
    """What was decided for the user, to be printed."""


_TOKENIZER = "data.tokenizer"
_VOCABULARY, _DIVISOR, _TP = (
    "model.vocab_size",
    "model.make_vocab_size_divisible_by",
    "parallel.tensor_model_parallel_size",
)

ReadModel = Callable[[str, str, Mapping[str, str], Mapping[str, Any]], Mapping[str, Any]]
"""From model.from, model.implementation, model.hf_overrides and model.lora to values by key: of the model, and
data.tokenizer. Raises PpctlError."""

CountTokens = Callable[[str], int]
"""From the value of `data.tokenizer` to the rows that an embedding needs for it. Raises PpctlError."""


def compose(
    overrides: Sequence[str],
    *,
    for_training: bool = False,
    read_model: ReadModel | None = None,
    count_tokens: CountTokens | None = None,
) -> Composed:
    """The config that `overrides` describe, on top of the defaults, conf/ and the recipe that they name.

    What `read_model` reads of `model.from` is stronger than files and weaker than the command line; its tokenizer is
    weaker than both. The vocabulary that nothing sets is what `count_tokens` finds. `for_training` also refuses what
    can be planned but not trained. Raises RefusedError with all problems.
    """
    arguments = _arguments(overrides)
    choices, values = _split_choices(arguments)
    scale = choices.pop("scale", None)
    draft = _files(choices, arguments.problems)
    recipe = choices.get("recipe")
    # A recipe's layout was written for the recipe's own model, not for one that the command line chose.
    before = (_files({"recipe": recipe}, []) if recipe and "model" in choices else draft).sizes()
    batch = draft.get(GLOBAL_BATCH) if isinstance(draft.tree["train"], dict) else None
    typed = _apply(draft, values)
    if isinstance(draft.tree["train"], dict):
        draft.set_rampup_aside(batch, typed)
    if read_model is not None:
        _take_model(draft, typed, read_model, scaled=scale is not None, for_training=for_training)
    draft.set_layout_aside(before, typed)
    draft.tree["recipe"] = recipe
    draft.provenance["recipe"] = PLACE if recipe else DEFAULT
    if scale is not None:
        _scale_down(draft, scale, typed)
    if count_tokens is not None:
        _take_vocabulary(draft, count_tokens, for_training=for_training)
    return _finish(draft, arguments.overrides, for_training)


def override(
    config: RunConfig, provenance: Mapping[str, str], overrides: Sequence[str], *, for_training: bool = False
) -> Composed:
    """`config` with `overrides` on top, as `resume` needs it: recipe and model stay as they were chosen.

    Where they change pp, vpp or the model's layers and give no layout, the old one is set aside. Raises ConfigError.
    """
    arguments = _arguments(overrides)
    choices, values = _split_choices(arguments)
    for group, option in choices.items():
        message = f"{group}={option}: a run keeps the {group} that it was started with; leave it out"
        arguments.problems.append(Problem("PP-E104", message, place=PLACE))
    draft = Draft(to_mapping(config), dict(provenance), arguments.problems)
    before, typed = draft.sizes(), _apply(draft, values)
    draft.set_layout_aside(before, typed)
    if config.model.transformers is not None:
        now = {name: draft.get(name) for name in sorted(typed)}
        draft.problems += without_effect(now, partial(value_of, config), PLACE, {"model.from"})
        _put_back(draft, {name: value_of(config, name) for name in now}, {"model.from"})
    return _finish(draft, arguments.overrides, for_training)


def _arguments(overrides: Sequence[str]) -> Arguments:
    found = normalise(overrides)
    found.problems += map(not_an_override, found.rest)
    return found


def not_an_override(word: str) -> Problem:
    """The problem of a word on the command line that is neither an override nor a flag."""
    close = nearest(word, recipes())
    remedy = f"+recipe={close[0]}" if close else "ppctl --help"
    return Problem("PP-E105", f"{word} is not an override, which is KEY=VALUE", remedy, PLACE)


def _split_choices(arguments: Arguments) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """(group -> option, [(key, text)]); a choice of something that does not exist becomes a problem."""
    options = groups()
    choices: dict[str, str] = {}
    values: list[tuple[str, str]] = []
    for text in arguments.overrides:
        key, _, value = text.partition("=")
        option = value.strip("'\"")
        if key == "scale":
            options[key] = list(SCALES)
        if key not in options or (key in sections() and value[:1] == "{"):
            values.append((key, value))
        elif option in options[key] or (key == "recipe" and find_recipe(option) is not None):
            choices[key] = option
        elif option not in ("", "null"):
            arguments.problems.append(_no_such(key, option, options[key]))
    return choices, values


def _no_such(group: str, option: str, options: Sequence[str]) -> Problem:
    """The problem of an option that does not exist; a recipe may be meant as a file."""
    if group == "recipe" and is_file_name(option) and option.endswith(".yaml"):
        here = f"ppctl recipes copy quickstart {shlex.quote(option)}"
        return Problem("PP-E104", f"there is no recipe file {option}", here, PLACE)
    close = nearest(option, options)
    message = f"there is no {group} {option}{did_you_mean(option, options)}"
    if not close:
        message += f"; there {'are' if len(options) > 1 else 'is'} {', '.join(options)}"
    usual = "ppctl recipes" if group == "recipe" else f"{group}={options[0]}"
    return Problem("PP-E104", message, f"{group}={close[0]}" if close else usual, PLACE)


def _files(choices: Mapping[str, str], problems: list[Problem]) -> Draft:
    """The draft that defaults, conf/ and the chosen groups make; what is wrong with files is added to `problems`."""
    from ppctl.config.hydra_source import load

    draft = Draft(to_mapping(RunConfig()), dict.fromkeys(text_keys(), DEFAULT), problems)
    try:
        for layer in load(choices):
            _apply_layer(draft, layer)
    except ConfigError as error:
        problems += error.problems
    return draft


def _scale_down(draft: Draft, scale: str, typed: Collection[str]) -> None:
    """Replace what makes the run large, except values of the command line, and note the changes as a table."""
    rows = []
    for key, value in _miniature(draft, scale, typed).items():
        before = draft.get(key)
        if key in draft.covered:
            draft.covered[key] = value  # a remedy goes back to the value without the command line
        if key not in typed and value != before:
            draft.put(key, value)
            draft.provenance[key] = f"scale={scale}"
            rows.append((key, value_text(before), value_text(value)))
    draft.tree["scale"], draft.provenance["scale"] = scale, PLACE
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    table = [f"  {key:{widths[0]}}  {before:>{widths[1]}} -> {value}" for key, before, value in rows]
    lines = [f"scale={scale} keeps {KEEPS[scale]}, and makes small:", *table]
    if "train.steps" not in typed:
        lines.append(steps_in_words(convert(draft.tree, draft.place)[0]))
    draft.notes.append("\n".join(lines))


def _miniature(draft: Draft, scale: str, typed: Collection[str]) -> dict[str, Any]:
    """The values that make the run small. The model's are in proportion to those of files: values on the command line
    are meant for the miniature."""
    config, _ = convert(draft.tree, draft.place)
    sound = within_limits(config, list(beyond_limits(config)), draft.covered)
    full = Draft(deepcopy(draft.tree), draft.provenance)
    for key in miniature(sound, scale, typed):
        if key.startswith(("model.", "log.")) and key in draft.covered:
            full.put(key, draft.covered[key])
    config, _ = convert(full.tree, draft.place)
    return miniature(within_limits(config, list(beyond_limits(config)), draft.covered), scale, typed)


def _apply_layer(draft: Draft, layer: ConfigLayer) -> None:
    prefix = f"{layer.package}." if layer.package else ""
    values = {name: value for name, value in layer.file.values.items() if name != "defaults"}
    for name, value in flat(values, prefix):
        draft.put(name, value)
        draft.provenance[name] = layer.source(name.removeprefix(prefix))


def _apply(draft: Draft, values: list[tuple[str, str]]) -> set[str]:
    """Put the command line on top; returns its keys."""
    from ppctl.config.hydra_source import parse

    typed = set()
    for key, text in values:
        known = _known(key)
        if known is None:
            draft.problems.append(_refuse(key, text))
            continue
        if known == "model.transformers" and text not in ("", "null"):
            message = f"{known} is what was found in the directory of model.from: it is not typed"
            draft.problems.append(Problem("PP-E103", message, "model.from=DIR", PLACE))
            continue
        if known in text_keys():
            draft.covered.setdefault(known, deepcopy(draft.get(known)))
        try:
            draft.put(key, parse(f"{key}={text}").value())
        except ConfigError as error:
            draft.problems += [_with_remedy(replace(p, place=f"{known} ({PLACE})"), draft) for p in error.problems]
            continue
        draft.provenance[known] = PLACE
        typed.add(known)
    return typed


def _take_model(draft: Draft, typed: set[str], read_model: ReadModel, *, scaled: bool, for_training: bool) -> None:
    """Put the sizes of `model.from` over those of files."""
    source = draft.get("model.from")
    if not isinstance(source, str) or not source:
        return
    if scaled:
        message = "a miniature has weights of its own: model.from and +scale exclude each other"
        draft.problems.append(Problem("PP-E103", message, "model.from=null", f"model.from = {source}"))
        return
    try:
        asked = (draft.get(f"model.{name}") for name in ("implementation", "hf_overrides", "lora"))
        values = read_model(source, *asked)
    except PpctlError as error:
        draft.problems += error.problems
        return
    if values.get("model.transformers") is not None:
        now = {name: draft.get(name) for name in sorted(typed)}
        fitting = {name: values.get(name, text_keys()[name].default) for name in now if name in text_keys()}
        draft.problems += without_effect(now, fitting.__getitem__, PLACE, READ)
        _put_back(draft, fitting, READ)
    is_set = draft.provenance.get(_TOKENIZER, DEFAULT) != DEFAULT
    for name, value in values.items():
        if name not in typed and not (name == _TOKENIZER and is_set):
            draft.put(name, value)
            draft.provenance[name] = f"model.from={source}"
    if for_training and not is_set and _TOKENIZER not in values:
        message = (
            f"{source} has no tokenizer, and {_TOKENIZER} names none (a directory, or byte where bytes are meant): "
            "bytes would be read as tokens of its vocabulary"
        )
        draft.problems.append(Problem("PP-E417", message, f"{_TOKENIZER}=byte", f"model.from = {source}"))


def _put_back(draft: Draft, fitting: Mapping[str, Any], read: Collection[str]) -> None:
    """Plan the model that there is, not the sizes that were refused: its description has layers of its own."""
    for name, value in fitting.items():
        if name.startswith("model.") and name not in read:
            draft.put(name, value)


def _take_vocabulary(draft: Draft, count_tokens: CountTokens, *, for_training: bool) -> None:
    """Set a vocabulary that nothing sets by the tokenizer, and round it as Megatron does."""
    source, rows, tokenizer = draft.provenance.get(_VOCABULARY, DEFAULT), draft.get(_VOCABULARY), draft.get(_TOKENIZER)
    if source.startswith("model.from"):
        return  # its weights have these rows
    reason = ""
    if source == DEFAULT or source.startswith("scale="):
        if draft.provenance.get(_TOKENIZER, DEFAULT) != DEFAULT and isinstance(tokenizer, str):
            try:
                rows = count_tokens(tokenizer)
                reason = f"{_TOKENIZER}={tokenizer} has {rows:,} tokens"
            except PpctlError as error:
                if for_training:
                    draft.problems += error.problems
                else:
                    reasons = "; ".join(problem.message for problem in error.problems)
                    draft.notes.append(f"the vocabulary stays {rows}, because {reasons}; {_VOCABULARY}=N sets it")
        elif source == DEFAULT and draft.provenance.get("data.path", DEFAULT) != DEFAULT:
            without = f"data.path is set, and neither {_TOKENIZER} nor {_VOCABULARY}"
            draft.notes.append(f"{without}: the vocabulary is {rows}, which is enough for bytes")
    multiple = _multiple(draft)
    if multiple > 1 and isinstance(rows, int) and rows % multiple:
        before = reason or f"{rows:,} ({source})"
        divisor = f"make_vocab_size_divisible_by {draft.get(_DIVISOR)} x tp {draft.get(_TP)}"
        rows, reason = -(-rows // multiple) * multiple, f"{before}, rounded up to a multiple of {divisor}"
    if reason:
        draft.put(_VOCABULARY, rows)
        draft.provenance[_VOCABULARY] = f"derived: {reason}"


def _multiple(draft: Draft) -> int:
    """What the vocabulary is rounded up to a multiple of; 1 where a factor is wrong, which `check` reports."""
    divisor, tp = draft.get(_DIVISOR), draft.get(_TP)
    sound = all(type(n) is int and text_keys()[key].allows(n) for key, n in ((_DIVISOR, divisor), (_TP, tp)))
    return divisor * tp if sound and divisor > 1 else 1


def _known(key: str) -> str | None:
    """The schema's key that `key` sets: itself, or the mapping that it is an entry of."""
    if key in keys():
        return key
    return mapping_with(key)


def _refuse(key: str, text: str) -> Problem:
    if key.split(".")[0] == "hydra":
        return Problem("PP-E122", f"{key}: Hydra's own settings have no effect here; leave it out", place=PLACE)
    if key in sections():
        return not_a_section(key, PLACE)
    last = key.rpartition(".")[2]
    absent = next((why for word, why in ABSENT.items() if word in last.lower().split("_")), None)
    if absent is not None:
        return Problem("PP-E101", f"there is no key {key}: {absent}; leave it out", place=PLACE)
    known = ALIASES.get(last) or meant_by(last)
    if known is not None and text_keys()[known].facts.support.state == LATER:
        coming = f"there is no key {key}, and {known} comes in a later release; leave it out"
        return Problem("PP-E101", coming, place=PLACE)
    close = [known] if known else nearest(key, [*text_keys(), *ALIASES, *groups()])
    fitting = [shlex.quote(f"{name}={text}") for name in close if _fits(name, text)]
    return unknown_key(key, PLACE, close, next(iter(fitting), ""))


def _fits(name: str, text: str) -> bool:
    """Whether the value typed for a misspelt key is one that the key or group `name` takes."""
    from ppctl.config.hydra_source import parse

    key = ALIASES.get(name, name)
    if key not in keys():
        return text in groups().get(name, ())
    try:
        value = parse(f"{key}={quote(key, text)}").value()
    except ConfigError:
        return False
    if "${" in str(value):
        return False
    section, _, field = key.rpartition(".")
    config, wrong = convert({section: {field: value}} if section else {field: value}, str)
    return not wrong and not any(problem.place.startswith(f"{key} = ") for problem in check(config, {}))


def _finish(draft: Draft, overrides: Sequence[str], for_training: bool) -> Composed:
    draft.resolve()
    draft.read_layout_file()
    draft.find_schedule_file()
    draft.unite_micro_batch()
    draft.count_steps()
    config, wrong = convert(draft.tree, draft.place)
    named = {_key_of(p): p for p in wrong}
    problems = [_with_remedy(p, draft) for p in draft.problems]
    # A value that was derived from a wrong one is wrong too: one problem is enough.
    problems += [_with_remedy(p, draft) for key, p in named.items() if "(derived" not in p.place]
    problems += check(config, draft.provenance, for_training=for_training, skip=named, usual=draft.covered)
    said = (*draft.notes, *ignored(config, draft.provenance), *(() if problems else notes(config)))
    composed = Composed(config, draft.provenance, said)
    if problems:
        same = typed_again("plan", overrides)
        problems = [replace(p, remedy=same) if p.code == "PP-E118" else p for p in problems]
        raise RefusedError(problems, composed)
    return composed


def _key_of(problem: Problem) -> str:
    """The key that a problem's place begins with."""
    return problem.place.partition(" (")[0]


def _with_remedy(problem: Problem, draft: Draft) -> Problem:
    """`problem`, with the value that stood before (or the default) as its remedy where it has none."""
    key = _key_of(problem)
    if problem.remedy or key not in text_keys():
        return problem
    before = draft.covered.get(key, text_keys()[key].default)
    return replace(problem, remedy=f"ppctl explain {key}" if key == "published" else as_typed(key, before))
