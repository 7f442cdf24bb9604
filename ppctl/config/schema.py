"""The closed configuration: one dataclass per group, and RunConfig that holds them.

Knows every key: its type, its default, what it means, and as metadata (`metadata.py`) what else is known of it alone.
Must not know Hydra, files or derived values: rules between values are in `checks.py`, derivations in `ppctl/plan`.
Torch-free; both towers read these types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppctl.accelerators import DEVICES
from ppctl.config import lr_pieces
from ppctl.config.limits import (
    ABSOLUTE,
    BELOW_ONE,
    DIRECTORY_NAME,
    MEMORY,
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
    NOT_EMPTY,
    ONE_LINE,
    RANK_ORDER,
    RESERVE,
    SLURM_TIME,
    STEPS,
    TIME,
    each_of,
    not_negative,
    one_of,
    positive,
)
from ppctl.config.metadata import LATER, Support, key
from ppctl.config.model_parallel_config import ModelParallelConfig
from ppctl.config.pipeline_config import PipelineConfig
from ppctl.topology import ORDER

CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
_PYXIS = Support(note="needs pyxis and enroot on the nodes; with these it was not run yet")


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The decoder, in Megatron's names."""

    from_: str | None = key(None, NOT_EMPTY, verbatim=True, training=True)
    """Where sizes and first weights come from: a Hugging Face directory, a checkpoint or a run; none draws weights."""
    implementation: str = key("auto", one_of("auto", "ppctl", "transformers"), training=True)
    """Whose code runs the model of model.from: `transformers`, the model's own forward on every stage; `ppctl`, blocks
    of ppctl's (fp8, tp, cp, ep; a dozen families); `auto`, ppctl's where it knows the family, else transformers'."""
    hf_overrides: dict[str, str] = key(dict, training=True)
    """Fields of config.json by other values, where the code is transformers': `model.hf_overrides.attn_pdrop=0`."""
    transformers: str | None = key(None, NOT_EMPTY, verbatim=True, training=True)
    """What was found in a model whose code is transformers', as JSON: model.from sets it, nobody has to type it."""
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
    """Rows of the embedding and of the output projection, padding included. Where nothing sets it, as many as the
    tokens of data.tokenizer."""
    make_vocab_size_divisible_by: int = key(
        1, positive(MOST_VOCABULARY), names="--make-vocab-size-divisible-by", training=True
    )
    """vocab_size is rounded up to a multiple of this times tp, as Megatron does (not that of model.from)."""
    max_position_embeddings: int = key(4096, positive(MOST_TOKENS), names="--max-position-embeddings")
    """Longest sequence that the model is meant for."""
    position_embedding_type: str = key("rope", one_of("rope", "learned_absolute"))
    """`rope`, or `learned_absolute`: a table of max_position_embeddings rows beside the embedding, as GPT-3."""
    rotary_base: float = key(10000.0, positive())
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = key(1.0, positive(1))
    """Share of every head that is rotated, from its first dimension on (not of MLA's heads)."""
    rotary_interleaved: bool = False
    """A rotated pair is two neighbours (DeepSeek) instead of half a head apart (Llama)."""
    rotary_scaling_factor: float | None = key(None, positive(), known_as="--rope-scaling-factor")
    """How many times longer the context is made; none leaves RoPE unscaled."""
    rotary_scaling_type: str = key("yarn", one_of("yarn", "llama3"))
    """How the context is made longer: `yarn`, or `llama3` as Llama 3.1 does."""
    original_max_position_embeddings: int = key(
        4096, positive(MOST_TOKENS), known_as="--yarn-original-max-position-embeddings"
    )
    """Longest sequence before the extension."""
    beta_fast: float = key(32.0, positive(), known_as="--yarn-beta-fast")
    """Frequencies with more turns than this within the original length are kept (llama3: high_freq_factor)."""
    beta_slow: float = key(1.0, positive(), known_as="--yarn-beta-slow")
    """Frequencies with fewer turns are divided by the factor, those between interpolated (llama3: low_freq_factor)."""
    mscale: float = key(1.0, not_negative())
    """YaRN: weight of ln(factor) in the magnitude of the rotary tables."""
    mscale_all_dim: float = key(0.0, not_negative())
    """YaRN: weight of ln(factor) that is taken out of the tables and put on MLA's whole attention, squared."""
    norm_epsilon: float = key(1e-5, positive(), known_as="--layernorm-epsilon")
    """Added inside norms to the mean square, or to the variance."""
    init_method_std: float = key(0.02, not_negative(), training=True)
    """Standard deviation of initial weights."""
    share_embeddings_and_output_weights: bool = False
    """Tie the output projection to the token embedding."""
    add_qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    qk_layernorm: bool = False
    """A norm on every query and key head."""
    attention_backend: str = key(
        "auto", one_of("auto", "fused", "flash", "unfused"), names="--attention-backend", training=True
    )
    """`auto` takes the fastest kernel that can (the run's first lines name it), `fused` cuDNN's or flash attention,
    `flash` this alone; `unfused` computes step by step and keeps the scores, [heads, s, s] per sequence."""
    cp_comm_type: str | list[str] = key("p2p", each_of(CP_COMM_TYPES), names="--cp-comm-type", training=True)
    """How ranks that share a sequence exchange it for attention; a list has one for all, or for each decoder layer.
    `p2p`: keys and values in a ring; `all_gather`: all at once; `a2a`: each rank gets whole sequences of some heads;
    `a2a+p2p`: this among neighbours, a ring between their groups (parallel.hierarchical_context_parallel_sizes)."""
    fp8: str | None = key(None, one_of("e4m3", "hybrid"), names="--fp8-format", training=True)
    """Products of the layers with weights in 8 bits: `e4m3`, or `hybrid` with gradients in e5m2; none: in the weights'
    dtype. Embedding, output, router and norms are as without; a CPU emulates it. Plans count activations in 16 bits."""
    fp8_recipe: str = key("rowwise", one_of("rowwise", "blockwise"), names="--fp8-recipe", training=True)
    """Which numbers share a scale: `rowwise`, a row's; `blockwise`, 1 x 128 of an activation, 128 x 128 of a weight."""
    attention_dropout: float = key(0.0, BELOW_ONE, training=True)
    """Share of attention probabilities that is dropped: by ppctl's own attention, in place of fused kernels."""
    hidden_dropout: float = key(0.0, BELOW_ONE, training=True)
    """Share of each block's output, and of the embedding's, that is dropped."""
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
    """Experts that a token goes to."""
    moe_ffn_hidden_size: int | None = key(None, positive(MOST_INNER_WIDTH))
    """Width of one expert; none means ffn_hidden_size."""
    moe_shared_expert_intermediate_size: int | None = key(None, positive(MOST_INNER_WIDTH))
    """Total width of the shared experts; none means no shared expert."""
    moe_layer_freq: Any = 1
    """1: every layer is MoE; N: every N-th; a list of 0/1 or Megatron's expression, as "[0]*3+[1]*58"."""
    moe_router_score_function: str = key("softmax", one_of("softmax", "sigmoid"))
    """How scores are normalised: `softmax` or `sigmoid`."""
    moe_router_pre_softmax: bool = False
    """Softmax: the chosen experts' weights are their shares of all experts', and do not add up to 1."""
    moe_router_enable_expert_bias: bool = False
    """Balance experts by a bias on their scores instead of by a loss."""
    moe_router_bias_update_rate: float = key(1e-3, not_negative(), training=True)
    """How far that bias moves in one step."""
    moe_router_num_groups: int | None = key(None, positive(MOST_HEADS))
    """Groups that the experts are divided into for group-limited routing."""
    moe_router_group_topk: int | None = key(None, positive(MOST_HEADS))
    """Groups that a token may use."""
    moe_router_topk_scaling_factor: float | None = key(None, positive())
    """Factor on the chosen experts' weights."""
    moe_router_load_balancing_type: str = key("aux_loss", one_of("aux_loss", "seq_aux_loss", "none"), training=True)
    """`aux_loss`, `seq_aux_loss` (per sequence) or `none`."""
    moe_aux_loss_coeff: float = key(0.0, not_negative(), training=True)
    """Weight of the balancing loss."""
    moe_z_loss_coeff: float | None = key(None, not_negative(), training=True)
    """Weight of the loss on the size of router logits."""
    # Multi-token prediction
    mtp_num_layers: int | None = key(None, not_negative(MOST_PREDICTED), names="--mtp-num-layers", layout=True)
    """Multi-token prediction layers after the decoder; none means none."""
    mtp_loss_scaling_factor: float = key(0.1, not_negative(), training=True)
    """Weight of the MTP losses."""


@dataclass(kw_only=True, slots=True)
class ParallelConfig(ModelParallelConfig):
    """Megatron's ModelParallelConfig, the layout and the data-parallel size."""

    data_parallel_size: int | None = key(None, positive(MOST_RANKS), names="dp")
    """None derives it: world / (tp x cp x pp)."""
    order: str = key(ORDER, RANK_ORDER)
    """In which order ranks count along the axes, neighbours first: tp, cp, ep, dp and pp, once each. Experts' tensors
    have the place of tp, and their copies that of dp."""
    pipeline_model_parallel_layout: Any = key(None, names="layout --pipeline-model-parallel-layout")
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
    """What the ranks of a data-parallel group share out: `none`, `optimizer_gradients`, or `full` (weights as well)."""

    def __post_init__(self) -> None:
        """Neither raise nor fill in: `checks.py` reports all problems at once, and the plan derives."""


@dataclass(kw_only=True, slots=True)
class RunPipelineConfig(PipelineConfig):
    """NeMo's PipelineConfig and the engine's own settings."""

    p2p_capacity: int | None = key(None, positive(MOST_CAPACITY))
    """Messages under way per channel (posted receives plus outstanding sends); none lets the plan choose."""
    extra_warmup: Any = 0
    """Forwards in flight beyond the textbook warm-up, at most pp - 1 - r on rank r; `auto` chooses by simulation."""
    schedule_memory: float | None = key(None, positive())
    """For pp_schedule=auto: the activations that a rank may hold, in units of what 1F1B keeps on its first rank. None:
    what launch.device_memory leaves for them, and where that is none, 1."""
    put_off_limit: int | None = key(None, not_negative(MOST_SAMPLES))
    """For a schedule with split backwards: the weight gradients that a rank may put off at once. Of more the oldest is
    computed behind the input gradient that would be one too many; 0 puts none off. None: what the schedule has."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """What is read and how long a sample is."""

    path: str | list[Any] | None = key(None, NOT_EMPTY, known_as="--data-path --train-data-path", verbatim=True)
    """Glob of .txt and .jsonl files, prefix of a .bin and .idx, or a blend of such with weights, as "[0.3,a,0.7,b]" or
    rows of {path, weight}; none reads the running interpreter's standard library sources."""
    tokenizer: str = key("byte", NOT_EMPTY, known_as="--tokenizer-model", verbatim=True)
    """`byte`: every byte is a token; else a directory with a tokenizer.json. By default that of model.from."""
    validation_path: str | list[Any] | None = key(None, NOT_EMPTY, known_as="--valid-data-path", verbatim=True)
    """What evaluation reads, written as data.path; none holds out a share of data.path."""
    validation_split: float = key(0.0, BELOW_ONE, known_as="--split")
    """Share of the samples of data.path that is held out, from the end of each corpus; training never reads it."""
    seq_length: int = key(256, positive(MOST_TOKENS), names="seq --seq-length", known_as="seq_len --encoder-seq-length")
    """Tokens per sample."""
    reset_position_ids: bool = key(False, names="--reset-position-ids")
    """Count positions from 0 in every document of a sample; data.tokenizer defines which token ends one."""
    reset_attention_mask: bool = key(False, names="--reset-attention-mask")
    """Let no token attend to another document of its sample, nor multi-token prediction look into one."""
    eod_mask_loss: bool = key(False, names="--eod-mask-loss")
    """Leave out the loss of what follows the mark at a document's end."""


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """AdamW, and a learning rate that rises linearly and then falls as lr_decay_style says."""

    lr: float = key(3e-4, positive(), names="lr", known_as="learning_rate")
    """Peak learning rate."""
    min_lr: float = key(0.0, not_negative())
    """Learning rate at the end of its decay."""
    warmup_steps: int = key(0, not_negative(), known_as="--lr-warmup-iters")
    """Updates over which the learning rate rises linearly. Neither this nor the decay moves on in a step that fp16
    leaves out."""
    warmup_tokens: float | None = key(None, positive())
    """The warm-up in tokens, in place of warmup_steps."""
    lr_decay_style: str = key(
        "cosine", one_of(*lr_pieces.STYLES), names="--lr-decay-style", known_as="lr_scheduler_type"
    )
    """How the rate falls behind the warm-up: `cosine`, `linear`, `constant` (not at all), `inverse-square-root`, `WSD`
    (stable until lr_wsd_decay_steps before the end), or `piecewise`, as lr_pieces say."""
    lr_decay_steps: int | None = key(None, positive(), names="--lr-decay-iters")
    """Updates, those of the warm-up included, after which the rate is min_lr; none: train.steps."""
    lr_decay_tokens: float | None = key(None, positive())
    """The end of the decay in tokens, in place of lr_decay_steps."""
    lr_wsd_decay_style: str = key("exponential", one_of(*lr_pieces.WSD_STYLES), names="--lr-wsd-decay-style")
    """The shape of WSD's decay."""
    lr_wsd_decay_steps: int | None = key(None, positive(), names="--lr-wsd-decay-iters")
    """Updates of WSD's decay."""
    lr_pieces: list[Any] | None = key(None, lr_pieces.PIECES)
    """For lr_decay_style=piecewise: rows such as {style: cosine, until: "14.3T tokens", lr: 2.2e-5}. From the rate
    before it a piece goes to `lr` (of constant: at once) until so many updates or tokens; lr by default min_lr, of
    constant what it was."""
    weight_decay: float = key(0.1, not_negative())
    """Not applied to norms, biases and embeddings."""
    beta1: float = key(0.9, BELOW_ONE, known_as="--adam-beta1")
    """Decay of the running mean of gradients."""
    beta2: float = key(0.95, BELOW_ONE, known_as="--adam-beta2")
    """Decay of the running mean of squared gradients."""
    eps: float = key(1e-8, positive(), known_as="--adam-eps")
    """Added to the denominator of an update."""
    clip_grad: float = key(1.0, not_negative())
    """Largest global gradient norm; 0 does not clip."""
    loss_scale: float | None = key(None, positive())
    """fp16: a fixed factor on the loss; none moves it by the rule below."""
    initial_loss_scale: float = key(2.0**32, positive())
    """fp16: the factor that a run starts with; the first steps overflow until it fits, and are left out."""
    min_loss_scale: float = key(1.0, positive())
    """fp16: the factor never falls below it."""
    loss_scale_window: int = key(1000, positive())
    """fp16: steps without overflow after which the factor doubles."""
    hysteresis: int = key(2, positive())
    """fp16: overflows before the factor is halved."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """How long and on how much."""

    steps: int = key(100, positive(), names="steps", known_as="--train-iters max_steps")
    """Optimizer steps of the whole run."""
    global_batch_size: int = key(8, positive(MOST_SAMPLES), names="gbs --global-batch-size", mathematics=True)
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int = key(
        1, positive(MOST_IN_A_MICROBATCH), names="mbs --micro-batch-size", known_as="local_batch_size --batch-size"
    )
    """Sequences that one forward takes."""
    seed: int = key(1234, not_negative(), mathematics=True)
    """Seed of initial weights and of the order of samples."""
    eval_interval: int = key(0, not_negative())
    """Steps between evaluations, of which there is one after the last step too; 0 never evaluates."""
    eval_steps: int = key(0, not_negative(), known_as="--eval-iters")
    """Batches of one evaluation, always the same ones; a held-out sample is read once at most."""
    exit_after: str | None = key(None, TIME, known_as="--exit-duration-in-mins")
    """Save and leave after this time, as 11h50m, counted from the start of rank 0; none runs to the last step."""
    compile: bool = False
    """Compile every layer with torch.compile: losses agree within a millionth, not to the bit."""
    recompute_granularity: str | None = key(
        None, one_of("full", "selective"), names="recompute --recompute-granularity model.recompute_granularity"
    )
    """Recompute activations in the backward instead of keeping them: `full` (layers) or `selective` (modules)."""
    recompute_method: str | None = key(
        None, one_of("uniform", "block"), names="--recompute-method model.recompute_method"
    )
    """full: `uniform` (the default) keeps every N-th layer's input; `block` recomputes a stage's first N layers."""
    recompute_num_layers: int | None = key(
        None, positive(MOST_STAGES), names="--recompute-num-layers model.recompute_num_layers"
    )
    """full: that N; none means 1 for `uniform`, every layer for `block`."""
    recompute_modules: list[str] | None = key(None, names="--recompute-modules model.recompute_modules")
    """selective: `core_attn`, `mlp`, `moe`, `moe_act`, `layernorm`, `mla_up_proj`; none means core_attn."""
    recompute_stages: list[int] | None = None
    """The stages (counted through the model from 0) that recompute; none means all."""
    check_replicas: int = key(0, not_negative(), names="--check-weight-hash-across-dp-replicas-interval")
    """Steps between comparisons of the copies that several ranks have of a parameter: the run stops where bits differ,
    naming parameter and ranks. For debugging; 0 never compares."""
    nonfinite: str = key("stop", one_of("stop"))
    """What a non-finite loss or gradient norm does: `stop`."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When to save and what to start from."""

    interval: int = key(0, not_negative(), known_as="--save-interval")
    """Steps between checkpoints; 0 saves at the end and on a signal only."""
    keep: int = key(2, not_negative())
    """How many checkpoints stay; 0 keeps all."""
    keep_every: int = key(0, not_negative())
    """Checkpoints of every so many steps stay besides; 0 for none."""
    async_: bool = key(True, names="--async-save")
    """Go on training while a checkpoint is written: a step waits for one copy to host memory, which takes as much of it
    as a rank saves; false: a step waits for the disk. The last save of a run is always waited for."""
    local: str | None = key(None, ABSOLUTE, verbatim=True)
    """A directory in the memory of every host, as /dev/shm/ppctl: the copies that `async` makes lie there and outlive
    the processes, so that a run that starts again on the same hosts, in the same cut, goes on from them."""
    local_every: int = key(0, not_negative())
    """Steps between copies in `local`; each takes the place of the one before. Saves to the disk leave one, too."""
    local_replicas: int = key(0, not_negative(), support=Support(LATER, "copies on a neighbour's host"))
    """How many other hosts hold a rank's copy."""
    resume: str | None = key(None, NOT_EMPTY, verbatim=True)
    """A checkpoint directory (or a run) to start from; `auto`: the newest of this run's own that is not damaged."""
    load: str | None = key(None, NOT_EMPTY, names="--load", known_as="resume_if_exists", verbatim=True)
    """Like resume, and the run begins where there is no checkpoint yet; also a directory of runs, of which the newest
    with a checkpoint counts: with log.dir set to it, the same command begins and goes on."""

    @property
    def in_background(self) -> bool:
        """Whether training goes on beside saves: with no interval, it ends behind the only one."""
        return self.async_ and (self.interval > 0 or self.local is not None)


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    """Where the ranks run."""

    target: str = key("local", one_of("local", "slurm", "env"))
    """`local`, `slurm` or `env` (ranks that ppctl does not start)."""
    device: str = key("cuda", one_of("cuda", "cpu", "any"))
    """`cuda`, `cpu`, or `any` (cuda where there are enough GPUs)."""
    nodes: int | None = key(None, positive(MOST_RANKS), names="nodes", known_as="--nnodes", options="-N --nodes")
    """Machines; none means as many as the layout needs (one, where the run is local)."""
    gpus_per_node: int | None = key(
        None,
        positive(MOST_RANKS),
        names="gpus_per_node",
        known_as="--nproc-per-node",
        options="-n --ntasks --ntasks-per-node --gpus-per-node",
    )
    """Ranks on each machine; none means as many as the layout needs."""
    device_memory: str | None = key(None, MEMORY)
    """Memory of one device, as "80GiB"; none means that the plan is not compared with a limit."""
    memory_reserve: str = key("auto", RESERVE)
    """Of device_memory, what CUDA's context and communicators take, as "2GiB": a plan's peak has to fit into the rest.
    `auto` follows from the sizes of the groups; it is 0 on the CPU."""
    share_gpu: bool = key(False)
    """Let ranks share GPUs: each takes the one of number local rank % GPUs. Messages go through host memory: slow, for
    tests. A rank may hold its share of device_memory, counted as if a machine had one GPU."""
    env: dict[str, str] = key(dict)
    """Environment variables set for every rank."""
    start_limit: str = key("30m", TIME)
    """How long the ranks may take to start, a checkpoint's loading included; then the job ends, naming the culprit."""
    edge_limit: str = key("2m", TIME)
    """How long one connection may take to answer, or one group to meet, when all are touched before the first step."""
    first_step_limit: str = key("60m", TIME)
    """How long nothing may move in the first step (compilation), in a save, in an evaluation; then the job ends."""
    step_limit: str | None = key(None, TIME, known_as="--distributed-timeout-minutes")
    """How long nothing may move in later steps; none: ten times the slowest step so far, at least 2 minutes and at most
    the longest of the other limits."""
    account: str | None = key(None, ONE_LINE, options="-A --account", slurm=True)
    """SLURM: the account that pays (sbatch --account)."""
    qos: str | None = key(None, ONE_LINE, options="-q --qos", slurm=True)
    """SLURM: the quality of service."""
    partition: str | None = key(None, ONE_LINE, options="-p --partition", verbatim=True, slurm=True)
    """SLURM: the partition, or several with commas."""
    time: str | None = key(None, SLURM_TIME, options="-t --time", slurm=True)
    """SLURM: the job's time limit, as 30 (minutes), 12:00:00 or 2-00:00:00; none takes the partition's."""
    constraint: str | None = key(None, ONE_LINE, options="-C --constraint", verbatim=True, slurm=True)
    """SLURM: features that every node must have."""
    exclusive: bool = key(False, options="--exclusive", slurm=True)
    """SLURM: share no node with other jobs."""
    cpus_per_task: int | None = key(None, positive(MOST_RANKS), options="-c --cpus-per-task", slurm=True)
    """SLURM: CPUs of one rank."""
    container_image: str | None = key(
        None, ONE_LINE, options="--container-image", verbatim=True, slurm=True, support=_PYXIS
    )
    """SLURM with pyxis: the image that the ranks run in."""
    container_mounts: list[str] | None = key(None, options="--container-mounts", slurm=True, support=_PYXIS)
    """SLURM with pyxis: what is mounted there, as SRC:DST[:FLAGS]."""
    container_workdir: str | None = key(None, ONE_LINE, options="--container-workdir", slurm=True, support=_PYXIS)
    """SLURM with pyxis: the directory to start in."""
    setup: list[str] | None = key(None, slurm=True)
    """SLURM: lines of bash that the job's script runs first, as "module load cuda"."""
    health_check: str | None = key(None, ONE_LINE, verbatim=True, slurm=True)
    """SLURM: a command run once on every node first; a node where it fails is left out and the job requeued."""
    sbatch_args: list[str] | None = key(None, slurm=True)
    """SLURM: further options of sbatch, as [--mail-type=END]."""
    srun_args: list[str] | None = key(None, slurm=True)
    """SLURM: further options of the srun that starts the ranks."""
    after: str | None = key(None, ONE_LINE, options="-d --dependency --kill-on-invalid-dep", slurm=True)
    """SLURM: a run (directory, id, job number) that must have finished first."""
    python: str | None = key(None, ONE_LINE, slurm=True)
    """SLURM: the interpreter that runs the ranks; none takes the one that submits."""
    code: str = key("pinned", one_of("pinned", "live"), slurm=True)
    """SLURM: `pinned` ends a job whose nodes hold other code of ppctl than was submitted; `live` takes any."""
    signal_lead: int = key(300, positive(10**7), options="--signal", slurm=True)
    """SLURM: how many seconds before the time limit the ranks save and end."""
    max_requeues: int = key(10, not_negative(), options="--requeue --no-requeue --open-mode", slurm=True)
    """SLURM: how often the job may requeue itself."""


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """What is written about a run, and where."""

    name: str = key("run", DIRECTORY_NAME)
    """Name of the run: a directory under `dir`."""
    dir: str = key(
        "runs", NOT_EMPTY, known_as="output_dir runs_dir --save", options="-o --output -e --error", verbatim=True
    )
    """Where run directories go."""
    tensorboard: bool = key(False, known_as="--tensorboard-dir")
    """Write the keys of metrics.jsonl for TensorBoard as well."""
    wandb: bool = key(False, known_as="--wandb-project")
    """Send the keys of metrics.jsonl to Weights & Biases as well."""
    trace: str | None = key(None, STEPS)
    """Steps in which every action of every rank is kept: 10:12 is steps 10 and 11. `ppctl trace` shows them."""
    profile: bool = key(False, known_as="profile", support=Support(LATER, "measured costs per stage"))
    """Write the measured costs of every stage."""


@dataclass(kw_only=True, slots=True)
class CostConfig:
    """What a plan is priced with. Changes what is predicted, never what is run."""

    device: str | None = key(None, one_of(*DEVICES, any_case=True))
    """A device preset: a100, h100, h800, h200, b200, b300, gb200, gb300, cpu; none takes h100, or cpu on the CPU."""
    profile: str | None = key(None, NOT_EMPTY)
    """Measured costs of an earlier run, `@runs/.../profile.json`, in place of the preset's times."""
    allocator: str = key("torch", one_of("torch", "megatron", "megatron_te_2.11"))
    """Who keeps what: `torch` (ppctl's own blocks), `megatron` or `megatron_te_2.11` (Transformer Engine's)."""
    matmul: str | None = key(None, one_of("fp8", "bf16"))
    """Rate of the linear layers' products: `fp8` or `bf16`; none takes what training uses (model.fp8, else the
    weights' own)."""
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
    published: list[dict[str, Any]] = key(list)
    """A recipe's table: rows of {what, published, here, why}."""
