"""What a stage is told of documents: from a batch, as data has it, to what the model takes.

Knows both sides' values. Must not know tokens, stages or when it is asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ppctl.data.documents import Lengths
from ppctl.model.packing import Documents, Packing


def packing_of(positions: Tensor | None, documents: Sequence[Lengths] | None, mb: int) -> Packing:
    """One micro-batch of `StepBatch.positions` and `StepBatch.documents`."""
    return Packing(
        None if positions is None else positions[mb], None if documents is None else Documents(documents[mb])
    )
