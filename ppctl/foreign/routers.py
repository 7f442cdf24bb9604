"""What the routers of a layer record for a loss that the model's own code adds (decision 53): seen without values.

Knows one forward of one layer. Must not know what a hop does with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppctl.foreign.anatomy import CannotCut
from ppctl.foreign.foreign_stage import ForeignStage
from ppctl.foreign.library import make_model
from ppctl.foreign.valueless import valueless
from ppctl.geometry.foreign_model import Anatomy, RouterLogits
from ppctl.geometry.layers import Layer

_SEQUENCES, _TOKENS = 3, 5
"""Of the forward in which routers are watched."""


def router_logits(config: Any, anatomy: Anatomy, index: int, hidden: int) -> RouterLogits:
    """What each router of the layer with this index records.

    Raises what torch does for code that reads values, and CannotCut where it is not one number for each token and
    expert.
    """
    recorded = [_recorded(config, anatomy, index, hidden, cast) for cast in (False, True)]
    for each in recorded:
        if each.dim() != 3 or each.shape[1] != _SEQUENCES * _TOKENS:
            shape = list(each.shape[1:])
            message = f"the routers of {anatomy.layer(index)} record {shape} of {_SEQUENCES} x {_TOKENS} tokens"
            raise CannotCut(f"{message}: a message carries [tokens, experts]")
    return RouterLogits(recorded[0].shape[2], *(each.dtype == torch.float32 for each in recorded))


def _recorded(config: Any, anatomy: Anatomy, index: int, hidden: int, cast: bool) -> Tensor:
    """What leaves a layer beside its hidden state: with 16-bit weights, or with products `cast`."""
    dtype = torch.float32 if cast else torch.bfloat16
    blank = make_model(config, "meta", dtype).train()
    with valueless(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        stage = ForeignStage(blank, anatomy, [Layer("decoder", index)])
        recorded: Tensor
        _, recorded = stage(torch.zeros(_SEQUENCES, _TOKENS, hidden, dtype=dtype))
    return recorded
