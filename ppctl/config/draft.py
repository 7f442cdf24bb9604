"""A configuration while it is composed: a tree of values, the source of each, and the problems found so far.

Knows how stronger values replace weaker ones, and the adjustments once all values are there: interpolations are
resolved, a layout made for other sizes is set aside, two names of one value become equal.
Reads a layout's file (`layout=@FILE`). Must not know Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppctl.config.argv import ALIASES, LAYOUT, PLACE
from ppctl.config.batch_sizes import run_length
from ppctl.config.checks import beyond_limits, within_limits
from ppctl.config.keys import keys_with, sections, text_keys
from ppctl.config.mapping import convert
from ppctl.errors import Problem
from ppctl.files import is_file, read_text

MICRO_BATCH = ("train.micro_batch_size", "pipeline.pp_microbatch_size")
"""Two names of one value."""

SCHEDULE_FILE = "pipeline.pp_schedule_csv"

STEPS, LENGTHS = "train.steps", ("train.samples", "train.tokens")
"""The length of a run, and its other measures."""

RAMPUP, GLOBAL_BATCH = "train.batch_rampup", "train.global_batch_size"

DEFAULT = "default"

LONGEST_INTERPOLATED = 2**16
"""Characters of what the interpolations of one key bring in from other ones that interpolate."""
_NAMED, _NESTED = re.compile(r"([\w-]+)(?:\[\w+\])*\s*\}"), re.compile(r"\$\{[^}]*\$\{")


@dataclass(slots=True)
class Draft:
    """Nested values by section, and their history."""

    tree: dict[str, Any]
    provenance: dict[str, str]
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    covered: dict[str, Any] = field(default_factory=dict)
    """Key -> the value that the command line has replaced: remedies go back to it."""

    def place(self, key: str) -> str:
        """The source of the value of `key`, for a problem."""
        return f"{key} ({self.provenance.get(key, DEFAULT)})"

    def get(self, key: str) -> Any:
        """The value of a dotted key."""
        value: Any = self.tree
        for part in key.split("."):
            value = value[part]
        return value

    def put(self, key: str, value: Any) -> None:
        """Replace the value of a dotted key; a mapping is added to a mapping."""
        *path, last = key.split(".")
        branch = self.tree
        for part in path:
            if not isinstance(branch.get(part), dict):
                branch[part] = {}
            branch = branch[part]
        old = branch.get(last)
        branch[last] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value

    def sizes(self) -> dict[str, Any]:
        """The present sizes that a layout depends on."""
        return {key: self.get(key) for key in keys_with("layout")}

    def resolve(self) -> None:
        """Resolve `${...}`, one leaf at a time so that every failure is reported."""
        leaves = [name for name, value in flat(self.tree, "") if "${" in str(value)]
        if not leaves:
            return
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        texts = {path: text for name in leaves for path, text in _texts(self.get(name), name)}
        for name in leaves:
            own = [path for path in texts if path == name or path.startswith(f"{name}.")]
            if sum(_length(path, texts, {}) for path in own) > LONGEST_INTERPOLATED:
                self._unresolved(name, ValueError(f"it becomes longer than {LONGEST_INTERPOLATED} characters"))
                continue
            try:
                OmegaConf.create({"value": self.get(name)})
            except (OmegaConfBaseException, RecursionError) as error:
                self._unresolved(name, error)
        tree = OmegaConf.create(self.tree)
        for name in leaves:
            try:
                value = OmegaConf.select(tree, name)
                self.put(name, OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)
            except OmegaConfBaseException as error:
                self._unresolved(name, error)

    def _unresolved(self, name: str, error: Exception) -> None:
        message = f"{name}: {str(error).splitlines()[0]}"
        self.problems.append(Problem("PP-E114", message, place=self.place(name)))
        self.put(name, None)  # first, since a mapping would be added to the wrong one
        self.put(name, text_keys()[name].default if name in text_keys() else None)

    def set_layout_aside(self, before: Mapping[str, Any], typed: set[str]) -> None:
        """Drop a layout of a file where the command line changes the sizes that it was made for.

        `before` are those sizes; `typed` the keys of the command line, which may set a layout itself.
        """
        layout = self.get(LAYOUT)
        changed = [key for key in keys_with("layout") if self.get(key) != before[key]]
        if LAYOUT in typed or layout in (None, "auto") or not changed:
            return
        short = {key: alias for alias, key in ALIASES.items()}
        names = " and ".join(short.get(key, key) for key in changed)
        reason = f"set aside because {names} {'was' if len(changed) == 1 else 'were'} changed on the command line"
        source = self.provenance.get(LAYOUT, DEFAULT)
        self.notes.append(f"layout {layout} ({source}) {reason}")
        self.put(LAYOUT, None)
        self.provenance[LAYOUT] = f"derived: layout {reason}"

    def set_rampup_aside(self, before: Any, typed: set[str]) -> None:
        """Drop a file's batch that grows where the command line changes the global batch that it grows to."""
        rampup = self.get(RAMPUP)
        if rampup is None or RAMPUP in typed or self.get(GLOBAL_BATCH) == before:
            return
        reason = "set aside because gbs was changed on the command line"
        self.notes.append(f"batch_rampup {rampup} ({self.provenance.get(RAMPUP, DEFAULT)}) {reason}")
        self.put(RAMPUP, None)
        self.provenance[RAMPUP] = f"derived: {reason}"

    def read_layout_file(self) -> None:
        """`@file`: a layout string (or a YAML list of stages), relative to the working directory."""
        value = self.get(LAYOUT)
        if not (isinstance(value, str) and value.startswith("@")):
            return
        from ppctl.config.yaml_file import read_yaml

        try:
            text = read_text(value[1:]).strip()
            self.put(LAYOUT, read_yaml(text)[0] if text[:1] in ("[", "-") else text)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            message = f"the layout file {value[1:]} cannot be read: {reason}; null is the even split"
            self.problems.append(Problem("PP-E123", message, "layout=null", self.place(LAYOUT)))
            self.put(LAYOUT, None)
            return
        self.provenance[LAYOUT] += f" (file {value[1:]})"

    def find_schedule_file(self) -> None:
        """Keep the schedule file's absolute path: a run is resumed from anywhere."""
        value = self.get(SCHEDULE_FILE)
        if isinstance(value, str) and is_file(value):
            self.put(SCHEDULE_FILE, str(Path(value).expanduser().resolve()))

    def count_steps(self) -> None:
        """Set train.steps by the length of the run in samples or tokens, unless steps have a stronger source.

        Where both are as strong both stay, and `batch_sizes` reports it.
        """
        train = self.tree["train"] if isinstance(self.tree["train"], dict) else {}
        given = [key for key in LENGTHS if train.get(key.partition(".")[2]) is not None]
        if not given:
            return
        strongest = max(_strength(self.provenance.get(key, DEFAULT)) for key in given)
        own = _strength(self.provenance.get(STEPS, DEFAULT))
        if own > strongest:
            for key in given:
                self.put(key, None)
                self.provenance[key] = f"derived: {STEPS} is set"
        elif own < strongest:
            config, _ = convert(self.tree, self.place)
            steps = run_length(within_limits(config, list(beyond_limits(config))))
            self.put(STEPS, steps)
            self.provenance[STEPS] = f"derived: {given[0]}"

    def unite_micro_batch(self) -> None:
        """Make train.micro_batch_size and pipeline.pp_microbatch_size one value: that of the stronger source.

        With equally strong sources both stay, and `checks.py` reports a difference.
        """
        ranks = [_strength(self.provenance.get(key, DEFAULT)) for key in MICRO_BATCH]
        if ranks[0] == ranks[1]:
            return
        stronger, weaker = MICRO_BATCH if ranks[0] > ranks[1] else MICRO_BATCH[::-1]
        self.put(weaker, self.get(stronger))
        self.provenance[weaker] = f"derived: {stronger}"


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Dotted path -> text, of all texts in a value that interpolate."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from _texts(each, f"{path}.{key}")
    if isinstance(value, str) and "${" in value:
        yield path, value


def _length(path: str, texts: Mapping[str, str], known: dict[str, int]) -> int:
    """More characters than a text gets from texts that interpolate, itself included; a cycle ends there.

    A text may name another one twice, and that one a third: some lines would take hours, and fill the memory.
    """
    if path not in known:
        known[path] = 0
        named = _NAMED.findall(texts[path])
        brought = [other for word in named for other in texts if word in other.split(".")]
        brought += [*texts] * len(_NESTED.findall(texts[path]))  # a name that is made of others may be any
        own = len(texts[path]) * texts[path].count("${")  # where they are nested, reading takes the square of that
        known[path] = own + sum(_length(other, texts, known) for other in brought)
    return known[path]


def _strength(source: str) -> int:
    """Order of sources: derived and default, files, command line."""
    return 0 if source == DEFAULT or source.startswith("derived") else 2 if source.startswith(PLACE) else 1


def flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted name -> value, down to the schema's leaves (below a section, everything is a leaf's name)."""
    for name, value in tree.items():
        full = f"{prefix}{name}"
        if isinstance(value, Mapping) and full in sections():
            yield from flat(value, f"{full}.")
        elif not (value is None and full in sections()):
            yield full, value
