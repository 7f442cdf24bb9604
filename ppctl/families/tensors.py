"""The tensors of a model: canonical name and shape of each, once, in canonical order.

For whoever must check weights without building a model. Must not know torch, other people's names or files. A tied
output and the copy of the embedding that MTP reads are uses, not tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ppctl.config.schema import ModelConfig
from ppctl.geometry.layers import Layer, layer_kinds
from ppctl.geometry.parameters import Parameter, Sizes, beside_layers, kind_parameters

Shape = tuple[int, ...]


def model_tensors(model: ModelConfig) -> dict[str, Shape]:
    """Canonical name -> shape, for the whole model with its multi-token prediction; every expert is by itself."""
    sizes = Sizes.of(model)
    layers = [Layer("decoder", index) for index in range(model.num_layers)]
    layers += [Layer("mtp", depth) for depth in range(model.mtp_num_layers or 0)]
    first, *last = (row for row in beside_layers(sizes) if row.copy_of is None)
    found = {first.name: first.shape}
    for layer, kind in zip(layers, layer_kinds(model, layers), strict=True):
        found.update(_layer_tensors(kind_parameters(sizes, kind), layer.index))
    return found | {row.name: row.shape for row in last}


def _layer_tensors(rows: tuple[Parameter, ...], layer: int) -> Iterator[tuple[str, Shape]]:
    """The tensors of one layer: expert by expert where its rows are experts'."""
    for experts, run in groupby(rows, key=lambda row: row.experts):
        alike = list(run)
        for expert in range(experts or 1):
            for row in alike:
                yield row.name.format(layer=layer, expert=expert), row.shape
