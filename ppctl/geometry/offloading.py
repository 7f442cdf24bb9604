"""Which layers leave what they keep to host memory: the first ones of every stage (decision 43).

Knows the keys of `cpu_offloading`. Must not know bytes, ranks or how tensors are moved (`model/offload.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.config.schema import ParallelConfig
from ppctl.geometry.layers import Layer

SMALLEST = 2**10
"""Bytes of the smallest storage that is moved: below are scalars and counts, of which the plan knows nothing."""


def offloaded_layers(parallel: ParallelConfig, layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The decoder layers among a stage's `layers`, in model order, whose activations are moved to host memory."""
    if not (parallel.cpu_offloading and parallel.cpu_offloading_activations):
        return ()
    decoder = [layer for layer in layers if layer.kind == "decoder"]
    return tuple(decoder[: parallel.cpu_offloading_num_layers])
