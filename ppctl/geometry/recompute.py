"""What a stage recomputes in its backward instead of keeping it: read by those who build it and those who price it.

Knows Megatron's meaning of `train.recompute_*`. Must not know modules or bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.config.schema import TrainConfig
from ppctl.geometry.layers import Layer

DEFAULT_MODULES = ("core_attn",)


def recomputed_runs(train: TrainConfig, stage: int, layers: Sequence[Layer]) -> tuple[tuple[Layer, ...], ...]:
    """Under `full`: the runs of layers of which only the first one's input is kept; () where there are none.

    `uniform` makes runs of `recompute_num_layers` (1 by default) out of all decoder layers; `block` takes the first
    `recompute_num_layers` (all by default), each as a run of its own. An MTP layer is always a run of its own: it has
    other inputs. `layers` are the stage's, in model order.
    """
    if train.recompute_granularity != "full" or not _chosen(train, stage):
        return ()
    decoder = [layer for layer in layers if layer.kind == "decoder"]
    mtp = [(layer,) for layer in layers if layer.kind == "mtp"]
    number = train.recompute_num_layers
    if train.recompute_method == "block":
        return tuple([*((layer,) for layer in decoder), *mtp][:number])
    width = number or 1
    runs = [tuple(decoder[first : first + width]) for first in range(0, len(decoder), width)]
    return (*runs, *mtp)


def recomputed_modules(train: TrainConfig, stage: int) -> tuple[str, ...]:
    """Under `selective`: the modules recomputed in every layer of the stage, in Megatron's names; () where none."""
    if train.recompute_granularity != "selective" or not _chosen(train, stage):
        return ()
    return tuple(train.recompute_modules or DEFAULT_MODULES)


def _chosen(train: TrainConfig, stage: int) -> bool:
    return train.recompute_stages is None or stage in train.recompute_stages
