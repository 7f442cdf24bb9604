"""How many exchanges this rank has started along each axis; ranks' counts are compared when a job stands still.

All ranks of a group start the same exchanges in the same order, so that whoever has started fewer than another one is
waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist

Count = Callable[[], None]

_counters: dict[dist.ProcessGroup, Count] = {}


def watch(counters: Mapping[dist.ProcessGroup, Count]) -> None:
    """From now on call these whenever an exchange of their group starts, in place of those of an earlier call."""
    _counters.clear()
    _counters.update(counters)


def starting(group: dist.ProcessGroup | None) -> None:
    """An exchange of `group` starts: to be called right before it is handed to torch, which may wait in it."""
    if group is not None and (count := _counters.get(group)) is not None:
        count()
