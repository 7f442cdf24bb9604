"""The closed configuration: one dataclass per group of keys, and RunConfig that holds them.

Groups with files of their own: `training_config`, `launch_config`; Megatron's and NeMo's fields:
`model_parallel_config`, `pipeline_config`. Importers take all of them from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from ppctl.config.launch_config import LaunchConfig, LogConfig
from ppctl.config.metadata import (
    ACTIVATIONS,
    BELOW_ONE,
    MOST_CAPACITY,
    MOST_HEADS,
    MOST_INNER_WIDTH,
    MOST_PREDICTED,
    MOST_RANKS,
    MOST_SAMPLES,
    MOST_STAGES,
    MOST_TOKENS,
    MOST_VOCABULARY,
    MOST_WIDTH,
    MOST_WORKSPACE_MIB,
    NOT_EMPTY,
    PYTHON_NAMES,
    RANK_ORDER,
    SHARE,
    attribute_of,
    each_of,
    key,
    not_negative,
    one_of,
    positive,
)
from ppctl.config.model_parallel_config import ModelParallelConfig
from ppctl.config.pieces import MTP_PIECES
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
class ModelConfig:
    """The decoder, in Megatron's names."""

    from_: str | None = key(None, NOT_EMPTY, verbatim=True, training=True)
    """Where sizes and first weights come from: a Hugging Face directory, a checkpoint or a run; none draws weights."""
    implementation: str = key("auto", one_of("auto", "ppctl", "transformers"), training=True)
    """Whose code runs the model of model.from: `transformers`, the model's own forward on every stage; `ppctl`, ppctl's
    blocks (fp8, tp, cp, ep; a dozen families); `auto`, ppctl's if it knows the family, else transformers'."""
    hf_overrides: dict[str, str] = key(dict, training=True)
    """Other values for fields of config.json, if the code is transformers': `model.hf_overrides.attn_pdrop=0`."""
    lora: dict[str, Any] = key(dict, training=True)
    """Train low-rank adapters beside frozen weights, if the code is transformers': `rank`, and `targets`, the names of
    modules that get an adapter, as `model.lora.rank=16 model.lora.targets=[q_proj,v_proj]`; `alpha`, by default rank;
    `layers`; `dropout`; and `modules_to_save`, the names of modules that are trained whole."""
    transformers: str | None = key(None, NOT_EMPTY, verbatim=True, training=True)
    """The description of a model whose code is transformers', as JSON. Set by model.from, never typed."""
    num_layers: int = key(8, positive(MOST_STAGES), names="--num-layers", known_as="--encoder-num-layers", layout=True)
    """Decoder layers, MTP layers not counted."""
    hidden_size: int = key(256, positive(MOST_WIDTH), names="--hidden-size")
    """Width of the residual stream."""
    ffn_hidden_size: int = key(704, positive(MOST_INNER_WIDTH), names="--ffn-hidden-size")
    """Width of the dense feed-forward."""
    gated_linear_unit: bool = key(True, known_as="--swiglu")
    """SwiGLU (gate, up, down); false: two matrices with GELU between them (its form with tanh), as GPT-3."""
    add_bias_linear: bool = False
    """Biases on every linear layer of attention and feed-forward, as GPT-3."""
    normalization: str = key("RMSNorm", one_of("RMSNorm", "LayerNorm"))
    """`RMSNorm`, or `LayerNorm` (with a bias, as GPT-3)."""
    num_attention_heads: int = key(8, positive(MOST_HEADS), names="--num-attention-heads")
    """Query heads."""
    num_query_groups: int | None = key(None, positive(MOST_HEADS), names="--num-query-groups")
    """Key/value heads (GQA); none means num_attention_heads."""
    kv_channels: int | None = key(None, positive(MOST_HEADS), names="--kv-channels")
    """Width of one head; none means hidden_size / num_attention_heads."""
    vocab_size: int = key(320, positive(MOST_VOCABULARY), names="--vocab-size")
    """Rows of the embedding and of the output projection, padding included. If nothing sets it, it is the number of
    tokens of data.tokenizer."""
    make_vocab_size_divisible_by: int = key(
        1, positive(MOST_VOCABULARY), names="--make-vocab-size-divisible-by", training=True
    )
    """vocab_size is rounded up to a multiple of this times tp, as Megatron does (a vocab_size of model.from is not
    rounded)."""
    max_position_embeddings: int = key(4096, positive(MOST_TOKENS), names="--max-position-embeddings")
    """Longest sequence that the model supports."""
    position_embedding_type: str = key("rope", one_of("rope", "learned_absolute"))
    """`rope`, or `learned_absolute`: a table of max_position_embeddings rows beside the embedding, as GPT-3."""
    rotary_base: float = key(10000.0, positive())
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = key(1.0, positive(1), needs="model.multi_latent_attention=false")
    """Fraction of every head that is rotated, from its first dimension on (not for MLA)."""
    rotary_interleaved: bool = False
    """Rotate pairs of neighbouring elements (DeepSeek) instead of elements half a head apart (Llama)."""
    rotary_scaling_factor: float | None = key(None, positive(), known_as="--rope-scaling-factor")
    """Factor by which the context is extended; none leaves RoPE unscaled."""
    rotary_scaling_type: str = key("yarn", one_of("yarn", "llama3"), needs="model.rotary_scaling_factor")
    """How the context is extended: `yarn`, or `llama3` as Llama 3.1 does."""
    original_max_position_embeddings: int = key(
        4096,
        positive(MOST_TOKENS),
        known_as="--yarn-original-max-position-embeddings",
        needs="model.rotary_scaling_factor",
    )
    """Longest sequence of the model before its context was extended (rotary_scaling_factor)."""
    beta_fast: float = key(32.0, positive(), known_as="--yarn-beta-fast", needs="model.rotary_scaling_factor")
    """Frequencies with more rotations than this within the original length are kept (llama3: high_freq_factor)."""
    beta_slow: float = key(1.0, positive(), known_as="--yarn-beta-slow", needs="model.rotary_scaling_factor")
    """Frequencies with fewer rotations are divided by the factor (llama3: low_freq_factor), others interpolated."""
    mscale: float = key(1.0, not_negative(), needs="model.rotary_scaling_factor")
    """YaRN: weight of ln(factor) in the magnitude of the rotary tables."""
    mscale_all_dim: float = key(0.0, not_negative(), needs="model.multi_latent_attention=true")
    """YaRN: weight of ln(factor) that is taken out of the tables and put on MLA's whole attention, squared."""
    norm_epsilon: float = key(1e-5, positive(), known_as="--layernorm-epsilon")
    """Added inside norms to the mean square, or to the variance."""
    init_method_std: float = key(0.02, not_negative(), training=True)
    """Standard deviation of initial weights."""
    share_embeddings_and_output_weights: bool = False
    """Tie the output projection to the token embedding."""
    add_qkv_bias: bool = key(False, needs="model.multi_latent_attention=false")
    """Biases on the query, key and value projections."""
    qk_layernorm: bool = False
    """A norm on every query and key head."""
    attention_backend: str = key(
        "auto", one_of("auto", "fused", "flash", "unfused"), names="--attention-backend", training=True
    )
    """`auto` takes the fastest kernel that fits (the run's first lines name it); `fused` takes cuDNN's or flash
    attention, `flash` only the latter; `unfused` computes step by step and keeps scores, [heads, s, s] per sequence."""
    kernels: list[str] | None = key(None, PYTHON_NAMES, training=True)
    """Kernels that are not ppctl's, as [package.module:name]: values of ppctl.Kernel, which ranks import from where
    Python finds them (PYTHONPATH). Of several for one role, the first that fits serves (docs/kernels.md)."""
    cp_comm_type: str | list[str] = key(
        "p2p", each_of(("p2p", "all_gather", "a2a", "a2a+p2p")), names="--cp-comm-type", training=True
    )
    """How ranks that share a sequence exchange it for attention; a list has one for all, or for each decoder layer.
    `p2p`: keys and values in a ring; `all_gather`: all at once; `a2a`: each rank gets whole sequences of some heads;
    `a2a+p2p`: a2a among neighbours, p2p between their groups (parallel.hierarchical_context_parallel_sizes)."""
    fp8: str | None = key(None, one_of("e4m3", "hybrid"), names="--fp8-format", training=True)
    """Products of the layers with weights in 8 bits: `e4m3`, or `hybrid` with gradients in e5m2; none: in the weights'
    dtype. Embedding, output, router and norms keep that dtype. A CPU emulates fp8. Plans count 16-bit activations."""
    fp8_recipe: str = key(
        "rowwise", one_of("rowwise", "blockwise"), names="--fp8-recipe", training=True, needs="model.fp8"
    )
    """Which values share a scale: `rowwise`, those of a row; `blockwise`, 1 x 128 of an activation and 128 x 128 of a
    weight. On a GPU, models with experts need `rowwise` and model.fp8=e4m3."""
    attention_dropout: float = key(0.0, BELOW_ONE, training=True)
    """Fraction of attention probabilities that is dropped; uses ppctl's own attention instead of fused kernels."""
    hidden_dropout: float = key(0.0, BELOW_ONE, training=True)
    """Fraction of each block's output, and of the embedding's, that is dropped."""
    # Multi-head latent attention
    multi_latent_attention: bool = False
    """Keys and values from a compressed latent (MLA) in place of grouped heads."""
    q_lora_rank: int | None = key(None, positive(MOST_WIDTH))
    """MLA: width of the compressed query; none projects queries directly."""
    kv_lora_rank: int = key(512, positive(MOST_WIDTH))
    """MLA: width of the compressed keys and values."""
    qk_head_dim: int = key(128, positive(MOST_HEADS))
    """MLA: width of a head without positions."""
    qk_pos_emb_head_dim: int = key(64, positive(MOST_HEADS))
    """MLA: width of a head that carries positions."""
    v_head_dim: int = key(128, positive(MOST_HEADS))
    """MLA: width of a value head."""
    # Mixture of experts
    num_moe_experts: int | None = key(None, positive(MOST_HEADS), names="--num-experts")
    """Routed experts of an MoE layer; none makes every layer dense."""
    moe_router_topk: int = key(2, positive(MOST_HEADS))
    """Experts per token."""
    moe_ffn_hidden_size: int | None = key(None, positive(MOST_INNER_WIDTH))
    """Width of one expert; none means ffn_hidden_size."""
    moe_shared_expert_intermediate_size: int | None = key(None, positive(MOST_INNER_WIDTH))
    """Total width of the shared experts; none means no shared expert."""
    moe_layer_freq: Any = 1
    """The layers that are MoE: 1, every one; N, every N-th; a list of 0/1, or an expression, as "[0]*3+[1]*58"."""
    moe_router_score_function: str = key("softmax", one_of("softmax", "sigmoid"))
    """How scores are normalised: `softmax` or `sigmoid`."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice, so that the chosen experts' weights do not add up to 1."""
    moe_router_enable_expert_bias: bool = False
    """Balance experts by a bias on their scores instead of by a loss."""
    moe_router_bias_update_rate: float = key(1e-3, not_negative(), training=True)
    """Step size of the bias of moe_router_enable_expert_bias."""
    moe_router_num_groups: int | None = key(None, positive(MOST_HEADS))
    """Groups that the experts are divided into for group-limited routing."""
    moe_router_group_topk: int | None = key(None, positive(MOST_HEADS))
    """Groups of experts that a token may be routed to."""
    moe_router_topk_scaling_factor: float | None = key(None, positive())
    """Factor on the chosen experts' weights."""
    moe_router_load_balancing_type: str = key("aux_loss", one_of("aux_loss", "seq_aux_loss", "none"), training=True)
    """The loss that balances experts: `aux_loss`, `seq_aux_loss` (per sequence) or `none`."""
    moe_aux_loss_coeff: float = key(0.0, not_negative(), training=True)
    """Weight of the balancing loss."""
    moe_z_loss_coeff: float | None = key(None, not_negative(), training=True)
    """Weight of the loss on the size of router logits."""
    # Multi-token prediction
    mtp_num_layers: int | None = key(None, not_negative(MOST_PREDICTED), names="--mtp-num-layers", layout=True)
    """Multi-token prediction layers after the decoder; none means none."""
    mtp_loss_scaling_factor: float = key(0.1, not_negative(), training=True)
    """Weight of the MTP losses in the training loss."""
    mtp_loss_scaling_pieces: list[Any] | None = key(None, MTP_PIECES, training=True)
    """Earlier weights: rows such as {until: "10T tokens", weight: 0.3}, in steps or tokens of the run."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head (not of MLA's)."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def expert_width(self) -> int:
        """Inner width of one routed expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def outputs(self) -> int:
        """Hidden states from which the loss layer computes logits: the decoder's, and one for each MTP module."""
        return 1 + (self.mtp_num_layers or 0)


@dataclass(kw_only=True, slots=True)
class ParallelConfig(ModelParallelConfig):
    """Megatron's ModelParallelConfig, the layout and the data-parallel size."""

    data_parallel_size: int | None = key(None, positive(MOST_RANKS), names="dp")
    """Replicas of the model (dp); none derives them: world / (tp x cp x pp)."""
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
    """Decoder layers of one chunk in the even split; vpp follows from them. Compiled to a layout."""
    data_parallel_sharding: str = key(
        "none", one_of("none", "optimizer_gradients", "full"), known_as="--data-parallel-sharding-strategy"
    )
    """The tensors that data-parallel ranks shard: `none`, `optimizer_gradients`, or `full` (weights as well)."""
    expert_dispatch: str = key("auto", one_of("flat", "by_node", "auto"))
    """How tokens reach experts on other ranks: `flat` sends a copy for every expert straight to the expert's rank;
    `by_node` sends one to each machine (launch.gpus_per_node) with some of a token's experts, which passes it on.
    Results are the same bits. `auto` is by_node if possible. If fast links join machines (NVL72), take `flat`."""

    def __post_init__(self) -> None:
        """Do nothing, unlike the base class: `checks.py` reports all problems together, and the plan derives values."""


@dataclass(kw_only=True, slots=True)
class RunPipelineConfig(PipelineConfig):
    """NeMo's PipelineConfig and the engine's own settings."""

    p2p_capacity: int | None = key(None, positive(MOST_CAPACITY))
    """Messages under way per channel (posted receives plus outstanding sends); none lets the plan choose."""
    extra_warmup: Any = 0
    """Forwards in flight beyond the textbook warm-up, at most pp - 1 - r on rank r; `auto` chooses by simulation."""
    schedule_memory: float | str | None = key(None, ACTIVATIONS)
    """For pp_schedule=auto: the activations that a rank may hold, as 60GiB; a number without a unit is a multiple of
    what 1F1B keeps on its first rank. None: what launch.device_memory leaves for them, or 1 if that is not set."""
    put_off_limit: int | None = key(None, not_negative(MOST_SAMPLES))
    """For a schedule with split backwards: the weight gradients that a rank may defer at once. After the input gradient
    that would make one too many, the oldest is computed; 0 defers none. None: what the schedule has."""


@dataclass(kw_only=True, slots=True)
class CostConfig:
    """How a plan is priced. Changes predictions only, never the run."""

    device: str | None = key(None, one_of(*DEVICES, any_case=True))
    """A device preset: a100, h100, h800, h200, b200, b300, gb200, gb300, cpu; none takes h100, or cpu on the CPU."""
    profile: str | None = key(None, NOT_EMPTY)
    """Measured costs of an earlier run, `@runs/.../profile.json`, in place of the preset's times."""
    stack: str = key("ppctl", one_of(*STACKS))
    """Whose program is priced: `ppctl` (what a run executes: its dispatch of tokens, its exchanges, hidden only by
    pairs; uncalibrated) or `megatron` (Megatron-core's fused kernels and overlaps, fitted to published figures)."""
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
