"""Rules on precision: the dtype of weights and messages, autocast, and the scale of the loss."""

from __future__ import annotations

from collections.abc import Iterator

from ppctl.config.keys import Finding, as_typed, text_keys
from ppctl.config.model_parallel_config import dtype_name
from ppctl.config.schema import ModelConfig, ParallelConfig, RunConfig

_LOSS_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_SWITCH = {"float32": None, "bfloat16": "parallel.bf16", "float16": "parallel.fp16"}


def weight_dtype(parallel: ParallelConfig) -> str:
    """The dtype of weights and of messages between stages: `float16`, `bfloat16`, `float32` or `float64`."""
    switched = _switched(parallel)
    return switched if switched != "float32" else dtype_name(parallel.params_dtype) or switched


def _switched(parallel: ParallelConfig) -> str:
    return "float16" if parallel.fp16 else "bfloat16" if parallel.bf16 else "float32"


def autocast_dtype(parallel: ParallelConfig) -> str | None:
    """The autocast dtype of forwards, by default the dtype of messages, then of weights; None without
    `enable_autocast`."""
    if not parallel.enable_autocast:
        return None
    dtype = parallel.autocast_dtype or parallel.pipeline_dtype or parallel.params_dtype
    return dtype_name(dtype) or weight_dtype(parallel)


def broken_rules(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding for each rule on precision that the config breaks."""
    parallel = config.parallel
    if parallel.bf16 and parallel.fp16:
        keys = ("parallel.bf16", "parallel.fp16")
        yield keys, "weights have one dtype: bfloat16 or float16", "parallel.fp16=false"
        return
    yield from _dtypes(config)
    yield from _autocast(parallel)
    yield from _fp8(config)
    yield from _loss_scale(config)


def _dtypes(config: RunConfig) -> Iterator[Finding]:
    """Findings about dtypes of weights and messages that contradict bf16 or fp16."""
    dtype = _switched(config.parallel)
    if dtype == "float32" and dtype_name(config.parallel.params_dtype) == "float64":
        dtype = "float64"
    for name in ("parallel.params_dtype", "parallel.pipeline_dtype", "pipeline.dtype"):
        other = dtype_name(config[name])
        if other is not None and other != dtype:
            if "float64" in (other, dtype):
                yield _beside_float64(name, other, dtype)
                continue
            switch = _SWITCH[dtype] or _SWITCH[other] or "parallel.bf16"
            message = f"with {switch}={str(dtype != 'float32').lower()} weights and messages are {dtype}"
            flipped = f"{switch}={str(dtype == 'float32').lower()}"
            yield (name, switch), message, flipped if "float32" in (other, dtype) else f"{name}={dtype}"


def _beside_float64(name: str, other: str, dtype: str) -> Finding:
    """The finding of a key that names dtype `other` beside weights of `dtype`, if one of the two is float64."""
    switch = _SWITCH.get(dtype) or "parallel.params_dtype"
    value = "true" if switch != "parallel.params_dtype" else dtype
    keys = (name, switch) if name != switch else (name,)
    return keys, f"with {switch}={value} weights and messages are {dtype}, not {other}", f"{name}={dtype}"


def _autocast(parallel: ParallelConfig) -> Iterator[Finding]:
    name = "parallel.autocast_dtype"
    cast = autocast_dtype(parallel)
    if cast is None:
        return
    if weight_dtype(parallel) == "float64":
        keys = ("parallel.enable_autocast", "parallel.params_dtype")
        message = "autocast computes float32 weights in 16 bits, not float64 weights"
        yield keys, message, "parallel.enable_autocast=false"
    elif cast == "float32":
        keys = ("parallel.enable_autocast", name)
        message = "forwards are cast to float32, which they are computed in anyway"
        yield keys, message, f"{name}=bfloat16"
    elif cast == "float16" and not parallel.fp16:
        keys = (name, "parallel.fp16")
        yield keys, "gradients in float16 need a scaled loss, which parallel.fp16 brings", f"{name}=bfloat16"


def _fp8(config: RunConfig) -> Iterator[Finding]:
    model, parallel = config.model, config.parallel
    if model.fp8 is None:
        return
    if weight_dtype(parallel) != "bfloat16" or parallel.enable_autocast:
        keys = ("model.fp8", "parallel.bf16")
        remedy = "parallel.enable_autocast=false" if parallel.enable_autocast else "parallel.bf16=true"
        if weight_dtype(parallel) == "float64":
            keys, remedy = ("model.fp8", "parallel.params_dtype"), "model.fp8=null"
        yield keys, "products in 8 bits are part of training with bfloat16 weights, without autocast", remedy
    if model.fp8 == "hybrid" and model.fp8_recipe == "blockwise" and config.launch.device == "cuda":
        message = "on a GPU torch multiplies blockwise values in e4m3 alone, not gradients in e5m2"
        yield ("model.fp8", "model.fp8_recipe"), message, "model.fp8=e4m3"
    for name, width in _widths(model, parallel.expert_tensor_parallel_size or 1).items():
        if width % 16:
            message = f"a product in 8 bits needs widths that are multiples of 16, but this is {width}"
            yield (f"model.{name}", "model.fp8"), message, "model.fp8=null"


def _widths(model: ModelConfig, etp: int) -> dict[str, int]:
    """Key -> the width that it gives a product of a layer, on one of `etp` ranks that divide each expert."""
    heads = model.num_attention_heads
    widths = {"hidden_size": model.hidden_size, "ffn_hidden_size": model.ffn_hidden_size}
    if model.multi_latent_attention:
        turned = model.qk_pos_emb_head_dim
        widths |= {"qk_head_dim": heads * (model.qk_head_dim + turned), "v_head_dim": heads * model.v_head_dim}
        widths |= {"kv_lora_rank": model.kv_lora_rank, "qk_pos_emb_head_dim": model.kv_lora_rank + turned}
        widths |= {"q_lora_rank": model.q_lora_rank or 0}
    else:
        width = model.head_dim
        widths |= {"num_query_groups": width * model.query_groups, "num_attention_heads": width * heads}
    if model.num_moe_experts is not None:
        widths |= {"moe_ffn_hidden_size": model.expert_width // etp}
        widths |= {"moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size or 0}
    return widths


def _loss_scale(config: RunConfig) -> Iterator[Finding]:
    optim = config.optim
    for field in _LOSS_SCALE if optim.loss_scale is not None else ():
        key = f"optim.{field}"
        if config[key] != (usual := text_keys()[key].default):
            yield (key, "optim.loss_scale"), f"{key} moves a scale, but optim.loss_scale fixes it", as_typed(key, usual)
    if optim.initial_loss_scale < optim.min_loss_scale:
        keys = ("optim.initial_loss_scale", "optim.min_loss_scale")
        yield keys, "the initial loss scale is below its minimum", f"optim.initial_loss_scale={optim.min_loss_scale}"
