"""When stages that torch's fully_shard has divided sum their gradients: after every backward, or behind the last one.

Knows fully_shard's switches. Must not know schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class GradientSync:
    """The switches of one stage's sharded modules; `shards` says whether there are any."""

    def __init__(self, module: nn.Module) -> None:
        # Nobody has sharded anything without importing this, which takes a second.
        self._modules: list[Any] = [each for each in module.modules() if hasattr(each, "set_requires_gradient_sync")]
        self.shards = bool(self._modules)

    def around(self, last: int, mb: int, run: Callable[[], None]) -> None:
        """Run the backward of a microbatch; gradients are summed over the shards' ranks behind that of `last` alone."""
        for module in self._modules:
            module.set_requires_gradient_sync(mb == last, recurse=False)
            module.set_is_last_backward(mb == last)
        run()

    def at_once(self, mb: int, run: Callable[[], None]) -> None:
        """Run the backward of a microbatch, behind which gradients are summed."""
        self.around(mb, mb, run)
