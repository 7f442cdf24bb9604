"""Megatron-core's own process groups and sizes, if a program has loaded it. Imports nothing of Megatron."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

CORE = "megatron.core"


class PipelineSizes(NamedTuple):
    """Megatron's pipeline and virtual pipeline size; the latter is None without interleaving."""

    pp: int
    vpp: int | None


def parallel_state() -> Any:
    """Megatron's module of process groups, if it is loaded and has made them; else None."""
    state = sys.modules.get(f"{CORE}.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None


def pipeline_sizes() -> PipelineSizes | None:
    """The sizes that `parallel_state` has; None without it."""
    state = parallel_state()
    if state is None:
        return None
    vpp = state.get_virtual_pipeline_model_parallel_world_size()
    return PipelineSizes(state.get_pipeline_model_parallel_world_size(), vpp)


def groups_or_own(groups: Any, communicator: Any) -> Any:
    """`groups`, or without them what Megatron's functions then take from `parallel_state`; None if there is neither.

    These are the groups tp, cp, pp, embd, pos_embd and dp_cp. A communicator over another group than that pipeline's
    has nothing to do with them.
    """
    state = parallel_state()
    if groups is not None or state is None:
        return groups
    pp = state.get_pipeline_model_parallel_group()
    if communicator is not None and getattr(communicator, "pp_group", None) is not pp:
        return None
    return SimpleNamespace(
        tp=state.get_tensor_model_parallel_group(),
        cp=state.get_context_parallel_group(),
        pp=pp,
        embd=state.get_embedding_group(check_initialized=False),
        pos_embd=state.get_position_embedding_group(check_initialized=False),
        dp_cp=state.get_data_parallel_group(with_context_parallel=True),
    )


def first_layer(config: Any, vp_stage: int, pp_rank: int) -> int | None:
    """The number of the first layer (from 1) that Megatron gives a stage of its loop; None if it is not loaded."""
    layers = sys.modules.get(f"{CORE}.transformer.transformer_layer")
    offset = getattr(layers, "get_transformer_layer_offset", None)
    return None if offset is None else offset(config, vp_stage, pp_rank) + 1
