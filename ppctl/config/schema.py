"""The closed configuration: one dataclass per group, and RunConfig that holds them.

Knows every key, its type, its default and what it means. Must not know Hydra, files, the command line or derived
values: rules live in `checks.py`, derivations in `ppctl/plan`. Torch-free; both towers read these types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ppctl.config.model_parallel_config import ModelParallelConfig
from ppctl.config.pipeline_config import PipelineConfig


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The decoder, in Megatron's names."""

    num_layers: int = 8
    hidden_size: int = 256
    ffn_hidden_size: int = 704
    """Width of the dense SwiGLU feed-forward."""
    num_attention_heads: int = 8
    num_query_groups: int | None = None
    """Key/value heads (GQA); none means num_attention_heads."""
    kv_channels: int | None = None
    """Width of one head; none means hidden_size / num_attention_heads."""
    vocab_size: int = 320
    max_position_embeddings: int = 4096
    rotary_base: float = 10000.0
    norm_epsilon: float = 1e-5
    init_method_std: float = 0.02
    share_embeddings_and_output_weights: bool = False
    """Tie the output projection to the token embedding."""
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    # Multi-head latent attention
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    rotary_scaling_factor: float | None = None
    """YaRN context extension; none leaves RoPE unscaled."""
    # Mixture of experts
    num_moe_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    """Total width of the shared experts; none means no shared expert."""
    moe_layer_freq: Any = 1
    """1: every layer is MoE; N: every N-th; a list of 0/1 or Megatron's expression, as "[0]*3+[1]*58"."""
    moe_router_score_function: str = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_router_load_balancing_type: str = "aux_loss"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    # Multi-token prediction
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float = 0.1


@dataclass(kw_only=True, slots=True)
class ParallelConfig(ModelParallelConfig):
    """Megatron's ModelParallelConfig, the layout and the data-parallel size."""

    data_parallel_size: int | None = None
    """None derives it: world / (tp x cp x pp)."""
    pipeline_model_parallel_layout: Any = None
    """A layout string, a list of stages, `auto`, `@file`; none is the even split."""

    def __post_init__(self) -> None:
        """Neither raise nor fill in: `checks.py` reports all problems at once, and the plan derives."""


@dataclass(kw_only=True, slots=True)
class RunPipelineConfig(PipelineConfig):
    """NeMo's PipelineConfig and the engine's own settings."""

    p2p_capacity: int | None = None
    """Messages under way per channel (posted receives plus outstanding sends); none lets the plan choose."""
    extra_warmup: Any = 0
    """Forwards in flight beyond the textbook warm-up."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """What is read and how long a sample is."""

    path: str | None = None
    """Glob of .txt and .jsonl files; none reads the running interpreter's standard library sources."""
    tokenizer: str = "byte"
    seq_length: int = 256


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = 3e-4
    min_lr: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.1
    """Not applied to norms, biases and embeddings."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """How long and on how much."""

    steps: int = 100
    global_batch_size: int = 8
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int = 1
    seed: int = 1234
    eval_interval: int = 0
    eval_steps: int = 0
    compile: bool = False
    nonfinite: str = "stop"
    """What a non-finite loss or gradient norm does: `stop`."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When to save and what to start from."""

    interval: int = 0
    """Steps between checkpoints; 0 saves at the end and on a signal only."""
    keep: int = 2
    """How many checkpoints stay; 0 keeps all."""
    resume: str | None = None
    """A checkpoint directory (or a run) to start from."""


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    """Where the ranks run."""

    target: str = "local"
    """`local`, `slurm` or `env` (ranks started by others)."""
    device: str = "cuda"
    """`cuda`, `cpu`, or `any` (cuda where there are enough GPUs)."""
    nodes: int | None = None
    gpus_per_node: int | None = None
    device_memory: str | None = None
    """Memory of one device, as "80GiB"; none means that the plan is not held against a limit."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables set for every rank."""


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """What is written about a run, and where."""

    name: str = "run"
    dir: str = "runs"
    tensorboard: bool = False
    wandb: bool = False
    profile: bool = False


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run: everything that the user says. Derived values are the plan's."""

    recipe: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: RunPipelineConfig = field(default_factory=RunPipelineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    log: LogConfig = field(default_factory=LogConfig)
    published: list[dict[str, Any]] = field(default_factory=list)
    """A recipe's table: rows of {what, published, here, why}."""
