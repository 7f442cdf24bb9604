"""Fields of a model's config by other values (`model.hf_overrides`), each compared with what the config has.

Knows names, values and their kinds. Must not know transformers or directories.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ppctl.config.keys import did_you_mean, nearest
from ppctl.errors import ConfigError, Problem, pasted

KEY = "model.hf_overrides"
CODE = "PP-E552"
_KINDS: tuple[tuple[type, tuple[type, ...], str], ...] = (
    (bool, (bool,), "true or false"),
    (int, (int,), "a whole number"),
    (float, (int, float), "a number"),
    (str, (str,), "text"),
    (list, (list,), "a list, as JSON"),
    (dict, (dict,), "a mapping, as JSON"),
)
"""Of a field's own value: which values may stand in its place, and what these are called. The first that fits."""

_PRECISION = ("dtype", "torch_dtype")
"""Fields that name the dtype of the weights in a file."""


def overridden(config: Any, overrides: Mapping[str, str], make: Callable[[Mapping[str, Any]], Any]) -> Any:
    """The config that `make` makes with the values of these texts. `config` is without them.

    Raises ConfigError (PP-E552) with a problem for each field that is unknown, of another kind than the config's own
    value, or not finite; and for one that `make` refuses with a ConfigError, by itself or beside the others.
    """
    values = {name: value_of(text) for name, text in overrides.items()}
    problems = [problem for name, value in values.items() for problem in _misfits(config, name, value, overrides[name])]
    if problems:
        raise ConfigError(problems)
    values = {name: _as_own(getattr(config, name), value) for name, value in values.items()}
    try:
        return make(values)
    except ConfigError as refused:
        alone = [found for name, value in values.items() if (found := _refusal(config, name, value, make)) is not None]
        raise ConfigError(alone or [_problem(", ".join(values), _reason(refused), "")]) from None


def value_of(text: str) -> Any:
    """A field's value as it was typed: a number, true, null, a list, a mapping; else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _as_own(own: Any, value: Any) -> Any:
    """A whole number as the float that a field is: transformers' configs no longer take the one for the other."""
    return float(value) if isinstance(own, float) and isinstance(value, int) else value


def _misfits(config: Any, name: str, value: Any, text: str) -> Iterator[Problem]:
    if name.startswith("__") or not hasattr(config, name) or callable(getattr(config, name)):
        fields = [field for field in vars(config) if not field.startswith("_")]
        message = f"the config of {config.model_type} has no such field{did_you_mean(name, fields)}"
        yield _problem(name, message, next((_typed(each, text) for each in nearest(name, fields)), ""))
        return
    if name in _PRECISION:
        yield _problem(name, "has no effect: the run's precision is the dtype of its weights", "parallel.bf16=true")
        return
    own = getattr(config, name)
    kind = next((row for row in _KINDS if isinstance(own, row[0])), None)
    fits = (
        kind is None or value is None or (isinstance(value, kind[1]) and (kind[0] is bool) == isinstance(value, bool))
    )
    if isinstance(value, float) and not math.isfinite(value):
        yield _problem(name, f"{text} is not finite", _typed(name, own))
    elif kind is not None and not fits:
        yield _problem(name, f"takes {kind[2]}, not {text!r}: its config.json has {_text(own)}", _typed(name, own))


def _refusal(config: Any, name: str, value: Any, make: Callable[[Mapping[str, Any]], Any]) -> Problem | None:
    """The problem of a field that is refused by itself."""
    try:
        make({name: value})
    except ConfigError as refused:
        return _problem(name, _reason(refused), _typed(name, getattr(config, name)))
    return None


def _reason(refused: ConfigError) -> str:
    return refused.problems[0].message


def _problem(name: str, message: str, remedy: str) -> Problem:
    return Problem(CODE, f"{KEY}.{name}: {message}", remedy, KEY)


def _typed(name: str, value: Any) -> str:
    return pasted(f"{KEY}.{name}={value if isinstance(value, str) else _text(value)}")


def _text(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)
