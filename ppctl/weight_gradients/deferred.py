"""The weight gradients that the I of a microbatch defers, and how W hands them to autograd.

While a forward runs under `collecting(gradients)`, `_Product` runs each product with a weight. The weight is not part
of its graph; its backward (I) computes the gradient of the input and stores the operands of the weight's gradient in
`gradients`. `gradients.deliver()` (W) computes the gradients and gives each weight the sum over its uses, once, through
autograd, so that hooks see the same as in a whole backward.

The current collector is global and not thread-local, because on CUDA autograd runs backwards in a thread per device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ppctl.errors import Problem, TrainingError
from ppctl.weight_gradients.delivery import AT_ONCE, LEAVE_WHOLE, TOGETHER, Make, Use, deliver, operands, version_of
from ppctl.weight_gradients.wide_sums import AtOnce

PLAIN: set[type[Tensor]] = {Tensor}
"""The types of tensors whose products are deferred. Measurements on meta tensors add theirs."""


class DeferredGradients:
    """The deferred weight gradients of a stage and microbatch, from F to W, except those of the weights in `whole`."""

    def __init__(self, whole: Iterable[Tensor] = ()) -> None:
        self.intercepted = False
        """Whether `intercept` finds products: then a weight may have uses of any kind, also unseen ones."""
        self.drops = False
        """Whether gradients are dropped now, while `torch.autograd.grad` runs: what it makes is not for `.grad`."""
        self._whole = {id(base): base for base in map(_base_of, whole)}
        self._taken: dict[int, nn.Parameter] = {}
        self._uses: dict[int, list[Use]] = {}
        self._functions: list[Callable[[], object]] = []
        self._cast: dict[int, Tensor] = {}

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters whose gradients are deferred, in the order of their first uses."""
        return tuple(self._taken.values())

    def takes(self, weight: Tensor) -> bool:
        """Whether this use of a weight is deferred. If so, the parameter is noted: all its other uses must be deferred,
        too, because otherwise autograd's order of adding up a weight's uses would be lost.
        """
        base = parameter_of(weight)
        if base is None or id(base) in self._whole:
            return False
        self._taken[id(base)] = base
        return True

    def elsewhere(self, tensor: Tensor) -> Tensor:
        """Return what to give, in place of a tensor, to a function that is not an intercepted product with a weight.
        For a parameter with deferred uses this is an alias, whose gradient joins the deferred ones. Any other trained
        parameter is marked whole: no later use of it is deferred. Raises TrainingError (PP-E717) if an alias is needed
        inside a transform of torch.func."""
        base = parameter_of(tensor)
        if base is None:
            return tensor
        if id(base) in self._taken:
            if torch._C._are_functorch_transforms_active():
                raise _used_unseen(base, "inside a transform of torch.func (vmap, grad)")
            anchor = torch.empty(0, device=tensor.device, requires_grad=True)
            place = self.place(tensor, cast=False)
            alias: Tensor = _Elsewhere.apply(self, [tensor], [place], anchor)  # type: ignore[no-untyped-call]  # torch's own
            return alias
        self._whole[id(base)] = base
        return tensor

    def place(self, weight: Tensor, *, cast: bool) -> Tensor:
        """Return `weight` as the node of the graph that gets a use's gradient. The node keeps the use's place among the
        others: autograd adds gradients in the order in which nodes were made, last ones first. If products are
        intercepted, each use of a parameter has a node of its own, except that all uses cast by autocast share one.
        """
        if not self.intercepted or weight._base is not None:
            return weight
        if not cast:
            return weight.view_as(weight)
        return self._cast.setdefault(id(weight), weight.view_as(weight))

    def put(self, weight: Tensor, place: Tensor, make: Make) -> None:
        """Defer one use's part of a weight's gradient. Parts are added up in the order in which they are put. Raises
        TrainingError (PP-E717) if the weight also gets a gradient outside W."""
        if self.drops:
            return
        base = parameter_of(weight)
        assert base is not None  # set: this use was taken
        if self.intercepted:
            _look_for(place, base)
        self._uses.setdefault(id(base), []).append(Use(weight, place, make, version_of(weight, make)))

    def put_function(self, function: Callable[[], object]) -> None:
        """Defer any function: W calls such functions in the order given, once all weights have their gradients."""
        self._functions.append(function)

    def keeps(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors' memory may hold W's operands; true with a deferred function, which may keep any."""
        if not tensors or self._functions:
            return bool(tensors)
        own = {tensor.untyped_storage()._cdata for tensor in tensors}
        return any(tensor.untyped_storage()._cdata in own for tensor in self._kept())

    def separate_gradients(self) -> None:
        """Copy gradients of whole parameters that lie in the memory of kept operands. Autograd stores a parameter's
        first gradient without a copy, even if it is a view of a tensor that W needs, and adds the next microbatch's
        gradient in place.
        """
        kept = {tensor.untyped_storage()._cdata for tensor in self._kept()}
        for weight in self._whole.values():
            gradient = weight.grad
            if gradient is not None and not gradient.is_sparse and gradient.untyped_storage()._cdata in kept:
                weight.grad = gradient.clone()

    def deliver(self) -> None:
        """Compute and accumulate all gradients, then call the deferred functions. A weight's operands are freed after
        its gradient. Each call of autograd is for weights of about `AT_ONCE` bytes, whose gradients exist at the same
        time. Raises TrainingError (PP-E718)."""
        while self._uses:
            groups: list[list[Use]] = []
            size = 0
            while self._uses and size < AT_ONCE:
                size += self._move_to(groups)
            deliver(groups)
        functions, self._functions = self._functions, []
        for function in functions:
            function()

    def _move_to(self, groups: list[list[Use]]) -> int:
        """Move all uses of the first weights, of about `TOGETHER` bytes, to a new group; return the weights' bytes."""
        groups.append([])
        size = 0
        while self._uses and size < TOGETHER:
            uses = self._uses.pop(next(iter(self._uses)))
            weight = uses[0].weight
            # A single use needs no place among others, which would be a further node in W.
            groups[-1] += uses if len(uses) > 1 else [Use(weight, weight, *uses[0][2:])]
            size += weight.nbytes
        return size

    def _kept(self) -> Iterator[Tensor]:
        for uses in self._uses.values():
            for weight, _, make, _ in uses:
                yield from operands(weight, make)


def _used_unseen(weight: Tensor, where: str, remedy: str = LEAVE_WHOLE) -> TrainingError:
    message = (
        f"a weight of shape {list(weight.shape)} is used in a product whose gradient is deferred, but also {where}"
    )
    return TrainingError(Problem("PP-E717", message, remedy))


def parameter_of(weight: Tensor) -> nn.Parameter | None:
    """The trained parameter that a tensor is, or of which it is a view; else None."""
    if not weight.requires_grad:
        return None
    base = _base_of(weight)
    if not isinstance(base, nn.Parameter) or not (type(base) is nn.Parameter or type(base) in PLAIN):
        return None
    return base if base.requires_grad else None


def _base_of(weight: Tensor) -> Tensor:
    return weight if weight._base is None else weight._base


def _look_for(weight: Tensor, base: nn.Parameter) -> None:
    """Raise TrainingError (PP-E717) if this backward also gives `base`, a view's parameter, a gradient outside W."""
    end = weight.grad_fn
    while end is not None and end.next_functions:
        end = end.next_functions[0][0]
    if end is None or getattr(end, "variable", None) is not base:  # not one of torch's own views
        end = get_gradient_edge(base).node
    if torch._C._will_engine_execute_node(end):
        where = "in a function of which torch shows nothing (an autograd.Function, mostly)"
        raise _used_unseen(base, where, f'ppctl.split_backward(MyFunction, weights=("weight",))\n{LEAVE_WHOLE}')


_collecting: DeferredGradients | None = None
_in_backward = False


@contextmanager
def collecting(gradients: DeferredGradients | None, *, backward: bool = False) -> Iterator[None]:
    """While entered, defer weight gradients into `gradients` (None: defer none). Enter it around an F, and with
    `backward` around its I, because recomputation runs parts of the forward there, and for `WeightGradStore`."""
    global _collecting, _in_backward
    before = _collecting, _in_backward
    _collecting, _in_backward = gradients, backward
    try:
        yield
    finally:
        _collecting, _in_backward = before


def keep_collecting() -> Callable[[], None]:
    """A function that restores the present state of collecting, for work that continues after other work."""
    state = _collecting, _in_backward

    def restore() -> None:
        global _collecting, _in_backward
        _collecting, _in_backward = state

    return restore


def collector() -> DeferredGradients | None:
    """The collector of the F or I that runs now with gradients; None in any other forward or backward."""
    return _collecting if torch.is_grad_enabled() else None


def deferring(weight: Tensor) -> DeferredGradients | None:
    """The collector for the weight gradient of a product with `weight`; None if that gradient is not deferred."""
    gradients = collector()
    return None if gradients is None or not gradients.takes(weight) else gradients


class _Store:
    """Lets a user's autograd function defer its weight gradients, as in DeepSeek's DualPipe.

    For a function `f` that adds to a weight's `.grad`, call in the backward `WeightGradStore.put(f)` if
    `WeightGradStore.enabled`, else `f()`. `f` is called in the W of the same stage and microbatch. If the weight has
    hooks, as weights with a float32 master have in training, `f` must add with `torch.autograd.backward([weight],
    [gradient])`, which runs the hooks.
    """

    @property
    def enabled(self) -> bool:
        """Whether the running backward is an I, whose weight gradients are computed later."""
        return _in_backward

    def put(self, function: Callable[[], object]) -> None:
        """Call `function()` in the W of the running I. Raises RuntimeError if no I runs."""
        if _collecting is None or not _in_backward:
            raise RuntimeError("WeightGradStore.put outside an I: ask WeightGradStore.enabled first")
        _collecting.put_function(function)


WeightGradStore = _Store()


class ProductRule(NamedTuple):
    """A kind of product of an activation x and a factor, which is the weight in the dtype of the product."""

    multiply: Callable[..., Tensor]
    """(x, factor, bias, *others) -> product."""
    of_input: Callable[..., Tensor | None]
    """(gradient, x, factor, *others) -> gradient of x."""
    of_factor: Callable[..., Tensor | None]
    """(gradient, x, weight, *others) -> gradient of the factor, a new tensor; reads only the weight's form. None if it
    adds the gradient to a sum itself."""
    keeps_input: bool = True
    """Whether the gradients depend on x; if not, x is not kept, and both functions get None for it."""
    add_of_input: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """(total, gradient, factor) -> total, to which the gradient of x was added in its memory."""


class _ProductCall(NamedTuple):
    gradients: DeferredGradients | AtOnce
    rule: ProductRule
    weight: Tensor
    place: Tensor
    cast_back: torch.dtype | None
    factor: list[Tensor]
    """Emptied when saved: a factor that recomputation makes again must not be kept alive here."""


def multiply(
    gradients: DeferredGradients | AtOnce,
    rule: ProductRule,
    weight: Tensor,
    x: Tensor,
    *others: Tensor,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """Return `rule`'s product of x and `weight`. The backward puts the weight's gradient into `gradients`.

    `factor` is the weight in the product's dtype, if that differs. `others` get no gradient.
    """
    # Without any input that needs a gradient (token ids) the product would have no backward.
    anchor = None if x.requires_grad else torch.empty(0, device=x.device, requires_grad=True)
    cast = factor is not None
    # Autocast casts a parameter once for all uses, whose gradients are summed before the cast back, but a view each
    # time.
    cast_back = weight.dtype if cast and weight._base is not None else None
    place, held = gradients.place(weight, cast=cast), [weight if factor is None else factor]
    return _apply_product(_ProductCall(gradients, rule, weight, place, cast_back, held), anchor, x, bias, *others)


class _Product(torch.autograd.Function):
    """A product without its weight in the graph, so that I does not call the weight's hooks. Lists hide tensors from
    autograd."""

    @staticmethod
    def forward(
        ctx: Any, call: _ProductCall, _: Tensor | None, x: Tensor, bias: Tensor | None, *others: Tensor
    ) -> Tensor:
        factor = call.factor.pop()
        ctx.call = call
        ctx.save_for_backward(factor, x if call.rule.keeps_input else None, *others)
        return call.rule.multiply(x, factor, bias, *others)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (deferred, rule, weight, place, cast_back, _) = gradients, ctx.call
        factor, x, *others = ctx.saved_tensors  # recomputation may run here, under the collector
        make = partial(rule.of_factor, gradient, x, weight, *others)
        with torch._C.DisableTorchFunction():
            of_input = rule.of_input(gradient, x, factor, *others) if ctx.needs_input_grad[2] else None
            if cast_back is not None:
                make = partial(_cast_back, cast_back, *make.args, of=make.func)
            deferred.put(weight, place, make)
        # Autograd itself sums the rows of the bias's gradient.
        of_bias = gradient.flatten(0, -2) if ctx.needs_input_grad[3] else None
        return None, None, of_input, of_bias, *(None for _ in others)


_apply_product: Callable[..., Tensor] = super(torch.autograd.Function, _Product).apply
"""`_Product.apply` without its work for functorch, which takes as long as a small product."""


def _cast_back(dtype: torch.dtype, *operands: Tensor, of: Callable[..., Tensor]) -> Tensor:
    return of(*operands).to(dtype)


class _Elsewhere(torch.autograd.Function):
    """An alias of a weight for a function that is not deferred: its gradient joins the weight's deferred ones."""

    @staticmethod
    def forward(ctx: Any, gradients: DeferredGradients, weight: list[Tensor], place: list[Tensor], _: Tensor) -> Tensor:
        ctx.gradients, ctx.place = gradients, place.pop()
        return weight.pop().detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        ctx.gradients.put(ctx.place, ctx.place, partial(torch.clone, gradients[0]))
        return None, None, None, None
