"""From overrides to a RunConfig, with the source of every value and every problem at once.

Knows the order of strength (defaults, conf/, recipe, command line) and where each value came from. Must not know what
values mean: types are `mapping.py`'s, rules `checks.py`'s. Imports Hydra, through `hydra_source`, only when it composes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ppctl.config.argv import ALIASES, LAYOUT, PLACE, Arguments, normalise
from ppctl.config.checks import check, place_of
from ppctl.config.keys import did_you_mean, keys, nearest, sections, text_keys
from ppctl.config.mapping import convert, not_a_section, to_mapping, unknown_key
from ppctl.config.resources import groups, recipes
from ppctl.config.schema import RunConfig
from ppctl.config.support import later_key
from ppctl.errors import ConfigError, Problem

SETS_LAYOUT_ASIDE = (
    "parallel.pipeline_model_parallel_size",
    "parallel.virtual_pipeline_model_parallel_size",
    "model.num_layers",
    "model.mtp_num_layers",
)
"""Keys that a recipe's layout was written for."""


@dataclass(frozen=True, slots=True)
class Composed:
    """A config and its history."""

    config: RunConfig
    provenance: dict[str, str]
    """Dotted key -> where its value came from: `default`, a file and line, `command line`, `derived: ...`."""
    overrides: tuple[str, ...] = ()
    """The command line's overrides, normalised."""
    choices: dict[str, str] = field(default_factory=dict)
    """Config group -> chosen option, of those that the command line chose."""
    recipe_path: Path | None = None
    notes: tuple[str, ...] = ()
    """What was decided for the user and should be said."""


@dataclass(slots=True)
class _Draft:
    """A tree of values on its way."""

    tree: dict[str, Any]
    provenance: dict[str, str]
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def place(self, key: str) -> str:
        """Where `key` got its value, for a problem."""
        return f"{key} ({self.provenance.get(key, 'default')})"


def compose(overrides: Sequence[str], *, for_training: bool = False) -> Composed:
    """The config that `overrides` describe, on top of the defaults, conf/ and the recipe that they name.

    `for_training` also refuses what can be planned but not trained yet. Raises ConfigError with all problems.
    """
    arguments = _arguments(overrides)
    choices, values = _split_choices(arguments)
    layers = _load(choices, arguments.problems)
    draft = _Draft(to_mapping(RunConfig()), dict.fromkeys(text_keys(), "default"), arguments.problems)
    _apply_layers(draft, layers)
    before = _sizes_of_recipe(draft, choices)
    given = _apply_values(draft, values)
    _set_layout_aside(draft, before, given)
    recipe = choices.get("recipe")
    draft.tree["recipe"] = recipe
    draft.provenance["recipe"] = PLACE if recipe else "default"
    composed = _finish(draft, arguments.overrides, for_training)
    return replace(composed, choices=choices, recipe_path=recipes()[recipe].path if recipe else None)


def override(
    config: RunConfig, provenance: Mapping[str, str], overrides: Sequence[str], *, for_training: bool = False
) -> Composed:
    """`config` with `overrides` on top, as `resume` needs it: groups stay as they were chosen.

    A layout that `overrides` do not give is set aside where they change pp, vpp or the model's layers. Raises ConfigError.
    """
    arguments = _arguments(overrides)
    choices, values = _split_choices(arguments)
    for group, option in choices.items():
        message = f"{group}={option}: a run keeps the {group} that it was started with"
        arguments.problems.append(Problem("PP-E104", message, "set single keys, as train.steps=200", PLACE))
    draft = _Draft(to_mapping(config), dict(provenance), arguments.problems)
    before = {key: _get(draft.tree, key) for key in SETS_LAYOUT_ASIDE}
    given = _apply_values(draft, values)
    _set_layout_aside(draft, before, given)
    return _finish(draft, arguments.overrides, for_training)


def _arguments(overrides: Sequence[str]) -> Arguments:
    found = normalise(overrides)
    for token in found.rest:
        found.problems.append(Problem("PP-E105", f"{token} is no override: KEY=VALUE", "ppctl explain", PLACE))
    return found


def _split_choices(arguments: Arguments) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """(group -> option, [(key, text)]); choices of things that do not exist become problems."""
    options = groups()
    choices: dict[str, str] = {}
    values: list[tuple[str, str]] = []
    for text in arguments.overrides:
        key, _, value = text.partition("=")
        group = key.partition("@")[0].replace("/", ".")
        if group not in options or "=" in key:
            values.append((key, value))
        elif value.strip("'\"") in options[group]:
            choices[group] = value.strip("'\"")
        elif value not in ("", "null"):
            arguments.problems.append(_unknown_option(group, value, options[group]))
    return choices, values


def _unknown_option(group: str, value: str, options: list[str]) -> Problem:
    message = f"there is no {group} {value}{did_you_mean(value, options)}; there are {', '.join(options)}"
    return Problem("PP-E104", message, "ppctl recipes list" if group == "recipe" else f"{group}={options[0]}", PLACE)


def _load(choices: Mapping[str, str], problems: list[Problem]) -> list[Any]:
    from ppctl.config.hydra_source import load

    try:
        return load(choices)
    except ConfigError as error:
        problems += error.problems
        return []


def _apply_layers(draft: _Draft, layers: list[Any]) -> None:
    for layer in layers:
        prefix = f"{layer.package}." if layer.package else ""
        values = {name: value for name, value in layer.file.values.items() if name != "defaults"}
        for name, value in _flat(values, prefix):
            _set(draft.tree, name, value)
            draft.provenance[name] = layer.source(name.removeprefix(prefix))


def _flat(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    """Dotted name -> value, down to the schema's leaves (below a section everything is a leaf's name)."""
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        full = f"{prefix}{name}"
        if isinstance(value, Mapping) and full in sections():
            found += _flat(value, f"{full}.")
        elif not (value is None and full in sections()):
            found.append((full, value))
    return found


def _apply_values(draft: _Draft, values: list[tuple[str, str]]) -> set[str]:
    """Put the command line on top; returns the keys that it gave."""
    from ppctl.config.hydra_source import parse

    given = set()
    for key, text in values:
        known = _known(key)
        if known is None:
            draft.problems.append(_refuse(key, text))
            continue
        try:
            value = parse(f"{key}={text}").value()
        except ConfigError as error:
            draft.problems += error.problems
            continue
        _set(draft.tree, key, value)
        draft.provenance[known] = PLACE
        given.add(known)
    return given


def _known(key: str) -> str | None:
    """The schema's key that `key` sets: itself, or the mapping that it is an entry of."""
    if key in keys():
        return key
    parent = key.rpartition(".")[0]
    return parent if parent == "launch.env" else None


def _refuse(key: str, text: str) -> Problem:
    if key.split(".")[0] == "hydra":
        return Problem("PP-E122", f"{key}: Hydra's own settings have no effect here; leave it out", place=PLACE)
    if key in sections():
        return not_a_section(key, PLACE)
    alias = ALIASES.get(key.rpartition(".")[2])
    return later_key(key, PLACE) or unknown_key(key, PLACE, [alias] if alias else nearest(key, _names()), text)


def _names() -> list[str]:
    return [*text_keys(), *ALIASES, *groups()]


def _get(tree: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        branch = tree.get(part)
        if not isinstance(branch, dict):
            branch = tree[part] = {}
        tree = branch
    old = tree.get(last)
    tree[last] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value


def _sizes_of_recipe(draft: _Draft, choices: Mapping[str, str]) -> dict[str, Any]:
    """The sizes that the recipe's layout was written for: as files give them, with the recipe's own model."""
    if "recipe" in choices and "model" in choices:
        from ppctl.config.hydra_source import load

        draft = _Draft(to_mapping(RunConfig()), {})
        _apply_layers(draft, load({"recipe": choices["recipe"]}))
    return {key: _get(draft.tree, key) for key in SETS_LAYOUT_ASIDE}


def _set_layout_aside(draft: _Draft, before: Mapping[str, Any], given: set[str]) -> None:
    """The command line is stronger than a recipe: a layout made for other sizes gives way, unless it was typed as well."""
    if LAYOUT in given or _get(draft.tree, LAYOUT) in (None, "auto"):
        return
    changed = [key for key in SETS_LAYOUT_ASIDE if _get(draft.tree, key) != before[key]]
    if not changed:
        return
    short = {key: alias for alias, key in ALIASES.items()}
    names = " and ".join(short.get(key, key) for key in changed)
    source = draft.provenance.get(LAYOUT, "default")
    draft.notes.append(
        f"layout {_get(draft.tree, LAYOUT)} ({source}) set aside because {names} was given on the command line"
    )
    _set(draft.tree, LAYOUT, None)
    draft.provenance[LAYOUT] = f"derived: recipe layout set aside because {names} was given on the command line"


def _finish(draft: _Draft, overrides: Sequence[str], for_training: bool) -> Composed:
    _resolve(draft)
    _read_layout_file(draft)
    config, problems = convert(draft.tree, draft.place)
    wrong = {problem.place.partition(" (")[0] for problem in problems}
    problems = draft.problems + [later_key(p.place.partition(" (")[0], p.place) or p for p in problems]
    problems += check(config, draft.provenance, for_training=for_training, skip=wrong)
    if problems:
        same = shlex.join(["ppctl", "plan", *overrides])
        raise ConfigError(replace(p, remedy=same) if p.code == "PP-E118" else p for p in problems)
    return Composed(config, draft.provenance, tuple(overrides), notes=tuple(draft.notes))


def _resolve(draft: _Draft) -> None:
    """Resolve `${...}`, one leaf at a time so that every failure is told."""
    leaves = [(name, value) for name, value in _flat(draft.tree, "") if "${" in str(value)]
    if not leaves:
        return
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree = OmegaConf.create(draft.tree)
    for name, _ in leaves:
        try:
            value = OmegaConf.select(tree, name, throw_on_resolution_failure=True)
            plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            draft.problems.append(Problem("PP-E114", f"{name} cannot be resolved: {reason}", place=draft.place(name)))
            plain = _get(to_mapping(RunConfig()), name) if name in text_keys() else None
        _set(draft.tree, name, plain)


def _read_layout_file(draft: _Draft) -> None:
    """`@file`: a layout string (or a YAML list of stages), relative to the working directory."""
    value = _get(draft.tree, LAYOUT)
    if not (isinstance(value, str) and value.startswith("@")):
        return
    try:
        text = Path(value[1:]).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"the layout file {value[1:]} cannot be read: {reason}"
        place = place_of(LAYOUT, value, draft.provenance)
        draft.problems.append(Problem("PP-E123", message, "layout=null  (the even split)", place))
        _set(draft.tree, LAYOUT, None)
        return
    draft.provenance[LAYOUT] += f" (file {value[1:]})"
    if text[:1] in "[-":
        import yaml

        _set(draft.tree, LAYOUT, yaml.safe_load(text))
    else:
        _set(draft.tree, LAYOUT, text)
