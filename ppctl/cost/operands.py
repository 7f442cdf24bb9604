"""Bytes that a split backward keeps of a microbatch from its I to its W: the operands of the weight gradients.

The operands of a product are its input and the gradient of its result; an input that several products read counts once.
Recomputation changes nothing: values that I computes again are kept until W.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.cost.activations import stage_pieces
from ppctl.cost.parameter_counts import held
from ppctl.cost.setting import Setting
from ppctl.geometry.foreign_model import foreign_of, most
from ppctl.geometry.layers import Kind, Layer, foreign_cost, layer_kinds, offloaded_layers
from ppctl.geometry.parameters import Sizes, kind_parameters
from ppctl.geometry.rows import Parameter
from ppctl.topology import ParallelSizes

_READS_WITH = {"wk": "wq", "wv": "wq", "wkv_a": "wq", "wq_a": "wq", "w3": "w1"}
"""A matrix -> the matrix that reads the same input."""


class Operands(NamedTuple):
    """Bytes of one microbatch on a stage whose backward is split."""

    kept: int
    """Bytes of one microbatch from its I to its W."""
    in_weights: int
    """Further bytes while the W runs: the largest weight gradient, until it is added to the sum."""
    in_inputs: int | None = None
    """Further bytes while the stage's I runs; None if they equal a whole backward's."""


def stage_operands(model: ModelConfig, layers: Iterable[Layer], setting: Setting, stage: int = 0) -> Operands:
    """Bytes that a stage of these layers keeps for W, on one device. Operands are not offloaded."""
    layers = tuple(layers)
    each = [_of_layer(model, kind, setting) for kind in layer_kinds(model, layers)]
    largest = max((gradient for _, gradient in each), default=0.0)
    # W gathers all ranks' tokens again for the matrices that read them.
    again = setting.whole_bytes(model) if setting.sp > 1 else 0
    arriving = setting.travelling(model) if setting.sp > 1 else 0
    in_weights = round(max(largest + again, arriving))
    exact = offloaded_layers(setting.parallel, layers) or foreign_of(model) is not None
    in_inputs = _in_inputs(model, layers, setting, stage) if exact else None
    return Operands(round(sum(kept for kept, _ in each)), in_weights, in_inputs)


def _of_layer(model: ModelConfig, kind: Kind, setting: Setting) -> tuple[float, float]:
    """(bytes that a layer keeps for W, bytes of its largest weight gradient, which W makes beside them)."""
    foreign = foreign_cost(model, kind, setting.element, setting.seq_length)
    if foreign is not None:
        batch, length = setting.micro_batch_size, setting.seq_length
        return foreign.deferred.of(batch, length), most(foreign.in_weights, batch, length)
    width = operand_width(model, kind, setting.sizes, setting.sp)
    return width * setting.tokens * setting.element, _largest(model, kind, setting.sizes) * setting.element


def _in_inputs(model: ModelConfig, layers: tuple[Layer, ...], setting: Setting, stage: int) -> int:
    """Further bytes on the device while a stage's I runs: finished layers leave operands behind."""
    pieces = stage_pieces(model, layers, setting._replace(deferred=True), stage).by_place
    kinds, hidden = layer_kinds(model, layers), setting.hidden_bytes(model)
    most, behind, end = 0.0, 0.0, len(layers)
    for place, piece in sorted(pieces.items(), reverse=True):
        most = max(most, piece.backward + (hidden if behind else 0) - behind)
        behind += piece.stays - sum(_of_layer(model, kind, setting)[0] for kind in kinds[place:end])
        most, end = max(most, -behind), place
    return round(most)


def is_deferred(row: Parameter) -> bool:
    """Whether a parameter's gradient waits for W: that of a matrix (experts' too) or table does, but not that of a
    router, which is small and in float32, or of the output, whose operands are a microbatch's logits."""
    return row.role in ("matrix", "expert", "other", "embedding") and not row.name.startswith("output.")


def operand_width(model: ModelConfig, kind: Kind, sizes: ParallelSizes, sequence_parallel: int) -> float:
    """Elements per token that a layer keeps for W on one device; `sequence_parallel` divides the residual stream."""
    if kind.name == "loss":
        return 0.0
    seen: set[str] = set()
    total = 0.0
    for row in kind_parameters(Sizes.of(model), kind):
        if is_deferred(row):
            uses = model.moe_router_topk if row.experts else 1
            block, _, name = row.name.removesuffix(".weight").rpartition(".")
            read = f"{block}.{_READS_WITH.get(name, name)}"
            inside = 0.0 if row.role == "embedding" or read in seen else _on_device(row, 1, sizes, sequence_parallel)
            seen.add(read)
            total += uses * (inside + _on_device(row, 0, sizes, sequence_parallel))
    if kind.name == "mtp":  # every MTP module reads rows of the embedding's copy
        total += model.hidden_size
    return total


def _on_device(row: Parameter, dim: int, sizes: ParallelSizes, sequence_parallel: int) -> float:
    """Elements per token of a product's input (dim 1) or result (dim 0); a table's rows are results. A divided vector
    is the rank's own part, of all tokens. Of a row-parallel product the result's gradient has the whole width and all
    tokens; a column-parallel product keeps its input for the rank's own tokens alone."""
    splits: dict[int, int] = {at - bool(row.experts): getattr(sizes, axis) for axis, at in row.splits if axis != "ep"}
    if row.role == "embedding":
        return row.shape[1] / (1 if splits else sequence_parallel)
    if row.experts:
        return row.shape[dim] * sizes.etp / sizes.tp / splits.get(dim, 1)
    if dim in splits:
        return row.shape[dim] / min(splits[dim], row.units or splits[dim])
    return row.shape[dim] / (1 if dim == 0 and splits else sequence_parallel)


def _largest(model: ModelConfig, kind: Kind, sizes: ParallelSizes) -> int:
    """Elements of a layer's largest weight gradient in W on one device; a stack of experts counts as one weight."""
    if kind.name == "loss":
        return 0
    rows = [row for row in kind_parameters(Sizes.of(model), kind) if is_deferred(row)]
    return max((held(row.elements, row.axes, sizes) for row in rows), default=0)
