"""Activation recompute: layers and modules that keep only their inputs, and outputs that are computed a second time.

Recompute changes no bit: every operation is the same, on the same numbers, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ppctl.config.schema import TrainConfig
from ppctl.geometry.layers import Layer, made_again_by, recomputed_modules, recomputed_runs
from ppctl.model.offload import Offload
from ppctl.model.stage_model import Run, StageModel

Function = Callable[..., Any]

CHECKPOINTED = {
    "core_attn": (("attention", "mix"),),
    "mlp": (("feed_forward", "forward"),),
    "moe": (("moe", "forward"),),
    "experts": (("moe.experts", "forward"),),
}
"""Name (Megatron's, except `experts`) -> (module of a layer, its method), which keeps only its inputs."""

MADE_AGAIN = {
    "layernorm": (("attention_norm", "forward"), ("ffn_norm", "forward")),
    "mla_up_proj": (("attention", "expand"),),
    "moe_act": (("moe.experts", "activate"),),
}
"""Megatron's name -> (module of a layer, its method) whose outputs are not kept by the operations that save them."""


class Switch:
    """Whether runs of layers are recomputed in the forward that comes next."""

    on = True


def recompute(
    stage: StageModel,
    train: TrainConfig,
    number: int,
    offload: Offload | None = None,
    offloaded: Collection[Layer] = (),
) -> Switch:
    """Change the stage with this number: it recomputes what the config names, runs of layers only while the returned
    switch is on. What its first layers, those `offloaded`, still keep goes to the host through `offload`.
    """
    switch = Switch()
    layers = stage.decoder_layers()
    runs = recomputed_runs(train, number, list(layers))
    chosen = {layer for run in runs for layer in run}
    decoder = [run for run in runs if run[0].kind == "decoder"]
    single = [(layer,) for layer in layers if layer.kind == "decoder" and layer not in chosen]
    calls: list[tuple[Run, list[nn.Module]]] = []
    for run in (*decoder, *single):
        modules = [layers[layer] for layer in run]
        calls.append((_checkpointed(_in_order(modules), switch) if run[0] in chosen else modules[0], modules))
    if offload is not None and offloaded:
        stage.call_decoder_as(offload.stage(calls, sum(run[0] in offloaded for run in (*decoder, *single))))
    elif chosen:
        stage.call_decoder_as([call for call, _ in calls])
    for layer in chosen:
        if layer.kind == "mtp":
            layers[layer].forward = _checkpointed(layers[layer].forward, switch)
    names = recomputed_modules(train, number)
    # A compiled graph has no hooks: modules that are recomputed are called uncompiled.
    call = torch.compiler.disable if names and train.compile else _as_it_is
    for module in layers.values() if names else ():
        _recompute_modules(module, names, call)
    return switch


def _in_order(layers: Sequence[nn.Module]) -> Function:
    if len(layers) == 1:
        return layers[0]

    def run(x: Tensor, *places: Any) -> Tensor:
        for layer in layers:
            x = layer(x, *places)
        return x

    return run


def _checkpointed(function: Function, switch: Switch) -> Function:
    """`function`, whose forward keeps only its inputs. Draws follow from these (`dropout.py`): no state is restored."""

    def call(*inputs: Any) -> Any:
        if not (switch.on and torch.is_grad_enabled()):
            return function(*inputs)
        with _SecondCall(function, inputs, _hooks_around()).not_kept():
            return function(*inputs)

    return call


class _SecondCall:
    """A call of a function that keeps only the inputs, through the hooks `around` it. When the backward first needs
    something, a second call makes what the operations save, and the function's `outputs` if they are wanted.

    As torch's non-reentrant checkpoint; but that imports torch's compiler (2.3 s a process) and wraps a hook anew for
    every call. The graph is that of the first call, so that gradients add up in the same order. Unless outputs are
    wanted, the second call is given up after the last tensor that the first one saved; each saved tensor is free when
    its operation's backward has used it.
    """

    def __init__(self, function: Function, inputs: Sequence[Any], around: _Hooks, *, outputs: bool = False) -> None:
        self._function, self._cast, self._to_its_end = function, _casting(inputs), outputs
        self._inputs = [
            _Input(around.keep(each.detach()), each.requires_grad) if isinstance(each, Tensor) else each
            for each in inputs
        ]
        self._saved: list[ref[_Saved]] = []
        self._outputs: tuple[Tensor, ...] | None = None

    def not_kept(self) -> AbstractContextManager[object]:
        """Hooks for the first call: what its operations save is numbered and not kept."""
        return saved_tensors_hooks(self._number, _made_again)

    def _number(self, _: Tensor) -> _Saved:
        saved = _Saved(self)
        self._saved.append(ref(saved))
        return saved

    def outputs(self) -> tuple[Tensor, ...]:
        """The results of the second call, without a graph."""
        if self._outputs is None:
            self.call_again()
        assert self._outputs is not None  # they are wanted
        return self._outputs

    def call_again(self) -> None:
        """Make everything that the backward still asks for. Raises AssertionError if fewer tensors are saved."""
        count = 0

        def save(tensor: Tensor) -> Tensor:
            nonlocal count
            tensor = tensor.detach()  # an operation that holds its own result would hold itself
            if (saved := self._saved[count]()) is not None:
                saved.tensor = tensor
            count += 1
            if count == len(self._saved) and not self._to_its_end:
                raise _EnoughError
            return tensor

        inputs = [each.anew() if isinstance(each, _Input) else each for each in self._inputs]
        try:
            with self._cast, torch.enable_grad(), saved_tensors_hooks(save, _as_it_is):
                outputs = self._function(*inputs)
        except _EnoughError:
            return
        if count < len(self._saved) or not self._to_its_end:
            message = f"a function saved {len(self._saved)} tensors, but {count} when it was called again"
            raise AssertionError(message)
        self._outputs = tuple(tensor.detach() for tensor in _as_tuple(outputs))


class _Saved:
    """A tensor that an operation of the first call saved: it has no values until the operation's backward needs
    them."""

    __slots__ = ("__weakref__", "call", "tensor")

    def __init__(self, call: _SecondCall) -> None:
        self.call = call
        self.tensor: Tensor | None = None


class _EnoughError(Exception):
    """Ends the second call of a function after what the backward needs of it."""


def _made_again(saved: _Saved) -> Tensor:
    if saved.tensor is None:
        saved.call.call_again()
    tensor, saved.tensor = saved.tensor, None
    assert tensor is not None
    return tensor


def _as_it_is(value: Any) -> Any:
    return value


def _recompute_modules(
    layer: nn.Module, modules: Sequence[str], called: Callable[[Function], Function] = _as_it_is
) -> None:
    """Make named modules keep only their inputs (CHECKPOINTED), or free outputs until the backward (MADE_AGAIN)."""
    # What lies in another module is made again with it: by itself it would keep its inputs, and be computed thrice.
    modules = [name for name in modules if made_again_by(name, modules) == name]
    for name in modules:
        for path, method in CHECKPOINTED.get(name, ()):
            if (owner := _submodule(layer, path)) is not None and hasattr(owner, method):
                setattr(owner, method, called(_checkpointed(getattr(owner, method), Switch())))
    again = [place for name in modules for place in MADE_AGAIN.get(name, ())]
    if again:
        outputs = _Outputs()
        for path, method in again:
            if (owner := _submodule(layer, path)) is not None and hasattr(owner, method):
                setattr(owner, method, outputs.not_kept(getattr(owner, method)))
        layer.forward = outputs.watching(layer.forward)


def _submodule(layer: nn.Module, path: str) -> nn.Module | None:
    return dict(layer.named_modules()).get(path)


class _Outputs:
    """The outputs of one layer's functions that are computed again in the backward, while its forward runs.

    An operation that saves such an output for its backward saves a placeholder instead. Outputs are recognised by
    their memory, and kept until the layer's forward ends, so that no other tensor can get that memory.
    """

    def __init__(self) -> None:
        self._placeholders: dict[int, tuple[_SecondCall, int, Tensor]] = {}
        self._around = _NO_HOOKS

    def watching(self, forward: Function) -> Function:
        """A layer's forward, whose operations save placeholders for these outputs."""

        def call(*inputs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*inputs)
            self._around = _hooks_around()
            try:
                with saved_tensors_hooks(self._pack, _unpack):
                    return forward(*inputs)
            finally:
                self._placeholders.clear()
                self._around = _NO_HOOKS

        return call

    def not_kept(self, function: Function) -> Function:
        """`function` of tensors, whose outputs are not kept by the operations that save them."""

        def call(*inputs: Tensor) -> Any:
            if not torch.is_grad_enabled():
                return function(*inputs)
            again = _SecondCall(function, inputs, self._around, outputs=True)
            with again.not_kept():
                outputs = function(*inputs)
            for index, tensor in enumerate(_as_tuple(outputs)):
                self._placeholders[tensor.untyped_storage()._cdata] = (again, index, tensor)
            return outputs

        return call

    def _pack(self, tensor: Tensor) -> Any:
        again, index, _ = self._placeholders.get(tensor.untyped_storage()._cdata, (None, 0, None))
        if again is None:
            return self._around.keep(tensor)
        return again, index, tensor.shape, tensor.stride(), tensor.storage_offset()


class _KeptTensor(NamedTuple):
    unpack: Callable[[Any], Tensor]
    packed: Any


class _Hooks(NamedTuple):
    """The hooks around a layer: torch itself would apply only the innermost hooks."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]

    def keep(self, tensor: Tensor) -> _KeptTensor:
        return _KeptTensor(self.unpack, self.pack(tensor))


class _Input(NamedTuple):
    kept: _KeptTensor
    requires_grad: bool

    def anew(self) -> Tensor:
        return _unpack(self.kept).detach().requires_grad_(self.requires_grad)


_NO_HOOKS = _Hooks(lambda tensor: tensor, lambda tensor: tensor)


def _hooks_around() -> _Hooks:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return _NO_HOOKS if hooks is None else _Hooks(*hooks)


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, _KeptTensor):
        return packed.unpack(packed.packed)
    again, index, shape, stride, offset = packed
    output: Tensor = again.outputs()[index].as_strided(shape, stride, offset)
    return output


def _casting(inputs: Sequence[Any]) -> AbstractContextManager[object]:
    """The present autocast state of the inputs' device, as a context for later."""
    kind = next(each.device.type for each in inputs if isinstance(each, Tensor))
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
