"""The first weights of a session from somewhere else than the seed.

Knows sources by what lies in them, and copies each tensor into every place that the session has for it. Must not know
how sources are found or compared with the model: that was done before the first rank started.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ppctl.checkpoint.manifest import read_manifest
from ppctl.checkpoint.replicas import copies
from ppctl.families.directory import CONFIG, open_directory
from ppctl.pretrained.reading import Reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ppctl.checkpoint import Tensors
    from ppctl.config.schema import ModelConfig


@torch.no_grad()
def fill(tensors: Tensors, path: Path, model: ModelConfig) -> None:
    """Fill weights, keyed as checkpoints key them (`model.<canonical name>`), from a model directory or a checkpoint.

    Other keys are left alone. Values are cast to the dtype of where they go. Raises CheckpointError as the sources do.
    """
    read = _source(path, model)
    for name, value in tensors.items():
        if name.startswith("model."):
            tensor = read(name)
            for each in copies(value):
                each.copy_(tensor)


def _source(path: Path, model: ModelConfig) -> Callable[[str], Tensor]:
    if not (path / CONFIG).is_file():
        from ppctl.checkpoint.streaming import CheckpointReader  # it loads torch's checkpoint library

        return CheckpointReader(path, read_manifest(path)).tensor
    reader = Reader(open_directory(path, model=model))
    reader.check_copies()
    return lambda name: reader.tensor(name.removeprefix("model."))
