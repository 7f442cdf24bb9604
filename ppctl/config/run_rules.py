"""Rules on how a run is started, watched and saved: samples, recorded steps, copies in memory, submission."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ppctl.config.batch_sizes import MICRO_BATCH
from ppctl.config.keys import Finding, keys_with, names_of_keys
from ppctl.config.quantities import rollback_of, slurm_seconds, steps_of
from ppctl.config.schema import RunConfig
from ppctl.errors import Problem, pip_install

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")

WATCHED = ("log.trace", "log.torch_profile", "log.gradients")
"""Keys that choose steps from which more is recorded."""

_NEVER = (
    *("--parsable", "--wrap", "-a", "--array", "--test-only"),
    *("-W", "--wait", "--kill-on-bad-exit", "-K", "-l", "--label"),
)
"""Options that would hide the job's state from ppctl."""


def environment(config: RunConfig) -> Iterator[Finding]:
    """Findings about environment variables that must not be set, or cannot be."""
    for name in config.launch.env:
        if name in RANK_VARIABLES:
            message = f"launch.env cannot set {name}: it differs between ranks, and the launcher sets it for each"
        elif name == "PPCTL_SECRET":
            message = "launch.env cannot set PPCTL_SECRET: others can read config.yaml and the job script; use export"
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            message = f"launch.env cannot set {name!r}: letters, digits and _ make the name of a variable"
        else:
            continue
        yield ("launch.env",), message, "launch.env"


def samples(config: RunConfig) -> Iterator[Finding]:
    """Findings about the sizes of samples and microbatches."""
    if config.train.micro_batch_size != config.pipeline.pp_microbatch_size != 1:
        yield MICRO_BATCH, "the two names of the micro batch size differ", f"mbs={config.train.micro_batch_size}"
    length, positions = config.data.seq_length, config.model.max_position_embeddings
    if config.pipeline.pp_seq_len not in (None, length):
        message = f"messages would be made for sequences of {config.pipeline.pp_seq_len}, but the data's have {length}"
        yield ("pipeline.pp_seq_len", "data.seq_length"), message, f"pipeline.pp_seq_len={length}"
    if length > positions:
        message = f"a sequence of {length} is longer than the model's {positions} positions"
        # A model whose code is transformers' has its positions in its config.json.
        foreign = config.model.transformers is not None
        remedy = f"data.seq_length={positions}" + ("" if foreign else f"\nmodel.max_position_embeddings={length}")
        yield ("data.seq_length", "model.max_position_embeddings"), message, remedy


def watched_steps(config: RunConfig) -> Iterator[Finding]:
    """Findings about recorded steps beyond the run's end: nothing would be recorded, silently."""
    last = config.train.steps
    for name in WATCHED:
        asked = config[name]
        if asked is not None and (steps := steps_of(asked))[-1] > last:
            first = max(last - len(steps) + 1, 1)
            message = f"{name}={asked} ends with step {steps[-1]}, but the run ends with step {last}"
            yield (name, "train.steps"), message, f"{name}={first}:{last + 1}"


def local_copies(config: RunConfig) -> Iterator[Finding]:
    """Findings if only one of the directory and the interval of copies in memory is set."""
    checkpoint = config.checkpoint
    if (checkpoint.local is not None) != (checkpoint.local_every > 0):
        message = "set both the directory and the interval of copies in memory, or neither"
        remedy = "checkpoint.local_every=10" if checkpoint.local is not None else "checkpoint.local=/dev/shm/ppctl"
        yield ("checkpoint.local", "checkpoint.local_every"), message, remedy


def best_checkpoints(config: RunConfig) -> Iterator[Finding]:
    """Findings about keep_best with checkpoints at steps without evaluation, which could never be the best."""
    evaluated, saved = config.train.eval_interval, config.checkpoint.interval
    if config.checkpoint.keep_best and (not evaluated or not saved or saved % evaluated):
        message = f"saves (every {saved} steps) do not all follow an evaluation (every {evaluated} steps)"
        fitting = f"interval={-(-max(saved, 1) // evaluated) * evaluated}" if evaluated else "keep_best=0"
        yield ("checkpoint.keep_best", "checkpoint.interval", "train.eval_interval"), message, f"checkpoint.{fitting}"


def guards(config: RunConfig) -> Iterator[Finding]:
    """Findings about guards: a rollback needs checkpoints and a batch that does not grow; comparing repeated
    computations needs deterministic kernels."""
    key, steps, checkpoint = "train.on_bad_step", rollback_of(config.train.on_bad_step), config.checkpoint
    if steps and config.train.batch_rampup is not None:
        message = "the sizes of a growing batch follow from the samples read, but a rollback passes some by"
        yield (key, "train.batch_rampup"), message, f"{key}=skip"
    if steps and not checkpoint.interval:
        message = "a rollback needs checkpoints, but without an interval there is only one, at the end"
        yield (key, "checkpoint.interval"), message, f"checkpoint.interval={max(1, config.train.steps // 10)}"
    elif steps and (need := -(-(steps - 1) // checkpoint.interval) + 1) > checkpoint.keep > 0 == checkpoint.keep_every:
        message = f"{checkpoint.keep} checkpoints may not reach {steps:,} steps back, but {need} do"
        yield (key, "checkpoint.keep", "checkpoint.interval"), message, f"checkpoint.keep={need}"
    if config.train.replay and config.model.kernels:
        message = f"{', '.join(config.model.kernels)} may compute other bits the second time"
        yield ("train.replay", "model.kernels"), message, "train.replay=0"


def submission(config: RunConfig) -> Iterator[Finding]:
    """Findings about time limits, lines of the batch script, and options that ppctl sets itself."""
    launch = config.launch
    limit = None if launch.time is None else slurm_seconds(launch.time)
    if limit is not None and limit <= launch.signal_lead:
        message = f"the ranks would have to stop {launch.signal_lead} s before a limit of {limit} s: at the start"
        yield ("launch.time", "launch.signal_lead"), message, f"launch.signal_lead={max(limit // 2, 1)}"
    for name, key in keys_with("jobs").items():
        if key.is_list and any("\n" in line or "\0" in line for line in config[name] or ()):
            yield (name,), f"each entry of {name} must be one line", f"{name}=null"
    for name in ("sbatch_args", "srun_args"):
        yield from _arguments(f"launch.{name}", getattr(launch, name) or ())


def _arguments(key: str, arguments: Sequence[str]) -> Iterator[Finding]:
    owners = names_of_keys("options")
    for argument in arguments:
        option = argument.partition("=")[0] if argument.startswith("--") else argument[:2]
        if not re.match(r"-[A-Za-z]|--[a-z]", argument):
            yield (key,), f"{key}: {argument!r} is no option; write each as one word, as --mail-type=END", f"{key}=null"
        elif option in owners:
            yield (key,), f"{key}: ppctl sets {option} by {owners[option]}", f"{key}=null"
        elif option in _NEVER:
            yield (key,), f"{key}: with {option} ppctl could not tell how the job goes", f"{key}=null"


def not_installed(switch: str) -> Problem:
    """The problem (PP-E704) of a tracker that the key `switch` turns on, but whose package is not installed."""
    package = switch.partition(".")[2]
    return Problem("PP-E704", f"{switch} is on, but {package} is not installed", pip_install(package), switch)
