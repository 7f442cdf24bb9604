"""Tensors as a measurement needs them: floating-point ones have shapes and no values, whole numbers have values.

Knows torch's operators. Must not know stages or costs. Code that asks how many rows an expert gets, or which of them,
is answered: every choice of the largest scores is a balanced one, so that each expert gets equally many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from ppctl.weight_gradients.put_off import PLAIN

_aten = torch.ops.aten
GROUPED = _aten._grouped_mm.default
_DEVICE = torch.ops.prim.device.default


@contextmanager
def valueless() -> Iterator[None]:
    """Inside, what is made has no values but for whole numbers."""
    PLAIN.add(FakeTensor)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _NumbersHaveValues():
            yield
    finally:
        PLAIN.discard(FakeTensor)


class OperatorMode(TorchDispatchMode):
    """Sees every operator but one: more than half of what torch calls asks a tensor without values for its device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and torch's guard against that takes as long as a cheap operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        return self.operator(func, args, kwargs or {})

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of `func`, a function of torch's dispatcher."""
        raise NotImplementedError


class _NumbersHaveValues(OperatorMode):
    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = tensors_of((args, kwargs))
        known = not any(isinstance(tensor, FakeTensor) for tensor in given)
        if known and (given or _makes_numbers(func, kwargs)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        stand_in: Callable[..., Any] | None = _STAND_INS.get(func)
        return func(*args, **kwargs) if stand_in is None else stand_in(*args, **kwargs)


def tensors_of(values: Any) -> list[Tensor]:
    """All tensors in lists, tuples and dicts: torch's own walk through these takes a tenth of a measurement's time."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in tensors_of(value)]


def _makes_numbers(func: Any, kwargs: Any) -> bool:
    """Whether a factory makes whole numbers: `arange` also where no dtype says so."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        return func.overloadpacket is _aten.arange
    return not (dtype.is_floating_point or dtype.is_complex)


def _largest(scores: Tensor, count: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> Any:
    """As `topk`, of rows that take turns: row r has the numbers from r * count on."""
    values, _ = _aten.topk.default(scores, count, dim, largest, in_order)
    size, length = scores.shape[dim], values.numel() // max(1, count)
    with unset_fake_temporarily():
        numbers = (torch.arange(length)[:, None] * count + torch.arange(count)) % size
        front = values.movedim(dim, -1).shape
        chosen = numbers.view(front).movedim(-1, dim).contiguous()
    return values, chosen


def grouped(one: Tensor, other: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The result of a grouped product has a shape; torch's own stand-in for tensors without values takes bf16 alone."""
    if one.dim() == 2 and other.dim() == 2:  # of columns and rows, for each group one matrix
        assert offs is not None
        return one.new_empty(len(offs), one.shape[0], other.shape[1])
    return one.new_empty(one.shape[0], other.shape[-1])


def _chosen(func: Any) -> Callable[..., Any]:
    """As `index` and the like, whose switches are made places: they have values, what they index has none."""

    def call(tensor: Tensor, indices: Sequence[Tensor | None], *others: Any, **named: Any) -> Any:
        places: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor):
                with unset_fake_temporarily():
                    places += index.nonzero().unbind(1)
            else:
                places.append(index)
        return func(tensor, places, *others, **named)

    return call


_INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_STAND_INS: dict[Any, Callable[..., Any]] = {
    _aten.topk.default: _largest,
    GROUPED: grouped,
    **{func: _chosen(func) for func in _INDEXED},
}


def grouped_flops(one: Sequence[int], other: Sequence[int]) -> int:
    """Operations of a grouped product of these shapes: every row, or column, meets one group's matrix."""
    rows, inner = one
    return 2 * rows * inner * other[-1]
