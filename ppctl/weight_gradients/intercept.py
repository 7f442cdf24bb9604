"""Finds products with weights in any module while its forward runs, by a mode that intercepts torch's functions.

The mode sees Python's calls. Inside functions of torch that call others (`F.multi_head_attention_forward`) and inside
an `autograd.Function` it sees nothing: gradients of weights used there stay in I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from ppctl.errors import Problem, TrainingError
from ppctl.weight_gradients import products
from ppctl.weight_gradients.deferred import PLAIN, DeferredGradients, ProductRule, collecting, parameter_of


@contextmanager
def intercepting(gradients: DeferredGradients, *, backward: bool = False) -> Iterator[None]:
    """`collecting` for modules that do not defer weight gradients themselves: a mode of torch intercepts products."""
    gradients.intercepted = True
    with collecting(gradients, backward=backward), _Mode(gradients):
        yield
    if backward:
        gradients.separate_gradients()


class _Mode(TorchFunctionMode):
    def __init__(self, gradients: DeferredGradients) -> None:
        super().__init__()
        self.gradients = gradients

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace a product with a weight by one whose weight gradient is deferred; other functions run as they are."""
        kwargs = kwargs or {}
        if function in _LOOKS or getattr(function, "__name__", "") == "__get__":
            return function(*args, **kwargs)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            raise TrainingError(
                Problem(
                    "PP-E392",
                    "a stage with split backwards calls a compiled module: torch.compile hides its products",
                    "leave out torch.compile, or run a schedule without I and W",
                )
            )
        if function in (torch.autograd.backward, Tensor.backward):
            with self:  # a backward in a backward, with further forwards: `checkpoint(use_reentrant=True)`
                return _run_backward(*args, **kwargs)
        if function is torch.autograd.grad:
            self.gradients.drops = True
            try:
                return function(*args, **kwargs)
            finally:
                self.gradients.drops = False
        if function in _COPIES_PERHAPS and parameter_of(args[0]) is not None:
            made = function(*args, **kwargs)
            if parameter_of(made) is not None:
                return made
        # Inside a transform of torch.func (vmap, grad) no autograd function of this package runs.
        product = None if torch._C._are_functorch_transforms_active() else _PRODUCTS.get(function)
        given = None if product is None else _in_order(product.names, args, kwargs)
        result = None if product is None or given is None else product.make(self.gradients, *given)
        if result is not None:
            return result
        args = _each(self.gradients.elsewhere, args)
        return function(*args, **{name: _each(self.gradients.elsewhere, value) for name, value in kwargs.items()})


def _run_backward(
    tensors: Sequence[Tensor],
    gradient: Sequence[Tensor | None] | Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | None = None,
    **spelling: Any,
) -> None:
    """Do what `torch.autograd.backward` and `Tensor.backward` do; they would run the backward without the mode."""
    gradient = spelling.get("grad_tensors", gradient)
    roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    given = (gradient,) * len(roots) if gradient is None or isinstance(gradient, Tensor) else gradient
    seeds = tuple(torch.ones_like(root) if seed is None else seed for root, seed in zip(roots, given, strict=True))
    keep = create_graph if retain_graph is None else retain_graph
    _engine_run_backward(
        roots, seeds, keep, create_graph, tuple(inputs or ()), allow_unreachable=True, accumulate_grad=True
    )


def _each(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return an argument with `change` applied to its tensors, also to those in lists and tuples."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_each(change, each) for each in value)
    return value


class _NamedProduct(NamedTuple):
    names: tuple[str, ...]
    """Torch's names of all arguments that `make` can take."""
    make: Callable[..., Tensor | None]
    """(gradients, *arguments in the order of `names`) -> product; None if it cannot be made from these."""


def _in_order(names: tuple[str, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return the arguments of a call in the order of `names`, None for those left out; None if there are others."""
    named = {name: value for name, value in kwargs.items() if value is not None}
    given = dict(zip(names, args, strict=False)) | named
    if len(given) < len(args) + len(named) or not given.keys() <= set(names):
        return None
    return [given.get(name) for name in names]


def _taken(gradients: DeferredGradients, x: Any, weight: Any, dims: int) -> bool:
    """Whether x and `weight` make a product of floating-point matrices whose weight gradient is deferred."""
    plain = type(x) in PLAIN and isinstance(weight, Tensor) and x.is_floating_point()
    return plain and x.dim() >= 2 and weight.dim() == dims and gradients.takes(weight)


def _linear(gradients: DeferredGradients, x: Any, weight: Any, bias: Any) -> Tensor | None:
    if not _taken(gradients, x, weight, 2):
        return None
    return products.linear(
        gradients, gradients.elsewhere(x), weight, None if bias is None else gradients.elsewhere(bias)
    )


def _of_two(rule: ProductRule, dims: int) -> Callable[..., Tensor | None]:
    """Return a function that makes `rule`'s product of x and a weight of `dims` dims, or None if it cannot."""

    def product(gradients: DeferredGradients, x: Any, weight: Any) -> Tensor | None:
        if not _taken(gradients, x, weight, dims):
            return None
        return products.product(gradients, rule, gradients.elsewhere(x), weight)

    return product


def _addmm(gradients: DeferredGradients, bias: Any, x: Any, weight: Any) -> Tensor | None:
    if not (type(bias) not in PLAIN or bias.dim() < 2) or not _taken(gradients, x, weight, 2):
        return None
    bias = gradients.elsewhere(bias)
    return products.product(gradients, products.ADDMM, gradients.elsewhere(x), weight, bias)


def _grouped(gradients: DeferredGradients, x: Any, weight: Any, offs: Any) -> Tensor | None:
    casts = torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)
    if offs is None or casts or x.dim() != 2 or not _taken(gradients, x, weight, 3):
        return None
    return products.grouped_mm(gradients, gradients.elsewhere(x), weight, offs)


def _embedding(
    gradients: DeferredGradients,
    numbers: Any,
    weight: Any,
    padding_idx: int | None,
    max_norm: float | None,
    _: float | None,
    scale_grad_by_freq: bool | None,
    sparse: bool | None,
) -> Tensor | None:
    """`F.embedding` with a deferred gradient of its table; None if these arguments are not supported."""
    if sparse or max_norm is not None or type(numbers) not in PLAIN or not gradients.takes(weight):
        return None
    padding = -1 if padding_idx is None else padding_idx % len(weight)
    return products.embedding(gradients, numbers, weight, padding, by_frequency=bool(scale_grad_by_freq))


_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_PRODUCTS: dict[Callable[..., Any], _NamedProduct] = {
    F.linear: _NamedProduct(("input", "weight", "bias"), _linear),
    torch.addmm: _NamedProduct(("input", "mat1", "mat2"), _addmm),
    F.embedding: _NamedProduct(_EMBEDDING, _embedding),
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__), _NamedProduct(("input", "other"), _of_two(products.MATMUL, 2))
    ),
    **dict.fromkeys((torch.mm, Tensor.mm), _NamedProduct(("input", "mat2"), _of_two(products.MATMUL, 2))),
    **dict.fromkeys((torch.bmm, Tensor.bmm), _NamedProduct(("input", "mat2"), _of_two(products.BMM, 3))),
}
if hasattr(torch, "_grouped_mm"):  # what F.grouped_mm calls
    _PRODUCTS[torch._grouped_mm] = _NamedProduct(("input", "mat2", "offs"), _grouped)

_LOOKS = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        *("t", "transpose", "permute", "view", "view_as", "unbind", "chunk", "split", "narrow", "select", "squeeze"),
        *("unsqueeze", "detach", "swapaxes", "movedim", "unflatten", "size", "dim", "stride", "numel"),
        *("is_floating_point", "is_complex", "is_contiguous", "data_ptr", "__len__", "element_size", "is_inference"),
        *("requires_grad_", "untyped_storage", "storage_offset", "get_device", "__hash__", "is_same_size", "expand"),
    )
    if hasattr(owner, name)
)
"""Functions that do not compute with a parameter: views, and queries of its form."""

_COPIES_PERHAPS = frozenset(
    getattr(Tensor, name)
    for name in ("to", "type_as", "float", "half", "bfloat16", "contiguous", "reshape", "flatten", "__getitem__")
)
"""Methods that return a view or the tensor itself if possible, else a copy (`weight[ids]` is one)."""
