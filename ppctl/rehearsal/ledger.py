"""Counts what a device would do and hold while a rank runs, where torch hands operations to their kernels.

Knows torch's operators and storages. Must not know stages, schedules or plans. Tensors are on torch's `meta` device:
they have shapes, dtypes and memory that can be counted, and no values. What would copy values to the host is answered
with zeros, and noted as a wait with the line of ppctl's that asked.
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
from ppctl.rehearsal.layer_counts import LayerMarks, launches, moved_bytes, multiplies

BLOCK = 512
"""CUDA's caching allocator rounds every allocation up to a multiple of this."""

_PACKAGE = str(Path(__file__).parents[1])
_OWN = str(Path(__file__).parent)
_aten = torch.ops.aten
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
    """Counts while it is entered. `during` says what the rank is doing; whoever drives the rank sets it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._during = STEP
        self._thread = threading.get_ident()
        self.live = 0
        """Bytes of all storages on the device that were made inside and still exist."""
        self.peak = 0
        """The most so far; `restart_peak` starts anew."""
        self.axes: dict[str, str] = {}
        """Process group's name -> its axis; the groups of tied parameters are not in it."""
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
        """Count an operation and let it happen, or answer it if it reads values."""
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
            self._wait()  # torch multiplies group by group there, and reads on the host where each one ends
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
        """Count the kernels of these layers, each a module and the kind that it is of, by kind."""
        for layer, kind in layers:
            self._marks.watch(layer, kind)

    @property
    def during(self) -> str:
        """The phase of an operation. In a thread of its own runs the backward of a pair, beside a forward."""
        return self._during if threading.get_ident() == self._thread else BACKWARD

    @during.setter
    def during(self, phase: str) -> None:
        self._during = phase

    def message(self, kind: str, axis: str, size: int, during: str = MESSAGE) -> None:
        """Note a message or a collective of `size` bytes."""
        self._messages[kind, axis, during] += 1
        self._message_bytes[kind, axis, during] += size

    def begin_step(self) -> None:
        """Forget what was counted; what is alive stays, and is the peak so far."""
        counted = (self._waits, self._operations, self._launches, self._messages, self._message_bytes)
        for counter in (*counted, self._of_layers, self._marks.passes):
            counter.clear()
        self.restart_peak()

    def restart_peak(self) -> int:
        """The peak since the last call; the next one starts from what is alive now."""
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
        # A storage's Python object lives as long as the storage, whoever else holds it.
        self._storages[key] = weakref.ref(storage, lambda _: self._free(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, key: int, size: int) -> None:
        del self._storages[key]
        self.live -= size

    def _copy(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Note a copy between host and device for which the host waits; the answer to one that reads the device."""
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
        """Note a place where the host would wait for the device: the innermost frame of ppctl outside the rehearsal."""
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
