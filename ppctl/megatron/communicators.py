"""Which communicator a call uses, and whether all ranks of its pipeline make the same call. Must not know schedules."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from ppctl.comm.connections import moves_on_device
from ppctl.megatron.models import config_of, misuse, setting
from ppctl.megatron.p2p_communication import P2PCommunicator

_MODES = (
    "pipeline_dtype",
    "variable_seq_lengths",
    "batch_p2p_comm",
    "batch_p2p_sync",
    "overlap_p2p_comm",
    "overlap_p2p_comm_warmup_flush",
    "use_ring_exchange_p2p",
    "pipeline_model_parallel_comm_backend",
    "mtp_standalone",
)

_made: WeakKeyDictionary[nn.Module, tuple[object, P2PCommunicator]] = WeakKeyDictionary()
"""Communicators made for calls without one, by the rank's first chunk: channels and buffers outlive a step."""


def pipeline_of(model: nn.Module, communicator: P2PCommunicator | None, groups: Any) -> P2PCommunicator | None:
    """`communicator`, else one over `groups.pp`, else one over the world; None for a pipeline of one rank.

    A communicator that is made here is kept as long as the model lives and its modes stay the same. Raises
    ConfigError where the config says that the world is not one pipeline.
    """
    if communicator is None:
        group = getattr(groups, "pp", None)
        if group is None and dist.is_initialized():
            group = _world(config_of(model))
        communicator = None if group is None or group.size() == 1 else _kept(model, group)
    if communicator is not None and not isinstance(communicator, P2PCommunicator):
        message = f"p2p_communicator is a {type(communicator).__name__}"
        raise misuse(message, "p2p_communicator=P2PCommunicator(pp_group, config)")
    return None if communicator is None or communicator.total_stages == 1 else communicator


def _world(config: Any) -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # distributed is initialised
    size = setting(config, "pipeline_model_parallel_size", 1)
    if size > 1 and size != world.size():
        message = f"the config has {size} pipeline ranks and the world {world.size()}: which of them are this pipeline?"
        raise misuse(message, "p2p_communicator=P2PCommunicator(pp_group, config)")
    return world


def _kept(model: nn.Module, group: ProcessGroup) -> P2PCommunicator:
    config = config_of(model)
    key = [group, *(setting(config, name) for name in _MODES)]
    kept = _made.get(model)
    if kept is None or kept[0] != key:
        kept = (key, P2PCommunicator(group, config))
        _made[model] = kept
    return kept[1]


_agreed: WeakSet[P2PCommunicator] = WeakSet()


def agree(communicator: P2PCommunicator | None, asked: dict[str, int | None]) -> None:
    """Compare what this rank asks for, by name, with all others, at the first call over a communicator.

    Ranks that differ in chunks, microbatches or shapes would wait for each other for ever, or fail in the transport.
    Later calls are not compared: an exchange at every step would cost as much as a message. A collective of the
    communicator's group. Raises ConfigError on every rank, naming what differs and on which pp_ranks.
    """
    if communicator is None or communicator in _agreed:
        return
    group = communicator.pp_group
    device = communicator.device if moves_on_device(group) else torch.device("cpu")
    own = torch.tensor([-1 if value is None else value for value in asked.values()], device=device)
    table = torch.empty(group.size(), len(own), dtype=own.dtype, device=device)
    dist.all_gather(list(table.unbind()), own, group=group)
    columns = dict(zip(asked, table.T.tolist(), strict=True))
    differing = {name: values for name, values in columns.items() if len(set(values)) > 1}
    if differing:
        listed = "; ".join(_difference(name, values) for name, values in differing.items())
        name, (first, *_) = next(iter(differing.items()))
        message = f"the ranks of a pipeline do not call for the same: {listed}"
        raise misuse(message, f"{name}={None if first == -1 else first} on every rank")
    _agreed.add(communicator)


def _difference(name: str, values: list[int]) -> str:
    """`num_microbatches is 4 on pp_rank 0 and 5 on pp_rank 1`."""
    first = values[0]
    rank = next(rank for rank, value in enumerate(values) if value != first)
    return f"{name} is {first} on pp_rank 0 and {values[rank]} on pp_rank {rank}"
