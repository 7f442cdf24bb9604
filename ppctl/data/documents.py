"""Where the documents of a sample begin and end, found by the token that ends each.

Knows tokens and one mark. Must not know samples, batches, attention or torch. A mark belongs to the document that it
ends; a sample that begins or stops within a document has a part of it, which counts as a document.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Lengths = tuple[tuple[int, ...], ...]
"""Of each row: the tokens of its documents, in order; they add up to the row."""


class DocumentEnd(NamedTuple):
    """The token that ends a document, and what follows from it (Megatron's names in `config.data`)."""

    token: int
    masks_loss: bool = False
    """What follows it is another document, which nothing foretells: that label does not count (eod_mask_loss)."""
    restarts_positions: bool = False
    """Positions count from 0 in every document (reset_position_ids)."""
    separates: bool = False
    """No token attends to another document, nor looks ahead into one (reset_attention_mask)."""


def positions(tokens: npt.NDArray[np.int64], end: int) -> npt.NDArray[np.int64]:
    """How far each of `tokens` [..., s] is from the first of its document."""
    places = np.broadcast_to(np.arange(tokens.shape[-1]), tokens.shape)
    begins = np.zeros_like(tokens)
    begins[..., 1:] = np.where(tokens[..., :-1] == end, places[..., 1:], 0)
    return places - np.maximum.accumulate(begins, axis=-1)


def lengths(positions: npt.NDArray[np.int64]) -> Lengths:
    """The documents of rows [b, s] of positions."""
    begins = [[*np.flatnonzero(row == 0).tolist(), len(row)] for row in positions]
    return tuple(tuple(after - first for first, after in pairwise(row)) for row in begins)
