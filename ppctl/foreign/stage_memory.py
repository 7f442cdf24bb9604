"""Memory and values of a stage's own tensors, in a whole model on meta: parameters without values, buffers with theirs.

Must not know where a model is cut, nor who computes with what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_FILLED = "_is_hf_initialized"
"""An attribute of tensors that the functions with which transformers fills tensors leave alone."""


def give_memory(module: nn.Module, device: torch.device, *, owned: bool) -> None:
    """Move a module's own tensors off meta: with memory where they are owned, else as one number with their shape."""
    tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
    for tensors in tables:
        for key, tensor in tensors.items():
            if tensor is None:
                continue
            # Values that nobody sets are seen: they make every result NaN.
            fill = float("nan") if tensor.is_floating_point() else 0
            shape = tensor.shape if owned else ()
            made: Tensor = torch.full(shape, fill, dtype=tensor.dtype, device=device).expand(tensor.shape)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=owned and tensor.requires_grad)
            tensors[key] = made
            if not owned or key not in module._non_persistent_buffers_set:
                setattr(made, _FILLED, True)


@torch.no_grad()
def make_buffers(model: nn.Module, names: Sequence[str]) -> None:
    """Let the model's own code make the buffers in these modules that no state dict has, such as rotary frequencies.

    transformers builds every model on meta before it reads weights, so each class can (`_init_weights`): that of the
    buffer's module, or of some buffers that of a module around it, the nearest first.
    """
    for name in names:
        if model.get_submodule(name)._non_persistent_buffers_set:
            _initializer(model, name)(model.get_submodule(name))
    for name in reversed(names):
        if any(map(_is_unset, model.get_submodule(name).modules())):
            _initializer(model, name)(model.get_submodule(name))


def _initializer(model: nn.Module, name: str) -> Callable[..., Any]:
    """`_init_weights` of the module with this name, or of the nearest one around it: as transformers chooses it."""
    while name and not hasattr(model.get_submodule(name), "_init_weights"):
        name = name.rpartition(".")[0]
    owner: Any = model.get_submodule(name)
    found: Callable[..., Any] = owner._init_weights
    return found


def _is_unset(module: nn.Module) -> bool:
    """Whether a buffer of a module, which has memory and is in no state dict, has no values yet."""
    buffers = [module._buffers[key] for key in module._non_persistent_buffers_set]
    if torch._C._len_torch_dispatch_stack():
        return False  # a layer is measured or rehearsed: nothing has values
    return any(b is not None and not hasattr(b, _FILLED) and bool(b.isnan().any()) for b in buffers)
