"""Where a module is cut: which of its modules are on which stage.

A user's module is cut by names (`PipelineConfig.module_fqns_per_model_part`), a transformers model by the layers of
its anatomy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ppctl.config.keys import nearest
from ppctl.errors import ConfigError, Problem, some
from ppctl.geometry.foreign_model import Anatomy
from ppctl.geometry.layers import Layer

FIELD = "module_fqns_per_model_part"
CODE = "PP-E131"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_SHOWN = 8


@dataclass(frozen=True)
class ModuleCut:
    """The modules of every part, in model order. Modules without parameters or saved buffers run on all stages."""

    parts: tuple[tuple[str, ...], ...]
    """The names of the modules with parameters or saved buffers."""
    inner: str = ""
    """The name of the inner model: the only child, no container, that holds several of these modules; or ""."""

    @cached_property
    def _parts_by_name(self) -> dict[str, int]:
        return {name: part for part, names in enumerate(self.parts) for name in names}

    def part_of(self, path: str) -> int | None:
        """The part with the module at this path, or with a module around it; None for modules of every stage."""
        while path:
            if path in self._parts_by_name:
                return self._parts_by_name[path]
            path = path.rpartition(".")[0]
        return None

    def forward_around(self, path: str) -> str:
        """The module whose forward calls the module at this path: the inner model's name, or "" for the model."""
        return self.inner if self.inner and f"{path}.".startswith(f"{self.inner}.") else ""

    @property
    def inner_parts(self) -> list[int]:
        """The parts with modules of the inner model, in order."""
        return [k for k, names in enumerate(self.parts) if any(map(self.forward_around, names))]


UNCUT = ModuleCut(())
"""The cut of a model that is not divided: every module is on every stage."""


def cut_around(anatomy: Anatomy, layers: Sequence[Layer]) -> ModuleCut:
    """Cut a transformers model into three parts: what comes before these neighbouring layers, the layers, the rest."""
    inside = [anatomy.layer(index) for index in range(anatomy.count)]
    order = [*anatomy.first, *inside, *anatomy.last]
    ends = {"embedding": anatomy.first, "loss": anatomy.last}
    own = [name for layer in layers for name in ends.get(layer.kind) or (inside[layer.index],)]
    begin = order.index(own[0]) if own else 0
    return ModuleCut((tuple(order[:begin]), tuple(own), tuple(order[begin + len(own) :])))


def saved(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the parameters and saved buffers of a module, without its children's."""
    yield from ((key, tensor) for key, tensor in module._parameters.items() if tensor is not None)
    yield from saved_buffers(module)


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) for the buffers of a module that its state dict has, without its children's."""
    transient = module._non_persistent_buffers_set
    yield from ((k, buffer) for k, buffer in module._buffers.items() if buffer is not None and k not in transient)


_WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod"}
"""Names that torch's checkpoint_wrapper and compile put in front of a module's own."""


def unwrapped(path: str) -> str:
    """The path that a module had before torch's checkpoint_wrapper or compile was put around it or a module above."""
    return ".".join(name for name in path.split(".") if name not in _WRAPPERS)


def further_names(model: nn.Module) -> dict[str, str]:
    """Map every further name of a shared parameter to the parameter's first name."""
    owners: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    pairs = {name: owners.setdefault(id(parameter), name) for name, parameter in named}
    return {name: owner for name, owner in pairs.items() if name != owner}


def cut_by_names(model: nn.Module, parts: Sequence[Sequence[str]] | None, pp: int) -> ModuleCut:
    """Return the cut by `parts`. Raises ConfigError with all problems: PP-E131 for unknown names, a module named in two
    parts or in none, an empty part, a number of parts that pp ranks cannot share; PP-E132 for a module with two names.
    """
    if parts is None:
        message = "a module that is not from transformers is cut by the names of its modules, but none are given"
        raise ConfigError(Problem(CODE, message, _proposal(model, pp)))
    if isinstance(parts, str) or any(isinstance(part, str) for part in parts):
        raise ConfigError(
            Problem(CODE, f"{FIELD} must be one list of names for every part, not {parts!r}", _proposal(model, pp))
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    named = [[str(name) for name in part] for part in parts]
    problems = [_unknown(name, k, modules) for k, part in enumerate(named) for name in part if name not in modules]
    holds = {path: any(True for each in module.modules() for _ in saved(each)) for path, module in modules.items()}
    owned = tuple(tuple(dict.fromkeys(name for name in part if holds.get(name))) for part in named)
    problems += _twice(owned)
    if empty := [k for k, part in enumerate(named) if not any(holds.get(n) or n not in modules for n in part)]:
        listed = ", ".join(map(str, empty))
        problems.append(Problem(CODE, f"{FIELD}: part {listed} names no module with parameters", _proposal(model, pp)))
    cut = ModuleCut(owned, _inner(modules, owned))
    problems += _shared(modules)
    problems += _uncovered(modules, cut)
    if len(named) % pp or not named:
        message = f"{FIELD} has {len(named)} parts, which {pp} pipeline ranks cannot share evenly"
        problems.append(Problem(CODE, message, _proposal(model, pp)))
    if problems:
        raise ConfigError(problems)
    return cut


def _unknown(name: str, part: int, modules: dict[str, nn.Module]) -> Problem:
    near = nearest(name, [path for path in modules if path], limit=_SHOWN)
    known = near or [path for path in modules if path and "." not in path]
    message = f"{FIELD}: part {part} names {name!r}, but the model has no such module"
    return Problem(CODE, message, f"one of {', '.join(known[:_SHOWN])}")


def _twice(parts: Sequence[Sequence[str]]) -> list[Problem]:
    """Return the problems of modules that are in several parts, by name or inside a module of another part."""
    problems = []
    counts = Counter(name for part in parts for name in part)
    for name, count in counts.items():
        if count > 1:
            listed = " and ".join(str(k) for k, part in enumerate(parts) if name in part)
            problems.append(Problem(CODE, f"{FIELD}: {name} is named in parts {listed}", f"name {name} in one part"))
    for k, part in enumerate(parts):
        for name in part:
            around = [(other, j) for j, names in enumerate(parts) for other in names if name.startswith(f"{other}.")]
            for other, j in around:
                if j != k:
                    message = f"{FIELD}: {name} is named in part {k}, but {other}, which holds it, in part {j}"
                    problems.append(Problem(CODE, message, f"name the modules in {other} one by one"))
    return problems


def _shared(modules: dict[str, nn.Module]) -> list[Problem]:
    """Return the problems of modules that have two names: two stages would call one module."""
    first: dict[int, str] = {}
    problems = []
    for path, module in modules.items():
        before = first.setdefault(id(module), path)
        if before != path and any(True for _ in saved(module)):
            message = f"{path} is the same module as {before}"
            remedy = "two modules that share their parameters: one.weight = other.weight"
            problems.append(Problem("PP-E132", message, remedy))
    return problems


def _uncovered(modules: dict[str, nn.Module], cut: ModuleCut) -> list[Problem]:
    """Return a problem that names the parameters and saved buffers that no part holds; none if all are held."""
    lost = [
        f"{path}.{key}" if path else key
        for path, module in modules.items()
        if cut.part_of(path) is None
        for key, _ in saved(module)
    ]
    if not lost:
        return []
    shown = some(lost, _SHOWN)
    homes = dict.fromkeys(name.rpartition(".")[0] for name in lost)
    if "" in homes:
        remedy = "put parameters of the model itself into a module of their own, and name it in a part"
    else:
        remedy = f"name {', '.join(list(homes)[:_SHOWN])} in a part"
    return [Problem(CODE, f"{FIELD}: no part holds {shown}", remedy)]


def _inner(modules: dict[str, nn.Module], parts: Sequence[Sequence[str]]) -> str:
    names = [name for part in parts for name in part]
    paths = []
    for path, module in modules.items():
        inside = {name[len(path) + 1 :].partition(".")[0] for name in names if name.startswith(f"{path}.")}
        if path and "." not in path and len(inside) > 1 and not isinstance(module, (*_CONTAINERS, nn.Sequential)):
            paths.append(path)
    return paths[0] if len(paths) == 1 else ""


def _units(module: nn.Module, prefix: str = "") -> list[str]:
    """Return the names of the smallest modules that an even cut keeps whole: children, and members of containers."""
    units = []
    for name, child in module.named_children():
        if any(True for each in child.modules() for _ in saved(each)):
            spread = isinstance(child, _CONTAINERS) or any(isinstance(each, _CONTAINERS) for each in child.children())
            units += _units(child, f"{prefix}{name}.") if spread else [f"{prefix}{name}"]
    return units


def _proposal(model: Any, pp: int) -> str:
    """Return an even cut to paste; for a model with fewer modules than ranks, the names of its modules."""
    units = _units(model)
    if len(units) < pp:
        return f"at most as many ranks as it has modules with parameters: {', '.join(units)}"
    ends = [len(units) * (k + 1) // pp for k in range(pp)]
    parts = [units[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return f"{FIELD}={parts}"
