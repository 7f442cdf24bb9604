"""NeMo Automodel's `PipelineConfig`, and its computation of the number of stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from ppctl.config.metadata import (
    MOST_IN_A_MICROBATCH,
    MOST_SAMPLES,
    MOST_STAGES,
    MOST_TOKENS,
    PYTHON,
    Support,
    key,
    positive,
)
from ppctl.errors import ConfigError, Problem

CODE = "PP-E119"


class StageCountError(ConfigError, ValueError):
    """A number of layers per stage that gives no legal number of stages."""


class PlacementError(StageCountError, AssertionError):
    """Stages that cannot be placed on the ranks."""


@dataclass(slots=True)
class PipelineConfig:
    """Schedule, split and run-time options of a pipeline. Checks nothing itself."""

    pp_schedule: str | None = key("1f1b", names="pp_schedule", known_as="pipeline_parallel_schedule")
    """Name of the schedule, in any case: 1f1b, interleaved_1f1b or gpipe; with backwards split into input gradients and
    weight gradients zb_h1, zb_h2, interleaved_zero_bubble, zbv_zero_bubble, v_half, v_min, dualpipev, and auto: the one
    that is found for the stages' costs and the memory (`schedule_memory`). If none is given and vpp is above 1, it is
    interleaved_1f1b."""
    pp_schedule_csv: str | None = key(
        None, names="pp_schedule_csv", known_as="pipeline_parallel_schedule_csv", verbatim=True
    )
    """File with a schedule in torch's CSV form; replaces pp_schedule. It has a row for each pp_rank, with the rank's
    actions in order: stage, F or B (or I and W), microbatch, as in 0F0,0F1,0B0,0B1. `ppctl plan --dump-schedule` writes
    one to begin with; docs/schedules.md is the guide, `ppctl explain PP-E216` says what must fit."""
    pp_microbatch_size: int = key(1, positive(MOST_IN_A_MICROBATCH))
    """Sequences per microbatch: the micro batch size."""
    pp_batch_size: int = key(1, positive(MOST_SAMPLES))
    """Sequences of one schedule call on a data-parallel rank; if set, a step makes as many calls as its batch needs."""
    layers_per_stage: int | None = key(None, positive(MOST_STAGES), layout=True)
    """Decoder layers per stage; none gives one stage per rank (two under a schedule that needs several)."""
    round_virtual_stages_to_pp_multiple: Literal["up", "down"] | None = None
    """Round the number of stages to a multiple of pp, `up` or `down`; none refuses a number that is not one."""
    module_fqns_per_model_part: list[list[str]] | None = key(None, layout=True)
    """Module names of every stage, in place of a split by layers: Hugging Face's, or a module's own."""
    patch_inner_model: bool = True
    """Let ppctl stand in for what an inner model's forward calls on other stages. False: that forward itself takes
    hidden states and is called as it is, with None in place of other stages' modules."""
    patch_causal_lm_model: bool = True
    """Replace the forward of the model itself, with or without an inner model."""
    patch_stage_backward_maybe_with_nosync: bool = False
    """Stages under fully_shard sum their gradients once, after a stage's last backward, not after each backward. The
    data parallelism of a run always does so."""
    dtype: Any = key(None, mathematics=True)
    """dtype of messages whose shapes are computed in advance; none takes the parameters' dtype, and in `ppctl.pipeline`
    that of the stages' results."""
    scale_grads_in_schedule: bool = key(False, mathematics=True)
    """Give every microbatch the same weight: its loss is the mean over its own tokens, and the schedule divides the sum
    of gradients by the number of microbatches (torch's scale_grads). Otherwise every token has the same weight."""
    loss_fn: Callable[..., Any] | None = key(None, support=Support(PYTHON))
    """`loss_fn(logits, labels)` in place of cross entropy: the sum over a microbatch's tokens, or with
    scale_grads_in_schedule their mean. Labels that do not count are -100. Python only; in `ppctl.pipeline` any function
    of output and labels, whose sum over the microbatches (mean, with scale_grads_in_schedule) is the loss."""
    pp_seq_len: int | None = key(None, positive(MOST_TOKENS))
    """Sequence length for which message shapes are computed in advance; none takes the data's."""

    def to_dict(self) -> dict[str, Any]:
        """Field name -> value, not copied."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def calculate_virtual_stages(
    num_layers: int,
    layers_per_stage: int | None,
    pp_size: int,
    is_single_stage_schedule: bool,
    round_to_pp_multiple: str | None = None,
) -> tuple[int, int]:
    """(number of stages, stages per rank) for a model of `num_layers` cut into pieces of `layers_per_stage`.

    Without `layers_per_stage`: one stage per rank under a single-stage schedule, else two. Otherwise ceil(num_layers /
    layers_per_stage) stages, rounded `up` or `down` to a multiple of `pp_size` where asked. Raises StageCountError (a
    ValueError) if that is no multiple, or does not suit the schedule. Source: NeMo Automodel's documented behaviour.
    """
    if layers_per_stage is None:
        per_rank = 1 if is_single_stage_schedule else 2
        return pp_size * per_rank, per_rank
    if layers_per_stage < 1:
        raise _bad(f"layers_per_stage is {layers_per_stage}: a stage holds at least one layer")
    stages = -(-num_layers // layers_per_stage)
    count = f"{num_layers} layers in stages of {layers_per_stage} make {stages} stages for {pp_size} pipeline ranks"
    if stages % pp_size:
        stages = _rounded(stages, pp_size, round_to_pp_multiple, count)
    per_rank = stages // pp_size
    if is_single_stage_schedule and per_rank != 1:
        raise _bad(f"a single-stage schedule runs 1 stage per rank, not {per_rank}: {count}")
    if not is_single_stage_schedule and per_rank < 2:
        raise _bad(f"a multi-stage schedule runs at least 2 stages per rank, not {per_rank}: {count}")
    return stages, per_rank


def _rounded(stages: int, pp_size: int, direction: str | None, sizes_text: str) -> int:
    """`stages`, no multiple of `pp_size`, rounded `up` or `down` to one. Raises StageCountError for None and others."""
    if direction == "up":
        return stages + pp_size - stages % pp_size
    if direction == "down":
        return stages - stages % pp_size
    if direction is None:
        raise _bad(f"the number of stages must be a multiple of the pipeline ranks: {sizes_text}")
    raise _bad(f"round_to_pp_multiple must be 'up', 'down' or None, not {direction!r}")


def stage_ids_this_rank(pp_rank: int, pp_size: int, num_stages: int, style: str = "loop") -> tuple[int, ...] | None:
    """The stages of one pipeline rank, in chunk order, under `loop` or `v` placement; None for any other style. Loop:
    pp_rank, pp_rank + pp_size, ... V (two per rank): down the ranks and back. Raises PlacementError, a ValueError, if
    the stages do not divide, or a V does not have two per rank."""
    if num_stages % pp_size:
        raise PlacementError(_bad(f"{num_stages} stages cannot be shared evenly by {pp_size} pipeline ranks").problems)
    per_rank = num_stages // pp_size
    if style == "loop":
        return tuple(pp_rank + lap * pp_size for lap in range(per_rank))
    if style != "v":
        return None
    if per_rank != 2:
        raise PlacementError(_bad(f"a V has 2 stages per rank, not {per_rank}").problems)
    return (pp_rank, num_stages - 1 - pp_rank)


def _bad(message: str) -> StageCountError:
    return StageCountError(Problem(CODE, message, "ppctl plan pp=4 vpp=2"))
