"""A configuration while it is composed: values by dotted key, the source of each, and the problems so far.

Each layer replaces weaker values. Then interpolations are resolved, a layout made for other sizes is dropped, and two
names of one value become equal. Callers pass the functions that read directories and tokenizers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from ppctl.config.argv import LAYOUT, PLACE, SHORT, Arguments
from ppctl.config.batch_sizes import LENGTHS, MICRO_BATCH, STEPS, run_length
from ppctl.config.checks import within_limits
from ppctl.config.keys import as_typed, keys, keys_with, mapping_with, sections, text_keys, value_text
from ppctl.config.mapping import convert, converted_value, to_values
from ppctl.config.metadata import LATER, NEEDS
from ppctl.config.model_rules import READ, without_effect
from ppctl.config.resources import find_recipe, groups
from ppctl.config.scale import KEEPS, SCALES
from ppctl.config.schema import RunConfig
from ppctl.config.unknown_words import no_such_key, no_such_option
from ppctl.errors import ConfigError, PpctlError, Problem
from ppctl.host.files import expanded, is_file, read_text

SCHEDULE_FILE = "pipeline.pp_schedule_csv"

EPOCHS = "train.epochs"
RAMPUP, GLOBAL_BATCH = "train.batch_rampup", "train.global_batch_size"

DEFAULT = "default"

TOKENIZER = "data.tokenizer"

ReadModel = Callable[[str, str, Mapping[str, str], Mapping[str, Any]], Mapping[str, Any]]
"""From model.from, model.implementation, model.hf_overrides and model.lora to values by key: the model's and
data.tokenizer. Raises PpctlError."""

CountSamples = Callable[[RunConfig], int]
"""The samples of an epoch. Raises PpctlError."""


@dataclass(slots=True)
class Draft:
    """Values by dotted key, and their history."""

    values: dict[str, Any]
    provenance: dict[str, str]
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    typed: set[str] = field(default_factory=set)
    """The keys of the command line."""
    covered: dict[str, Any] = field(default_factory=dict)
    """Key -> the value that the command line has replaced: remedies go back to it."""

    @classmethod
    def of(cls, config: RunConfig, provenance: Mapping[str, str], problems: list[Problem]) -> Draft:
        """A draft with the values of `config`; values without a source count as defaults."""
        return cls(to_values(config), {**dict.fromkeys(text_keys(), DEFAULT), **provenance}, problems)

    def source(self, key: str) -> str:
        """Where the value of `key` came from."""
        return self.provenance.get(key, DEFAULT)

    def place(self, key: str) -> str:
        """`key` with the source of its value, as a problem's place."""
        return f"{key} ({self.source(key)})"

    def put(self, key: str, value: Any, source: str) -> None:
        """Replace the value of a dotted key; a mapping is added to a mapping."""
        if isinstance(value, dict) and isinstance(self.values.get(key), dict):
            value = {**self.values[key], **value}
        self.values[key] = value
        self.provenance[key] = source

    def sizes(self) -> dict[str, Any]:
        """The present sizes that a layout depends on."""
        return {key: self.values[key] for key in keys_with("layout")}

    def config(self) -> RunConfig:
        """The config so far, with usual values in place of wrong ones."""
        known = {
            key: text_keys()[key].default if isinstance(v, Exception) else v for key, v in self._interpolated().items()
        }
        return within_limits(convert(self.values | known, self.place)[0], self.covered)

    def value(self, key: str) -> Any:
        """The value that a key will have; None for one that is refused later."""
        try:
            value = converted_value(key, self._interpolated().get(key, self.values[key]))
        except ValueError:
            return None
        return value if text_keys()[key].allows(value) else None

    def adjust(self, count_samples: CountSamples | None, *, for_training: bool) -> None:
        """Make the values of keys fit each other, once all values are there."""
        self._resolve()
        self._read_layout_file()
        self._find_schedule_file()
        self._expand_homes()
        self._unite_micro_batch()
        self._count_epochs(count_samples, for_training=for_training)
        self._count_steps()

    def _interpolated(self) -> dict[str, Any]:
        """Key -> its value with `${...}` resolved, or the error, of each key whose value has any."""
        names = [name for name, value in self.values.items() if "${" in str(value) and name in text_keys()]
        if not names:
            return {}
        from ppctl.config.hydra_source import interpolated

        return interpolated(self.values, names)

    def _resolve(self) -> None:
        """Resolve `${...}`; a value that cannot be resolved is a problem, and the key's default replaces it."""
        for name, value in self._interpolated().items():
            self.values[name] = value
            if isinstance(value, Exception):
                message = f"{name}: {str(value).splitlines()[0]}"
                self.problems.append(Problem("PP-E114", message, place=self.place(name)))
                self.values[name] = text_keys()[name].default

    def _set_aside(self, key: str, shown: str, reason: str, derived: str) -> None:
        self.notes.append(f"{shown} {self.values[key]} ({self.source(key)}) {reason}")
        self.values[key] = None
        self.provenance[key] = f"derived: {derived}{reason}"

    def set_layout_aside(self, before: Mapping[str, Any]) -> None:
        """Drop a file's layout, with a note, if the command line changes the sizes `before` that it was made for."""
        changed = [key for key in keys_with("layout") if self.values[key] != before[key]]
        if LAYOUT in self.typed or self.values[LAYOUT] in (None, "auto") or not changed:
            return
        names = " and ".join(SHORT.get(key, key) for key in changed)
        reason = f"set aside because {names} {'was' if len(changed) == 1 else 'were'} changed on the command line"
        self._set_aside(LAYOUT, "layout", reason, "layout ")

    def set_rampup_aside(self, before: Any) -> None:
        """Drop a file's growing batch, with a note, if the command line changes the global batch size that ends it."""
        if RAMPUP in self.typed or self.values[RAMPUP] is None or self.values[GLOBAL_BATCH] == before:
            return
        self._set_aside(RAMPUP, "batch_rampup", "set aside because gbs was changed on the command line", "")

    def _read_layout_file(self) -> None:
        """Replace `@file`, a path from the working directory, by its layout string or YAML list of stages."""
        value = self.values[LAYOUT]
        if not (isinstance(value, str) and value.startswith("@")):
            return
        from ppctl.config.yaml_file import read_yaml

        try:
            text = read_text(value[1:]).strip()
            self.values[LAYOUT] = read_yaml(text)[0] if text[:1] in ("[", "-") else text
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            message = f"the layout file {value[1:]} cannot be read: {reason}; null is the even split"
            self.problems.append(Problem("PP-E123", message, "layout=null", self.place(LAYOUT)))
            self.values[LAYOUT] = None
            return
        self.provenance[LAYOUT] += f" (file {value[1:]})"

    def _find_schedule_file(self) -> None:
        """Make the schedule file's path absolute: a run may be resumed from another directory."""
        value = self.values[SCHEDULE_FILE]
        if isinstance(value, str) and is_file(value):
            self.values[SCHEDULE_FILE] = str(expanded(value).resolve())

    def _expand_homes(self) -> None:
        """Replace `~`, which no shell expands behind `=`, in paths of directories that a run makes or goes on from."""
        for key in ("log.dir", "checkpoint.resume"):
            if isinstance(value := self.values[key], str):
                self.values[key] = os.path.expanduser(value)

    def _unite_micro_batch(self) -> None:
        """Give both names of the micro batch size the stronger source's value; a rule compares equally strong ones."""
        ranks = [self._strength(key) for key in MICRO_BATCH]
        if ranks[0] != ranks[1]:
            stronger, weaker = MICRO_BATCH if ranks[0] > ranks[1] else MICRO_BATCH[::-1]
            self.put(weaker, self.values[stronger], f"derived: {stronger}")

    def _count_steps(self) -> None:
        """Set train.steps from samples or tokens if these are stronger, drop them if weaker; a rule compares equals."""
        given = [key for key in LENGTHS if self.values[key] is not None]
        if not given:
            return
        sources = [*given, *([EPOCHS] if self.values[EPOCHS] is not None else [])]
        strongest, own = max(map(self._strength, sources)), self._strength(STEPS)
        if own > strongest:
            for key in given:
                self.put(key, None, f"derived: {STEPS} is set")
        elif own < strongest:
            self.put(STEPS, run_length(self.config()), f"derived: {given[0]}")

    def _count_epochs(self, count_samples: CountSamples | None, *, for_training: bool) -> None:
        """Set train.samples from train.epochs, unless a stronger source sets steps, samples or tokens; an equally
        strong one is a problem (PP-E103). A resumed run keeps its count unless train.epochs is typed. If the data
        cannot be read, a plan keeps train.steps with a note; for training that is a problem."""
        own, epochs = self._strength(EPOCHS), None if self.values[EPOCHS] is None else self.config().train.epochs
        if epochs is None or not keys()[EPOCHS].allows(epochs):  # `check` says what is wrong
            return
        if EPOCHS not in self.typed and self.source(LENGTHS[0]).startswith(f"derived: {EPOCHS}"):
            return
        others = [key for key in (STEPS, *LENGTHS) if self.values[key] is not None and self._strength(key) >= own]
        if any(self._strength(key) == own for key in others):
            message = f"the length of the run is given by {EPOCHS} and by {others[0]}: set one of them"
            self.problems.append(Problem("PP-E103", message, f"{EPOCHS}=null", self.place(EPOCHS)))
        if others:
            self.put(EPOCHS, None, f"derived: {others[0]} is set")
            return
        for key in LENGTHS:
            self.put(key, None, f"derived: {EPOCHS} is set")
        try:
            number = count_samples(self.config()) if count_samples is not None else 0
        except PpctlError as error:
            number, self.problems = 0, [*self.problems, *(error.problems if for_training else ())]
        if number:
            self.put(LENGTHS[0], max(1, round(epochs * number)), f"derived: {EPOCHS}={epochs:g} of {number:,} samples")
        else:
            unknown = f"the steps follow from data that cannot be read here; this plan has {STEPS}={self.values[STEPS]}"
            self.notes.append(f"{EPOCHS}={epochs:g}: {unknown}")

    def _strength(self, key: str) -> int:
        """The strength of a key's source: 0 derived and default, 1 files, 2 command line."""
        source = self.source(key)
        return 0 if source == DEFAULT or source.startswith("derived") else 2 if source.startswith(PLACE) else 1


# The layers, weakest first


def files(choices: Mapping[str, str], problems: list[Problem]) -> Draft:
    """The draft from defaults, conf/ and the chosen groups; problems of files are added to `problems`."""
    from ppctl.config.hydra_source import load

    draft = Draft.of(RunConfig(), {}, problems)
    try:
        for key, value, source in load(choices):
            draft.put(key, value, source)
    except ConfigError as error:
        problems += error.problems
    recipe = find_recipe(choices.get("recipe", ""))
    if recipe is not None and draft.source("log.name") == DEFAULT:
        draft.put("log.name", recipe.name[:100], f"derived: the name of {recipe.label}")
    return draft


def split_choices(arguments: Arguments) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """(group -> option, [(key, text)]) of the overrides; an option that does not exist becomes one of the problems."""
    options: dict[str, Sequence[str]] = {**groups(), "scale": list(SCALES)}
    choices: dict[str, str] = {}
    values: list[tuple[str, str]] = []
    for override in arguments.overrides:
        key, _, value = override.partition("=")
        option = value.strip("'\"")
        if key not in options or (key in sections() and value[:1] == "{"):
            values.append((key, value))
        elif option in options[key] or (key == "recipe" and find_recipe(option) is not None):
            choices[key] = option
        elif option != "null":
            arguments.problems.append(no_such_option(key, option, options[key]))
    return choices, values


def command_line(draft: Draft, values: Sequence[tuple[str, str]], arguments: Arguments) -> None:
    """Put the command line's values into the draft, over all others; words that it cannot take become problems."""
    from ppctl.config.hydra_source import parse

    for key, text in values:
        known = key if key in keys() else mapping_with(key)
        if known is None:
            draft.problems.append(no_such_key(key, text))
            continue
        if known == "model.transformers" and text not in ("", "null"):
            message = f"{known} is read from the directory of model.from and cannot be typed: leave it out"
            draft.problems.append(Problem("PP-E103", message, place=PLACE))
            continue
        source = arguments.sources.get(key, PLACE)
        if known in draft.typed and source == PLACE:
            source = draft.provenance[known]  # the source of another entry of the same mapping
        if known in text_keys():
            draft.covered.setdefault(known, deepcopy(draft.values[known]))
        try:
            value = parse(f"{key}={text}").value()
            draft.put(known, value if key == known else {key.rpartition(".")[2]: value}, source)
        except ConfigError as error:
            draft.problems += [replace(p, place=f"{known} ({PLACE})") for p in error.problems]  # remedies come last
            continue
        draft.typed.add(known)


_SWITCHED = {**dict.fromkeys(("yes", "on", "y", "1"), True), **dict.fromkeys(("no", "off", "n", "0"), False)}
"""Other words for true and false -> the value meant."""


def with_remedy(problem: Problem, draft: Draft) -> Problem:
    """`problem`, with the value that stood before (or the default) as its remedy if it has none."""
    key = problem.place.partition(" (")[0]
    if problem.remedy or key not in text_keys():
        return problem
    # The defaults of these keys cannot be typed.
    explained = key in ("published", "pipeline.pp_batch_size")
    known, default = text_keys()[key], text_keys()[key].default
    meant = _SWITCHED.get(str(draft.values[key]).lower()) if known.is_switch else None
    taken = meant == default or known.facts.support.state not in (LATER, NEEDS)
    if meant is not None and taken and problem.code == "PP-E102":
        return replace(problem, remedy=as_typed(key, meant))
    before = draft.covered.get(key, default)
    return replace(problem, remedy=f"ppctl explain {key}" if explained else as_typed(key, before))


def model(draft: Draft, read_model: ReadModel, *, scaled: bool, for_training: bool) -> None:
    """Put what `read_model` reads from `model.from` over the files' values; typed ones stay. Errors become problems."""
    directory = draft.value("model.from")
    if not directory:
        return
    if scaled:
        message = "a miniature has weights of its own: model.from and +scale exclude each other"
        draft.problems.append(Problem("PP-E103", message, "model.from=null", f"model.from = {directory}"))
        return
    try:
        names = ("model.implementation", "model.hf_overrides", "model.lora")
        values = read_model(directory, *(draft.value(name) or text_keys()[name].default for name in names))
    except PpctlError as error:
        draft.problems += error.problems
        for name in ("hf_overrides", "lora"):  # without a known model, these keys are not wrong as well
            draft.values[f"model.{name}"] = {}
        return
    if values.get("model.transformers") is not None:
        now = {name: draft.values[name] for name in sorted(draft.typed)}
        fitting = {name: values.get(name, text_keys()[name].default) for name in now if name in text_keys()}
        draft.problems += without_effect(now, fitting, PLACE, READ)
        put_back(draft, fitting, READ)
    is_set = draft.source(TOKENIZER) != DEFAULT
    for name, value in values.items():
        if name not in draft.typed and not (name == TOKENIZER and is_set):
            draft.put(name, value, f"model.from={directory}")
    if for_training and not is_set and TOKENIZER not in values:
        message = (
            f"{directory} has no tokenizer, and {TOKENIZER} names none (a directory, or byte where bytes are meant): "
            "bytes would be read as tokens of the model's vocabulary"
        )
        draft.problems.append(Problem("PP-E417", message, f"{TOKENIZER}=byte", f"model.from = {directory}"))


def put_back(draft: Draft, fitting: Mapping[str, Any], read: Collection[str]) -> None:
    """Replace refused sizes of a foreign model in the draft by sizes that fit, so that a plan is possible."""
    for name, value in fitting.items():
        if name.startswith("model.") and name not in read:
            draft.values[name] = value


def scale_down(draft: Draft, scale: str, source: str) -> None:
    """Replace what makes the run large, except values of the command line, and note the changes as a table."""
    rows = []
    try:
        values = _miniature(draft, scale)
    except ConfigError as error:  # the values give no layers, for example if model.moe_layer_freq is wrong
        draft.problems += error.problems
        return
    for key, value in values.items():
        before = draft.values[key]
        if key in draft.covered:
            draft.covered[key] = value  # remedies go back to the value without the command line
        if key not in draft.typed and value != before:
            draft.put(key, value, f"scale={scale}")
            rows.append((key, *(t if len(t) < 25 else f"{t[:21]}..." for t in map(value_text, (before, value)))))
    draft.put("scale", scale, source)
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    table = [f"  {key:{widths[0]}}  {before:>{widths[1]}} -> {value}" for key, before, value in rows]
    draft.notes.append("\n".join([f"scale={scale} keeps {KEEPS[scale]}, and makes small:", *table]))


def _miniature(draft: Draft, scale: str) -> dict[str, Any]:
    """The values that make the run small, in proportion to the files' values; typed ones are the miniature's own."""
    small = SCALES[scale]
    full = replace(draft, values=dict(draft.values))
    for key in small(draft.config(), draft.typed):
        if key.startswith(("model.", "log.")) and key in draft.covered:
            full.values[key] = draft.covered[key]
    return small(full.config(), draft.typed)
