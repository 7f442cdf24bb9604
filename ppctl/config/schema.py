"""The closed configuration: one dataclass per group, and RunConfig that holds them.

Knows every key, its type, its default, what a value may be on its own (`limits.py`) and what it means. Must not know
Hydra, files, the command line or derived values: rules between values live in `checks.py`, derivations in
`ppctl/plan`. Torch-free; both towers read these types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ppctl.accelerators import DEVICES
from ppctl.config.limits import (
    MOST_CAPACITY,
    MOST_HEADS,
    MOST_IN_A_MICROBATCH,
    MOST_INNER_WIDTH,
    MOST_PREDICTED,
    MOST_RANKS,
    MOST_SAMPLES,
    MOST_STAGES,
    MOST_TOKENS,
    MOST_VOCABULARY,
    MOST_WIDTH,
    MOST_WORKSPACE_MIB,
    below_one,
    not_empty,
    not_negative,
    one_of,
    positive,
)
from ppctl.config.model_parallel_config import ModelParallelConfig
from ppctl.config.pipeline_config import PipelineConfig


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The decoder, in Megatron's names."""

    from_: str | None = field(default=None, metadata=not_empty())
    """Where sizes and first weights come from: a Hugging Face directory, a checkpoint or a run; none draws weights."""
    num_layers: int = field(default=8, metadata=positive(MOST_STAGES))
    """Decoder layers, MTP layers not counted."""
    hidden_size: int = field(default=256, metadata=positive(MOST_WIDTH))
    """Width of the residual stream."""
    ffn_hidden_size: int = field(default=704, metadata=positive(MOST_INNER_WIDTH))
    """Width of the dense feed-forward."""
    gated_linear_unit: bool = True
    """SwiGLU (gate, up, down); false: two matrices with an activation between them, as GPT-3."""
    add_bias_linear: bool = False
    """Biases on every linear layer, as GPT-3."""
    normalization: str = field(default="RMSNorm", metadata=one_of("RMSNorm", "LayerNorm"))
    """`RMSNorm`, or `LayerNorm` (with a bias, as GPT-3)."""
    num_attention_heads: int = field(default=8, metadata=positive(MOST_HEADS))
    """Query heads."""
    num_query_groups: int | None = field(default=None, metadata=positive(MOST_HEADS))
    """Key/value heads (GQA); none means num_attention_heads."""
    kv_channels: int | None = field(default=None, metadata=positive(MOST_HEADS))
    """Width of one head; none means hidden_size / num_attention_heads."""
    vocab_size: int = field(default=320, metadata=positive(MOST_VOCABULARY))
    """Rows of the embedding and of the output projection, padding included."""
    max_position_embeddings: int = field(default=4096, metadata=positive(MOST_TOKENS))
    """Longest sequence that the model is meant for."""
    position_embedding_type: str = field(default="rope", metadata=one_of("rope", "learned_absolute"))
    """`rope`, or `learned_absolute`: a table of max_position_embeddings rows beside the embedding, as GPT-3."""
    rotary_base: float = field(default=10000.0, metadata=positive())
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = field(default=1.0, metadata=positive(1))
    """Share of every head that is turned, from its first dimension on (not of MLA's heads)."""
    rotary_interleaved: bool = False
    """Pairs that turn together are neighbours (DeepSeek) instead of half a head apart (Llama)."""
    rotary_scaling_factor: float | None = field(default=None, metadata=positive())
    """How many times longer the context is made; none leaves RoPE unscaled."""
    rotary_scaling_type: str = field(default="yarn", metadata=one_of("yarn", "llama3"))
    """How it is made longer: `yarn`, or `llama3` as Llama 3.1 does."""
    original_max_position_embeddings: int = field(default=4096, metadata=positive(MOST_TOKENS))
    """Longest sequence before the extension."""
    beta_fast: float = field(default=32.0, metadata=positive())
    """Frequencies that turn more often than this within the original length are kept (llama3: high_freq_factor)."""
    beta_slow: float = field(default=1.0, metadata=positive())
    """Those that turn less often than this are divided by the factor, and those between in part (llama3:
    low_freq_factor)."""
    mscale: float = field(default=1.0, metadata=not_negative())
    """YaRN: weight of ln(factor) in the magnitude of the rotary tables."""
    mscale_all_dim: float = field(default=0.0, metadata=not_negative())
    """YaRN: weight of ln(factor) that is taken out of the tables and put on MLA's whole attention, squared."""
    norm_epsilon: float = field(default=1e-5, metadata=positive())
    """Added to the mean square inside RMSNorm."""
    init_method_std: float = field(default=0.02, metadata=not_negative())
    """Standard deviation of initial weights."""
    share_embeddings_and_output_weights: bool = False
    """Tie the output projection to the token embedding."""
    add_qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    qk_layernorm: bool = False
    """RMSNorm on every query and key head."""
    attention_backend: str = field(default="auto", metadata=one_of("auto", "fused", "flash", "unfused"))
    """`auto` and `flash` keep no scores for the backward; `unfused` keeps them, [heads, s, s] per sequence."""
    attention_dropout: float = field(default=0.0, metadata=below_one())
    """Share of attention probabilities that is dropped."""
    hidden_dropout: float = field(default=0.0, metadata=below_one())
    """Share of each block's output that is dropped."""
    # Multi-head latent attention
    multi_latent_attention: bool = False
    """Keys and values from a compressed latent (MLA) in place of grouped heads."""
    q_lora_rank: int | None = field(default=None, metadata=positive(MOST_WIDTH))
    """MLA: width of the compressed query; none projects queries directly."""
    kv_lora_rank: int = field(default=512, metadata=positive(MOST_WIDTH))
    """MLA: width of the compressed keys and values."""
    qk_head_dim: int = field(default=128, metadata=positive(MOST_HEADS))
    """MLA: width of a head without positions."""
    qk_pos_emb_head_dim: int = field(default=64, metadata=positive(MOST_HEADS))
    """MLA: width of a head that carries positions."""
    v_head_dim: int = field(default=128, metadata=positive(MOST_HEADS))
    """MLA: width of a value head."""
    # Mixture of experts
    num_moe_experts: int | None = field(default=None, metadata=positive(MOST_HEADS))
    """Routed experts of an MoE layer; none makes every layer dense."""
    moe_router_topk: int = field(default=2, metadata=positive(MOST_HEADS))
    """Experts that a token goes to."""
    moe_ffn_hidden_size: int | None = field(default=None, metadata=positive(MOST_INNER_WIDTH))
    """Width of one expert; none means ffn_hidden_size."""
    moe_shared_expert_intermediate_size: int | None = field(default=None, metadata=positive(MOST_INNER_WIDTH))
    """Total width of the shared experts; none means no shared expert."""
    moe_layer_freq: Any = 1
    """1: every layer is MoE; N: every N-th; a list of 0/1 or Megatron's expression, as "[0]*3+[1]*58"."""
    moe_router_score_function: str = field(default="softmax", metadata=one_of("softmax", "sigmoid"))
    """How scores are normalised: `softmax` or `sigmoid`."""
    moe_router_pre_softmax: bool = False
    """Softmax: the chosen experts' weights are their shares of all experts', and do not add up to 1."""
    moe_router_enable_expert_bias: bool = False
    """Balance experts by a bias on their scores instead of by a loss."""
    moe_router_bias_update_rate: float = field(default=1e-3, metadata=not_negative())
    """How far that bias moves in one step."""
    moe_router_num_groups: int | None = field(default=None, metadata=positive(MOST_HEADS))
    """Groups that the experts are divided into for group-limited routing."""
    moe_router_group_topk: int | None = field(default=None, metadata=positive(MOST_HEADS))
    """Groups that a token may use."""
    moe_router_topk_scaling_factor: float | None = field(default=None, metadata=positive())
    """Factor on the chosen experts' weights."""
    moe_router_load_balancing_type: str = field(default="aux_loss", metadata=one_of("aux_loss", "seq_aux_loss", "none"))
    """`aux_loss`, `seq_aux_loss` (per sequence) or `none`."""
    moe_aux_loss_coeff: float = field(default=0.0, metadata=not_negative())
    """Weight of the balancing loss."""
    moe_z_loss_coeff: float | None = field(default=None, metadata=not_negative())
    """Weight of the loss on the size of router logits."""
    # Multi-token prediction
    mtp_num_layers: int | None = field(default=None, metadata=not_negative(MOST_PREDICTED))
    """Multi-token prediction layers after the decoder; none means none."""
    mtp_loss_scaling_factor: float = field(default=0.1, metadata=not_negative())
    """Weight of the MTP losses."""


@dataclass(kw_only=True, slots=True)
class ParallelConfig(ModelParallelConfig):
    """Megatron's ModelParallelConfig, the layout and the data-parallel size."""

    data_parallel_size: int | None = field(default=None, metadata=positive(MOST_RANKS))
    """None derives it: world / (tp x cp x pp)."""
    pipeline_model_parallel_layout: Any = None
    """A layout string, a list of stages, `auto`, `@file`; none is the even split."""
    num_layers_in_first_pipeline_stage: int | None = field(default=None, metadata=positive(MOST_STAGES))
    """Decoder layers on the first pp_rank (all its chunks); the others share the rest evenly. Compiled to a layout."""
    num_layers_in_last_pipeline_stage: int | None = field(default=None, metadata=positive(MOST_STAGES))
    """Decoder layers on the last pp_rank (all its chunks); the others share the rest evenly. Compiled to a layout."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer in the even split. Compiled to a layout."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the loss as one layer in the even split. Compiled to a layout."""
    num_layers_per_virtual_pipeline_stage: int | None = field(default=None, metadata=positive(MOST_STAGES))
    """Decoder layers of one chunk in the even split, which gives vpp. Compiled to a layout."""
    data_parallel_sharding: str = field(default="none", metadata=one_of("none", "optimizer_gradients", "full"))
    """What the ranks of a data-parallel group share out: `none`, `optimizer_gradients`, or `full` (weights as well)."""

    def __post_init__(self) -> None:
        """Neither raise nor fill in: `checks.py` reports all problems at once, and the plan derives."""


@dataclass(kw_only=True, slots=True)
class RunPipelineConfig(PipelineConfig):
    """NeMo's PipelineConfig and the engine's own settings."""

    p2p_capacity: int | None = field(default=None, metadata=positive(MOST_CAPACITY))
    """Messages under way per channel (posted receives plus outstanding sends); none lets the plan choose."""
    extra_warmup: Any = 0
    """Forwards in flight beyond the textbook warm-up, at most pp - 1 - r on rank r; `auto` chooses by simulation."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """What is read and how long a sample is."""

    path: str | list[Any] | None = field(default=None, metadata=not_empty())
    """Glob of .txt and .jsonl files, prefix of a .bin and .idx, or a blend of such with weights, as "[0.3,a,0.7,b]" or
    rows of {path, weight}; none reads the running interpreter's standard library sources."""
    tokenizer: str = field(default="byte", metadata=not_empty())
    """`byte`: every byte is a token; else a directory with a tokenizer.json. Unsaid, it is that of model.from."""
    validation_path: str | list[Any] | None = field(default=None, metadata=not_empty())
    """What evaluation reads, written as data.path; none holds out a share of data.path."""
    validation_split: float = field(default=0.0, metadata=below_one())
    """Share of the samples of data.path that is held out, from the end of each corpus; training never reads it."""
    seq_length: int = field(default=256, metadata=positive(MOST_TOKENS))
    """Tokens per sample."""
    reset_position_ids: bool = False
    """Count positions anew in every document of a sample; `data.tokenizer` says which token ends one."""
    reset_attention_mask: bool = False
    """Let no token attend to another document of its sample, nor multi-token prediction look into one."""
    eod_mask_loss: bool = False
    """Leave out the loss of what follows the mark at a document's end."""


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = field(default=3e-4, metadata=positive())
    """Peak learning rate."""
    min_lr: float = field(default=0.0, metadata=not_negative())
    """Learning rate at the end of the cosine."""
    warmup_steps: int = field(default=0, metadata=not_negative())
    """Updates over which the learning rate rises linearly. Neither this nor the cosine moves on in a step that fp16
    leaves out."""
    weight_decay: float = field(default=0.1, metadata=not_negative())
    """Not applied to norms, biases and embeddings."""
    beta1: float = field(default=0.9, metadata=below_one())
    """Decay of the running mean of gradients."""
    beta2: float = field(default=0.95, metadata=below_one())
    """Decay of the running mean of squared gradients."""
    eps: float = field(default=1e-8, metadata=positive())
    """Added to the denominator of an update."""
    clip_grad: float = field(default=1.0, metadata=not_negative())
    """Largest global gradient norm; 0 does not clip."""
    loss_scale: float | None = field(default=None, metadata=positive())
    """fp16: a fixed factor on the loss; none moves it by the rule below."""
    initial_loss_scale: float = field(default=2.0**32, metadata=positive())
    """fp16: the factor that a run starts with; the first steps overflow until it fits, and are left out."""
    min_loss_scale: float = field(default=1.0, metadata=positive())
    """fp16: the factor never falls below it."""
    loss_scale_window: int = field(default=1000, metadata=positive())
    """fp16: steps without overflow after which the factor doubles."""
    hysteresis: int = field(default=2, metadata=positive())
    """fp16: overflows before the factor is halved."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """How long and on how much."""

    steps: int = field(default=100, metadata=positive())
    """Optimizer steps of the whole run."""
    global_batch_size: int = field(default=8, metadata=positive(MOST_SAMPLES))
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int = field(default=1, metadata=positive(MOST_IN_A_MICROBATCH))
    """Sequences that one forward takes."""
    seed: int = field(default=1234, metadata=not_negative())
    """Seed of initial weights and of the order of samples."""
    eval_interval: int = field(default=0, metadata=not_negative())
    """Steps between evaluations, of which there is one after the last step too; 0 never evaluates."""
    eval_steps: int = field(default=0, metadata=not_negative())
    """Batches of one evaluation, always the same ones; a held-out sample is read once at most."""
    exit_after: str | None = None
    """Save and leave after this time, as 11h50m, counted from the start of rank 0; none runs to the last step."""
    compile: bool = False
    """Compile every layer with torch.compile: losses agree within a millionth, not to the bit."""
    recompute_granularity: str | None = None
    """Recompute activations in the backward instead of keeping them: `full` (layers) or `selective` (modules)."""
    recompute_method: str | None = None
    """full: `uniform` (the default) keeps every N-th layer's input; `block` recomputes a stage's first N layers."""
    recompute_num_layers: int | None = field(default=None, metadata=positive(MOST_STAGES))
    """full: that N; none means 1 for `uniform`, every layer for `block`."""
    recompute_modules: list[str] | None = None
    """selective: `core_attn`, `mlp`, `moe`, `moe_act`, `layernorm`, `mla_up_proj`; none means core_attn."""
    recompute_stages: list[int] | None = None
    """The stages (counted through the model from 0) that recompute; none means all."""
    nonfinite: str = field(default="stop", metadata=one_of("stop"))
    """What a non-finite loss or gradient norm does: `stop`."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When to save and what to start from."""

    interval: int = field(default=0, metadata=not_negative())
    """Steps between checkpoints; 0 saves at the end and on a signal only."""
    keep: int = field(default=2, metadata=not_negative())
    """How many checkpoints stay; 0 keeps all."""
    resume: str | None = field(default=None, metadata=not_empty())
    """A checkpoint directory (or a run) to start from."""


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    """Where the ranks run."""

    target: str = field(default="local", metadata=one_of("local", "slurm", "env"))
    """`local`, `slurm` or `env` (ranks started by others)."""
    device: str = field(default="cuda", metadata=one_of("cuda", "cpu", "any"))
    """`cuda`, `cpu`, or `any` (cuda where there are enough GPUs)."""
    nodes: int | None = field(default=None, metadata=positive(MOST_RANKS))
    """Machines; none means as many as the layout needs (one, where the run is local)."""
    gpus_per_node: int | None = field(default=None, metadata=positive(MOST_RANKS))
    """Ranks on each machine; none means as many as the layout needs."""
    device_memory: str | None = None
    """Memory of one device, as "80GiB"; none means that the plan is not held against a limit."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables set for every rank."""
    start_limit: str = "30m"
    """How long the ranks may take to start, a checkpoint's loading included; then the job ends, naming the culprit."""
    edge_limit: str = "2m"
    """How long one connection may take to answer, or one group to meet, when all are touched before the first step."""
    first_step_limit: str = "60m"
    """How long nothing may move in the first step (compilation), in a save, in an evaluation; then the job ends."""
    step_limit: str | None = None
    """How long nothing may move in later steps; none: ten times the slowest step so far, at least 2 minutes and at most
    the longest of the other limits."""
    account: str | None = None
    """SLURM: the account that pays (sbatch --account)."""
    qos: str | None = None
    """SLURM: the quality of service."""
    partition: str | None = None
    """SLURM: the partition, or several with commas."""
    time: str | None = None
    """SLURM: the job's time limit, as 30 (minutes), 12:00:00 or 2-00:00:00; none takes the partition's."""
    constraint: str | None = None
    """SLURM: features that every node must have."""
    exclusive: bool = False
    """SLURM: share no node with other jobs."""
    cpus_per_task: int | None = field(default=None, metadata=positive(MOST_RANKS))
    """SLURM: CPUs of one rank."""
    container_image: str | None = None
    """SLURM with pyxis: the image that the ranks run in."""
    container_mounts: list[str] | None = None
    """SLURM with pyxis: what is mounted there, as SRC:DST[:FLAGS]."""
    container_workdir: str | None = None
    """SLURM with pyxis: the directory to start in."""
    setup: list[str] | None = None
    """SLURM: lines of bash that the job's script runs first, as "module load cuda"."""
    health_check: str | None = None
    """SLURM: a command run once on every node first; a node where it fails is left out and the job requeued."""
    sbatch_args: list[str] | None = None
    """SLURM: further options of sbatch, as [--mail-type=END]."""
    srun_args: list[str] | None = None
    """SLURM: further options of the srun that starts the ranks."""
    after: str | None = None
    """SLURM: a run (directory, id, job number) that must have finished first."""
    python: str | None = None
    """SLURM: the interpreter that runs the ranks; none takes the one that submits."""
    code: str = field(default="pinned", metadata=one_of("pinned", "live"))
    """SLURM: `pinned` ends a job whose nodes hold other code of ppctl than was submitted; `live` takes any."""
    signal_lead: int = field(default=300, metadata=positive(10**7))
    """SLURM: seconds before the time limit at which the ranks are told to save and leave."""
    max_requeues: int = field(default=10, metadata=not_negative())
    """SLURM: how often the job may requeue itself."""


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """What is written about a run, and where."""

    name: str = field(default="run", metadata=not_empty())
    """Name of the run: a directory under `dir`."""
    dir: str = field(default="runs", metadata=not_empty())
    """Where run directories go."""
    tensorboard: bool = False
    """Write the keys of metrics.jsonl for TensorBoard as well."""
    wandb: bool = False
    """Send the keys of metrics.jsonl to Weights & Biases as well."""
    profile: bool = False
    """Write the measured costs of every stage."""


@dataclass(kw_only=True, slots=True)
class CostConfig:
    """What a plan is priced with. Changes what is predicted, never what is run."""

    device: str | None = field(default=None, metadata=one_of(*DEVICES, any_case=True))
    """A device preset: a100, h100, h800, h200, b200, b300, gb200, gb300, cpu; none takes h100, or cpu on the CPU."""
    profile: str | None = field(default=None, metadata=not_empty())
    """Measured costs of an earlier run, `@runs/.../profile.json`, in place of the preset's times."""
    allocator: str = field(default="torch", metadata=one_of("torch", "megatron", "megatron_te_2.11"))
    """Who keeps what: `torch` (ppctl's own blocks), `megatron` or `megatron_te_2.11` (Transformer Engine's)."""
    matmul: str | None = field(default=None, metadata=one_of("fp8", "bf16"))
    """Rate of the linear layers' products: `fp8` or `bf16`; none takes the weights' own. A what-if: training has no
    fp8."""
    cublas_workspace_mib: float | None = field(default=None, metadata=not_negative(MOST_WORKSPACE_MIB))
    """One cuBLAS workspace in MiB; none takes the preset's."""
    te_workspace_mib: float | None = field(default=None, metadata=not_negative(MOST_WORKSPACE_MIB))
    """One Transformer Engine workspace in MiB; none takes the preset's."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run: everything that the user says. Derived values are the plan's."""

    recipe: str | None = None
    """The recipe that the config started from."""
    scale: str | None = None
    """`smoke`: the recipe as a miniature of the same layout, layers and switches, for a laptop."""
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: RunPipelineConfig = field(default_factory=RunPipelineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    published: list[dict[str, Any]] = field(default_factory=list)
    """A recipe's table: rows of {what, published, here, why}."""
