"""Where a causal language model of unknown code can be cut: found by its structure and by watching one forward.

Knows modules, their names and the order in which they are called. Must not know stages or families: nothing here goes
by the name of a class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ppctl.foreign.library import call, recorded
from ppctl.geometry.foreign_model import Anatomy

_TOKENS = 4
"""In each of two sequences of the forward that is watched."""


class CannotCut(Exception):
    """What of a model a cut cannot carry; the text names the module."""


def survey(model: nn.Module) -> Anatomy:
    """The anatomy of a whole model with weights, on the CPU. Raises CannotCut naming what stands against a cut.

    A forward of 2 x 4 tokens is watched, so the model should be small; the anatomy is that of all sizes.
    """
    name, layers = _layers_of(model)
    tables: Any = model
    embedding, head = tables.get_input_embeddings(), tables.get_output_embeddings()
    names = {id(module): path for path, module in model.named_modules()}
    if id(embedding) not in names or id(head) not in names:
        raise CannotCut("it has no embedding or no head of its own")
    outside = {
        path: module
        for path, module in model.named_modules()
        if not path.startswith(f"{name}.") and next(_saved(module), None) is not None
    }
    for path in outside:
        if name.startswith(f"{path}.") or not path:
            raise CannotCut(f"{path or 'the model itself'} has weights of its own beside its layers")
    tied = head.weight is embedding.weight
    _check_sharing(model, {f"{names[id(head)]}.weight"} if tied else set())
    calls, returned, routers = _watch(model, layers, outside)
    first, last = _sides(outside, calls, len(layers), name)
    listed = list(names.values())
    early = tuple(path for path in last if listed.index(path) < listed.index(name))
    return Anatomy(
        name, len(layers), first, last, names[id(embedding)], names[id(head)], tied, returned, early, routers
    )


def _layers_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    count = getattr(model.config, "num_hidden_layers", None)
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    outermost = [each for each in found if not any(each[0].startswith(f"{path}.") for path, _ in found)]
    if len(outermost) != 1:
        listed = ", ".join(path for path, _ in outermost) or "none"
        raise CannotCut(f"one list of {count} layers is needed, and it has {listed}")
    return outermost[0]


def _saved(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a module itself that a state dict has."""
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    transient = module._non_persistent_buffers_set
    yield from (buffer for key, buffer in module._buffers.items() if buffer is not None and key not in transient)


def _check_sharing(model: nn.Module, tied: set[str]) -> None:
    """Refuse parameters with several names, but for a tied head."""
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), name)
        if owner != name and name not in tied:
            raise CannotCut(f"{name} is the same parameter as {owner}, which another stage may hold")


def _watch(
    model: nn.Module, layers: nn.ModuleList, outside: dict[str, nn.Module]
) -> tuple[list[str | int], int, tuple[int, ...]]:
    """Who is called in one forward: layers by index, modules outside by name; how layers return; and of a model that
    adds to the loss how many tensors the routers of each layer record.
    """
    calls: list[str | int] = []
    forms = Counter[int]()
    routed = list[int]()

    def note(who: str | int) -> Any:
        return lambda *_: calls.append(who)

    def form(module: nn.Module, arguments: Any, output: Any) -> None:
        whole = isinstance(output, tuple)
        if not isinstance(output[0] if whole else output, Tensor):
            raise CannotCut(f"its layers return {type(output).__name__}, which is no hidden state")
        forms[len(output) if whole else 0] += 1
        routed.append(len(recorded()))

    hooks = [module.register_forward_pre_hook(note(path)) for path, module in outside.items()]
    for index, layer in enumerate(layers):
        hooks += [layer.register_forward_pre_hook(note(index)), layer.register_forward_hook(form)]
    try:
        _, added = call(model, input_ids=torch.arange(2 * _TOKENS).view(2, _TOKENS))
    finally:
        for hook in hooks:
            hook.remove()
    if len(forms) != 1:
        raise CannotCut(f"its layers return in {len(forms)} ways")
    return calls, next(iter(forms)), () if added is None else tuple(b - a for a, b in pairwise([0, *routed]))


def _sides(
    outside: dict[str, nn.Module], calls: list[str | int], count: int, name: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules outside the layers that run before and behind them."""
    order = [call for call in calls if isinstance(call, int)]
    if order != list(range(count)):
        wrong = next(index for index in range(count) if order[index : index + 1] != [index])
        raise CannotCut(f"{name}.{wrong} is not called once, behind the layers before it")
    begin, end = calls.index(0), calls.index(count - 1)
    first, last = [], []
    for path in outside:
        at = [place for place, call in enumerate(calls) if call == path]
        if at and max(at) < begin:
            first.append(path)
        elif at and min(at) > end:
            last.append(path)
        else:
            raise CannotCut(f"{path} has weights and runs neither before nor behind all layers")
    return tuple(first), tuple(last)
