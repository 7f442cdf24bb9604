"""Finds out by one forward on meta tensors whether a module can be cut between its parts, and what messages result.

Every tensor is followed from the operation that makes it. Beyond a cut only the tensor that enters the next part may be
read: any other value of an earlier part (a residual that skips the cut, a weight of another part, an auxiliary result)
would be lost silently.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from ppctl.errors import ConfigError, Problem
from ppctl.foreign.cut import ModuleCut, saved
from ppctl.foreign.cut_stage import Arguments, CutStage, Forms, copied, first_tensor, with_first_tensor
from ppctl.foreign.fully_shard import Casts, cast

CODE = "PP-E132"
_META, _CPU = torch.device("meta"), torch.device("cpu")
_SHAPE_ALONE = {"new_zeros", "new_ones", "new_empty", "new_full", "zeros_like", "ones_like", "empty_like", "full_like"}
"""Operations that read nothing of a tensor but its shape, its dtype and its device."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """The tensors that cross the cuts in a forward whose arguments have certain shapes."""

    edges: tuple[Tensor, ...]
    """The message from each part to the next one, on meta."""
    forms: Forms = field(default_factory=dict)
    """Module -> its result, on meta."""
    output: Any = None
    """The model's result, on meta; None if it was not seen."""


def look_at(
    blank: nn.Module,
    cut: ModuleCut,
    arguments: Arguments,
    aware: Collection[str] = (),
    around: Sequence[Casts] = (),
    device: torch.device = _CPU,
) -> Crossing:
    """The Crossing of a model on meta, called with arguments of these shapes.

    `aware` is as in `CutStage`: inside these forwards nothing is followed. `around` has each stage's casts. The model
    will run on `device`, so that device's autocast counts. Raises ConfigError (PP-E132) naming the module that reads a
    value of another part, is called out of order or not at all, or needs values.
    """
    forward = _Forward(cut, arguments, frozenset(aware), tuple(around) or (Casts(),) * len(cut.parts), device)
    try:
        if not torch.is_autocast_enabled(device.type):
            with _META:
                crossing = forward(blank, _META)
            if crossing is not None:
                return crossing
        return _autocast(forward, blank, device)
    except ConfigError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        message = f"the model's forward cannot be followed on tensors without values: {type(error).__name__}: {reason}"
        remedy = _BY_HAND if any(words in str(error) for words in _READS) else _ALONE
        raise ConfigError(Problem(CODE, message, remedy, _line_of(error))) from None


def _autocast(forward: _Forward, blank: nn.Module, device: torch.device) -> Crossing:
    """Follow the forward under autocast, on torch's fake tensors of the device, since autocast ignores meta tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # a slow import, rarely needed

    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    with FakeTensorMode(), torch.autocast(kind, dtype, enabled, cache_enabled=False):
        crossing = forward(copied(blank, device), device)
        assert crossing is not None  # given on the device of the autocast
    return Crossing(*(_in_place(_META, each) for each in (crossing.edges, crossing.forms, crossing.output)))


def _in_place(place: torch.device, values: Any) -> Any:
    """Return `values` with an empty tensor of the same form and dtype on this device in place of each tensor."""

    def empty(each: Tensor) -> Tensor:
        return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=place)

    return tree_map_only(Tensor, empty, values)


@dataclass(frozen=True, slots=True)
class _Forward:
    """The forward of a whole model on tensors without values: on meta, or as fake tensors of a device."""

    cut: ModuleCut
    arguments: Arguments
    aware: frozenset[str]
    around: tuple[Casts, ...]
    device: torch.device

    def __call__(self, blank: nn.Module, place: torch.device) -> Crossing | None:
        """Run on tensors in `place`; None if the model's code switches on an autocast that ignores such tensors."""
        arguments = _in_place(place, self.arguments)
        with torch.no_grad():
            positional, named = cast(arguments, self.around[0].inputs)
            followed = self._follow(blank, (positional, named), place)
            if followed is None or not self.aware:
                return followed
            return self._chain(blank, arguments, place)

    def _chain(self, blank: nn.Module, arguments: Arguments, place: torch.device) -> Crossing:
        """Call the parts in order; return the tensors between them. Raises ConfigError if a part returns no tensor."""
        edges: list[Tensor] = []
        for number, casts in enumerate(self.around[:-1]):
            stage = CutStage(blank, self.cut, number, place, self.aware)
            result = cast(stage(*cast((edges[-1] if edges else None, *arguments), casts.inputs)), casts.result)
            if not isinstance(result, Tensor):
                message = (
                    f"part {number} returns a {type(result).__name__}, but only one tensor can be sent to the next part"
                )
                raise ConfigError(Problem(CODE, message, "return the hidden state alone where the head is None"))
            edges.append(result)
        return Crossing(tuple(edges))

    def _follow(self, blank: nn.Module, arguments: Arguments, place: torch.device) -> Crossing | None:
        watch, autocast = _Watch(blank, self.cut, self.aware, self.around), _Autocast(self.device.type)
        try:
            with watch, autocast:
                output = blank(*arguments[0], **arguments[1])
        finally:
            watch.remove_hooks()
        if autocast.seen and place.type != self.device.type:
            return None
        watch.conclude()
        return Crossing(tuple(watch.edges), watch.forms, cast(output, self.around[-1].result))


_READS = ("meta tensor", "meta device", "data-dependent", "is_nonzero", "_local_scalar_dense")
"""Words in torch's errors if code asks a meta tensor for its values."""
_ALONE = "the model by itself with these arguments: where that runs, so does this"
_BY_HAND = "the value as an argument that is no tensor, such as step({'x': x, 'masked': bool(mask.any()), 'labels': y})"


def _line_of(error: Exception) -> str:
    libraries = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(libraries)]
    return f"{frames[-1].filename}:{frames[-1].lineno}\n{frames[-1].line}" if frames else ""


_AS_IT_IS = "a forward that takes hidden states itself, with patch_inner_model=False patch_causal_lm_model=False"


class _Autocast(TorchFunctionMode):
    """Records in `seen` whether autocast was ever on for `device_type`. A mode of torch functions, because in a
    dispatch mode autocast always reads as off."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type, self.seen = device_type, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.is_autocast_enabled(self.device_type)
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """Marks tensors with the part that made them while a model on meta runs, and notes the tensors that cross a cut.

    Tensors that depend on the model's arguments alone have no mark: every stage makes them. Modules that an `aware`
    forward calls are not followed; an inner model that is aware counts as one module, which begins in its first part
    and ends in its last. Hooks stay on `model` until `remove_hooks`.
    """

    def __init__(self, model: nn.Module, cut: ModuleCut, aware: frozenset[str], around: Sequence[Casts]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.part, self.around = 0, around
        self.watched = [[name for name in names if cut.forward_around(name) not in aware] for names in cut.parts]
        self.edges: list[Tensor] = []
        self.forms: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self._marks: Any = WeakIdKeyDictionary()
        self._names: Any = WeakIdKeyDictionary()
        """Parameters and buffers by tensor, and results by the module that returned them."""
        self._running: list[str] = []
        self._hooks = []
        modules = dict(model.named_modules())
        for path, module in modules.items():
            part = cut.part_of(path)
            if part is not None and cut.forward_around(path) not in aware:
                for key, tensor in saved(module):
                    self._marks.setdefault(tensor, part)
                    self._names.setdefault(tensor, f"{path}.{key}")
        spans = [(name, part, part) for part, names in enumerate(self.watched) for name in names]
        if cut.inner and cut.inner in aware and "" not in aware:
            spans.append((cut.inner, cut.inner_parts[0], cut.inner_parts[-1]))
        for name, first, last in spans:
            before, behind = partial(self._enter, first, name), partial(self._leave, last, name)
            self._hooks.append(modules[name].register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._hooks.append(modules[name].register_forward_hook(behind))

    def remove_hooks(self) -> None:
        """Remove all hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def conclude(self) -> None:
        """Raise ConfigError with the first problem found, if any. A part of which no module was called is one."""
        called = self.forms.keys()
        for part, names in enumerate(self.watched):
            lost = [name for name in names if name not in called]
            if lost and len(lost) == len(names) and not self.problems:
                message = f"the model's forward calls no module of part {part}: {', '.join(lost[:3])}"
                self.problems.append(Problem(CODE, message, _AS_IT_IS))
        if self.problems:
            raise ConfigError(self.problems[0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _SHAPE_ALONE:
            return result
        read = [each for each in tree_leaves((args, kwargs or {})) if isinstance(each, Tensor) and each in self._marks]
        for each in read:
            if self._marks[each] != self.part:
                self._crossed(each)
        if read:
            self._mark(result, max(self._marks[each] for each in read))
        return result

    def _mark(self, result: Any, part: int) -> None:
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._marks[each] = part

    def _crossed(self, tensor: Tensor) -> None:
        where = self._running[-1] if self._running else "the model's own forward"
        what, made = self._names.get(tensor, "a tensor"), self._marks[tensor]
        message = f"{where}, in part {self.part}, reads {what} of part {made}, but only the hidden state crosses a cut"
        self.problems.append(
            Problem(CODE, message, "parts that keep both on one stage, or a residual inside one module")
        )

    def _enter(self, part: int, name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before a module runs, note if the order of calls is wrong. For the first module of `part`, check that its
        first tensor is a result of the part before, and return its arguments with a message in place of that tensor."""
        self._running.append(name)
        if part < self.part:
            message = f"{name} of part {part} is called when part {self.part} has already begun"
            self.problems.append(Problem(CODE, message, "parts in the order in which the forward calls their modules"))
        if part <= self.part:
            return None
        if part > self.part + 1:
            message = f"{name} of part {part} is called before any module of part {self.part + 1}"
            self.problems.append(Problem(CODE, message, "parts in the order in which the forward calls their modules"))
        state = first_tensor((args, kwargs))
        if self._marks.get(state) != self.part:
            message = f"the first tensor that {name} gets is not a result of part {self.part}, so it would not be sent"
            self.problems.append(Problem(CODE, message, "a module whose first argument is the hidden state"))
        edge = cast(torch.empty_like(state), self.around[self.part].result)
        self.edges.append(edge)
        self.part = part
        arrived = cast(torch.empty_like(edge), self.around[part].inputs)
        self._marks[arrived] = part
        return with_first_tensor((args, kwargs), arrived)

    def _leave(self, part: int, name: str, _: nn.Module, args: Any, output: Any) -> Any:
        """After a module has run, replace the tensors that it returned with new ones, marked with `part`."""
        self._running.pop()
        self.part = max(self.part, part)

        def result(each: Tensor) -> Tensor:
            """A new tensor, marked with this part, in place of a result that may be an unchanged input."""
            made = torch.empty_like(each)
            self._marks[made], self._names[made] = part, f"the result of {name}"
            return made

        self.forms[name] = tree_map_only(Tensor, result, output)
        return self.forms[name]
