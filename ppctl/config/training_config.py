"""The keys of `data`, `optim`, `train` and `checkpoint`: on what a model is trained, how long, what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppctl.config.metadata import (
    ABSOLUTE,
    BELOW_ONE,
    MOST_IN_A_MICROBATCH,
    MOST_SAMPLES,
    MOST_STAGES,
    MOST_TOKENS,
    NOT_EMPTY,
    ON_BAD_STEP,
    PYTHON_NAMES,
    TIME,
    key,
    not_negative,
    one_of,
    positive,
)
from ppctl.config.pieces import LR_PIECES, RAMPUP, STYLES, WSD_STYLES

TEXT, CHAT, COMPLETION = "text", "chat", "completion"
REFUSE, CUT, LEAVE_OUT = "refuse", "cut", "leave_out"
_LAYERS = "train.recompute_granularity=full"


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """The training data and the length of a sample."""

    path: str | list[Any] | None = key(None, NOT_EMPTY, known_as="--data-path --train-data-path", verbatim=True)
    """Glob of .txt, .jsonl, .parquet and .arrow files, directory saved by `datasets`, prefix of a .bin and .idx, or a
    blend of these with weights, as "[0.3,a,0.7,b]"; none reads the sources of the running interpreter's standard
    library."""
    tokenizer: str = key("byte", NOT_EMPTY, known_as="--tokenizer-model", verbatim=True)
    """`byte`: every byte is a token; else a directory with a tokenizer.json. By default the tokenizer of model.from."""
    cache: str | None = key("auto", NOT_EMPTY, verbatim=True)
    """The directory in which the tokens of text and conversations are kept, so that a tokenizer reads them once:
    `auto`, ~/.cache/ppctl/tokens; none tokenizes on every rank at each start. `byte` needs none."""
    validation_path: str | list[Any] | None = key(None, NOT_EMPTY, known_as="--valid-data-path", verbatim=True)
    """Data for evaluation, in the form of data.path; none holds out a share of data.path."""
    validation_split: float = key(0.0, BELOW_ONE, known_as="--split")
    """Fraction of the samples of data.path that is held out for evaluation, from the end of each corpus."""
    seq_length: int = key(256, positive(MOST_TOKENS), names="seq --seq-length", known_as="seq_len --encoder-seq-length")
    """Tokens per sample."""
    format: str = key(TEXT, one_of(TEXT, CHAT, COMPLETION))
    """What a line of a .jsonl file or a row of a table is: `text`, learned whole; `chat`, messages, of which those of
    the assistant are learned; `completion`, a prompt and a completion, of which the completion is learned. With the
    last two a row of a batch holds whole conversations and is filled up."""
    text_key: str = key("text", NOT_EMPTY, verbatim=True, needs="data.format=text")
    """For format=text: the field of a .jsonl line, or the column of a table, that has the text."""
    chat_template: str | None = key(
        None,
        NOT_EMPTY,
        known_as="--chat-template --sft-tokenizer-prompt-format",
        verbatim=True,
        needs="data.format=chat",
    )
    """A Jinja file that renders messages; none: the tokenizer's own template."""
    pack: bool = key(False, needs="data.format=chat,completion")
    """Put several conversations into a row, separated by reset_attention_mask and reset_position_ids; false: one."""
    too_long: str = key(REFUSE, one_of(REFUSE, CUT, LEAVE_OUT), needs="data.format=chat,completion")
    """The treatment of a conversation longer than a row: `refuse`, `cut` (its end) or `leave_out`."""
    reset_position_ids: bool = key(False, names="--reset-position-ids")
    """Start positions at 0 in every document of a sample; data.tokenizer defines which token ends one."""
    reset_attention_mask: bool = key(False, names="--reset-attention-mask")
    """Prevent attention, and multi-token prediction, across the documents of a sample."""
    eod_mask_loss: bool = key(False, names="--eod-mask-loss", needs="data.format=text")
    """Leave out the loss of the token after a document's end."""


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """AdamW or Muon, and a learning rate that rises linearly and then falls as lr_decay_style says."""

    name: str = key("adamw", one_of("adamw", "muon"), known_as="--optimizer")
    """`adamw`; or `muon`: Muon for matrices of hidden layers, each expert's by itself, AdamW for embeddings, the
    output, norms and biases. With sharding each matrix is owned whole by one rank. A checkpoint goes on with the
    optimizer that wrote it."""
    muon_momentum: float = key(0.95, BELOW_ONE, known_as="--muon-momentum", needs="optim.name=muon")
    """Muon: decay of the running mean of gradients."""
    muon_nesterov: bool = key(True, known_as="--muon-use-nesterov", needs="optim.name=muon")
    """Muon: look ahead by Nesterov's rule."""
    muon_ns_steps: int = key(5, positive(99), known_as="--muon-num-ns-steps", needs="optim.name=muon")
    """Muon: steps of the Newton-Schulz iteration, in bfloat16."""
    muon_adjust_lr: str = key("match_rms_adamw", one_of("match_rms_adamw", "original"), needs="optim.name=muon")
    """Muon: factor on lr for a matrix [A, B]: `match_rms_adamw`, 0.2 sqrt(max(A, B)), as large as AdamW's updates; or
    `original`, sqrt(max(1, A / B))."""
    lr: float = key(3e-4, positive(), names="lr", known_as="learning_rate")
    """Peak learning rate."""
    min_lr: float = key(0.0, not_negative())
    """Learning rate at the end of the decay."""
    warmup_steps: int = key(0, not_negative(), known_as="--lr-warmup-iters")
    """Updates over which the learning rate rises linearly. A step that fp16 leaves out is not counted."""
    warmup_tokens: float | None = key(None, positive())
    """The warm-up in tokens, in place of warmup_steps."""
    lr_decay_style: str = key("cosine", one_of(*STYLES), names="--lr-decay-style", known_as="lr_scheduler_type")
    """How the rate falls after the warm-up: `cosine`, `linear`, `constant` (not at all), `inverse-square-root`, `WSD`
    (stable until lr_wsd_decay_steps before the end), or `piecewise`, as lr_pieces say."""
    lr_decay_steps: int | None = key(None, positive(), names="--lr-decay-iters")
    """Updates, those of the warm-up included, after which the rate is min_lr; none: train.steps."""
    lr_decay_tokens: float | None = key(None, positive())
    """The end of the decay in tokens, in place of lr_decay_steps."""
    lr_wsd_decay_style: str = key("exponential", one_of(*WSD_STYLES), names="--lr-wsd-decay-style")
    """The shape of WSD's decay."""
    lr_wsd_decay_steps: int | None = key(
        None, positive(), names="--lr-wsd-decay-iters", needs="optim.lr_decay_style=WSD"
    )
    """Updates of WSD's decay."""
    lr_pieces: list[Any] | None = key(None, LR_PIECES, needs="optim.lr_decay_style=piecewise")
    """For lr_decay_style=piecewise: rows such as {style: cosine, until: "14.3T tokens", lr: 2.2e-5}. From the rate
    before it a piece goes to `lr` (if constant, immediately) until so many updates or tokens are done. By default `lr`
    is min_lr; if constant, the rate before."""
    weight_decay: float = key(0.1, not_negative())
    """Weight decay of the optimizer; not applied to norms, biases and embeddings."""
    beta1: float = key(0.9, BELOW_ONE, known_as="--adam-beta1")
    """Decay of the running mean of gradients."""
    beta2: float = key(0.95, BELOW_ONE, known_as="--adam-beta2")
    """Decay of the running mean of squared gradients."""
    eps: float = key(1e-8, positive(), known_as="--adam-eps")
    """Added to the denominator of an update."""
    clip_grad: float = key(1.0, not_negative())
    """Largest global gradient norm; 0 does not clip."""
    loss_scale: float | None = key(None, positive(), needs="parallel.fp16=true")
    """fp16: a fixed loss scale; none adjusts it, by loss_scale_window and hysteresis."""
    initial_loss_scale: float = key(2.0**32, positive(), needs="parallel.fp16=true")
    """fp16: the initial loss scale; the first steps overflow until it fits, and are skipped."""
    min_loss_scale: float = key(1.0, positive(), needs="parallel.fp16=true")
    """fp16: the lowest loss scale."""
    loss_scale_window: int = key(1000, positive(), needs="parallel.fp16=true")
    """fp16: steps without overflow after which the scale doubles."""
    hysteresis: int = key(2, positive(), needs="parallel.fp16=true")
    """fp16: overflows before the scale is halved."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """Length and batch of the training, evaluation and recomputation."""

    steps: int = key(100, positive(), names="steps", known_as="--train-iters max_steps")
    """Optimizer steps of the whole run."""
    samples: int | None = key(None, positive(), names="--train-samples")
    """The length of the run in samples, in place of steps: as many whole steps as they fill."""
    tokens: float | None = key(None, positive())
    """The length of the run in tokens, in place of steps."""
    epochs: float | None = key(None, positive(), known_as="num_train_epochs num_epochs --epochs")
    """The length of the run in passes over the samples of data.path, in place of steps: it sets train.samples. With a
    weighted blend, a pass ends when every sample of every path has come."""
    global_batch_size: int = key(8, positive(MOST_SAMPLES), names="gbs --global-batch-size", mathematics=True)
    """Sequences per optimizer step, over all ranks."""
    batch_rampup: list[int] | None = key(None, RAMPUP, names="--rampup-batch-size", mathematics=True)
    """[START, INCREMENT, SAMPLES]: the global batch grows from START by INCREMENT to global_batch_size while SAMPLES
    are consumed, each size for an equal part of them. Every size must divide as global_batch_size must."""
    micro_batch_size: int = key(
        1,
        positive(MOST_IN_A_MICROBATCH),
        names="mbs --micro-batch-size",
        known_as="pipeline_parallel_microbatch_size --batch-size",
    )
    """Sequences per microbatch."""
    seed: int = key(1234, not_negative(), names="seed", mathematics=True)
    """Seed of initial weights and of the order of samples."""
    eval_interval: int = key(0, not_negative())
    """Steps between evaluations; 0 never evaluates. There is also one after the last step."""
    eval_steps: int = key(0, not_negative(), known_as="--eval-iters")
    """Batches per evaluation, always the same ones; a held-out sample is read at most once."""
    exit_after: str | None = key(None, TIME, known_as="--exit-duration-in-mins")
    """Save and leave after this time, as 11h50m, counted from the start of rank 0; none runs to the last step."""
    compile: bool = False
    """Compile every layer with torch.compile; with tp or cp, the parts between exchanges. Losses then agree within a
    millionth, not to the bit."""
    recompute_granularity: str | None = key(
        None, one_of("full", "selective"), names="recompute --recompute-granularity model.recompute_granularity"
    )
    """Recompute activations in the backward instead of keeping them: `full` (layers) or `selective` (modules)."""
    recompute_method: str | None = key(
        None, one_of("uniform", "block"), names="--recompute-method model.recompute_method", needs=_LAYERS
    )
    """full: `uniform` (the default) keeps every N-th layer's input; `block` recomputes a stage's first N layers."""
    recompute_num_layers: int | None = key(
        None, positive(MOST_STAGES), names="--recompute-num-layers model.recompute_num_layers", needs=_LAYERS
    )
    """full: the N of recompute_method; none means 1 for `uniform`, every layer for `block`."""
    recompute_modules: list[str] | None = key(
        None,
        names="--recompute-modules model.recompute_modules",
        needs="train.recompute_granularity=selective",
    )
    """selective: `core_attn`, `mlp`, `moe`, `experts`, `moe_act`, `layernorm`, `mla_up_proj`; none means core_attn.
    `experts`, not in Megatron, starts from the rows that experts got; `moe` repeats their exchange as well."""
    recompute_stages: list[int] | None = key(None, needs="train.recompute_granularity")
    """The stages (counted through the model from 0) that recompute; none means all."""
    check_replicas: int = key(0, not_negative(), names="--check-weight-hash-across-dp-replicas-interval")
    """Steps between comparisons of the copies that several ranks have of a parameter: the run stops where bits differ,
    naming parameter and ranks. For debugging; 0 never compares."""
    replay: int = key(0, not_negative(), needs="parallel.deterministic_mode=true")
    """Steps between steps in which every rank computes one microbatch of a stage twice, forward and backward: the run
    stops before the update if a bit differs, naming rank and stage. 0 never does (docs/runs.md)."""
    callbacks: list[str] | None = key(None, PYTHON_NAMES)
    """Classes of your own that follow the run, as [package.module:Class], imported by every rank from where Python
    finds them (PYTHONPATH) and called in this order (docs/callbacks.md)."""
    on_bad_step: str = key("stop", ON_BAD_STEP, names="train.nonfinite")
    """The reaction to a gradient norm that is not finite, or too large by `spike_factor`: `stop` ends the run before
    the update; `skip` leaves the update out and goes on behind the step's samples, at most ten times in a row;
    `rollback:N` goes back to the newest checkpoint that is at least N steps older, at most five times to the same one,
    and never again reads the samples from that checkpoint's step to the bad step."""
    spike_factor: float = key(0.0, not_negative())
    """A norm is too large above this multiple of the median of the last 100 updates (at least 20); 0: none is."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When to save, and from what to start."""

    interval: int = key(0, not_negative(), known_as="--save-interval")
    """Steps between checkpoints; 0 saves at the end and on a signal only."""
    keep: int = key(2, not_negative())
    """Number of checkpoints to keep; 0 keeps all."""
    keep_every: int = key(0, not_negative())
    """Also keep the checkpoints of every N-th step; 0 for none."""
    keep_best: int = key(0, not_negative(), known_as="load_best_model_at_end")
    """Also keep the N checkpoints with the lowest eval_loss. Needs an interval that is a multiple of eval_interval."""
    async_: bool = key(True, names="--async-save")
    """Go on training while a checkpoint is written: a step waits for one copy to host memory, which takes as many bytes
    as the rank saves; false: a step waits for the disk. The end of a run always waits for the last save."""
    local: str | None = key(None, ABSOLUTE, verbatim=True, needs="checkpoint.async=true")
    """A directory in the memory of every host, as /dev/shm/ppctl: the copies that `async` makes lie there and outlive
    the processes, so that a run that starts again on the same hosts, in the same cut, goes on from them."""
    local_every: int = key(0, not_negative())
    """Steps between copies in `local`; each replaces the copy before. Saves to the disk leave one, too."""
    local_replicas: int = key(0, not_negative(1), needs="checkpoint.local")
    """How many other hosts hold a rank's copy, 0 or 1: with 1 a run that lost a host still goes on from memory. This
    takes the memory of a second copy, and sends one at every `local_every` and save while training goes on."""
    resume: str | None = key(None, NOT_EMPTY, verbatim=True)
    """A checkpoint directory (or a run) to start from; `auto`: the newest of this run's own that is not damaged."""
    load: str | None = key(None, NOT_EMPTY, names="--load", known_as="resume_if_exists", verbatim=True)
    """Like resume, but without a checkpoint the run begins anew. It may also be a directory of runs, of which the
    newest with a checkpoint counts: with log.dir set to that, one command both begins a run and continues it."""

    @property
    def in_background(self) -> bool:
        """Whether training goes on while saves are written: without an interval, the only save is at the end."""
        return self.async_ and (self.interval > 0 or self.local is not None)
