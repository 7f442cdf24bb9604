"""What one forward and backward of a stage computes, keeps and holds, on tensors that have shapes and no values.

Knows torch's operators and storages. Must not know batches of several sizes, nor what grows with what. Operations are
counted by torch's FlopCounterMode, kept bytes by what autograd saves, and what lives only for a moment by the storages
that exist, operator by operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ppctl.foreign.foreign_stage import ForeignStage
from ppctl.foreign.valueless import OperatorMode, grouped_flops, tensors_of
from ppctl.weight_gradients.intercept import intercepting
from ppctl.weight_gradients.put_off import PutOff

_aten = torch.ops.aten
COUNTED = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(
        query, key, value
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, query, key, value, *_, **__: (
        sdpa_backward_flop_count(grad, query, key, value)
    ),
    _aten._grouped_mm: lambda one, other, *_, **__: grouped_flops(one, other),
}
"""Operators whose operations torch's counter does not know."""


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Of one forward and backward, and of one whose backward is split: bytes."""

    flops: float
    kept: dict[int, float]
    """Storages that autograd saved -> their bytes."""
    given: int
    """The storage of what arrived."""
    arguments: tuple[int, ...]
    """The storages of the tensors that the layer was called with."""
    before: float
    """What lives when its forward begins, beside tables and what arrived."""
    forward: list[float]
    """By operator what lives beside all that."""
    backward: list[float]
    inputs: list[float]
    weights: list[float]
    waiting: float
    input_flops: float
    """Of the I."""
    weight_flops: float


def pass_costs(stage: ForeignStage, given: Tensor) -> PassCosts:
    """A forward and backward of one microbatch, and a forward with both halves of a split backward."""
    whole = _Pass(stage, given)
    backward = whole.backward()
    split = _Pass(stage, given, PutOff(stage.whole))
    inputs = split.backward()
    waiting, weights = split.weights()
    flops, input_flops, weight_flops = (
        float(each.get_total_flops()) for each in (whole.counter, split.of_inputs, split.of_weights)
    )
    return PassCosts(
        flops,
        whole.kept,
        storage_of(given),
        whole.arguments,
        whole.before,
        whole.forward,
        backward,
        inputs,
        weights,
        waiting,
        input_flops,
        weight_flops,
    )


def operators_of(stage: ForeignStage, given: Tensor) -> int:
    """How many operators one forward has."""
    return len(_Pass(stage, given).forward)


class _Pass:
    """One forward of a stage, up to its W where `put_off` is given."""

    def __init__(self, stage: ForeignStage, given: Tensor, put_off: PutOff | None = None) -> None:
        self.stage, self.given, self.put_off = stage, given, put_off
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
        self.forward = [value - self.before for value in self.live.trace]

    def _watched(self, run: Callable[[], Any], called: Any) -> Any:
        _, *others = called or (None,)
        given = [tensor for tensor in tensors_of(others) if storage_of(tensor) not in self.own] if called else []
        self.arguments = tuple(storage_of(tensor) for tensor in given if storage_of(tensor) != storage_of(called[0]))
        for storage in self.arguments:  # tables live as long as any layer reads them: they are counted by themselves
            self.live.forget(storage)
        self.live.look()
        self.before = self.live.trace[-1]
        self.live.trace.clear()

        kept, alive = dict[int, float](), dict[int, weakref.ref[Any]]()

        def pack(tensor: Tensor) -> Tensor:
            storage, key = tensor.untyped_storage(), storage_of(tensor)
            if key not in self.own and key not in kept:
                kept[key] = float(storage.nbytes())
                # What a part of the graph kept that is gone is not kept, and its address may be another storage's.
                alive[key] = weakref.ref(storage, lambda _: kept.pop(key, None))
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor), self.counter:
            found = run()
        self.kept = dict(kept)
        return found

    def backward(self) -> list[float]:
        """What lives by operator of the backward, or of its I: an output is a message, or the next layer's input."""
        self.live.trace.clear()
        self.live.forget(storage_of(self.output))
        if self.stage.ends and self.stage.adapted:
            return self._backward_of_loss()
        gradient = torch.zeros_like(self.output)
        # The counter takes some operators apart: it stands behind what counts bytes, which sees them whole.
        with self.of_inputs, self.live, self._collecting(backward=True):
            if self.output.requires_grad:
                self.output.backward(gradient)
        if self.put_off is not None and self.put_off.keeps([gradient]):  # the products that come last read it in W
            self.waiting = float(gradient.untyped_storage().nbytes())
        del gradient, self.output
        return list(self.live.trace)

    def _backward_of_loss(self) -> list[float]:
        """The same with the gradient of the logits, which takes their place and is gone behind the head's product."""
        with self.of_inputs, self.live, self._collecting(backward=True):
            loss: Tensor = _Loss.apply(self.output)  # type: ignore[no-untyped-call]  # torch's own
            del self.output
            loss.backward()
        return list(self.live.trace)

    def weights(self) -> tuple[float, list[float]]:
        """(Bytes that wait for W, what lives by operator of it). What I sends is gone."""
        assert self.put_off is not None
        if self.given.grad is not None:
            self.live.forget(storage_of(self.given.grad))
        self.live.look()
        waiting, arrived = self.live.trace[-1] + self.waiting, self.waiting
        self.live.trace.clear()
        with self.of_weights, self.live:
            self.put_off.deliver()
        return waiting, [value + arrived for value in self.live.trace]

    def _collecting(self, *, backward: bool = False) -> Any:
        return nullcontext() if self.put_off is None else intercepting(self.put_off, backward=backward)


class _Loss(torch.autograd.Function):
    """A number of logits, whose gradient is made in its backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.shape = logits.shape
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.new_zeros(ctx.shape)


class _Live(OperatorMode):
    """The bytes of storages that were made inside and are alive, after every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.size = 0
        self.trace: list[float] = []

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = {storage_of(tensor) for tensor in tensors_of((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in tensors_of(result):
            if storage_of(tensor) not in given:
                self._note(tensor.untyped_storage())
        self.look()
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.storages:
            # A storage's Python object lives as long as the storage, whoever else holds it.
            self.storages[key] = weakref.ref(storage, lambda _: self.forget(key)), size
            self.size += size

    def look(self) -> None:
        """Count what is alive now."""
        self.trace.append(float(self.size))

    def forget(self, storage: int) -> None:
        """Count this one no more."""
        _, size = self.storages.pop(storage, (None, 0))
        self.size -= size


def held_tensors(stage: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers."""
    yield from stage.parameters()
    yield from stage.buffers()


def storage_of(tensor: Tensor) -> int:
    """The address of its storage, by which tensors that share memory are told."""
    address: int = tensor.untyped_storage()._cdata
    return address
