"""Which decoder layers have experts: Megatron's `moe_layer_freq`, read without executing anything."""

from __future__ import annotations

import ast
from functools import lru_cache
from itertools import groupby
from typing import Any

from ppctl.config.schema import ModelConfig
from ppctl.errors import ConfigError, Problem, pasted

_LIMIT = 100_000
"""No model has more layers; a longer expression is a mistake."""


def moe_layer_pattern(model: ModelConfig) -> tuple[bool, ...]:
    """Per decoder layer, whether its feed-forward is a mixture of experts. `moe_layer_freq` is 1 (every layer), N
    (layers 0, N, 2N, ... as Megatron counts), a list of 0/1 with one entry per layer, or an expression of lists, `+`
    and `*` as text: "[0]*3+[1]*58". Raises ConfigError (PP-E210) otherwise."""
    if not model.num_moe_experts:
        return (False,) * model.num_layers
    freq = _listed(model)
    if freq is None:
        raise _wrong(f"takes a positive number, or a list of 0 and 1, not {model.moe_layer_freq!r}", model)
    if len(freq) != model.num_layers:
        raise _wrong(f"lists {len(freq)} layers, but model.num_layers is {model.num_layers}", model)
    return freq


def fitted_moe_layer_freq(model: ModelConfig) -> str:
    """`moe_layer_freq` cut, or continued with its last entry, to the model's number of layers, as an expression."""
    freq = _listed(model) or (True,)
    fitted = (freq + freq[-1:] * model.num_layers)[: model.num_layers]
    return "+".join(f"[{int(moe)}]*{len(list(run))}" for moe, run in groupby(fitted))


def _listed(model: ModelConfig) -> tuple[bool, ...] | None:
    """The entries of `moe_layer_freq`, a list with any number of entries; None if it has no valid form."""
    freq = model.moe_layer_freq
    if isinstance(freq, str | int):
        return _read(freq, model.num_layers)
    return _entries(freq)


@lru_cache(maxsize=None, typed=True)  # tells True from 1
def _read(freq: str | int, num_layers: int) -> tuple[bool, ...] | None:
    value = _evaluate(freq) if isinstance(freq, str) else freq
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return tuple(i % value == 0 for i in range(num_layers))
    return _entries(value)


def _entries(value: Any) -> tuple[bool, ...] | None:
    if not isinstance(value, list | tuple) or any(entry not in (0, 1) for entry in value):
        return None
    return tuple(bool(entry) for entry in value)


def _wrong(what: str, model: ModelConfig) -> ConfigError:
    remedy = pasted(f"model.moe_layer_freq={fitted_moe_layer_freq(model)}")
    return ConfigError(Problem("PP-E210", f"model.moe_layer_freq {what}", remedy))


def _evaluate(text: str) -> Any:
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    """The value of an expression of integers and lists. Raises ValueError for any other."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool) and abs(number) <= _LIMIT:
            return number
        case ast.List(elts=elements):
            return [_value(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _bounded(_value(left), _value(right), add=True)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _bounded(_value(left), _value(right), add=False)
    raise ValueError("not an expression of integers and lists")


def _bounded(left: Any, right: Any, *, add: bool) -> Any:
    """Sum or product. Raises ValueError, before computing, if the list would be too long."""
    sizes = [len(side) if isinstance(side, list) else side for side in (left, right)]
    if not all(isinstance(size, int) for size in sizes) or (sum(sizes) if add else sizes[0] * sizes[1]) > _LIMIT:
        raise ValueError("too long")
    return left + right if add else left * right
