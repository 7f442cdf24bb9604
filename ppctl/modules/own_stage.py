"""A stage of a user's module: the whole module's forward, in which modules of other stages stand in for themselves.

Knows modules and what stands beyond the two cuts of a stage. Must not know schedules, ranks or losses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ppctl.modules.names import Cut, saved

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and those by name."""
Forms = Mapping[str, Any]
"""Module -> what it returns, with tensors on meta in place of values."""


class _Departed(Exception):
    """Ends a forward where the next stage begins."""

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.state = state


class OwnStage(nn.Module):
    """One stage of a module, which is called as a whole.

    `model` stays as it is; this stage has a copy of its tree of modules, in which its own parameters are the same
    objects (moved to `device`; `uses` names further uses of shared ones, each of which becomes a parameter of its own),
    and all others are one number each, spread over their shape. The first own module gets what arrived in place of its
    first tensor; a module of a later stage ends the forward with its first tensor. `aware` names the forwards that take
    hidden states themselves and are called as they are, "" for the model and the name of the inner one: modules of
    other stages are None there, or missing in their container.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        number: int,
        device: torch.device,
        aware: Collection[str] = (),
        uses: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.cut, self.number, self.aware = cut, number, frozenset(aware)
        self.forms: Forms = {}
        self.model = _copied(model, cut, number, device, frozenset(uses))
        self._names = [
            f"{path}.{key}"
            for path, module in self.model.named_modules()
            if cut.part_of(path) == number
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._arrived: Tensor | None = None
        self._entered = True
        self._connect()

    def forward(self, arrived: Tensor | None, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What the next stage receives, of the last stage what the model returns.

        `arrived` is the tensor of the stage before; None on the first one. The arguments are the model's own, and the
        same on every stage: masks and positions are made of them by the model's own code.
        """
        if "" in self.aware:
            return self.model(*positional, **named) if arrived is None else self._aware(arrived, positional, named)
        self._arrived, self._entered = arrived, arrived is None
        try:
            return self.model(*positional, **named)
        except _Departed as departed:
            state = departed.state
            return state.clone() if state is arrived else state
        finally:
            self._arrived = None

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """This stage's parameters by the names that the whole model gives them."""
        return {name: self.model.get_parameter(name) for name in self._names}

    def canonical_buffers(self) -> dict[str, Tensor]:
        """This stage's buffers that a state dict has, by the same names."""
        return {
            f"{path}.{key}": tensor
            for path, module in self.model.named_modules()
            if self.cut.part_of(path) == self.number
            for key, tensor in saved(module)
            if key in module._buffers
        }

    def _aware(self, arrived: Tensor, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The model's forward with what arrived in the place of its first argument."""
        if positional:
            return self.model(arrived, *positional[1:], **named)
        first = next(iter(named))
        return self.model(arrived, **{name: value for name, value in named.items() if name != first})

    # --- what is replaced --------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        modules, inner = dict(self.model.named_modules()), self.cut.inner
        for part, names in enumerate(self.cut.parts):
            for name in names:
                if self.cut.forward_around(name) not in self.aware:
                    self._replace(modules[name], name, part)
                elif part != self.number:
                    _remove(self.model, name)
        if inner and ("" in self.aware) != (inner in self.aware):
            if inner in self.aware:  # to the forward around it, the inner model is one module of several stages
                self._replace(modules[inner], inner, min(self.cut.inner_parts, key=self._distance))
            else:
                target: Any = modules[inner]
                target.forward = partial(self._inside, target.forward)

    def _distance(self, part: int) -> int:
        return abs(part - self.number)

    def _replace(self, module: nn.Module, name: str, part: int) -> None:
        target: Any = module
        if part == self.number:
            target.forward = partial(self._own, target.forward)
            return
        target._forward_hooks.clear()
        target._forward_pre_hooks.clear()
        target.forward = partial(self._behind if part > self.number else self._before, name)

    def _own(self, forward: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        """An own module: the first one that is called reads what arrived."""
        if not self._entered:
            self._entered = True
            assert self._arrived is not None  # a stage that has received nothing counts as entered
            positional, named = with_first_tensor((positional, named), self._arrived)
        return forward(*positional, **named)

    def _before(self, name: str, *positional: Any, **named: Any) -> Any:
        """A module of an earlier stage: something of the form of its result, whose values nobody reads."""
        if name not in self.forms:
            return self._arrived
        device = None if self._arrived is None else self._arrived.device
        return tree_map(
            lambda each: torch.zeros_like(each, device=device) if is_tensor(each) else each, self.forms[name]
        )

    def _behind(self, _: str, *positional: Any, **named: Any) -> Any:
        """A module of a later stage: what it would read is this stage's result."""
        raise _Departed(first_tensor((positional, named)))

    def _inside(self, forward: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        """The inner model's forward, given hidden states by the model's own."""
        first = self.number == self.cut.inner_parts[0]
        self._arrived, self._entered = (None, True) if first else (first_tensor((positional, named)), False)
        try:
            return forward(*positional, **named)
        except _Departed as departed:
            state = departed.state
            return state.clone() if state is self._arrived else state
        finally:
            self._arrived = None


def is_tensor(value: Any) -> bool:
    """Whether a leaf of arguments or results is a tensor."""
    return isinstance(value, Tensor)


def first_tensor(arguments: Arguments) -> Tensor:
    """The first tensor of a module's arguments: its hidden state. Raises LookupError where there is none."""
    positional, named = arguments
    for value in (*positional, *named.values()):
        if isinstance(value, Tensor):
            return value
    raise LookupError("a module is called without a tensor")


def with_first_tensor(arguments: Arguments, state: Tensor) -> Arguments:
    """The arguments with another first tensor."""
    positional, named = arguments
    for place, value in enumerate(positional):
        if isinstance(value, Tensor):
            return (*positional[:place], state, *positional[place + 1 :]), named
    name = next(name for name, value in named.items() if isinstance(value, Tensor))
    return positional, {**named, name: state}


def _remove(model: nn.Module, name: str) -> None:
    """Take a module out: of a container, whose other members keep their names; elsewhere None takes its place."""
    around, _, own = name.rpartition(".")
    parent = model.get_submodule(around)
    if isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        del parent._modules[own]
    else:
        parent._modules[own] = None


def _copied(model: nn.Module, cut: Cut, number: int, device: torch.device, uses: frozenset[str]) -> nn.Module:
    """The model's tree of modules with memory for what this stage has. `uses` get parameters of their own."""
    modules = dict(model.named_modules())
    tensors = {
        id(t): t for m in modules.values() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None
    }
    twin = copy.deepcopy(model, {key: _Kept() for key in tensors})
    for path, module in twin.named_modules():
        part = cut.part_of(path)
        for table in ("_parameters", "_buffers"):
            for key in [key for key, tensor in getattr(modules[path], table).items() if tensor is not None]:
                tensor = getattr(modules[path], table)[key]
                name = f"{path}.{key}" if path else key
                if part is None or part == number:
                    getattr(module, table)[key] = _moved(tensor, device, copied=name in uses)
                else:
                    del getattr(module, table)[key]  # code that reads a dtype, a device or a shape still finds them
                    fill = float("nan") if tensor.is_floating_point() else 0
                    one = torch.full((), fill, dtype=tensor.dtype, device=device)
                    module.__dict__[key] = one.expand(tensor.shape)
    return twin


class _Kept:
    """Stands for a tensor while modules are copied, so that no values are."""


def _moved(tensor: Tensor, device: torch.device, *, copied: bool) -> Tensor:
    """A tensor on a device: the same object where it is there, without values where it has none."""
    if tensor.device == device and not copied:
        return tensor
    if tensor.device.type == "meta":
        fill = float("nan") if tensor.is_floating_point() else 0  # values that nobody sets are seen
        made = torch.full(tensor.shape, fill, dtype=tensor.dtype, device=device)
    else:
        made = tensor.detach().to(device, copy=True)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
