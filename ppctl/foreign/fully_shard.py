"""A stage that torch's fully_shard has divided: the dtypes in which it computes and returns, and its gradient sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ppctl.foreign.cut import unwrapped


@dataclass(frozen=True, slots=True)
class Casts:
    """The dtypes to which a module's floating inputs and results are cast; None leaves them as they are."""

    inputs: torch.dtype | None = None
    result: torch.dtype | None = None


UNCHANGED = Casts()


@dataclass(frozen=True, slots=True)
class StageDtypes:
    """The dtypes in the forward of one stage, by names within the whole model."""

    tensors: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The dtype in which the forward reads its floating parameters and buffers."""
    weights: torch.dtype | None = None
    """The dtype of the stage's parameters; None if they have several."""
    around: Casts = UNCHANGED
    """Casts around the whole stage."""
    modules: Mapping[str, Casts] = field(default_factory=dict)
    """Casts around modules within the stage."""


def dtypes_of(stage: Any) -> StageDtypes:
    """The dtypes of a stage whose attribute `model` is the whole model's tree of modules."""
    own = {id(each) for each in stage.all_parameters().values()}
    policies: dict[str, Any] = {}
    weights: dict[str, torch.dtype] = {}
    buffers: dict[str, torch.dtype] = {}
    casts: dict[str, Casts] = {}
    for path, module in stage.named_modules(remove_duplicate=False):
        own_policy = _policy_of(module)
        policies[path] = own_policy or (policies[path.rpartition(".")[0]] if path else None)
        if own_policy is not None:
            asked = own_policy.param_dtype if own_policy.cast_forward_inputs else None
            casts[path] = Casts(asked, own_policy.output_dtype)
        for key, tensor in module._parameters.items():
            if id(tensor) in own and tensor is not None and tensor.is_floating_point():
                weights[_name(path, key)] = _read_as(tensor, policies[path])
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                buffers[_name(path, key)] = buffer.dtype
    around = casts.pop("", None) or casts.pop("model", None) or UNCHANGED
    kinds = set(weights.values())
    inside = {unwrapped(path).removeprefix("model."): each for path, each in casts.items()}
    return StageDtypes(weights | buffers, kinds.pop() if len(kinds) == 1 else None, around, inside)


def _name(path: str, key: str) -> str:
    return f"{unwrapped(path)}.{key}".removeprefix("model.")


def _policy_of(module: nn.Module) -> Any:
    """The precision policy of a module on which fully_shard was called; None for all other modules."""
    state = getattr(module, "_get_fsdp_state", None)
    return None if state is None else state()._mp_policy


def _read_as(tensor: Tensor, policy: Any) -> torch.dtype:
    """The dtype in which a tensor is read: a policy's for divided parameters (DTensors), else its own."""
    divided = policy is not None and hasattr(tensor, "full_tensor")
    return (policy.param_dtype or tensor.dtype) if divided else tensor.dtype


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Return arguments or results with all floating tensors cast to `dtype` (None: unchanged), as fully_shard does."""
    if dtype is None:
        return value
    return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, value)


def imitate(blank: nn.Module, stages: Sequence[StageDtypes]) -> None:
    """Change a whole model on meta to compute in the dtypes of its stages. The caller adds the casts between stages."""
    modules = dict(blank.named_modules(remove_duplicate=False))
    for name, dtype in {name: dtype for stage in stages for name, dtype in stage.tensors.items()}.items():
        path, _, key = name.rpartition(".")
        tables: tuple[dict[str, Any], ...] = (modules[path]._parameters, modules[path]._buffers)
        for table in tables:
            tensor = table.get(key)
            if tensor is not None and tensor.dtype != dtype:
                other = torch.empty_like(tensor, dtype=dtype, requires_grad=False)
                is_parameter = isinstance(tensor, nn.Parameter)
                table[key] = nn.Parameter(other, requires_grad=tensor.requires_grad) if is_parameter else other
    for name, casts in {name: casts for stage in stages for name, casts in stage.modules.items()}.items():
        modules[name].register_forward_pre_hook(
            lambda _, args, kwargs, dtype=casts.inputs: cast((args, kwargs), dtype), with_kwargs=True
        )
        modules[name].register_forward_hook(lambda _, args, result, dtype=casts.result: cast(result, dtype))


class GradientSync:
    """Switches the gradient sums of one stage's sharded modules; `shards` says whether the stage has such modules."""

    def __init__(self, module: nn.Module) -> None:
        # Sharded modules exist only after this slow import.
        self._modules: list[Any] = [each for each in module.modules() if hasattr(each, "set_requires_gradient_sync")]
        self.shards = bool(self._modules)

    def around(self, last: int, mb: int, run: Callable[[], None]) -> None:
        """Run the backward of `mb`; gradients are summed over the shards' ranks only if it is the microbatch `last`."""
        for module in self._modules:
            module.set_requires_gradient_sync(mb == last, recurse=False)
            module.set_is_last_backward(mb == last)
        run()

    def at_once(self, mb: int, run: Callable[[], None]) -> None:
        """Run the backward of a microbatch, after which gradients are summed."""
        self.around(mb, mb, run)
