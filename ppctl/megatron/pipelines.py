"""The pipeline of a call: its process group, its communicator, and the comparison of its ranks' arguments.

The groups and sizes of a loaded Megatron-core are read; nothing of it is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from ppctl.comm.groups import gather_values
from ppctl.comm.modes import Modes
from ppctl.megatron.models import config_of, holder_of, misuse
from ppctl.megatron.p2p_communication import P2PCommunicator
from ppctl.schedule.action import Channel, Placement, Schedule

CORE = "megatron.core"


class PipelineSizes(NamedTuple):
    """Megatron's pipeline and virtual pipeline size; the latter is None without interleaving."""

    pp: int
    vpp: int | None


def parallel_state() -> Any:
    """Megatron's module of process groups, if it is loaded and has made the groups; else None."""
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
    """Return `groups`, else the groups of Megatron's `parallel_state` (tp, cp, pp, embd, pos_embd, dp_cp); None if it
    has none, or if the communicator is over another group than Megatron's pipeline.
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
    """The number (from 1) of the first layer that Megatron gives a stage of a loop; None if Megatron is not loaded."""
    layers = sys.modules.get(f"{CORE}.transformer.transformer_layer")
    offset = getattr(layers, "get_transformer_layer_offset", None)
    return None if offset is None else offset(config, vp_stage, pp_rank) + 1


_made: WeakKeyDictionary[nn.Module, tuple[object, P2PCommunicator]] = WeakKeyDictionary()
"""Communicators made for calls without one, by the rank's first chunk, so that channels and buffers outlive a step."""


def pipeline_of(model: nn.Module, communicator: Any, groups: Any, kind: str = "loop") -> P2PCommunicator | None:
    """Return `communicator`, else one over `groups.pp`, else one over the world; None for a pipeline of one rank. Of a
    communicator of another class (Megatron's), only `pp_group` and `config` are used. `kind` is how stages are placed:
    if the communicator lacks the channels of a V, one that has them is made. Made communicators are kept while the
    model lives and the modes stay the same. Raises ConfigError if the config says that the world is not one pipeline,
    or for a communicator without `pp_group` or `config`.
    """
    if communicator is None:
        group = getattr(groups, "pp", None)
        if group is None and dist.is_initialized():
            group = _world(config_of(model))
        return None if group is None or group.size() == 1 else _kept(model, group, config_of(model), kind)
    group, config = getattr(communicator, "pp_group", None), getattr(communicator, "config", None)
    if not isinstance(group, ProcessGroup) or config is None:
        message = f"p2p_communicator is a {type(communicator).__name__}, but must have a pp_group and a config"
        raise misuse(message, "p2p_communicator=P2PCommunicator(pp_group, config)")
    if group.size() == 1:
        return None
    if isinstance(communicator, P2PCommunicator) and _has_channels(communicator, kind):
        return communicator
    return _kept(model, group, config, kind)


def _world(config: Any) -> ProcessGroup:
    """The world as the pipeline's group. Raises ConfigError if the config gives the pipeline another size."""
    world = dist.group.WORLD
    assert world is not None  # distributed is initialised
    size = getattr(config, "pipeline_model_parallel_size", 1)
    if size > 1 and size != world.size():
        message = f"the config has {size} pipeline ranks, but the world {world.size()}: a communicator must name them"
        raise misuse(message, "p2p_communicator=P2PCommunicator(pp_group, config)")
    return world


def _has_channels(communicator: P2PCommunicator, kind: str) -> bool:
    own = {end.channel for end in communicator.ends}
    rank = communicator.pp_rank
    return kind == "loop" or not own or {c for c in v_channels(communicator.pp) if rank in c[:2]} <= own


def v_channels(pp: int) -> frozenset[Channel]:
    """The channels of a V of two stages per rank: activations and gradients between neighbours, both ways."""
    return frozenset(edge.channel for edge in Schedule("v", Placement("v", pp, 2 * pp), 1, ()).edges)


def _kept(model: nn.Module, group: ProcessGroup, config: Any, kind: str) -> P2PCommunicator:
    """The model's communicator over `group`. It is made anew if the group, the placement or a mode has changed."""
    key = group, kind, Modes.of(config)
    kept = _made.get(model)
    if kept is None or kept[0] != key:
        channels = None if kind == "loop" else v_channels(group.size())
        kept = (key, P2PCommunicator(group, config, channels=channels))
        _made[model] = kept
    return kept[1]


_agreed: WeakSet[P2PCommunicator] = WeakSet()


def agree(communicator: P2PCommunicator | None, asked: dict[str, int | None], misplaced: str | None) -> None:
    """Compare this rank's arguments `asked` with all other ranks', at the first call over a communicator. Ranks that
    differ in chunks, microbatches or shapes would wait for each other for ever, or fail in the transport; so would the
    neighbours of a rank that stops because its chunks are `misplaced`. Later calls are not compared: an exchange at
    every step would cost as much as a message. A collective of the communicator's group. Raises ConfigError on every
    rank, naming the differences and their pp_ranks.
    """
    if communicator is None or communicator in _agreed:
        return
    own = misplaced is not None, {name: None if value is None else int(value) for name, value in asked.items()}
    gathered = gather_values(tuple[bool, dict[str, int | None]], own, communicator.pp_group, everywhere=True)
    wrong = next((pp_rank for pp_rank, (is_wrong, _) in enumerate(gathered) if is_wrong), None)
    if wrong is not None:
        message = misplaced or f"pp_rank {wrong} has chunks that are not in the places of the schedule"
        raise misuse(message, 'ppctl.adopt(schedule="interleaved_zero_bubble")')
    by_name = {name: [each.get(name) for _, each in gathered] for name in asked}
    differing = {name: values for name, values in by_name.items() if len(set(values)) > 1}
    if differing:
        listed = "; ".join(_difference(name, values) for name, values in differing.items())
        name, (first, *_) = next(iter(differing.items()))
        message = f"the ranks of a pipeline call with different arguments: {listed}"
        raise misuse(message, f"{name}={first} on every rank")
    _agreed.add(communicator)


def _difference(name: str, values: list[int | None]) -> str:
    """`num_microbatches is 4 on pp_rank 0 and 5 on pp_rank 1`."""
    first = values[0]
    rank = next(rank for rank, value in enumerate(values) if value != first)
    return f"{name} is {first} on pp_rank 0 and {values[rank]} on pp_rank {rank}"


def misplaced_on_v(chunks: Sequence[nn.Module], placement: Placement, pp_rank: int) -> str | None:
    """Why these chunks are not the stages that a V places on this rank; None if they may be, or for a loop.

    Megatron numbers layers, and places embedding and output layer, for a loop: rank 0 has the first stage and the last
    rank the last one. On a V rank 0 has both. Compares a chunk's `pre_process`, `post_process`, its first layer's
    number, and whether it shares the embedding's weight, which would need another group of embeddings in Megatron.
    """
    if placement.kind != "v":
        return None
    last = placement.num_stages - 1
    for number, (chunk, stage) in enumerate(zip(chunks, placement.stages_of(pp_rank), strict=True)):
        for name, due in (("pre_process", stage == 0), ("post_process", stage == last)):
            holder = holder_of(chunk, name)
            if holder is not None and bool(getattr(holder, name)) != due:
                return (
                    f"a V has stage {stage} of {last + 1} on pp_rank {pp_rank}, but the chunk there has "
                    f"{name}={not due}: the model was built for a loop"
                )
        config = config_of(chunk)
        shares = holder_of(chunk, "share_embeddings_and_output_weights")
        if shares is not None and shares.share_embeddings_and_output_weights:
            return "on a V one rank has embedding and output layer, but Megatron shares their weight between two ranks"
        if getattr(config, "mtp_num_layers", None):
            return "on a V Megatron's multi-token prediction would share the embedding between the wrong ranks"
        if getattr(config, "pipeline_model_parallel_layout", None) is not None:
            return "pipeline_model_parallel_layout numbers the layers of a loop, but the schedule is a V"
        first, due_first = _first_layer(chunk), first_layer(config, number, stage % placement.pp)
        if first is not None and due_first is not None and first != due_first:
            return (
                f"stage {stage} of a V begins with layer {due_first}, but the chunk with layer {first}: build it with "
                f"pg_collection=ppctl.on_v(groups, {number})"
            )
    return None


def _first_layer(chunk: nn.Module) -> int | None:
    """The number of a chunk's first layer, as Megatron counts (from 1)."""
    layers: Any = getattr(getattr(holder_of(chunk, "decoder"), "decoder", None), "layers", ())
    return getattr(layers[0], "layer_number", None) if len(layers) else None


def on_v(groups: Any, chunk: int) -> Any:
    """Megatron's collection of process groups for building the `chunk` (0 or 1) of a rank as its stage of a V.

    On a V the second chunk of pp_rank r is the stage that a loop has on pp_rank pp - 1 - r. Megatron's modules ask
    `groups.pp` for their rank, and number their layers by it, so names in checkpoints stay the model's. The result is a
    copy of `groups` (`ProcessGroupCollection`), only for building modules: its `pp` sends nothing. Raises ConfigError
    for any other chunk.
    """
    if chunk not in (0, 1):
        raise misuse(f"a V has the chunks 0 and 1 on each rank, not {chunk}", "ppctl.on_v(groups, 1)")
    placed = copy(groups)
    if chunk == 1:
        rank, size = groups.pp.size() - 1 - groups.pp.rank(), groups.pp.size()
        placed.pp = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    return placed
