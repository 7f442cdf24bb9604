"""Rules on how a model is divided and run: recomputation, offloading, messages, schedules, whole matrices.

The layers of stages are in `plan/layout_choice.py`, the recomputed ones in `geometry/layers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppctl.config.keys import Finding, as_typed, did_you_mean, nearest
from ppctl.config.schema import ModelConfig, ParallelConfig, RunConfig
from ppctl.schedule.policies import AUTO, POLICIES, SPELLINGS, fitting_policy, schedule_policy

MODULES = ("core_attn", "mlp", "moe", "experts", "moe_act", "layernorm", "mla_up_proj")
BESIDE_COMPILED = ("core_attn", "moe", "experts")
"""Modules that `train.compile` leaves out of its graphs, always or if they are recomputed."""

SWITCH, LAYERS = "parallel.cpu_offloading", "parallel.cpu_offloading_num_layers"
_ACTIVATIONS = "parallel.cpu_offloading_activations"

_OPTIMIZER = "optim.name"

_BATCH, _OVERLAP = "parallel.batch_p2p_comm", "parallel.overlap_p2p_comm"
TRANSPORT = "launch.transport"


def muon(config: RunConfig) -> Iterator[Finding]:
    """Findings about divided matrices under Muon, which needs weight, gradient and momentum whole on one rank."""
    if config.optim.name != "muon":
        return
    parallel = config.parallel
    for axis in ("tensor_model", "expert_tensor"):
        key = f"parallel.{axis}_parallel_size"
        if (getattr(parallel, f"{axis}_parallel_size") or 1) > 1:
            message = "Muon needs whole matrices, but tensor parallelism splits them"
            yield (key, _OPTIMIZER), message, f"{key}=1\n{_OPTIMIZER}=adamw"
    if config.model.lora:
        message = "Muon orthogonalises whole weights, but an adapter is a product of two factors"
        yield (_OPTIMIZER, "model.lora"), message, f"{_OPTIMIZER}=adamw"


def is_plain(config: RunConfig) -> bool:
    """Whether messages travel over the pipeline's process group alone (decision 79). With launch.device=any this is
    unknown before the run, whose config then has `cuda` or `cpu`."""
    launch = config.launch
    return launch.transport == "plain" or (launch.transport == "auto" and launch.device == "cuda")


def in_batches(config: RunConfig) -> bool:
    """Whether a rank waits for neighbouring messages as one batch, instead of computing while they travel."""
    return is_plain(config) or _asks_for_batches(config.parallel)


def _asks_for_batches(parallel: ParallelConfig) -> bool:
    return parallel.batch_p2p_comm or not parallel.overlap_p2p_comm


def messages(config: RunConfig) -> Iterator[Finding]:
    """Rules on how messages between stages travel."""
    parallel, backend = config.parallel, "parallel.pipeline_model_parallel_comm_backend"
    if parallel.overlap_p2p_comm and parallel.batch_p2p_comm:
        message = "a rank waits for each batch of messages: they cannot overlap with computation"
        yield (_BATCH, _OVERLAP), message, f"{_OVERLAP}=false"
    if parallel.batch_p2p_sync and not parallel.batch_p2p_comm:
        message = "batch_p2p_sync synchronises after the batches of batch_p2p_comm, which is off"
        yield ("parallel.batch_p2p_sync", _BATCH), message, "parallel.batch_p2p_sync=false"
    if config.pipeline.p2p_capacity is not None and in_batches(config):
        message = "in batches no message overlaps with computation, so a capacity has no effect"
        keys = ("pipeline.p2p_capacity", TRANSPORT, _BATCH, _OVERLAP)
        mended = "" if _asks_for_batches(parallel) else f"\n{TRANSPORT}=channels"
        yield keys, message, f"pipeline.p2p_capacity=null{mended}"
    if parallel.batch_p2p_comm and config.launch.transport == "channels":
        message = "batch_p2p_comm fuses messages on the pipeline's process group, but channels have connections each"
        yield (_BATCH, TRANSPORT), message, f"{TRANSPORT}=auto\n{_BATCH}=false"
    if parallel.pipeline_model_parallel_comm_backend == "nccl" and config.launch.device == "cpu":
        message = "NCCL sends tensors of GPUs, but the device is the CPU"
        yield (backend, "launch.device"), message, f"{backend}=null"


def recompute(config: RunConfig) -> Iterator[Finding]:
    """Findings about recomputation with torch.compile, and about recomputed modules that the model lacks."""
    named = config.train.recompute_modules or ()
    compiled = [module for module in named if module in MODULES and module not in BESIDE_COMPILED]
    if config.train.compile and config.train.recompute_granularity == "selective" and compiled:
        inside = f"{' and '.join(compiled)} {'lies' if len(compiled) == 1 else 'lie'}"
        message = (
            f"{inside} inside the graphs that torch.compile compiles, but the compiler itself decides what these keep"
        )
        keeping = as_typed("train.recompute_modules", [each for each in named if each in BESIDE_COMPILED] or None)
        yield ("train.compile", "train.recompute_modules"), message, f"{keeping}\ntrain.compile=false"
    yield from _modules(config)


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
    missing: dict[str, str] = {}
    if model.num_moe_experts is None:
        missing |= dict.fromkeys(("moe", "experts", "moe_act"), "model.num_moe_experts is null")
    if not model.multi_latent_attention:
        missing["mla_up_proj"] = "model.multi_latent_attention is false"
    return missing


def offloading(config: RunConfig) -> Iterator[Finding]:
    """Findings about `cpu_offloading` that moves nothing. Unlike Megatron, ppctl allows several stages."""
    parallel = config.parallel
    if not parallel.cpu_offloading_activations:
        message = f"without {_ACTIVATIONS} there is nothing that {SWITCH} could move"
        yield (_ACTIVATIONS, SWITCH), message, f"{_ACTIVATIONS}=true"
    if not parallel.cpu_offloading:
        return
    if not parallel.cpu_offloading_num_layers:
        message = f"{SWITCH} moves the first layers of every stage, but their number is 0"
        yield (SWITCH, LAYERS), message, f"{LAYERS}=1"
    if config.train.compile:
        message = "torch.compile decides what a layer keeps, which then cannot be moved to the host"
        yield ("train.compile", SWITCH), message, "train.compile=false"


def schedule(config: RunConfig) -> Iterator[Finding]:
    """Findings about an unknown schedule, and about keys that do not apply to the schedule."""
    name, memory = config.pipeline.pp_schedule, config.pipeline.schedule_memory
    if memory is not None and (config.pipeline.pp_schedule_csv is not None or schedule_policy(name) != AUTO):
        message = f"pipeline.schedule_memory={memory} is a limit for a search, but no schedule is searched for"
        remedy = f"pipeline.pp_schedule={AUTO}" if config.pipeline.pp_schedule_csv is None else None
        unset = "pipeline.schedule_memory=null"
        yield ("pipeline.schedule_memory", "pipeline.pp_schedule"), message, "\n".join(filter(None, (remedy, unset)))
    yield from _deferred_limit(config)
    if config.pipeline.pp_schedule_csv is not None and name is None:
        return
    if schedule_policy(name) is None:
        abstract = (name or "").lower() in ("pipelineschedulesingle", "pipelineschedulemulti")  # torch's base classes
        hint = ": that is a kind of schedule" if abstract else did_you_mean(str(name), SPELLINGS)
        fitting = fitting_policy(config.parallel.virtual_pipeline_model_parallel_size or 1)
        begun = [each for each in SPELLINGS if name and each.startswith(name.lower())]
        close = [*nearest(str(name), SPELLINGS), *begun, fitting]
        yield ("pipeline.pp_schedule",), f"there is no schedule {name}{hint}", f"pipeline.pp_schedule={close[0]}"


def _deferred_limit(config: RunConfig) -> Iterator[Finding]:
    limit, file = config.pipeline.put_off_limit, config.pipeline.pp_schedule_csv
    policy = POLICIES.get(schedule_policy(config.pipeline.pp_schedule) or "") if file is None else None
    if limit is not None and (policy is None or not policy.splits):
        name = config.pipeline.pp_schedule if file is None else "of a file"
        named = ", ".join(name for name, policy in POLICIES.items() if policy.splits)
        message = f"pipeline.put_off_limit={limit} is for schedules that split backwards ({named}), not schedule {name}"
        yield ("pipeline.put_off_limit", "pipeline.pp_schedule"), message, "pipeline.put_off_limit=null"


def exchanging_layers(config: RunConfig) -> Iterator[Finding]:
    """Findings about settings that need whole logits or whole graphs, which layers that communicate do not have."""
    tensor = "parallel.tensor_model_parallel_size"
    if config.pipeline.loss_fn is not None and config.parallel.tensor_model_parallel_size > 1:
        message = (
            "loss_fn needs the logits of the whole vocabulary, but each tensor-parallel rank has only a part of them"
        )
        yield ("pipeline.loss_fn", tensor), message, "tp=1"
