"""From overrides to a RunConfig, with the source of every value and every problem at once.

Knows the order of strength: defaults, conf/, recipe, command line. Must not know what values mean: types are
`mapping.py`'s, rules `checks.py`'s. Imports Hydra, through `hydra_source`, only when it composes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ppctl.config.argv import PLACE, Arguments, normalise, typed_again
from ppctl.config.checks import beyond_limits, check, notes, within_limits
from ppctl.config.draft import DEFAULT, GLOBAL_BATCH, Draft, flat
from ppctl.config.foreign_rules import without_effect
from ppctl.config.keys import as_typed, keys, mapping_with, sections, text_keys, value_of, value_text
from ppctl.config.mapping import convert, to_mapping
from ppctl.config.outside_values import CountTokens, ReadModel, put_back, take_model, take_vocabulary
from ppctl.config.resources import find_recipe, groups
from ppctl.config.scale import KEEPS, SCALES, miniature, steps_in_words
from ppctl.config.schema import RunConfig
from ppctl.config.support import ignored
from ppctl.config.unknown_words import no_such_key, no_such_option, not_an_override
from ppctl.errors import ConfigError, Problem

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
        take_model(draft, typed, read_model, scaled=scale is not None, for_training=for_training)
    draft.set_layout_aside(before, typed)
    draft.tree["recipe"] = recipe
    draft.provenance["recipe"] = PLACE if recipe else DEFAULT
    if scale is not None:
        _scale_down(draft, scale, typed)
    if count_tokens is not None:
        take_vocabulary(draft, count_tokens, for_training=for_training)
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
        message = f"{group}={option}: a resumed run keeps its {group}; leave this out"
        arguments.problems.append(Problem("PP-E104", message, place=PLACE))
    draft = Draft(to_mapping(config), dict(provenance), arguments.problems)
    before, typed = draft.sizes(), _apply(draft, values)
    draft.set_layout_aside(before, typed)
    if config.model.transformers is not None:
        now = {name: draft.get(name) for name in sorted(typed)}
        draft.problems += without_effect(now, partial(value_of, config), PLACE, {"model.from"})
        put_back(draft, {name: value_of(config, name) for name in now}, {"model.from"})
    return _finish(draft, arguments.overrides, for_training)


def _arguments(overrides: Sequence[str]) -> Arguments:
    found = normalise(overrides)
    found.problems += map(not_an_override, found.rest)
    return found


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
            arguments.problems.append(no_such_option(key, option, options[key]))
    return choices, values


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
        config = convert(draft.tree, draft.place)[0]
        lines.append(steps_in_words(within_limits(config, list(beyond_limits(config)))))
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
            draft.problems.append(no_such_key(key, text))
            continue
        if known == "model.transformers" and text not in ("", "null"):
            message = f"{known} is what was found in the directory of model.from: leave it out"
            draft.problems.append(Problem("PP-E103", message, place=PLACE))
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


def _known(key: str) -> str | None:
    """The schema's key that `key` sets: itself, or the mapping that it is an entry of."""
    if key in keys():
        return key
    return mapping_with(key)


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
