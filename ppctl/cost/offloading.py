"""Bytes on the device of a stage whose first layers leave their activations to the host.

Knows when a layer's storages are on the device (`ppctl/model/offload.py`, decision 43). Must not know which parts of a
layer they are (`activations`), schedules or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Piece(NamedTuple):
    """Bytes of one microbatch in a layer, or in a run of layers that are computed again as one."""

    stays: float
    """From its forward to its backward."""
    forward: float
    """More while its forward runs, at most."""
    backward: float
    """More while its backward runs, at most."""


def on_device(pieces: Mapping[int, Piece], moved: Mapping[int, float], decoder: int) -> dict[int, Piece]:
    """`pieces` by place in the stage, of which those in `moved` leave so many bytes to the host.

    While a layer computes, all of its own are on the device, and so are those of the layer before it: on their way out
    in the forward, on their way back in the backward. Where every one of the `decoder` pieces moves, nothing waits for
    the last one's copies: they are there until the next layer's end, or until a backward fetches.
    """
    lasting = moved[max(moved)] if len(moved) == decoder else 0.0
    kept: dict[int, Piece] = {}
    beside, fetches = lasting, False
    for place, (stays, forward, backward) in sorted(pieces.items()):
        own = moved.get(place, 0.0)
        kept[place] = Piece(stays - own, forward + own + beside, backward + own + (beside if fetches else 0.0))
        fetches |= place in moved
        beside = moved.get(place, lasting)
    return kept
