"""Rules on models whose code is transformers': what that code cannot do, and what only ppctl's own blocks read.

Knows keys. Must not know what a description says, or what such a model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ppctl.config.keys import Finding, as_typed, value_of
from ppctl.config.schema import RunConfig
from ppctl.errors import Problem

_AXES = {
    "parallel.tensor_model_parallel_size": "multiplies with whole weights",
    "parallel.context_parallel_size": "attends to whole sequences",
    "parallel.expert_model_parallel_size": "holds all experts of a layer",
    "parallel.expert_tensor_parallel_size": "multiplies with whole weights",
}
_OTHERS = {
    "data.pack": (False, "takes a row for one conversation"),
    "data.reset_position_ids": (False, "counts positions through a row"),
    "data.reset_attention_mask": (False, "attends to whole rows"),
    "pipeline.patch_inner_model": (True, "does not take hidden states"),
    "pipeline.patch_causal_lm_model": (True, "does not take hidden states"),
    "parallel.cpu_offloading": (False, "keeps what masks and positions are made of beside its layers"),
}
READ = frozenset({"model.from", "model.implementation", "model.hf_overrides", "model.lora", "model.init_method_std"})
"""The keys of `model` that count for such a model."""


def broken_rules(config: RunConfig) -> Iterator[Finding]:
    """Every rule that is broken, each naming its key."""
    if config.model.transformers is None:
        return
    code = "a model whose code is transformers'"
    for key, why in _AXES.items():
        size = value_of(config, key)
        if size is not None and size > 1:
            yield (key,), f"{code} {why}: {key} must be 1, not {size}", f"{key}=1"
    for key, (fitting, why) in _OTHERS.items():
        if value_of(config, key) != fitting:
            yield (key,), f"{code} {why}: {key} must be {str(fitting).lower()}", as_typed(key, fitting)
    if config.train.recompute_granularity == "selective":
        key = "train.recompute_granularity"
        yield (key,), f"{code} has modules of other names: whole layers can be recomputed", f"{key}=full"
    elif config.train.recompute_method != "block" and (config.train.recompute_num_layers or 1) > 1:
        key = "train.recompute_num_layers"
        yield (key,), f"{code} calls its layers itself: each is recomputed alone", f"{key}=1"


def without_effect(
    typed: Mapping[str, Any], fitting: Callable[[str], Any], place: str, read: Collection[str]
) -> list[Problem]:
    """The problems of values of `model` that were typed for a model whose code is transformers': its config.json has
    them, or nothing reads them. `fitting` says which value of a key is the right one, `read` which keys do count.
    """
    return [
        Problem(
            "PP-E103",
            f"{name} has no effect on a model whose code is transformers': its config.json says what it is",
            as_typed(name, fitting(name)),
            f"{name} = {value} ({place})",
        )
        for name, value in typed.items()
        if name.startswith("model.") and name not in read and value != fitting(name)
    ]
