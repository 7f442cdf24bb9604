"""How many exchanges this rank has started along each axis; ranks' counts are compared when a job hangs. All ranks of a
group start the same exchanges in the same order, so a rank that has started fewer than others is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist

Count = Callable[[], None]

_counters: dict[dist.ProcessGroup, Count] = {}


def watch(counters: Mapping[dist.ProcessGroup, Count]) -> None:
    """From now on call a group's counter whenever an exchange of the group starts; replaces earlier counters."""
    _counters.clear()
    _counters.update(counters)


def starting(group: dist.ProcessGroup | None) -> None:
    """Count an exchange of `group`: call this right before torch's call, which may wait."""
    if group is not None and (count := _counters.get(group)) is not None:
        count()
