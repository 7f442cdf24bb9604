"""Rules on the keys of activation recompute: which belong together, and which modules a model has to recompute.

Knows Megatron's names of modules. Must not know stages or torch: what a stage recomputes is in `geometry/layers.py`,
how it does so in `model/recompute.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppctl.config.keys import Finding, as_typed, did_you_mean
from ppctl.config.schema import ModelConfig, RunConfig

MODULES = ("core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj")

_KEY = "train.recompute_granularity"
_BELONGS = {
    "full": ("recompute_method", "recompute_num_layers"),
    "selective": ("recompute_modules",),
}


def broken_rules(config: RunConfig) -> Iterator[Finding]:
    """Every rule that is broken."""
    train = config.train
    granularity = train.recompute_granularity
    for owner, names in _BELONGS.items():
        for name in names:
            if getattr(train, name) is not None and granularity != owner:
                message = f"train.{name} is a detail of {_KEY}={owner}, and that is {granularity or 'null'}"
                yield (f"train.{name}", _KEY), message, f"train.{name}=null"
    if train.recompute_stages is not None and granularity is None:
        keys = ("train.recompute_stages", _KEY)
        yield keys, "recompute_stages has no effect: recompute_granularity is null", "train.recompute_stages=null"
    if train.compile and granularity == "selective":
        message = "torch.compile decides what a layer keeps: single modules of it cannot be recomputed"
        yield ("train.compile", _KEY), message, "train.compile=false"
    yield from _modules(config)
    partial = config.parallel.num_microbatches_with_partial_activation_checkpoints
    if partial is not None and granularity != "full":
        name = "parallel.num_microbatches_with_partial_activation_checkpoints"
        message = f"it exempts microbatches from {_KEY}=full, and that is {granularity or 'null'}"
        yield (name, _KEY), message, f"{name}=null"


def _modules(config: RunConfig) -> Iterator[Finding]:
    modules = config.train.recompute_modules
    if modules is None or config.train.recompute_granularity != "selective":
        return
    name = "train.recompute_modules"
    missing = _missing(config.model)
    right = [module for module in modules if module in MODULES and module not in missing]
    remedy = as_typed(name, right or None)
    if not modules:
        yield (name,), f"{name} names no module", remedy
    for module in modules:
        if module not in MODULES:
            known = f"{', '.join(MODULES)}{did_you_mean(module, MODULES)}"
            yield (name,), f"there is no module {module} to recompute; there are {known}", remedy
        elif module in missing:
            yield (name,), f"the model has no {module} to recompute: {missing[module]}", remedy


def _missing(model: ModelConfig) -> dict[str, str]:
    """The modules that this model does not have, and why."""
    found: dict[str, str] = {}
    if model.num_moe_experts is None:
        found |= dict.fromkeys(("moe", "moe_act"), "model.num_moe_experts is null")
    if not model.multi_latent_attention:
        found["mla_up_proj"] = "model.multi_latent_attention is false"
    return found
