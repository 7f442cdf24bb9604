"""Where a causal language model of unknown code can be cut, from its structure and from watching one forward.

Nothing here depends on names of classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ppctl.foreign.cut import further_names, saved
from ppctl.foreign.library import call, recorded
from ppctl.geometry.foreign_model import Anatomy

_TOKENS = 4
"""Tokens in each of the two sequences of the watched forward."""


class CannotCut(Exception):
    """A cut would lose something; the text names the module."""


def survey(model: nn.Module) -> Anatomy:
    """The anatomy of a whole model with weights, on the CPU. Raises CannotCut naming the obstacle. A forward of 2 x 4
    tokens is watched, so the model should be small; the anatomy holds for all sizes."""
    name, layers = structure(model)
    embedding, head, tied = _ends(model)
    outside = _outside(model, name)
    calls, returned, routers = _watch(model, layers, outside)
    first, last = _sides(outside, calls, len(layers), name)
    _check_sharing(model, name, {embedding, head} if tied else set(), first)
    listed = [path for path, _ in model.named_modules()]
    early = tuple(path for path in last if listed.index(path) < listed.index(name))
    return Anatomy(name, len(layers), first, last, embedding, head, tied, returned, early, routers)


def _ends(model: Any) -> tuple[str, str, bool]:
    """(path of the embedding, path of the head, whether they share a weight). Raises CannotCut without them."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): path for path, module in model.named_modules()}
    if id(embedding) not in names or id(head) not in names:
        raise CannotCut("it has no embedding or no head")
    return names[id(embedding)], names[id(head)], head.weight is embedding.weight


def structure(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name of the list of decoder layers, and the list; the model may be on meta. Raises CannotCut if modules or
    shared weights prevent a cut; nothing is run."""
    embedding, head, tied = _ends(model)
    name, layers = _layers_of(model)
    for path, module in _outside(model, name).items():
        if name.startswith(f"{path}.") or not path:
            owned = ", ".join(f"{path}.{key}".lstrip(".") for key, _ in saved(module))
            raise CannotCut(f"{owned}: weights of the module around all layers, which is part of every stage")
    _check_sharing(model, name, {embedding, head} if tied else set())
    return name, layers


def _outside(model: nn.Module, layers: str) -> dict[str, nn.Module]:
    """Name -> module, for modules outside the layers that have weights or saved buffers themselves."""
    named = model.named_modules()
    return {path: module for path, module in named if not path.startswith(f"{layers}.") and next(saved(module), None)}


def _layers_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name of the list of decoder layers, and the list. Raises CannotCut if no list or several can be it."""
    count = getattr(model.config, "num_hidden_layers", None)
    candidates = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and next(module.parameters(), None) is not None
    ]
    counted = [each for each in candidates if len(each[1]) == count]
    outermost = [
        each
        for each in counted or candidates
        if not any(each[0].startswith(f"{path}.") for path, _ in counted or candidates)
    ]
    if len(outermost) != 1:
        listed = ", ".join(f"{path} of {len(module)}" for path, module in outermost) or "none"
        raise CannotCut(
            f"exactly one of its lists of modules must be the list of its layers, but the candidates are {listed}"
        )
    return outermost[0]


def _check_sharing(model: nn.Module, layers: str, tied: set[str], first: Sequence[str] | None = None) -> None:
    """Raise CannotCut for parameters that several parts of the model share, except the weight of a tied head.

    Parts are the single layers and the modules outside them; with `first` (the names of the modules that run before the
    layers), the modules before and after the layers are two parts.
    """

    def part(name: str) -> str:
        inside = name.removeprefix(f"{layers}.")
        if inside != name:
            return inside.split(".")[0]
        return "outside" if first is None else "first" if name.rpartition(".")[0] in first else "last"

    for name, owner in further_names(model).items():
        if not {name.removesuffix(".weight"), owner.removesuffix(".weight")} <= tied and part(name) != part(owner):
            raise CannotCut(f"{name} is the same parameter as {owner}, which another stage may hold")


def _watch(
    model: nn.Module, layers: nn.ModuleList, outside: dict[str, nn.Module]
) -> tuple[list[str | int], int, tuple[int, ...]]:
    """Run one forward; return (its calls, layers by index and other modules by name; the length of the tuple that a
    layer returns, 0 for a tensor alone; if the model adds to the loss, how many tensors the routers of each layer
    record). Raises CannotCut."""
    calls: list[str | int] = []
    forms, widths = Counter[int](), Counter[tuple[int, ...]]()
    routed = list[int]()

    def note(who: str | int) -> Any:
        return lambda *_: calls.append(who)

    def form(module: nn.Module, arguments: Any, output: Any) -> None:
        several = isinstance(output, tuple | list)
        state = output[0] if several else output
        if not isinstance(state, Tensor):
            raise CannotCut(f"its layers return {type(output).__name__}, which is no hidden state")
        widths[tuple(state.shape)] += 1
        forms[len(output) if several else 0] += 1
        routed.append(len(recorded()))

    hooks = [module.register_forward_pre_hook(note(path)) for path, module in outside.items()]
    for index, layer in enumerate(layers):
        hooks += [layer.register_forward_pre_hook(note(index)), layer.register_forward_hook(form)]
    try:
        _, *added = call(model, input_ids=torch.arange(2 * _TOKENS).view(2, _TOKENS))
    finally:
        for hook in hooks:
            hook.remove()
    _check_states([*widths])
    if len(forms) > 1:
        raise CannotCut(f"its layers return results of {len(forms)} forms, but all must return the same form")
    return calls, next(iter(forms), 0), tuple(b - a for a, b in pairwise([0, *routed])) if added else ()


def _check_states(shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise CannotCut unless every hidden state is one tensor, [sequences, tokens, width], of equal width."""
    if len(shapes) > 1 or any(len(shape) != 3 or shape[:2] != (2, _TOKENS) for shape in shapes):
        listed = ", ".join(str(list(shape)) for shape in shapes)
        reason = f"a message carries one state [2, {_TOKENS}, width], of the same width for all layers"
        raise CannotCut(f"its layers return {listed} for 2 x {_TOKENS} tokens, but {reason}")


def _sides(
    outside: dict[str, nn.Module], calls: list[str | int], count: int, name: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(modules called before all layers, after all layers). Raises CannotCut unless each layer runs once, in order."""
    order = [call for call in calls if isinstance(call, int)]
    if order != list(range(count)):
        # At the first place with another layer: that layer, if it is called again, else the one that is missing there.
        wrong = next(min(place) for place in enumerate([*order, count]) if place[0] != place[1])
        raise CannotCut(f"{name}.{wrong} is not called exactly once, after the layers before it")
    begin, end = calls.index(0), calls.index(count - 1)
    first, last = [], []
    for path in outside:
        at = [place for place, call in enumerate(calls) if call == path]
        if at and max(at) < begin:
            first.append(path)
        elif at and min(at) > end:
            last.append(path)
        else:
            raise CannotCut(f"{path} has weights and runs neither before nor after all layers")
    return tuple(first), tuple(last)
