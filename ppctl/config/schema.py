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

    from_: str | None = None
    """Where sizes and first weights come from: a Hugging Face directory, a checkpoint or a run; none draws weights."""
    num_layers: int = 8
    """Decoder layers, MTP layers not counted."""
    hidden_size: int = 256
    """Width of the residual stream."""
    ffn_hidden_size: int = 704
    """Width of the dense feed-forward."""
    gated_linear_unit: bool = True
    """SwiGLU (gate, up, down); false: two matrices with an activation between them, as GPT-3."""
    add_bias_linear: bool = False
    """Biases on every linear layer, as GPT-3."""
    normalization: str = "RMSNorm"
    """`RMSNorm`, or `LayerNorm` (with a bias, as GPT-3)."""
    num_attention_heads: int = 8
    """Query heads."""
    num_query_groups: int | None = None
    """Key/value heads (GQA); none means num_attention_heads."""
    kv_channels: int | None = None
    """Width of one head; none means hidden_size / num_attention_heads."""
    vocab_size: int = 320
    """Rows of the embedding and of the output projection, padding included."""
    max_position_embeddings: int = 4096
    """Longest sequence that the model is meant for."""
    position_embedding_type: str = "rope"
    """`rope`, or `learned_absolute`: a table of max_position_embeddings rows beside the embedding, as GPT-3."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = 1.0
    """Share of every head that is turned, from its first dimension on (not of MLA's heads)."""
    rotary_interleaved: bool = False
    """Pairs that turn together are neighbours (DeepSeek) instead of half a head apart (Llama)."""
    rotary_scaling_factor: float | None = None
    """How many times longer the context is made; none leaves RoPE unscaled."""
    rotary_scaling_type: str = "yarn"
    """How it is made longer: `yarn`, or `llama3` as Llama 3.1 does."""
    original_max_position_embeddings: int = 4096
    """Longest sequence before the extension."""
    beta_fast: float = 32.0
    """Frequencies that turn more often than this within the original length are kept (llama3: high_freq_factor)."""
    beta_slow: float = 1.0
    """Those that turn less often than this are divided by the factor, and those between in part (llama3:
    low_freq_factor)."""
    mscale: float = 1.0
    """YaRN: weight of ln(factor) in the magnitude of the rotary tables."""
    mscale_all_dim: float = 0.0
    """YaRN: weight of ln(factor) that is taken out of the tables and put on MLA's whole attention, squared."""
    norm_epsilon: float = 1e-5
    """Added to the mean square inside RMSNorm."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights."""
    share_embeddings_and_output_weights: bool = False
    """Tie the output projection to the token embedding."""
    add_qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    qk_layernorm: bool = False
    """RMSNorm on every query and key head."""
    attention_backend: str = "auto"
    """`auto` and `flash` keep no scores for the backward; `unfused` keeps them, [heads, s, s] per sequence."""
    attention_dropout: float = 0.0
    """Share of attention probabilities that is dropped."""
    hidden_dropout: float = 0.0
    """Share of each block's output that is dropped."""
    # Multi-head latent attention
    multi_latent_attention: bool = False
    """Keys and values from a compressed latent (MLA) in place of grouped heads."""
    q_lora_rank: int | None = None
    """MLA: width of the compressed query; none projects queries directly."""
    kv_lora_rank: int = 512
    """MLA: width of the compressed keys and values."""
    qk_head_dim: int = 128
    """MLA: width of a head without positions."""
    qk_pos_emb_head_dim: int = 64
    """MLA: width of a head that carries positions."""
    v_head_dim: int = 128
    """MLA: width of a value head."""
    # Mixture of experts
    num_moe_experts: int | None = None
    """Routed experts of an MoE layer; none makes every layer dense."""
    moe_router_topk: int = 2
    """Experts that a token goes to."""
    moe_ffn_hidden_size: int | None = None
    """Width of one expert; none means ffn_hidden_size."""
    moe_shared_expert_intermediate_size: int | None = None
    """Total width of the shared experts; none means no shared expert."""
    moe_layer_freq: Any = 1
    """1: every layer is MoE; N: every N-th; a list of 0/1 or Megatron's expression, as "[0]*3+[1]*58"."""
    moe_router_score_function: str = "softmax"
    """How scores are normalised: `softmax` or `sigmoid`."""
    moe_router_pre_softmax: bool = False
    """Softmax: the chosen experts' weights are their shares of all experts', and do not add up to 1."""
    moe_router_enable_expert_bias: bool = False
    """Balance experts by a bias on their scores instead of by a loss."""
    moe_router_bias_update_rate: float = 1e-3
    """How far that bias moves in one step."""
    moe_router_num_groups: int | None = None
    """Groups that the experts are divided into for group-limited routing."""
    moe_router_group_topk: int | None = None
    """Groups that a token may use."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor on the chosen experts' weights."""
    moe_router_load_balancing_type: str = "aux_loss"
    """`aux_loss`, `seq_aux_loss` (per sequence) or `none`."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the balancing loss."""
    moe_z_loss_coeff: float | None = None
    """Weight of the loss on the size of router logits."""
    # Multi-token prediction
    mtp_num_layers: int | None = None
    """Multi-token prediction layers after the decoder; none means none."""
    mtp_loss_scaling_factor: float = 0.1
    """Weight of the MTP losses."""


@dataclass(kw_only=True, slots=True)
class ParallelConfig(ModelParallelConfig):
    """Megatron's ModelParallelConfig, the layout and the data-parallel size."""

    data_parallel_size: int | None = None
    """None derives it: world / (tp x cp x pp)."""
    pipeline_model_parallel_layout: Any = None
    """A layout string, a list of stages, `auto`, `@file`; none is the even split."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Decoder layers on the first pp_rank (all its chunks); the others share the rest evenly. Compiled to a layout."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Decoder layers on the last pp_rank (all its chunks); the others share the rest evenly. Compiled to a layout."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer in the even split. Compiled to a layout."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the loss as one layer in the even split. Compiled to a layout."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Decoder layers of one chunk in the even split, which gives vpp. Compiled to a layout."""
    data_parallel_sharding: str = "none"
    """What the ranks of a data-parallel group share out: `none`, `optimizer_gradients`, or `full` (weights as well)."""

    def __post_init__(self) -> None:
        """Neither raise nor fill in: `checks.py` reports all problems at once, and the plan derives."""


@dataclass(kw_only=True, slots=True)
class RunPipelineConfig(PipelineConfig):
    """NeMo's PipelineConfig and the engine's own settings."""

    p2p_capacity: int | None = None
    """Messages under way per channel (posted receives plus outstanding sends); none lets the plan choose."""
    extra_warmup: Any = 0
    """Forwards in flight beyond the textbook warm-up, at most pp - 1 - r on rank r; `auto` chooses by simulation."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """What is read and how long a sample is."""

    path: str | list[Any] | None = None
    """Glob of .txt and .jsonl files, prefix of a .bin and .idx, or a blend of such with weights, as "[0.3,a,0.7,b]" or
    rows of {path, weight}; none reads the running interpreter's standard library sources."""
    tokenizer: str = "byte"
    """`byte`: every byte is a token; else a directory with a tokenizer.json. Unsaid, it is that of model.from."""
    validation_path: str | list[Any] | None = None
    """What evaluation reads, written as data.path; none holds out a share of data.path."""
    validation_split: float = 0.0
    """Share of the samples of data.path that is held out, from the end of each corpus; training never reads it."""
    seq_length: int = 256
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

    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the cosine."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly. Neither this nor the cosine moves on in a step that fp16
    leaves out."""
    weight_decay: float = 0.1
    """Not applied to norms, biases and embeddings."""
    beta1: float = 0.9
    """Decay of the running mean of gradients."""
    beta2: float = 0.95
    """Decay of the running mean of squared gradients."""
    eps: float = 1e-8
    """Added to the denominator of an update."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    loss_scale: float | None = None
    """fp16: a fixed factor on the loss; none moves it by the rule below."""
    initial_loss_scale: float = 2.0**32
    """fp16: the factor that a run starts with; the first steps overflow until it fits, and are left out."""
    min_loss_scale: float = 1.0
    """fp16: the factor never falls below it."""
    loss_scale_window: int = 1000
    """fp16: steps without overflow after which the factor doubles."""
    hysteresis: int = 2
    """fp16: overflows before the factor is halved."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """How long and on how much."""

    steps: int = 100
    """Optimizer steps of the whole run."""
    global_batch_size: int = 8
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int = 1
    """Sequences that one forward takes."""
    seed: int = 1234
    """Seed of initial weights and of the order of samples."""
    eval_interval: int = 0
    """Steps between evaluations, of which there is one after the last step too; 0 never evaluates."""
    eval_steps: int = 0
    """Batches of one evaluation, always the same ones; a held-out sample is read once at most."""
    exit_after: str | None = None
    """Save and leave after this time, as 11h50m, counted from the start of rank 0; none runs to the last step."""
    compile: bool = False
    """Compile every layer with torch.compile: losses agree within a millionth, not to the bit."""
    recompute_granularity: str | None = None
    """Recompute activations in the backward instead of keeping them: `full` (layers) or `selective` (modules)."""
    recompute_method: str | None = None
    """full: `uniform` (the default) keeps every N-th layer's input; `block` recomputes a stage's first N layers."""
    recompute_num_layers: int | None = None
    """full: that N; none means 1 for `uniform`, every layer for `block`."""
    recompute_modules: list[str] | None = None
    """selective: `core_attn`, `mlp`, `moe`, `moe_act`, `layernorm`, `mla_up_proj`; none means core_attn."""
    recompute_stages: list[int] | None = None
    """The stages (counted through the model from 0) that recompute; none means all."""
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
    """Machines; none means as many as the layout needs (one, where the run is local)."""
    gpus_per_node: int | None = None
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
    cpus_per_task: int | None = None
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
    code: str = "pinned"
    """SLURM: `pinned` ends a job whose nodes hold other code of ppctl than was submitted; `live` takes any."""
    signal_lead: int = 300
    """SLURM: seconds before the time limit at which the ranks are told to save and leave."""
    max_requeues: int = 10
    """SLURM: how often the job may requeue itself."""


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """What is written about a run, and where."""

    name: str = "run"
    """Name of the run: a directory under `dir`."""
    dir: str = "runs"
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

    device: str | None = None
    """A device preset: a100, h100, h800, h200, b200, b300, gb200, gb300, cpu; none takes h100, or cpu on the CPU."""
    profile: str | None = None
    """Measured costs of an earlier run, `@runs/.../profile.json`, in place of the preset's times."""
    allocator: str = "torch"
    """Who keeps what: `torch` (ppctl's own blocks), `megatron` or `megatron_te_2.11` (Transformer Engine's)."""
    matmul: str | None = None
    """Rate of the linear layers' products: `fp8` or `bf16`; none takes the weights' own. A what-if: training has no
    fp8."""
    cublas_workspace_mib: float | None = None
    """One cuBLAS workspace in MiB; none takes the preset's."""
    te_workspace_mib: float | None = None
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
