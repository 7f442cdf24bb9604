"""Counts the operations and bytes of a device while a rank runs, where torch dispatches operations to kernels.

Tensors are on torch's `meta` device: they have shapes, dtypes and memory that can be counted, and no values. Copies of
values to the host give zeros, and are recorded as waits, with the line of ppctl that asked.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives of meta tensors
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ppctl.foreign.measured_pass import GROUPED, grouped, tensors_of
from ppctl.records.rehearsal_record import (
    BACKWARD,
    FORWARD,
    MESSAGE,
    STEP,
    HostWait,
    LayerKernels,
    MeasuredTraffic,
    Operations,
)

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
    read = {tensor.untyped_storage()._cdata for tensor in tensors_of(args)}  # by its schema `_unsafe_view` is no view
    return any(tensor.untyped_storage()._cdata not in read for tensor in made)


def multiplies(func: Any) -> bool:
    """Whether an operation is a product of matrices or attention, which are bound by arithmetic and not by memory."""
    name = func._opname
    return name in _PRODUCTS or name.startswith(_ATTENTION)


def moved_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """The least bytes that an operation's kernel reads and writes: each operand and each result once. An
    expanded operand counts its elements in memory, a looked-up table the rows in the result."""
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
    """Bytes of the rows that are looked up; in a sum over rows, each of them."""
    if func._opname == "_embedding_bag":
        return int(args[1].numel() * args[0].shape[1] * args[0].element_size())
    return sum(_size(tensor) for tensor in tensors_of(result))


def _size(tensor: Tensor) -> int:
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()


class LayerMarks:
    """Finds the kind of layer of a dispatched operation: in a forward that of the called module, in a backward that of
    the layer whose forward made the running node, also while that layer recomputes."""

    def __init__(self) -> None:
        self.passes: dict[str, int] = {}
        """Kind -> the number of forwards so far whose graph is kept, without recomputed ones."""
        self._here = threading.local()

    def watch(self, layer: nn.Module, kind: str) -> None:
        """Mark this layer's operations from now on."""

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
    """Name the layer in every node of its graph: from its output back to its inputs, or to an earlier layer's nodes."""
    outside = {tensor.grad_fn for tensor in tensors_of(inputs)}
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors_of(output)]
    while waiting:
        node = waiting.pop()
        if node is None or node in outside or _MARK in node.metadata:
            continue
        node.metadata[_MARK] = kind
        waiting.extend(each for each, _ in node.next_functions)


BLOCK = 512
"""CUDA's caching allocator rounds every allocation up to a multiple of this."""

_PACKAGE = str(Path(__file__).parents[1])
_OWN = str(Path(__file__).parent)
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_READS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
_SIZES_FROM_VALUES = {
    _aten.nonzero.default,
    _aten.bincount.default,
    _aten.masked_select.default,
    _aten.repeat_interleave.Tensor,
    _aten._unique2.default,
}


class DeviceLedger(TorchDispatchMode):
    """Counts while it is entered. `during` is the rank's present activity, set by the code that drives the rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._during = STEP
        self._thread = threading.get_ident()
        self.live = 0
        """Bytes of all storages on the device that were made inside and still exist."""
        self.peak = 0
        """The most bytes alive since `restart_peak`."""
        self.axes: dict[str, str] = {}
        """Process group's name -> its axis, without groups of tied parameters."""
        self._waits: Counter[tuple[str, int, str]] = Counter()
        self._operations: Counter[str] = Counter()
        self._launches: Counter[str] = Counter()
        self._messages: Counter[tuple[str, str, str]] = Counter()
        self._message_bytes: Counter[tuple[str, str, str]] = Counter()
        self._marks = LayerMarks()
        self._of_layers: Counter[tuple[str, str, str]] = Counter()
        """Kind of layer, phase and field of LayerKernels -> count."""
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count an operation and run it, or give a zero if it reads a value. Raises NotImplementedError if the size of
        its result depends on values."""
        kwargs = kwargs or {}
        self._operations[self.during] += 1
        if func.namespace == "c10d":
            self._collective(func, args)
        elif func in _READS and _on_device(args):
            self._wait()
            return 0 if not args[0].is_floating_point() else 0.0
        elif func in _COPIES:
            answer = self._copy(func, args, kwargs)
            if answer is not None:
                return answer
        elif func in _SIZES_FROM_VALUES and kwargs.get("output_size") is None and _on_device(args):
            self._wait()
            message = f"the size of the result of {func} depends on values, which a rehearsal does not have"
            raise NotImplementedError(message)
        if func is GROUPED and _on_device(args) and args[0].dtype != torch.bfloat16:
            self._wait()  # there torch multiplies group by group, and reads the groups' ends on the host
            result = grouped(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if func.namespace != "c10d" and launches(func, args, result):
            self._launches[self.during] += 1
            self._kernel(func, args, kwargs, result)
        for tensor in tensors_of(result):
            if tensor.is_meta:
                self._own(tensor)
        return result

    def watch_layers(self, layers: Iterable[tuple[nn.Module, str]]) -> None:
        """Count the kernels of these layers, (module, kind), by kind."""
        for layer, kind in layers:
            self._marks.watch(layer, kind)

    @property
    def during(self) -> str:
        """The phase of an operation. In another thread it is the backward of a pair, beside a forward."""
        return self._during if threading.get_ident() == self._thread else BACKWARD

    @during.setter
    def during(self, phase: str) -> None:
        self._during = phase

    def message(self, kind: str, axis: str, size: int, during: str = MESSAGE) -> None:
        """Count a message or a collective of `size` bytes."""
        self._messages[kind, axis, during] += 1
        self._message_bytes[kind, axis, during] += size

    def begin_step(self) -> None:
        """Clear the counts; live bytes stay, and are the first peak."""
        counted = (self._waits, self._operations, self._launches, self._messages, self._message_bytes)
        for counter in (*counted, self._of_layers, self._marks.passes):
            counter.clear()
        self.restart_peak()

    def restart_peak(self) -> int:
        """Return the peak since the last call; the next one starts from the bytes alive now."""
        peak, self.peak = self.peak, self.live
        return peak

    @property
    def host_waits(self) -> tuple[HostWait, ...]:
        """Every place where the host would wait for the device."""
        return tuple(HostWait(*key, count) for key, count in sorted(self._waits.items()))

    @property
    def traffic(self) -> tuple[MeasuredTraffic, ...]:
        """Messages and collectives by kind and group."""
        return tuple(
            MeasuredTraffic(*key, count, self._message_bytes[key]) for key, count in sorted(self._messages.items())
        )

    @property
    def operations(self) -> tuple[Operations, ...]:
        """Operations, and those among them that start kernels."""
        return tuple(Operations(during, n, self._launches[during]) for during, n in sorted(self._operations.items()))

    @property
    def layers(self) -> tuple[LayerKernels, ...]:
        """Kernels of each kind of layer, forwards before backwards."""
        return tuple(
            LayerKernels(kind, during, passes, *(self._of_layers[kind, during, name] for name in LayerKernels.COUNTED))
            for kind, passes in sorted(self._marks.passes.items())
            for during in (FORWARD, BACKWARD)
        )

    def _kernel(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        kind = self._marks.kind()
        if kind is None:
            return
        self._of_layers[kind, self.during, "kernels"] += 1
        if not multiplies(func):
            self._of_layers[kind, self.during, "others"] += 1
            self._of_layers[kind, self.during, "other_bytes"] += moved_bytes(func, args, kwargs, result)

    def _own(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        # A storage's Python object lives as long as the storage, whatever else holds the storage.
        self._storages[key] = weakref.ref(storage, lambda _: self._free(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, key: int, size: int) -> None:
        del self._storages[key]
        self.live -= size

    def _copy(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Record a copy between host and device for which the host waits; returns zeros if it reads the device."""
        if func is _aten.copy_.default:
            target, source = args[0], args[1]
            non_blocking, to_host = bool(args[2:] and args[2]) or kwargs.get("non_blocking"), not target.is_meta
        else:
            source, non_blocking = args[0], kwargs.get("non_blocking")
            device = kwargs.get("device")
            to_host = (source.device if device is None else torch.device(device)).type == "cpu"
        if source.is_meta != to_host:  # both on the device, or both on the host
            return None
        if not non_blocking:
            self._wait()
        if not to_host:
            return None
        if func is _aten.copy_.default:
            zeros: Tensor = target.zero_()
            return zeros
        return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)

    def _collective(self, func: Any, args: Sequence[Any]) -> None:
        group = next(_groups(args), None)
        if group is None:
            return
        tensors = [tensor for tensor in tensors_of(args) if tensor.is_meta]
        if tensors:
            kind = func._opname.strip("_")
            size = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.message(kind, self.axes.get(group.group_name, "ties"), size, self.during)

    def _wait(self) -> None:
        """Count a wait of the host for the device, at the innermost line of ppctl outside the rehearsal."""
        frame = sys._getframe(1)
        while frame.f_back is not None:
            name = frame.f_code.co_filename
            if name.startswith(_PACKAGE) and not name.startswith(_OWN):
                break
            frame = frame.f_back
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            file = f"ppctl{file[len(_PACKAGE) :]}"
        self._waits[file, frame.f_lineno, self.during] += 1
        kind = self._marks.kind()
        if kind is not None:
            self._of_layers[kind, self.during, "host_waits"] += 1


def _groups(args: Sequence[Any]) -> Iterator[dist.ProcessGroup]:
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            yield dist.ProcessGroup.unbox(value)


def _on_device(args: Sequence[Any]) -> bool:
    return any(tensor.is_meta for tensor in tensors_of(args))
