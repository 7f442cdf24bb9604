"""A small model of the same architecture: the same class and the same layers in the same order, of small widths.

Knows the usual names of sizes in configs of transformers. Must not know what is done with the miniature.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from typing import Any

from ppctl.foreign.library import ConfigFails

VOCABULARY = 256
_WIDTH, _EXPERTS, _RANK, _WINDOW = 64, 32, 32, 8
"""Sizes of a miniature, where the model's own are larger: of the residual stream and inner widths, routed experts, the
low ranks of latent attention; and a window shorter than the miniature's sequences."""

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
"""Sizes beside the residual stream's: where they are equal, there is no projection between the two."""
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_OTHER_HEADS = ("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads", "index_n_heads")
"""Of linear attention, and of what chooses the tokens that attention sees."""
_STATE_SPACES = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand", "mamba_n_groups"),
    ("num_heads", "head_dim", "expand", "n_groups"),
)
"""Names of heads, their width, the factor of the residual stream's width that is their product, and groups of heads."""
_STATE_WIDTH = "mamba_d_ssm"
"""The name of that product, where a config has it."""
_CHUNKS = ("mamba_chunk_size", "chunk_size")
_CHUNK = 16
"""Tokens that are computed together: a sequence is filled up to a whole number of chunks, and is shorter than most."""


def miniatures(config: Any, drops: str | None = None) -> Iterator[Any]:
    """Copies of a config of transformers with small widths, no dropout, and all of its layers; the smallest first.

    `drops` names a field by which so much is dropped that it is seen in a few tokens.

    The width of a head stays, because rotary tables are written for it. Larger ones follow for models whose residual
    stream has to be as wide as all heads, that want more heads, or other sizes than are lowered here;
    and for those that ask for a padding token.
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
    """Make windows and chunks of attention shorter than all that is measured; the shortest that there was, or 0."""
    found = [value for name in _WINDOWS if _is_size(value := _own(config, name))]
    for name in _WINDOWS:
        _lower(config, name, _WINDOW)
    return min(found, default=0)


_SEEN = 0.5
"""A share of what is dropped, or of noise, that changes a miniature's results whatever it draws."""
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
    """Let no token of a batch have a meaning of its own: the one that has is None, or behind those that are drawn."""
    try:
        setattr(config, name, token)
    except ConfigFails:  # it has to be a number
        setattr(config, name, last)


def _lower(config: Any, name: str, most: int) -> None:
    """Lower a size, or each of a list of sizes."""
    value = _own(config, name)
    if isinstance(value, list) and value and all(map(_is_size, value)):
        setattr(config, name, [min(each, most) for each in value])
    elif _is_size(value) and value > most:
        setattr(config, name, most)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _own(config: Any, name: str) -> Any:
    """A field by its name or by the usual one, from the object itself: configs compute attributes in their own ways."""
    return vars(config).get(type(config).attribute_map.get(name, name))


def _lower_heads(config: Any, most: int, *, narrow: bool) -> None:
    """So many groups of at most two query heads, and the residual stream that belongs to them.

    `narrow` makes that no wider than other sizes, where a config names the width of a head.
    """
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
    beside = hidden != heads * width or (narrow and named is not None)
    _narrow(config, min(hidden, _WIDTH) if beside else fewer * width)


def _narrow(config: Any, width: int) -> None:
    """Give the residual stream another width, and what is as wide."""
    for name in (*(name for name in _AS_WIDE if _own(config, name) == config.hidden_size), "hidden_size"):
        setattr(config, name, width)


def _lower_other_heads(config: Any, most: int) -> None:
    """At most so many of the kind with the fewest heads, and of the others in proportion."""
    found = {name: heads for name in _OTHER_HEADS if _is_size(heads := _own(config, name))}
    share = max(1, min(found.values(), default=1) // most)
    for name, heads in found.items():
        if heads % share == 0:
            setattr(config, name, heads // share)


def _fit_state_spaces(small: Any, config: Any) -> None:
    """As many heads of a state space as the narrower residual stream has room for, where they filled the wide one."""
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
    """Lower what configs within a config say: inner widths, experts, heads of keys, and the residual stream's width."""
    for inner in (vars(small)[name] for name in config.sub_configs if hasattr(vars(small).get(name), "__dict__")):
        wide = _own(inner, "hidden_size")
        _lower_widths(inner)
        if wide is not None and wide == _own(config, "hidden_size"):
            inner.hidden_size = _own(small, "hidden_size")
        _lower(inner, "kv_n_heads", _own(small, "num_attention_heads") or 1)
