"""Every configuration key: its type, its default, its docstring, and the nearest name to a misspelt one.

Read from the dataclasses in `schema.py` and their metadata, never written twice.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ppctl.config.metadata import Facts, Limit, OneOf, attribute_of
from ppctl.config.schema import RunConfig
from ppctl.errors import CONTROL, pasted, visible

Finding = tuple[tuple[str, ...], str, str]
"""A broken rule between values: its keys, what is wrong, and a remedy."""


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of the configuration tree."""

    name: str
    """Dotted, as `train.steps`."""
    type: Any
    default: Any
    owner: type
    """The dataclass that declares the field."""
    facts: Facts
    """The facts in the metadata of the key's field and of its section."""

    @property
    def limit(self) -> Limit | None:
        """The allowed values; None allows all values of the type."""
        return self.facts.limit

    @property
    def field(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def attribute(self) -> str:
        """The field's name in Python, where `from` is a keyword."""
        return attribute_of(self.field)

    def allows(self, value: Any) -> bool:
        """Whether `value`, of the key's type, has no control characters and is within the key's limit."""
        if self._controls(value):
            return False
        if self.limit is None:
            return True
        return self.type is Any or NoneType in members(self.type) if value is None else self.limit.allows(value)

    def misfit(self, value: Any) -> tuple[str, str | None]:
        """(why `allows` refuses a value, the word that was probably meant)."""
        if bad := self._controls(value):
            shown = " ".join(dict.fromkeys(bad))
            return f"{self.name} has control characters, which scripts and terminals obey: {shown}", None
        message = f"{self.name} must be {self.limit.words if self.limit else ''}"
        if not isinstance(self.limit, OneOf):
            return message, None
        word, words = str(value).lower(), {name.lower(): name for name in self.limit.names}
        close = nearest(word, words)
        return message + did_you_mean(word, words), words[close[0]] if close else None

    def _controls(self, value: Any) -> str:
        """The control characters of `value` that are not allowed in this key's text."""
        return _controls(value, "\n\t" if self.facts.lines else "")

    @property
    def is_dtype(self) -> bool:
        """Whether the key holds a dtype or its name."""
        return self.field == "dtype" or self.field.endswith("_dtype")

    @property
    def is_callable(self) -> bool:
        """Whether the key holds a Python object, which no text can set."""
        return self.field.startswith("_") or "Callable" in str(self.type)

    @property
    def is_text(self) -> bool:
        """Whether the key's values are strings (names, paths, layouts) or None."""
        return str in members(self.type) or self.is_dtype

    @property
    def is_container(self) -> bool:
        """Whether the key may hold a list or a mapping."""
        return (self.type is Any and not self.is_dtype) or any(
            get_origin(t) in (list, dict) for t in members(self.type)
        )

    @property
    def is_switch(self) -> bool:
        """Whether the key is true or false."""
        return self.type is bool

    @property
    def is_list(self) -> bool:
        """Whether the key's flags take several values."""
        return any(get_origin(t) is list for t in members(self.type))


def _controls(value: Any, kept: str = "") -> str:
    """The control characters in all texts of `value`, also within lists and mappings, except those in `kept`."""
    if isinstance(value, str):
        return "".join(letter for letter in CONTROL.findall(value) if letter not in kept)
    parts = [*value, *value.values()] if isinstance(value, Mapping) else value
    return "".join(_controls(each, kept) for each in parts) if isinstance(parts, list | tuple) else ""


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def type_text(annotation: Any) -> str:
    """A type in words: `int`, `text or null`, `list of int or null`."""
    names = {int: "int", float: "number", bool: "true or false", str: "text", NoneType: "null", Any: "any value"}
    parts = []
    for member in members(annotation):
        if get_origin(member) is Literal:
            parts.append(" or ".join(map(str, get_args(member))))
        elif get_origin(member) is list:
            parts.append(f"list of {type_text(get_args(member)[0])}")
        elif get_origin(member) is dict:
            parts.append("mapping of text to text")
        else:
            parts.append(names.get(member, "Python object"))
    return " or ".join(parts)


@cache
def sections() -> dict[str, type]:
    """Dotted name of a section -> its dataclass, in order, each after its outer section."""
    return dict(_sections_of(RunConfig, ""))


def _sections_of(cls: type, prefix: str) -> Iterator[tuple[str, type]]:
    hints = get_type_hints(cls)
    for name in (f.name for f in fields(cls) if is_dataclass(hints[f.name])):
        yield prefix + name, hints[name]
        yield from _sections_of(hints[name], f"{prefix}{name}.")


@cache
def keys() -> dict[str, Key]:
    """Dotted name -> key, for every leaf, Python-only ones included."""
    declared = {key.name: key for key in _keys_of(RunConfig, "", Facts())}
    for section, cls in sections().items():
        declared.update((key.name, key) for key in _keys_of(cls, section + ".", declared[section].facts))
    return {name: key for name, key in declared.items() if name not in sections()}


@cache
def text_keys() -> dict[str, Key]:
    """The keys that a file or the command line can set."""
    return {name: key for name, key in keys().items() if not key.is_callable}


def mapping_with(name: str) -> str | None:
    """The key of the mapping that `name` is an entry of: `launch.env` for `launch.env.PATH`; None for other names."""
    parent = keys().get(name.rpartition(".")[0])
    return parent.name if parent is not None and get_origin(parent.type) is dict else None


@cache
def keys_with(fact: str) -> Mapping[str, Key]:
    """The keys that have a fact (the name of a field of `Facts`: `limit`, `verbatim`, ...), in order."""
    return {name: key for name, key in text_keys().items() if getattr(key.facts, fact)}


@cache
def names_of_keys(fact: str) -> Mapping[str, str]:
    """Each name in a fact that lists names (`names`, `known_as`, `options`) -> the key."""
    return {name: key.name for key in keys_with(fact).values() for name in getattr(key.facts, fact).split()}


def _keys_of(cls: type, prefix: str, section: Facts) -> list[Key]:
    hints = get_type_hints(cls)
    declared = []
    for field in fields(cls):
        default = field.default
        if default is MISSING:
            default = field.default_factory() if field.default_factory is not MISSING else None
        owner = next(c for c in reversed(cls.__mro__) if field.name in inspect.get_annotations(c))
        name, facts = prefix + field.name.removesuffix("_"), field.metadata.get("key", Facts())
        facts = replace(facts, mathematics=facts.mathematics or section.mathematics)
        declared.append(Key(name, hints[field.name], default, owner, facts))
    return declared


@cache
def _docstrings(cls: type) -> dict[str, str]:
    """Field name -> the string under it, read from the class's source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            texts[node.target.id] = inspect.cleandoc(str(after.value.value))
    return texts


def docstring(key: Key) -> str:
    """The meaning of a field; empty if the class does not say."""
    return _docstrings(key.owner).get(key.attribute, "")


def place_of(name: str, value: Any, provenance: Mapping[str, str]) -> str:
    """A key, its value and its source, as problems show them."""
    return f"{name} = {visible(value_text(value), '')} ({provenance.get(name, 'default')})"


def as_typed(name: str, value: Any) -> str:
    """`name=value` as a shell takes it."""
    return pasted(f"{name}={value_text(value)}")


def value_text(value: Any) -> str:
    """`value` as the command line takes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{value_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(value_text, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def nearest(word: str, known: Iterable[str], *, limit: int = 3) -> list[str]:
    """The known names most like `word`, best first; the last part of a dotted name counts for the whole."""
    known = list(known)
    word = "cuda" if word.lower() == "gpu" and "cuda" in known else word
    last = word.rpartition(".")[2]
    exact = [name for name in known if name.rpartition(".")[2] == last]
    # Names of one section are similar by their first part alone: the last part has to be similar too.
    close = [
        name
        for name in difflib.get_close_matches(word, known, n=2 * limit, cutoff=0.6)
        if difflib.SequenceMatcher(None, last, name.rpartition(".")[2]).ratio() >= 0.6
    ]
    by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
    tails = [by_last[tail] for tail in difflib.get_close_matches(last, by_last, n=limit, cutoff=0.75)]
    return list(dict.fromkeys([*exact, *close, *tails]))[:limit]


def misspelt(word: str, known: str) -> bool:
    """Whether `word` differs from `known` in one letter: changed, missing or added."""
    short, long = sorted((word, known), key=len)
    one = len(short) == len(long)
    return len(long) - len(short) < 2 and any(
        short[:at] == long[:at] and short[at + one :] == long[at + 1 :] for at in range(len(long))
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean a or b?`, or nothing."""
    close = nearest(word, known)
    return f"; did you mean {' or '.join(close)}?" if close else ""
