"""Token embedding whose weights are left for `initialize` to fill.

Knows that torch's own draw, on the meta device, would import its compiler: a second of every rank's start.
"""

from __future__ import annotations

from torch import nn


class Embedding(nn.Embedding):
    """Rows by token id; made without values."""

    def reset_parameters(self) -> None:
        """Draw nothing."""
