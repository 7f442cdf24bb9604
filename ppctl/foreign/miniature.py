"""Miniatures of a transformers model: the same class and layers, narrow enough to run quickly on a CPU.

If no miniature can be made, CannotCut gives the reason; the cheapest checks come first.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ppctl.foreign.anatomy import CannotCut, structure, survey
from ppctl.foreign.library import ConfigFails, make_model
from ppctl.geometry.foreign_model import Anatomy
from ppctl.geometry.rows import Start

VOCABULARY = 256
_WIDTH, _EXPERTS, _RANK, _WINDOW = 64, 32, 32, 8
"""The largest sizes of a miniature: the residual stream and inner widths, routed experts, the low ranks of latent
attention; and a window shorter than the miniature's sequences."""

_INNER = ("intermediate", "ffn", "inner", "hidden_size_per", "laurel")
"""Parts of names of inner widths."""
_WINDOWS = ("sliding_window", "attention_chunk_size")
_OTHERS = {
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "q_lora_rank": _RANK,
    "kv_lora_rank": _RANK,
    **dict.fromkeys(_WINDOWS, _WINDOW),
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
}
_AS_WIDE = ("word_embed_proj_dim", "attention_hidden_size", "embedding_dim")
"""Sizes that stay equal to the residual stream's if they are: then there is no projection between the two."""
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_OTHER_HEADS = ("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads", "index_n_heads")
"""Heads of linear attention, and of indexers, which choose the tokens that attention sees."""
_STATE_SPACES = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand", "mamba_n_groups"),
    ("num_heads", "head_dim", "expand", "n_groups"),
)
"""Fields for the number of heads, their width, the ratio of their product to the residual stream's, and groups."""
_STATE_WIDTH = "mamba_d_ssm"
"""The name of that product, if a config has it."""
_CHUNKS = ("mamba_chunk_size", "chunk_size")
_CHUNK = 16
"""Sizes of chunks of tokens: sequences are padded to whole chunks, and a miniature's would be shorter than most."""


def miniatures(config: Any, drops: str | None = None) -> Iterator[Any]:
    """Yield copies of a config with small widths, all layers and no dropout, the smallest copy first.

    The field named by `drops`, if any, gets `_SEEN`, a dropout that shows in a few tokens. The width of a head stays,
    because rotary tables depend on it. Callers take the first copy that runs: later copies are for models whose
    residual stream must be as wide as all heads, and for models that need more heads, larger sizes or a padding token.
    """
    sizes = ((2, True), (2, False), (4, False), (None, False))
    words = _own(config, "vocab_size")
    last = min(VOCABULARY, words if _is_size(words) else VOCABULARY) - 1
    for token, (groups, narrow) in product((None, last), sizes):
        small = deepcopy(config)
        for name in dropout_fields(config):
            setattr(small, name, _SEEN if name == drops else 0.0)
        _lower_widths(small)
        if groups is not None:
            _lower_heads(small, groups, narrow=narrow)
            _lower_other_heads(small, groups)
            _fit_state_spaces(small, config)
            for name in _CHUNKS:
                _lower(small, name, _CHUNK)
        _lower_nested(small, config)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if vars(small).get(name) is not None:
                _take_token(small, name, token, last)
        yield small


def _lower_widths(small: Any) -> None:
    for name, most in _OTHERS.items():
        _lower(small, name, most)
    for name in list(vars(small)):
        if any(part in name for part in _INNER):
            _lower(small, name, _WIDTH)


def lower_windows(config: Any) -> int:
    """Lower the windows and chunks of attention to `_WINDOW` tokens; return the shortest before that, or 0."""
    widths = [value for name in _WINDOWS if _is_size(value := _own(config, name))]
    for name in _WINDOWS:
        _lower(config, name, _WINDOW)
    return min(widths, default=0)


_SEEN = 0.5
"""A share of dropout or noise that changes a miniature's results with any draws."""
_DRAWS = ("drop", "jitter")
"""Parts of the names of fields by which a model draws random numbers in training."""


def dropout_fields(config: Any) -> dict[str, float]:
    """The fields of a config whose names say that they drop something or add noise, with their values."""
    return {
        name: value
        for name, value in vars(config).items()
        if any(part in name for part in _DRAWS) and isinstance(value, float) and value > 0
    }


def _take_token(config: Any, name: str, token: int | None, last: int) -> None:
    """Set a special token to `token`; if the config refuses None, to `last`, which no batch draws."""
    try:
        setattr(config, name, token)
    except ConfigFails:  # the field must be a number
        setattr(config, name, last)


def _lower(config: Any, name: str, most: int) -> None:
    value = _own(config, name)
    if isinstance(value, list) and value and all(map(_is_size, value)):
        setattr(config, name, [min(each, most) for each in value])
    elif _is_size(value) and value > most:
        setattr(config, name, most)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _own(config: Any, name: str) -> Any:
    """Return the value that a config stores for a field (None if it has none), by transformers' usual name or the
    class's own. From the object's dictionary, since classes compute attributes in their own ways."""
    return vars(config).get(type(config).attribute_map.get(name, name))


def _lower_heads(config: Any, most: int, *, narrow: bool) -> None:
    """Keep at most `most` groups, each of one key head and one or two query heads, and narrow the residual stream: with
    `narrow`, and if the config names the width of a head, to at most `_WIDTH` elements."""
    heads, hidden = _own(config, "num_attention_heads"), _own(config, "hidden_size")
    if not _is_size(hidden):
        return
    if not _is_size(heads):
        _narrow(config, min(hidden, _WIDTH))
        return
    keys = next((name for name in _KEY_HEADS if _is_size(_own(config, name))), None)
    groups = heads if keys is None else _own(config, keys)
    if heads % groups:
        return
    named = _own(config, "head_dim")
    width = named or hidden // heads
    fewer = min(groups, most) * min(heads // groups, 2)
    config.num_attention_heads = fewer
    if keys is not None:
        setattr(config, keys, min(groups, most))
    independent = hidden != heads * width or (narrow and named is not None)
    _narrow(config, min(hidden, _WIDTH) if independent else fewer * width)


def _narrow(config: Any, width: int) -> None:
    """Set the width of the residual stream, and the sizes of `_AS_WIDE` that were equal to the old one."""
    for name in (*(name for name in _AS_WIDE if _own(config, name) == config.hidden_size), "hidden_size"):
        setattr(config, name, width)


def _lower_other_heads(config: Any, most: int) -> None:
    """Lower the other kinds of heads in proportion, so that the kind with the fewest heads has at most `most`."""
    heads_of = {name: heads for name in _OTHER_HEADS if _is_size(heads := _own(config, name))}
    share = max(1, min(heads_of.values(), default=1) // most)
    for name, heads in heads_of.items():
        if heads % share == 0:
            setattr(config, name, heads // share)


def _fit_state_spaces(small: Any, config: Any) -> None:
    """Lower the number of heads of state spaces in proportion to the residual streams of `config` and `small`."""
    for heads_, width_, factor_, groups_ in _STATE_SPACES:
        heads, width, factor, groups = (_own(config, name) for name in (heads_, width_, factor_, groups_))
        filled = _own(config, _STATE_WIDTH)
        if not all(map(_is_size, (heads, width, factor, _own(config, "hidden_size")))):
            continue
        if heads * width not in (filled, factor * _own(config, "hidden_size")):
            continue
        fewer = max(1, min(heads, factor * _own(small, "hidden_size") // width))
        setattr(small, heads_, fewer)
        if filled == heads * width:
            setattr(small, _STATE_WIDTH, fewer * width)
        if _is_size(groups):
            setattr(small, groups_, math.gcd(groups, fewer))


def _lower_nested(small: Any, config: Any) -> None:
    """Lower the sizes in the configs inside `small`; those as wide as `config` become as wide as `small`."""
    for inner in (vars(small)[name] for name in config.sub_configs if hasattr(vars(small).get(name), "__dict__")):
        old_width = _own(inner, "hidden_size")
        _lower_widths(inner)
        if old_width is not None and old_width == _own(config, "hidden_size"):
            inner.hidden_size = _own(small, "hidden_size")
        _lower(inner, "kv_n_heads", _own(small, "num_attention_heads") or 1)


_MOST_PARAMETERS = 100_000_000
"""The most parameters of a miniature: more would take minutes, and memory that a login node does not have."""
CODE_FAILS = (
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, ImportError),
    ConfigFails,
)
"""The exceptions of a model's own code if sizes do not fit together, or if something that the code reads is missing."""


def small_model(config: Any) -> tuple[nn.Module, nn.Module, Anatomy, dict[str, Start]]:
    """Make the smallest miniature that runs; return (it on meta, it with weights, its anatomy, how each weight starts).
    Raises CannotCut if transformers cannot build the model, if its structure forbids a cut, or if its code runs with no
    small size."""
    _check_code(config)
    failed: Exception | None = None
    for small in miniatures(config):
        try:
            blank = make_model(small, "meta").train()
            structure(blank)
            if (number := sum(parameter.numel() for parameter in blank.parameters())) > _MOST_PARAMETERS:
                failed = failed or ValueError(f"it has {number:,} parameters, most of them in {_largest(blank)}")
                continue
            torch.manual_seed(0)
            whole = make_model(small, "cpu").train()
            starts = {name: _start(tensor) for name, tensor in whole.state_dict().items()}
            _shake(whole)
            return blank, whole, survey(whole), starts
        except CODE_FAILS as error:
            failed = failed or error
    assert failed is not None  # a miniature was tried
    raise CannotCut(f"its small copy, on which the cut is tried, cannot be made: {line_of(failed)}") from failed


def _check_code(config: Any) -> None:
    try:
        make_model(config, "meta")
    except CODE_FAILS as error:
        reason = f"transformers cannot build a model from this config: {line_of(error)}"
        raise CannotCut(f"{reason} ({_place(error)})") from error


def _place(error: BaseException) -> str:
    """Return the function of the model's own code that raised an error, its file and its line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.name} in {Path(last.filename).name}, line {last.lineno}"


def _largest(model: nn.Module) -> str:
    sizes = {
        path: sum(each.numel() for each in module.parameters(recurse=False)) for path, module in model.named_modules()
    }
    path = max(sizes, key=lambda each: sizes[each])
    return f"{path} ({type(model.get_submodule(path)).__name__})"


def _start(tensor: Tensor) -> Start:
    """Return how transformers initialises a weight: with a constant, for any size, or drawn."""
    return "ones" if bool((tensor == 1).all()) else "zeros" if bool((tensor == 0).all()) else "normal"


def _shake(model: nn.Module) -> None:
    """Add noise to every parameter: equal zeros or ones would hide swapped biases or norms."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)


def line_of(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
