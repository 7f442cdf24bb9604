"""Bytes of state on one device, what lives beside it, and peaks over a schedule.

Knows the precision recipes of `train/precision.py` and how sharding divides them. Must not know layers' activations,
or of schedules more than their order of F, B and W.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.cost.allocator import MIB, Allocator
from ppctl.cost.parameters import Count
from ppctl.geometry.layers import Layer, expert_width, head_dim, layer_kinds, query_groups
from ppctl.schedule.action import LIFE_ENDS, Action, F


class Precision(NamedTuple):
    """Bytes per parameter and per activation element."""

    dtype: str
    weight: int
    gradient: int
    optimizer: int
    """AdamW's two fp32 moments, and the fp32 master weight where weights are narrower."""
    activation: int


PRECISIONS = {
    "float32": Precision("float32", 4, 4, 8, 4),
    "bfloat16": Precision("bfloat16", 2, 4, 12, 2),
    "float16": Precision("float16", 2, 4, 12, 2),
}


SHARED_OPTIMIZER = 12
"""Bytes per parameter of a part: its float32 master and AdamW's two moments."""


class State(NamedTuple):
    """Bytes on one device."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class Spread(NamedTuple):
    """Over how many devices a parameter is split or shared out."""

    tp: int = 1
    ep: int = 1
    etp: int = 1
    dense: int = 1
    """Ranks that hold the same dense parameters: dp x cp."""
    experts: int = 1
    """Ranks that hold the same experts."""


def state_bytes(count: Count, spread: Spread, precision: Precision, sharding: str) -> State:
    """Weights, gradients and optimizer state of `count` parameters while a step uses them.

    Sharding divides the optimizer's state, in which there is a float32 master of every weight then. Weights and
    gradients are whole, since gradients are summed once a step; with `full` only for as long as `Passing` says.
    """
    dense, experts = count.on_device(spread.tp, spread.ep, spread.etp)
    whole = dense + experts
    weights, gradients = whole * precision.weight, whole * precision.gradient
    if sharding == "none":
        return State(weights, gradients, whole * precision.optimizer)
    return State(weights, gradients, shared(dense, experts, spread) * SHARED_OPTIMIZER)


def shared(dense: int, experts: int, spread: Spread) -> int:
    """Parameters of a device that are its part of what its data-parallel ranks share."""
    return -(-dense // spread.dense) - (-experts // spread.experts)


def workspace_bytes(allocator: Allocator, cublas_mib: float, te_mib: float) -> int:
    """Workspaces of the libraries, on a GPU."""
    te = te_mib if allocator.transformer_engine else 0.0
    return int((allocator.cublas_workspaces * cublas_mib + te) * MIB)


def dummy_gradient_bytes(model: ModelConfig, layers: Iterable[Layer], spread: Spread) -> int:
    """One 16-bit weight gradient for every distinct shape of a weight in these layers, as TE 2.11 keeps them."""
    shapes: set[tuple[int, int]] = set()
    for kind, moe in set(layer_kinds(model, layers)):
        if kind in ("decoder", "mtp"):
            shapes |= _attention_shapes(model, spread.tp) | _feed_forward_shapes(model, moe, spread)
        elif kind == "loss":
            shapes.add((model.vocab_size // spread.tp, model.hidden_size))
    return 2 * sum(rows * columns for rows, columns in shapes)


def _attention_shapes(model: ModelConfig, tp: int) -> set[tuple[int, int]]:
    h, heads = model.hidden_size, model.num_attention_heads
    if not model.multi_latent_attention:
        d = head_dim(model)
        return {((heads + 2 * query_groups(model)) * d // tp, h), (h, heads * d // tp)}
    q, kv, rope = model.q_lora_rank, model.kv_lora_rank, model.qk_pos_emb_head_dim
    width = heads * (model.qk_head_dim + rope) // tp
    queries = {(width, h)} if q is None else {(q, h), (width, q)}
    up = (heads * (model.qk_head_dim + model.v_head_dim) // tp, kv)
    return {*queries, (kv + rope, h), up, (h, heads * model.v_head_dim // tp)}


def _feed_forward_shapes(model: ModelConfig, moe: bool, spread: Spread) -> set[tuple[int, int]]:
    inputs = 2 if model.gated_linear_unit else 1

    def pair(width: int, over: int) -> set[tuple[int, int]]:
        return {(inputs * width // over, model.hidden_size), (model.hidden_size, width // over)} if width else set()

    if not moe:
        return pair(model.ffn_hidden_size, spread.tp)
    shared = model.moe_shared_expert_intermediate_size or 0
    return pair(expert_width(model), spread.etp) | pair(shared, spread.tp)


def peaks(
    actions: Iterable[Action], bytes_of: Sequence[int], while_backward: Sequence[int] | None = None
) -> tuple[int, int]:
    """(activations in flight, their bytes) of one rank, each at its largest.

    A (stage, microbatch) lives from the start of its F to the end of its B, or of its W where the backward is split,
    and holds `bytes_of[stage]`; `while_backward[stage]` more (what is computed again) while its backward runs. Exact,
    since a rank runs its list in order. One walk for both: plans hold many actions.
    """
    alive = most = held = largest = 0
    for op, stage, _ in actions:
        if op is F:
            alive += 1
            held += bytes_of[stage]
            if alive > most:
                most = alive
            if held > largest:
                largest = held
        elif op in LIFE_ENDS:
            if while_backward is not None and held + while_backward[stage] > largest:
                largest = held + while_backward[stage]
            alive -= 1
            held -= bytes_of[stage]
    return most, largest
