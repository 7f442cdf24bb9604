"""Whether all ranks of a pipeline call for the same, asked once: at the first call over a communicator.

Ranks that differ in chunks, microbatches or shapes would wait for each other for ever, or end inside the transport.
Must not know what is called. Later calls are not compared: an exchange at every step would cost as much as a message.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
import torch.distributed as dist

from ppctl.comm.connections import moves_on_device
from ppctl.megatron.models import misuse
from ppctl.megatron.p2p_communication import P2PCommunicator

_agreed: WeakSet[P2PCommunicator] = WeakSet()


def agree(communicator: P2PCommunicator | None, asked: dict[str, int | None]) -> None:
    """Compare what this rank asks for, by name, with all others. A collective of the communicator's group.

    Raises ConfigError on every rank, naming what differs and on which pp_ranks, where they do not ask for the same.
    """
    if communicator is None or communicator in _agreed:
        return
    group = communicator.pp_group
    device = communicator.device if moves_on_device(group) else torch.device("cpu")
    own = torch.tensor([-1 if value is None else value for value in asked.values()], device=device)
    table = torch.empty(group.size(), len(own), dtype=own.dtype, device=device)
    dist.all_gather(list(table.unbind()), own, group=group)
    columns = dict(zip(asked, table.T.tolist(), strict=True))
    told = [_difference(name, values) for name, values in columns.items() if len(set(values)) > 1]
    if told:
        raise misuse(f"the ranks of a pipeline do not call for the same: {'; '.join(told)}")
    _agreed.add(communicator)


def _difference(name: str, values: list[int]) -> str:
    """`num_microbatches is 4 on pp_rank 0 and 5 on pp_rank 1`."""
    first = values[0]
    rank = next(rank for rank, value in enumerate(values) if value != first)
    return f"{name} is {first} on pp_rank 0 and {values[rank]} on pp_rank {rank}"
