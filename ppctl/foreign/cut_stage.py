"""A stage of a module that ppctl has not made: the whole forward, with stand-ins for modules beyond the cut."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ppctl.errors import ConfigError, Problem
from ppctl.foreign.cut import UNCUT, ModuleCut, saved_buffers, unwrapped

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""(positional arguments, arguments by name)."""
Forms = Mapping[str, Any]
"""Module -> its result, with tensors on meta in place of values."""
Forward = Callable[..., Any]


class Departed(Exception):
    """Ends a forward at the cut after a stage, and carries what is sent: the hidden state, and tensors beside it."""

    def __init__(self, state: Tensor, *beside: Tensor) -> None:
        super().__init__()
        self.state, self.beside = state, beside


class CutStage(nn.Module):
    """One stage of a module; a call runs the module's whole forward, as far as this stage goes.

    `model` stays unchanged: the stage has a copy of its tree of modules. The stage's parameters are the same objects
    where they are on `device` already, else copies there; `uses` names further uses of shared ones, each of which
    becomes a parameter of its own. Every other parameter is one number, expanded to the parameter's shape, so that code
    can read dtypes, devices and shapes. This stage's first module gets the arrived tensor in place of its first tensor;
    the first tensor given to a module of a later stage ends the forward, as its result. `aware` names the forwards that
    take hidden states themselves ("" for the model's, or the name of the inner model): there modules of other stages
    are None, or missing in their container. Names are those of the whole model.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: ModuleCut,
        number: int,
        device: torch.device,
        aware: Collection[str] = (),
        uses: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.cut, self.number, self.aware = cut, number, frozenset(aware)
        self.forms: Forms = {}
        self.model = copied(model, device, frozenset(uses), cut, number)
        self._names = {name: name for name, _ in self.model.named_parameters()}
        """Canonical name -> the name within the module."""
        self._arrived: Tensor | None = None
        self._entered = True
        self._first: str | None = None
        """The own module that gets the arrived tensor; None before a forward."""
        self._connect()

    def forward(self, arrived: Tensor | None, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return the tensor that the next stage receives, or on the last stage the model's result.

        `arrived` is the previous stage's tensor; None on the first stage. The other arguments are the model's, equal on
        every stage: the model's own code computes masks and positions from them.
        """
        if "" in self.aware and arrived is not None:
            positional, named = with_first_argument((positional, named), arrived)
        if "" in self.aware:
            return self.model(*positional, **named)
        return self._left(arrived, partial(self.model, *positional, **named))

    def canonical_parameters(self) -> Mapping[str, nn.Parameter]:
        """This stage's parameters by the names that the whole model gives them."""
        return self.all_parameters()

    def all_parameters(self) -> Mapping[str, nn.Parameter]:
        """This stage's parameters, trained or not, by the names that the whole model gives them."""
        return {name: self.model.get_parameter(own) for name, own in self._names.items()}

    def canonical_buffers(self) -> Mapping[str, Tensor]:
        """This stage's saved buffers, by the names that the whole model gives them."""
        modules = self.model.named_modules()
        return {f"{unwrapped(path)}.{key}": each for path, module in modules for key, each in saved_buffers(module)}

    def holds(self, path: str) -> bool:
        """Whether the module at this path computes here: it is this stage's, or has no parameters and saved buffers."""
        return self.cut.part_of(path) in (None, self.number)

    # --- what is replaced --------------------------------------------------------------------------------------------

    def _left(self, arrived: Tensor | None, run: Forward) -> Any:
        """Run a whole forward; return the tensors at the cut after this stage, or if there is no cut, the result."""
        self._arrived, self._entered = arrived, arrived is None
        try:
            return run()
        except Departed as departed:
            state = departed.state.clone() if departed.state is arrived else departed.state
            return (state, *departed.beside) if departed.beside else state
        finally:
            self._arrived = None

    def _connect(self) -> None:
        """Put stand-ins in place of other stages' modules; where the forward around them is `aware`, remove them."""
        modules, inner = dict(self.model.named_modules()), self.cut.inner
        for part, names in enumerate(self.cut.parts):
            for name in names:
                if self.cut.forward_around(name) not in self.aware:
                    self._replace(modules[name], name, part)
                elif part != self.number:
                    _remove(self.model, name)
        if inner and ("" in self.aware) != (inner in self.aware):
            if inner in self.aware:  # the model's forward sees the inner model as one module of several stages
                nearest = min(self.cut.inner_parts, key=lambda part: abs(part - self.number))
                self._replace(modules[inner], inner, nearest)
            else:
                target: Any = modules[inner]
                target.forward = partial(self._inside, target.forward)

    def _replace(self, module: nn.Module, name: str, part: int) -> None:
        target: Any = module
        if part == self.number:
            target.forward = self._own(name, target.forward)
            return
        target._forward_hooks.clear()
        target._forward_pre_hooks.clear()
        target.forward = self._behind if part > self.number else self._before(name, target)

    def _own(self, name: str, forward: Forward) -> Forward:
        return partial(self._run_own, name, forward)

    def _before(self, name: str, module: nn.Module) -> Forward:
        return partial(self._stand_in, name)

    def _run_own(self, name: str, forward: Forward, *positional: Any, **named: Any) -> Any:
        """Call a module of this stage; the first one called gets the arrived tensor in place of its first tensor."""
        if not self._entered or name == self._first:
            positional, named = self._with_arrived(name, (positional, named))
        return forward(*positional, **named)

    def _with_arrived(self, name: str, arguments: Arguments) -> Arguments:
        """Return the arguments of this stage's first module, with the arrived tensor in the forward's first call.

        The tensor that it replaces remembers it: activation checkpointing calls the module again in the backward, with
        the same tensor. Raises ConfigError (PP-E132) for checkpointing that would compute from the stand-in's zeros.
        """
        given: Any = first_tensor(arguments)
        instead = getattr(given, _ARRIVED, None)
        if instead is None and self._arrived is not None:
            if not self._entered:
                if self._arrived.requires_grad and not torch.is_grad_enabled():
                    what = "runs without gradients (checkpoint with use_reentrant=True, or no_grad)"
                    raise _unlike_whole(name, self.number, what)
                instead = None if given is self._arrived else self._arrived  # no tensor refers to itself
            self._entered, self._first = True, name
            setattr(given, _ARRIVED, instead)
        elif not hasattr(given, _ARRIVED) and _in_backward():
            raise _unlike_whole(name, self.number, _RECOMPUTED)
        return arguments if instead is None else with_first_tensor(arguments, instead)

    def _stand_in(self, name: str, *positional: Any, **named: Any) -> Any:
        """Return zeros of the form of an earlier module's result, or the arrived tensor if that form is unknown."""
        if name not in self.forms:
            return self._arrived
        device = None if self._arrived is None else self._arrived.device
        return tree_map_only(Tensor, partial(torch.zeros_like, device=device), self.forms[name])

    def _behind(self, *positional: Any, **named: Any) -> Any:
        """Raise Departed with the first tensor of a later stage's module, which is this stage's result."""
        if _in_backward():
            raise _unlike_whole(self.cut.parts[self.number + 1][0], self.number + 1, _RECOMPUTED)
        raise Departed(first_tensor((positional, named)))

    def _inside(self, forward: Forward, *positional: Any, **named: Any) -> Any:
        """Run the inner model's forward. Its first tensor counts as arrived, unless this stage begins that model."""
        first = self.number == self.cut.inner_parts[0]
        return self._left(None if first else first_tensor((positional, named)), partial(forward, *positional, **named))


_ARRIVED = "_ppctl_arrived"
"""The attribute of a first tensor that the first module of a stage got: what took its place; None if nothing did."""
_RECOMPUTED = "activation checkpointing recomputes code before it, too"


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _unlike_whole(name: str, part: int, what: str) -> ConfigError:
    remedy = "x = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)"
    return ConfigError(Problem("PP-E132", f"{name} begins part {part}, but {what}", remedy))


def first_tensor(arguments: Arguments) -> Tensor:
    """The first tensor of a module's arguments: its hidden state. Raises LookupError if there is none."""
    positional, named = arguments
    for value in (*positional, *named.values()):
        if isinstance(value, Tensor):
            return value
    raise LookupError("a module is called without a tensor")


def with_first_tensor(arguments: Arguments, state: Tensor) -> Arguments:
    """Return the arguments with `state` in the place of their first tensor."""
    positional, named = arguments
    for place, value in enumerate(positional):
        if isinstance(value, Tensor):
            return (*positional[:place], state, *positional[place + 1 :]), named
    name = next(name for name, value in named.items() if isinstance(value, Tensor))
    return positional, {**named, name: state}


def with_first_argument(arguments: Arguments, state: Tensor) -> Arguments:
    """Return the arguments with `state` in place of the first one, of any type; a named one becomes positional."""
    positional, named = arguments
    if positional:
        return (state, *positional[1:]), named
    first = next(iter(named))
    return (state,), {name: value for name, value in named.items() if name != first}


def _remove(model: nn.Module, name: str) -> None:
    """Remove a module: from a container, whose other members keep their names; elsewhere replace it by None."""
    around, _, own = name.rpartition(".")
    parent = model.get_submodule(around)
    if isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        del parent._modules[own]
    else:
        parent._modules[own] = None


def copied(
    model: nn.Module, device: torch.device, uses: Collection[str] = (), cut: ModuleCut = UNCUT, number: int = 0
) -> nn.Module:
    """Copy a model's tree of modules, hooks included, with its tensors on a device. With a `cut` only the tensors of
    part `number` are copied: all others become one NaN each, expanded to their shape. Tensors that are on the device
    already stay the same objects, except the parameters named in `uses`."""
    copies: dict[int, Any] = {}
    """Tensor, by id -> what takes its place wherever a module refers to it, such as the list of weights of an LSTM."""
    made: dict[tuple[str, str], Tensor] = {}
    moved: dict[int, Tensor] = {}
    owned = {path: cut.part_of(path) in (None, number) for path, _ in model.named_modules()}
    for path, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if not owned[path]:
                made[path, key] = _unset(tensor, (), device).expand(tensor.shape)
            elif (f"{path}.{key}" if path else key) in uses:
                made[path, key] = _moved(tensor, device, copied=True)
            else:
                if id(tensor) not in moved:  # a tensor with several names stays one tensor
                    moved[id(tensor)] = _moved(tensor, device)
                made[path, key] = moved[id(tensor)]
            if owned[path] or id(tensor) not in copies:
                copies[id(tensor)] = made[path, key]
    twin = copy.deepcopy(model, copies)
    modules = dict(twin.named_modules())
    for (path, key), tensor in made.items():
        tables: Any = modules[path]._parameters, modules[path]._buffers
        table = next(each for each in tables if key in each)
        if owned[path]:
            table[key] = tensor
        else:
            del table[key]
            modules[path].__dict__[key] = tensor
    return twin


def _moved(tensor: Tensor, device: torch.device, *, copied: bool = False) -> Tensor:
    """Return a tensor on a device: without `copied` the same object if it is there; a meta tensor becomes `_unset`."""
    if tensor.device == device and not copied:
        return tensor
    unset = tensor.device.type == "meta"
    made = _unset(tensor, tensor.shape, device) if unset else tensor.detach().to(device, copy=True)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _unset(tensor: Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return a new tensor of this shape and the tensor's dtype: NaNs, so that unset values show; integers are zeros."""
    return torch.full(shape, float("nan") if tensor.is_floating_point() else 0, dtype=tensor.dtype, device=device)
