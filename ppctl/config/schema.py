"""The closed configuration: one dataclass per group of keys, and RunConfig that holds them.

Groups with files of their own: `model_config`, `training_config`, `launch_config`; Megatron's and NeMo's fields:
`model_parallel_config`, `pipeline_config`. Importers take all of them from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from ppctl.config.launch_config import LaunchConfig, LogConfig
from ppctl.config.metadata import (
    ACTIVATIONS,
    MOST_CAPACITY,
    MOST_RANKS,
    MOST_SAMPLES,
    MOST_STAGES,
    MOST_WORKSPACE_MIB,
    NOT_EMPTY,
    RANK_ORDER,
    SHARE,
    attribute_of,
    key,
    not_negative,
    one_of,
    positive,
)
from ppctl.config.model_config import ModelConfig
from ppctl.config.model_parallel_config import ModelParallelConfig
from ppctl.config.pipeline_config import PipelineConfig
from ppctl.config.training_config import CheckpointConfig, DataConfig, OptimConfig, TrainConfig
from ppctl.host.accelerators import DEVICES, STACKS
from ppctl.topology import ORDER

__all__ = [
    "CheckpointConfig",
    "CostConfig",
    "DataConfig",
    "LaunchConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RunConfig",
    "RunPipelineConfig",
    "TrainConfig",
]


@dataclass(kw_only=True, slots=True)
class ParallelConfig(ModelParallelConfig):
    """Megatron's ModelParallelConfig, the layout and the data-parallel size."""

    data_parallel_size: int | None = key(None, positive(MOST_RANKS), names="dp")
    """None derives it: world / (tp x cp x pp)."""
    order: str = key(ORDER, RANK_ORDER)
    """Order in which ranks are numbered along the axes, neighbours first: tp, cp, ep, dp and pp, once each. For
    experts, etp takes the place of tp and edp that of dp."""
    pipeline_model_parallel_layout: Any = key(None, names="layout --pipeline-model-parallel-layout", lines=True)
    """A layout string, a list of stages, `auto`, `@file`; none is the even split."""
    num_layers_in_first_pipeline_stage: int | None = key(
        None,
        positive(MOST_STAGES),
        names="--decoder-first-pipeline-num-layers model.num_layers_in_first_pipeline_stage",
        layout=True,
    )
    """Decoder layers on the first pp_rank (all its chunks); the others share the rest evenly. Compiled to a layout."""
    num_layers_in_last_pipeline_stage: int | None = key(
        None,
        positive(MOST_STAGES),
        names="--decoder-last-pipeline-num-layers model.num_layers_in_last_pipeline_stage",
        layout=True,
    )
    """Decoder layers on the last pp_rank (all its chunks); the others share the rest evenly. Compiled to a layout."""
    account_for_embedding_in_pipeline_split: bool = key(
        False,
        names="--account-for-embedding-in-pipeline-split model.account_for_embedding_in_pipeline_split",
        layout=True,
    )
    """Count the embedding as one layer in the even split. Compiled to a layout."""
    account_for_loss_in_pipeline_split: bool = key(
        False, names="--account-for-loss-in-pipeline-split model.account_for_loss_in_pipeline_split", layout=True
    )
    """Count the loss as one layer in the even split. Compiled to a layout."""
    num_layers_per_virtual_pipeline_stage: int | None = key(
        None, positive(MOST_STAGES), names="--num-layers-per-virtual-pipeline-stage", layout=True
    )
    """Decoder layers of one chunk in the even split, which gives vpp. Compiled to a layout."""
    data_parallel_sharding: str = key(
        "none", one_of("none", "optimizer_gradients", "full"), known_as="--data-parallel-sharding-strategy"
    )
    """The tensors that data-parallel ranks shard: `none`, `optimizer_gradients`, or `full` (weights as well)."""
    expert_dispatch: str = key("auto", one_of("flat", "by_node", "auto"))
    """How tokens reach experts on other ranks: `flat` sends a copy for every expert straight to its rank, `by_node` one
    to each machine (launch.gpus_per_node) with some of a token's experts, and on from there; the bits are the same.
    `auto` is by_node wherever that is possible. Where fast links reach beyond a machine (NVL72) take `flat`."""

    def __post_init__(self) -> None:
        """Neither raise nor fill in: `checks.py` reports all problems at once, and the plan derives."""


@dataclass(kw_only=True, slots=True)
class RunPipelineConfig(PipelineConfig):
    """NeMo's PipelineConfig and the engine's own settings."""

    p2p_capacity: int | None = key(None, positive(MOST_CAPACITY))
    """Messages under way per channel (posted receives plus outstanding sends); none lets the plan choose."""
    extra_warmup: Any = 0
    """Forwards in flight beyond the textbook warm-up, at most pp - 1 - r on rank r; `auto` chooses by simulation."""
    schedule_memory: float | str | None = key(None, ACTIVATIONS)
    """For pp_schedule=auto: the activations that a rank may hold, as 60GiB; a number without a unit counts what 1F1B
    keeps on its first rank. None: what launch.device_memory leaves for them, and where that is none, 1."""
    put_off_limit: int | None = key(None, not_negative(MOST_SAMPLES))
    """For a schedule with split backwards: the weight gradients that a rank may defer at once. Of more the oldest is
    computed behind the input gradient that would be one too many; 0 defers none. None: what the schedule has."""


@dataclass(kw_only=True, slots=True)
class CostConfig:
    """How a plan is priced. Changes predictions only, never the run."""

    device: str | None = key(None, one_of(*DEVICES, any_case=True))
    """A device preset: a100, h100, h800, h200, b200, b300, gb200, gb300, cpu; none takes h100, or cpu on the CPU."""
    profile: str | None = key(None, NOT_EMPTY)
    """Measured costs of an earlier run, `@runs/.../profile.json`, in place of the preset's times."""
    stack: str = key("ppctl", one_of(*STACKS))
    """Whose program is priced: `ppctl` (what a run executes: its dispatch of tokens, its exchanges, nothing hidden but
    by pairs; uncalibrated) or `megatron` (the fused kernels and overlaps of Megatron-core, fitted to rows)."""
    allocator: str | None = key(None, one_of("torch", "megatron", "megatron_te_2.11"))
    """Whose activations to count: `torch` (ppctl's blocks), `megatron` or `megatron_te_2.11` (Transformer Engine); none
    takes those of cost.stack."""
    matmul: str | None = key(None, one_of("fp8", "mxfp8", "nvfp4", "bf16"))
    """Rate of the linear layers' products: `fp8`, `mxfp8`, `nvfp4` or `bf16`; none takes what training uses (model.fp8,
    else the weights' own)."""
    overlapped_link: float = key(0.8, SHARE)
    """The share of a link's rate that an exchange of experts reaches while the other half of a pair computes."""
    cublas_workspace_mib: float | None = key(None, not_negative(MOST_WORKSPACE_MIB))
    """One cuBLAS workspace in MiB; none takes the preset's."""
    te_workspace_mib: float | None = key(None, not_negative(MOST_WORKSPACE_MIB))
    """One Transformer Engine workspace in MiB; none takes the preset's."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run: everything that the user sets. Derived values are the plan's."""

    recipe: str | None = None
    """The recipe that the config started from."""
    scale: str | None = None
    """`smoke`: the recipe as a miniature of the same layout, layers and switches, for a laptop; `axes`: one of the same
    axes, kinds of layers and switches, with every parallel size above 1 made 2."""
    model: ModelConfig = key(ModelConfig, mathematics=True)
    parallel: ParallelConfig = key(ParallelConfig)
    pipeline: RunPipelineConfig = key(RunPipelineConfig)
    data: DataConfig = key(DataConfig, mathematics=True)
    optim: OptimConfig = key(OptimConfig, mathematics=True)
    train: TrainConfig = key(TrainConfig)
    checkpoint: CheckpointConfig = key(CheckpointConfig)
    launch: LaunchConfig = key(LaunchConfig)
    log: LogConfig = key(LogConfig)
    cost: CostConfig = key(CostConfig)
    published: list[dict[str, Any]] = key(list, lines=True)
    """A recipe's table: rows of {what, published, here, why}."""

    def __getitem__(self, name: str) -> Any:
        """The value of a dotted key, such as `train.steps`."""
        *path, field = name.split(".")
        return getattr(reduce(getattr, path, self), attribute_of(field))

    def __setitem__(self, name: str, value: Any) -> None:
        """Set the value of a dotted key."""
        *path, field = name.split(".")
        setattr(reduce(getattr, path, self), attribute_of(field), value)
