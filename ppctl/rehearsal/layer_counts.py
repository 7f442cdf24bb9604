"""Which operations launch a kernel, how many bytes one moves, and to which kind of layer it belongs.

Knows torch's operators and the nodes of autograd's graph. Must not know what is done with the counts.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ppctl.foreign.measured_pass import tensors_of

_aten = torch.ops.aten
_PRODUCTS = {
    *("mm", "addmm", "bmm", "baddbmm", "dot", "mv", "addmv", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2"),
    *("_scaled_grouped_mm", "_scaled_grouped_mm_v2"),
}
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_", "detach", "lift_fresh"}
_WRITES_ONLY = {
    *("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_"),
    *("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
}
"""Operations that do not read their first operand."""
_READS_ROWS = {"index_select", "embedding", "gather", "index", "_embedding_bag"}
_MARK = "ppctl.layer"


def launches(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Whether an operation makes or changes values on the device: memory without values and views need no kernel."""
    made = [tensor for tensor in tensors_of(result) if tensor.is_meta]
    if not made or func.is_view or func._opname in _EMPTY:
        return False
    if func._schema.is_mutable:
        return True
    read = {tensor.untyped_storage()._cdata for tensor in tensors_of(args)}  # `_unsafe_view` is no view by its schema
    return any(tensor.untyped_storage()._cdata not in read for tensor in made)


def multiplies(func: Any) -> bool:
    """Whether an operation is a product of matrices or attention, which are bound by arithmetic and not by memory."""
    name = func._opname
    return name in _PRODUCTS or name.startswith(_ATTENTION)


def moved_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """The least bytes that an operation's kernel reads and writes: each operand once, each result once.

    Of operands that are expanded the elements in memory count, of rows that are looked up as many as are put out.
    """
    written = sum(_size(tensor) for tensor in tensors_of(result))
    if func._opname in _WRITES_ONLY:
        args = args[1:]
    inside = [name for name in kwargs if name != "out"]
    operands = {id(tensor): tensor for tensor in tensors_of([*args, *(kwargs[name] for name in inside)])}
    read = [_size(tensor) for tensor in operands.values()]
    if func._opname in _READS_ROWS and read:
        read[0] = min(read[0], _rows_size(func, args, result))
    return written + sum(read)


def _rows_size(func: Any, args: Sequence[Any], result: Any) -> int:
    """Bytes of the rows that are looked up: of a sum over rows, each of them."""
    if func._opname == "_embedding_bag":
        return int(args[1].numel() * args[0].shape[1] * args[0].element_size())
    return sum(_size(tensor) for tensor in tensors_of(result))


def _size(tensor: Tensor) -> int:
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()


class LayerMarks:
    """Says to which kind of layer the operation belongs that is dispatched now.

    In a forward that is the layer whose module is called; in a backward it is the layer whose forward made the node of
    the graph that runs, even if this computes the forward a second time.
    """

    def __init__(self) -> None:
        self.passes: dict[str, int] = {}
        """Kind -> forwards so far whose graph is kept; second forwards in a backward are none."""
        self._here = threading.local()

    def watch(self, layer: nn.Module, kind: str) -> None:
        """Mark what this layer's module does from now on."""

        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._here.kind = kind

        def leave(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            self._here.kind = None
            if torch.is_grad_enabled() and torch._C._current_autograd_node() is None:
                self.passes[kind] = self.passes.get(kind, 0) + 1
                _mark(output, inputs, kind)

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)

    def kind(self) -> str | None:
        """The kind of layer of the present operation; None outside of layers."""
        node: Any = torch._C._current_autograd_node()
        kind: str | None = getattr(self._here, "kind", None) if node is None else node.metadata.get(_MARK)
        return kind


def _mark(output: Any, inputs: Sequence[Any], kind: str) -> None:
    """Name the layer in every node of its graph: from its output back to its inputs, or to nodes of a layer before."""
    outside = {tensor.grad_fn for tensor in tensors_of(inputs)}
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors_of(output)]
    while waiting:
        node = waiting.pop()
        if node is None or node in outside or _MARK in node.metadata:
            continue
        node.metadata[_MARK] = kind
        waiting.extend(each for each, _ in node.next_functions)
