"""Parity: a job's stages, samples and microbatches on one rank; and how far two jobs may differ."""

from __future__ import annotations

from collections.abc import Callable

from ppctl.config.keys import keys_with, text_keys, value_text
from ppctl.config.precision import autocast_dtype, weight_dtype
from ppctl.config.schema import RunConfig
from ppctl.geometry.canonical_names import embedding_uses, stack_of, stage_parameters, uses_of_embedding
from ppctl.plan.plan import Plan
from ppctl.plan.split_options import WITHOUT

_LAW = {"float64": 1e-12, "float32": 1e-6}
"""The allowed max |a - b| / max |a| of a tensor if axes change the order of a sum."""
_ROUNDING = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""The distance from 1 to the next number."""
_LATER = 1e3
"""The factor by which gradients of later steps may differ more: the optimizer divides by the size of each gradient."""

_COMPUTED = ("model", "data", "train", "optim")
_ENDS = ("train.steps", "train.exit_after")

_TRACKED = ("log.tensorboard=true", "log.wandb=true")

WHOLE = ("tp", "cp", "dp", "ep", "etp")
"""Axes that change the order of a sum."""


def kept_as(steps: int) -> list[str]:
    """Overrides by which a run does `steps` steps from its beginning, and keeps only what is compared."""
    return [
        f"train.steps={steps}",
        "train.samples=null",
        "train.tokens=null",
        "train.epochs=null",
        "train.callbacks=null",
        f"log.gradients=1:{steps + 1}",
        "log.trace=null",
        "log.torch_profile=null",
        "log.tensorboard=false",
        "log.wandb=false",
        *(f"{name}=null" for name, key in keys_with("needs").items() if key.facts.needs in _TRACKED),
        "train.eval_interval=0",
        "train.exit_after=null",
        "train.check_replicas=0",
        "checkpoint.interval=0",
        "log.interval=1",
        "checkpoint.local=null",
        "checkpoint.local_every=0",
        "checkpoint.local_replicas=0",
        "launch.target=local",
    ]


def in_one_process(plan: Plan) -> list[str]:
    """Overrides that put all stages of `plan` on one rank: the same microbatches of the same global batch."""
    stages = len(plan.stages)
    chunks = [f"vpp={stages}", "pipeline.pp_schedule=interleaved_1f1b"] if stages > 1 else ["vpp=null"]
    return [
        *("nodes=null", "gpus_per_node=null", "pp=1", *chunks, *([] if stages > 1 else ["pipeline.pp_schedule=1f1b"])),
        *("tp=1", "cp=1", "ep=1", "etp=null", "dp=1", "sp=false"),
        f"layout={plan.layout}",
        *(f"{key}={value_text(off)}" for key, off in WITHOUT.items()),
        "parallel.overlap_moe_expert_parallel_comm=false",
        "parallel.delay_wgrad_compute=false",
        "parallel.hierarchical_context_parallel_sizes=null",
        "parallel.data_parallel_sharding=none",
        "parallel.expert_dispatch=auto",
        "parallel.microbatch_group_size_per_vp_stage=null",
        "pipeline.pp_schedule_csv=null",
        "pipeline.schedule_memory=null",
        "pipeline.put_off_limit=null",
        "pipeline.extra_warmup=0",
        "pipeline.p2p_capacity=null",
    ]


def other_keys(one: RunConfig, other: RunConfig) -> list[str]:
    """The keys with different values that change what is computed, not only where or for how long."""
    return [
        name
        for name in text_keys()
        if name.partition(".")[0] in _COMPUTED and name not in _ENDS and one[name] != other[name]
    ]


def axes_that_differ(one: Plan, other: Plan) -> list[str]:
    """The axes along which the two plans sum in different orders, as `tp 2`."""
    pairs = [(axis, getattr(one.sizes, axis), getattr(other.sizes, axis)) for axis in WHOLE]
    return [f"{axis} {b if b != 1 else a}" for axis, a, b in pairs if a != b]


def tolerance(one: Plan, other: Plan, config: RunConfig, *, first: bool) -> float:
    """The allowed difference of a gradient, max |a - b| / max |a|. It is 0 if no axis differs, since bits are equal.
    Else sums have another order: 1e-6 in float32, 1e-12 in float64, more in narrower dtypes, in proportion to their
    rounding. `first` is for the first step, which begins with equal weights; later steps may differ more."""
    if not axes_that_differ(one, other):
        return 0.0
    dtype = autocast_dtype(config.parallel) or weight_dtype(config.parallel)
    law = _LAW.get(dtype) or _LAW["float32"] * _ROUNDING[dtype] / _ROUNDING["float32"]
    return law if first else min(_LATER * law, 0.5)


def place_of(plan: Plan, config: RunConfig) -> Callable[[str], tuple[int, int]]:
    """Return a function: a gradient's name -> (its stage, its number in the order of forwards), or (-1, -1)."""
    names = [(name, spec.stage) for spec in plan.stages for name in stage_parameters(config.model, spec.layers)]
    places = {name: (stage, number) for number, (name, stage) in enumerate(names)}
    return lambda name: places.get(name, places.get(stack_of(name), (-1, -1)))


def uses_of_shared(plan: Plan, config: RunConfig) -> list[str]:
    """The names under which the model uses its token embedding, whose gradients are summed; none if it has one use."""
    used = {name for spec in plan.stages for name in embedding_uses(config.model, spec.layers)}
    return [name for name in uses_of_embedding(config.model) if name in used] if len(used) > 1 else []
