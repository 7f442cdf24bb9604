"""The tokens that a checkpoint's model continues a prompt with."""

from __future__ import annotations

from pathlib import Path

import torch

from ppctl.pretrained.generate import continued
from ppctl.pretrained.whole_model import open_model


def spoken(checkpoint: Path, count: int) -> list[int]:
    """The likeliest tokens behind three others."""
    device = torch.device("cpu")
    model = open_model(checkpoint, device, None, lambda *_: None)
    return [*continued(model, [1, 2, 3], count, (), torch.argmax, device)]
