"""Which pipeline a call runs on: the communicator that it was given, or one over the process groups that there are.

Knows process groups and P2PCommunicator. Must not know schedules.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

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
"""Communicators that calls without one have made, by the rank's first chunk: channels and buffers outlive a step."""


def pipeline_of(model: nn.Module, communicator: P2PCommunicator | None, groups: Any) -> P2PCommunicator | None:
    """The communicator given, else one over `groups.pp`, else over the world; None for a pipeline of one rank.

    One that is made here is kept for as long as the model lives and nothing changes about how it sends. Raises
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


def place_in(communicator: P2PCommunicator | None) -> tuple[int, int]:
    """(pp, pp_rank)."""
    return (1, 0) if communicator is None else (communicator.total_stages, communicator.current_stage)
