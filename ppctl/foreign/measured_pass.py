"""One forward and backward of a stage on tensors without values: its operations, and the bytes that it keeps and holds.

Floating-point tensors have no values, but integer ones do: code may ask which rows an expert gets, and every choice of
the largest scores is balanced. Operations are counted by torch's FlopCounterMode, kept bytes from what autograd saves,
and short-lived bytes from the storages that exist after each operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ppctl.foreign.foreign_stage import ForeignStage
from ppctl.weight_gradients.deferred import PLAIN, DeferredGradients
from ppctl.weight_gradients.intercept import intercepting

_aten = torch.ops.aten
GROUPED = _aten._grouped_mm.default
_DEVICE = torch.ops.prim.device.default
_DRAWS = _aten.bernoulli.default
"""Stands in for an adapter's dropout; no other code draws, since models with dropout are refused."""


@contextmanager
def valueless() -> Iterator[None]:
    """A context in which new tensors have no values, except those of whole numbers."""
    PLAIN.add(FakeTensor)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _NumbersHaveValues():
            yield
    finally:
        PLAIN.discard(FakeTensor)


class OperatorMode(TorchDispatchMode):
    """A mode that sees every operator except queries of a fake tensor's device, more than half of torch's calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return True: nothing is compiled here, and torch's own check takes as long as a cheap operator."""
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
    """All tensors in lists, tuples and dicts; torch's own function would take a tenth of a measurement's time."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in tensors_of(value)]


def _makes_numbers(func: Any, kwargs: Any) -> bool:
    """Whether a factory makes integers: `arange` does without a dtype, too."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        return func.overloadpacket is _aten.arange
    return not (dtype.is_floating_point or dtype.is_complex)


def _largest(scores: Tensor, count: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> Any:
    """A balanced result of `topk`: row r gets the indexes from r * count on."""
    values, _ = _aten.topk.default(scores, count, dim, largest, in_order)
    size, length = scores.shape[dim], values.numel() // max(1, count)
    with unset_fake_temporarily():
        numbers = (torch.arange(length)[:, None] * count + torch.arange(count)) % size
        front = values.movedim(dim, -1).shape
        chosen = numbers.view(front).movedim(-1, dim).contiguous()
    return values, chosen


def grouped(one: Tensor, other: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The result of a grouped product, without values; torch's own meta kernel takes only bf16."""
    if one.dim() == 2 and other.dim() == 2:  # columns times rows: one matrix for each group
        assert offs is not None
        return one.new_empty(len(offs), one.shape[0], other.shape[1])
    return one.new_empty(one.shape[0], other.shape[-1])


def _chosen(func: Any) -> Callable[..., Any]:
    """`func`, an indexing function, with boolean masks replaced by positions: here masks have values, and the tensors
    that they index have none."""

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


COUNTED = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(
        query, key, value
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, query, key, value, *_, **__: (
        sdpa_backward_flop_count(grad, query, key, value)
    ),
    # Every row, or column, meets one group's matrix.
    _aten._grouped_mm: lambda one, other, *_, **__: 2 * one[0] * one[1] * other[-1],
}
"""Operators whose operations torch's counter does not know."""


class PassCosts:
    """The bytes and operations of a forward and backward of one microbatch, and of one with a split backward."""

    def __init__(self, stage: ForeignStage, given: Tensor) -> None:
        whole = _Pass(stage, given)
        self.given = storage_of(given)
        self.kept = whole.kept
        """Storages that autograd saved -> their bytes."""
        self.arguments = whole.arguments
        """The storages of the tensors that the layer was called with."""
        self.before = whole.before
        """Live bytes when the forward begins, beside tables and input."""
        self.forward = whole.forward
        """Live bytes by operator, beside tables and input, in the forward; fields for the backward are alike."""
        self.drawing_forward = whole.drawing
        """The part of `forward` at which dropout draws; fields for the backward are alike."""
        self.backward = whole.backward()
        self.drawing_backward = whole.live.drawing
        split = _Pass(stage, given, DeferredGradients(stage.whole))
        self.inputs = split.backward()
        self.drawing_inputs = split.live.drawing
        self.waiting, self.weights = split.weights()
        self.flops, self.input_flops, self.weight_flops = (
            float(each.get_total_flops()) for each in (whole.counter, split.of_inputs, split.of_weights)
        )


def operators_of(stage: ForeignStage, given: Tensor) -> int:
    """Return the number of operators in one forward of a stage."""
    return len(_Pass(stage, given).forward)


class _Pass:
    """One forward of a stage, run when this is made, and its backward; with `deferred` that is split (I, then W)."""

    def __init__(self, stage: ForeignStage, given: Tensor, deferred: DeferredGradients | None = None) -> None:
        self.stage, self.given, self.deferred = stage, given, deferred
        given.grad = None
        self.counter, self.of_inputs, self.of_weights = (
            FlopCounterMode(display=False, custom_mapping=COUNTED) for _ in range(3)
        )
        self.live, self.kept = _Live(), dict[int, float]()
        self.arguments: tuple[int, ...] = ()
        self.before = self.waiting = 0.0
        self.own = {storage_of(tensor) for tensor in held_tensors(stage)}
        layers = list(stage.decoder_layers().values())
        if layers:
            (layer,) = layers
            stage.call_decoder_as([lambda *called: self._watched(lambda: layer(*called), called)])
        with self.live, self._collecting():
            self.output, *_ = stage(given) if layers else self._watched(lambda: stage(given), ())
        self.forward, self.drawing = (
            [value - self.before for value in each] for each in (self.live.trace, self.live.drawing)
        )

    def _watched(self, run: Callable[[], Any], called: Any) -> Any:
        """Run a forward and return its result. Note in `kept` the bytes of each storage that autograd saves, except the
        stage's own tensors, and in `arguments` the tables of a layer, whose bytes are counted elsewhere."""
        _, *others = called or (None,)
        given = [tensor for tensor in tensors_of(others) if storage_of(tensor) not in self.own] if called else []
        self.arguments = tuple(storage_of(tensor) for tensor in given if storage_of(tensor) != storage_of(called[0]))
        for storage in self.arguments:  # tables live as long as any layer reads them, and are counted separately
            self.live.forget(storage)
        self.live.look()
        self.before = self.live.trace[-1]
        self.live.begin()

        kept, alive = dict[int, float](), dict[int, weakref.ref[Any]]()

        def pack(tensor: Tensor) -> Tensor:
            storage, key = tensor.untyped_storage(), storage_of(tensor)
            if key not in self.own and key not in kept:
                kept[key] = float(storage.nbytes())
                # If the part of the graph that kept a storage is gone, another storage may have its address.
                alive[key] = weakref.ref(storage, lambda _: kept.pop(key, None))
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor), self.counter:
            result = run()
        self.kept = dict(kept)
        return result

    def backward(self) -> list[float]:
        """Run the backward, or its I; return the live bytes by operator, without the output, which others hold."""
        self.live.begin()
        self.live.forget(storage_of(self.output))
        if self.stage.ends and self.stage.adapted:
            return self._backward_of_loss()
        gradient = torch.zeros_like(self.output)
        # The counter decomposes some operators: it comes after the mode that counts bytes, which sees them whole.
        with self.of_inputs, self.live, self._collecting(backward=True):
            if self.output.requires_grad:
                self.output.backward(gradient)
        if self.deferred is not None and self.deferred.keeps([gradient]):  # the last products read it in W
            self.waiting = float(gradient.untyped_storage().nbytes())
        del gradient, self.output
        return self.live.trace

    def _backward_of_loss(self) -> list[float]:
        """Run the backward of a loss; return the live bytes by operator. The logits' gradient takes the logits' place,
        and is freed after the head's product."""
        with self.of_inputs, self.live, self._collecting(backward=True):
            loss: Tensor = _Loss.apply(self.output)  # type: ignore[no-untyped-call]  # torch's own
            del self.output
            loss.backward()
        return self.live.trace

    def weights(self) -> tuple[float, list[float]]:
        """Run W; return (bytes that wait for W, live bytes by operator of W), without the message that I sends."""
        assert self.deferred is not None
        if self.given.grad is not None:
            self.live.forget(storage_of(self.given.grad))
        self.live.look()
        waiting, arrived = self.live.trace[-1] + self.waiting, self.waiting
        self.live.begin()
        with self.of_weights, self.live:
            self.deferred.deliver()
        return waiting, [value + arrived for value in self.live.trace]

    def _collecting(self, *, backward: bool = False) -> Any:
        return nullcontext() if self.deferred is None else intercepting(self.deferred, backward=backward)


class _Loss(torch.autograd.Function):
    """A loss of logits whose gradient takes its memory in the backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.shape = logits.shape
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.new_zeros(ctx.shape)


class _Live(OperatorMode):
    """Counts the bytes of the storages that were made in this mode and are alive: `trace` has them by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.size = 0
        self.begin()

    def begin(self) -> None:
        """Begin a new trace, and in `drawing` its moments at which dropout draws."""
        self.trace, self.drawing = list[float](), list[float]()

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = {storage_of(tensor) for tensor in tensors_of((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in tensors_of(result):
            if storage_of(tensor) not in given:
                self._note(tensor.untyped_storage())
        self.look()
        if func is _DRAWS:
            self.drawing.append(self.trace[-1])
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.storages:
            # A storage's Python object lives as long as the storage, whatever else holds the storage.
            self.storages[key] = weakref.ref(storage, lambda _: self.forget(key)), size
            self.size += size

    def look(self) -> None:
        """Add the bytes that are alive now to the trace."""
        self.trace.append(float(self.size))

    def forget(self, storage: int) -> None:
        _, size = self.storages.pop(storage, (None, 0))
        self.size -= size


def held_tensors(stage: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a stage."""
    yield from stage.parameters()
    yield from stage.buffers()


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage: equal for tensors that share memory."""
    address: int = tensor.untyped_storage()._cdata
    return address
