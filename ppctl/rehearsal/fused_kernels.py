"""The fused kernels that a GPU takes where torch, for tensors without values, would go step by step.

Knows torch's functions of which a GPU has one kernel, and what that kernel keeps. Must not know models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ppctl.model.kernels import Capability
from ppctl.wide_dtype import wide_dtype

_aten = torch.ops.aten

HOPPER = (9, 0)
CUDA = (12, 9)
"""The least version with all kernels that ppctl uses."""


def capability(device: torch.device, *, packed: bool) -> Capability:
    """What a run on H100s would have to choose from."""
    return Capability("cuda", HOPPER, attend_documents if packed else None, cuda=CUDA)


class FusedKernels(TorchFunctionMode):
    """Calls fused kernels by their own names while it is entered."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The kernel in place of the function, where there is one."""
        kernel: Callable[..., Any] | None = _KERNELS.get(func)
        return func(*args, **(kwargs or {})) if kernel is None else kernel(func, *args, **(kwargs or {}))


def _attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """cuDNN's or flash attention: kept are queries, keys, values, the result and a float32 a row and head."""
    fuses = torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.cudnn_sdp_enabled()  # sdpa_kernel's switches
    if not (query.is_meta and fuses) or attn_mask is not None:
        out: Tensor = func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return out
    keeps = torch.is_grad_enabled()
    made = _aten._scaled_dot_product_cudnn_attention(query, key, value, None, keeps, dropout_p, is_causal, scale=scale)
    fused: Tensor = made[0]
    return fused


def attend_documents(query: Tensor, key: Tensor, value: Tensor, *bounds: object, **options: object) -> Tensor:
    """varlen_attn's contract: [tokens, heads, width], all documents at once; it keeps what the others do."""
    heads = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    made = _aten._scaled_dot_product_cudnn_attention(*heads, None, torch.is_grad_enabled(), 0.0, True)
    out: Tensor = made[0][0].transpose(0, 1)
    return out


def _norm(func: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if not x.is_meta:
        stepwise: Tensor = func(x, shape, weight, eps)
        return stepwise
    fused: Tensor = _FusedNorm.apply(x, weight)  # type: ignore[no-untyped-call]  # torch's own
    return fused


class _FusedNorm(torch.autograd.Function):
    """A norm over the last dimension; kept are the input and a float32 a row. Torch itself would go step by step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=wide_dtype(x.dtype)))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


_KERNELS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _norm,
    torch.rms_norm: _norm,
}
