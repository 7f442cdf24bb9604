"""Deferred weight gradients of autograd functions and modules that users bring: the registration `split_backward`.

Gradients that stay in I are reported in the log, once for each stage.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ppctl.errors import ConfigError, Problem
from ppctl.weight_gradients.deferred import WeightGradStore, collector

Half = Callable[..., Any]


def split_backward(
    target: Any,
    *,
    weights: Sequence[int | str] = (),
    of_input: Half | None = None,
    of_weights: Half | None = None,
    applies: Callable[..., bool] | None = None,
) -> None:
    """Let an autograd function, or the modules of a model, take part in backwards that are split into I and W.

    `target` is a subclass of `torch.autograd.Function`, whose arguments at the positions (or of the names, in
    `forward`) `weights` are parameters: if a backward is split their gradients are computed in W. `of_input(ctx,
    *gradients)` returns what the function's backward returns, in which the weights' places are ignored, and
    `of_weights(ctx, *gradients)` a tuple with the weights' gradients alone, in the order of `weights`; None is for a
    gradient that the function has stored itself. `ctx` has what forward put there. Without the two the function's own
    backward runs twice, first with `ctx.needs_input_grad` False for the weights, then True for them alone, which suits
    a backward that computes only what is needed. Calls that lack one of the weights, or for which `applies(*arguments)`
    is false, are left whole.

    Or `target` is a module: it and those of its submodules that keep the operands of weight gradients in a
    `wgrad_store` (Transformer Engine's with `delay_wgrad_compute=True`) have their `backward_dw()` called in W, or at
    the end of a whole backward.

    A later registration of a function replaces an earlier one; subclasses need their own. Raises ConfigError (PP-E130)
    for any other target, and for weights that are no arguments of the function, or given twice."""
    if isinstance(target, nn.Module):
        for module in target.modules():
            if delays(module) and module not in _HOOKED:
                _HOOKED.add(module)
                module.register_forward_hook(_call_later)
        return
    if not (isinstance(target, type) and issubclass(target, Function)):
        message = f"{target!r} is neither an autograd function nor a module"
        raise ConfigError(Problem("PP-E130", message, "ppctl.split_backward(MyFunction, weights=(1,))"))
    arguments = _arguments(target)
    names = [each.name for each in arguments if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    known: dict[int | str, int] = {name: place for place, name in enumerate(names)}
    open_ended = any(each.kind is each.VAR_POSITIONAL for each in arguments)
    if not open_ended:
        known |= {number: number % len(names) for number in range(-len(names), len(names))}
    places = tuple(known.get(each, each if open_ended and isinstance(each, int) else -1) for each in weights)
    if not places or min(places) < 0 or len(set(places)) < len(places):
        message = f"weights={weights!r} of {target.__name__}, whose arguments are {', '.join(map(str, arguments))}"
        raise ConfigError(Problem("PP-E130", message, f"weights=({(*names[1:], *names, 1)[0]!r},)"))
    rule = _Rule(target, inspect.Signature(arguments), places, of_input, of_weights, applies)
    before = inspect.getattr_static(target, "apply")
    own = before.own if isinstance(before, _Registered) and before.rule.function is target else before
    target.apply = _Registered(rule, own)  # type: ignore[assignment, method-assign] # it is bound as a classmethod is


def _arguments(function: Any) -> list[inspect.Parameter]:
    """The parameters of the function's forward, without the context."""
    found = list(inspect.signature(function.forward).parameters.values())
    return found[1:] if _takes_context(function) and found[0].kind is not found[0].VAR_POSITIONAL else found


class _Rule(NamedTuple):
    function: type[Function]
    signature: inspect.Signature
    """Of the function's forward, without the context."""
    weights: tuple[int, ...]
    of_input: Half | None
    of_weights: Half | None
    applies: Callable[..., bool] | None


class _Registered:
    """`apply` of a registered function. A subclass, which inherits it, gets the one before it, bound to itself."""

    def __init__(self, rule: _Rule, own: Any) -> None:
        self.rule, self.own = rule, own

    def __get__(self, instance: Any, owner: type[Function]) -> Any:
        bind = getattr(type(self.own), "__get__", None)
        whole = self.own if bind is None else bind(self.own, instance, owner)
        return partial(_apply, self.rule, whole) if owner is self.rule.function else whole


def _apply(rule: _Rule, whole: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """`Function.apply`, but split into I and W in an F with a split backward, if all weights can be deferred."""
    gradients = collector()
    if gradients is None:
        return whole(*args, **named)
    bound = rule.signature.bind(*args, **named)
    if not _takes_context(rule.function):  # as torch does for `setup_context`
        bound.apply_defaults()
    args, named = bound.args, bound.kwargs
    weights: list[Any] = [args[place] if place < len(args) else None for place in rule.weights]
    fits = not named and all(isinstance(each, Tensor) for each in weights)
    fits = fits and (rule.applies is None or rule.applies(*args))
    if not fits or not all([gradients.takes(each) for each in weights]):
        elsewhere = partial(_if_tensor, gradients.elsewhere)
        return whole(*map(elsewhere, args), **{name: elsewhere(each) for name, each in named.items()})
    places = [gradients.place(each, cast=False) for each in weights]
    given = [each if index not in rule.weights else None for index, each in enumerate(args)]
    if gradients.intercepted:
        given = [_if_tensor(gradients.elsewhere, each) for each in given]
    trained = any(isinstance(each, Tensor) and each.requires_grad for each in given)
    anchor = None if trained else torch.empty(0, device=weights[0].device, requires_grad=True)
    return _Split.apply(*given, anchor, (rule, gradients, weights, places))  # type: ignore[no-untyped-call]


def _if_tensor(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    return change(value) if isinstance(value, Tensor) else value


class _Context:
    """Stands in for autograd's context in the forward, the I and the W of a split function."""

    def __init__(self, real: Any, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self.mark_non_differentiable, self.mark_dirty = real.mark_non_differentiable, real.mark_dirty
        self.set_materialize_grads = real.set_materialize_grads

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors, which autograd's own context saves after the forward."""
        self.saved_tensors = tensors

    def release(self) -> None:
        """Drop autograd's own context, which holds the graph."""
        del self.mark_non_differentiable, self.mark_dirty, self.set_materialize_grads


class _Split(Function):
    """A function whose weights are not in the graph: its backward is the I, and leaves the W to the collector."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        *args, _, call = given
        rule, _, weights, _ = call
        for place, weight in zip(rule.weights, weights, strict=True):
            args[place] = weight
        needs = tuple(isinstance(each, Tensor) and each.requires_grad for each in args)
        context = _Context(ctx, needs)
        function: Any = rule.function
        if _takes_context(function):
            outputs = function.forward(context, *args)
        else:
            outputs = function.forward(*args)
            function.setup_context(context, tuple(args), outputs)
        context.release()
        saved, context.saved_tensors = context.saved_tensors, ()
        ctx.save_for_backward(*saved)
        ctx.call, ctx.context = call, context
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        context, (rule, deferred, weights, places) = ctx.context, ctx.call
        saved = ctx.saved_tensors  # recomputation may run here, and is watched
        with torch._C.DisableTorchFunction():
            context.saved_tensors = saved
            needs = context.needs_input_grad
            context.needs_input_grad = tuple(need and i not in rule.weights for i, need in enumerate(needs))
            found = (rule.of_input or rule.function.backward)(context, *gradients)
            of_args = list(found) if isinstance(found, tuple | list) else [found]
            for place in rule.weights:
                of_args[place] = None
        context.saved_tensors = ()
        # Tensors are arguments of W's calls, where checks of kept and changed tensors find them.
        later = partial(_weight_gradient, rule, context, len(saved), {})
        for index, (weight, place) in enumerate(zip(weights, places, strict=True)):
            deferred.put(weight, place, partial(later, *saved, *gradients, index=index))
        return *of_args, None, None


def _weight_gradient(
    rule: _Rule, context: _Context, saved: int, made: dict[int, Tensor | None], *tensors: Any, index: int
) -> Tensor | None:
    """The gradient of weight `index` in the W of one call of a function; the first weight's call computes all gradients
    into `made`, from which the others take theirs."""
    if index not in made:
        context.saved_tensors = tensors[:saved]
        context.needs_input_grad = tuple(i in rule.weights for i in range(len(context.needs_input_grad)))
        with torch._C.DisableTorchFunction():
            if rule.of_weights is not None:
                made.update(enumerate(rule.of_weights(context, *tensors[saved:])))
            else:
                whole: Any = rule.function.backward(context, *tensors[saved:])
                made.update((number, whole[place]) for number, place in enumerate(rule.weights))
        context.saved_tensors = ()
    return made.pop(index)


def _takes_context(function: Any) -> bool:
    """Whether the function's forward, not `setup_context`, gets the context."""
    return bool(function.setup_context is Function.setup_context)


_HOOKED: WeakSet[nn.Module] = WeakSet()


def delays(module: Any) -> bool:
    """Whether a module itself defers weight gradients; one that passes `backward_dw` on to submodules does not."""
    store = getattr(module, "wgrad_store", None)
    if store is None or not callable(getattr(module, "backward_dw", None)):
        return False
    asked = getattr(store, "delay_wgrad_compute", None)
    return bool(asked()) if callable(asked) else True


def _call_later(module: nn.Module, _: Any, outputs: Any) -> None:
    """A forward hook of `module`: its pre-hook on the output's `grad_fn` only queues `module.backward_dw`.

    `backward_dw` itself runs in W if the backward is split, else at the end of the backward.
    """
    tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
    node = next((each.grad_fn for each in tensors if isinstance(each, Tensor) and each.grad_fn is not None), None)
    if node is not None:
        node.register_prehook(partial(_delay, module))


def _delay(module: Any, _: Any) -> None:
    if WeightGradStore.enabled:
        WeightGradStore.put(module.backward_dw)
    else:
        torch.autograd.Variable._execution_engine.queue_callback(module.backward_dw)


_LOG = logging.getLogger("ppctl")
_SHOWN = 8
_TOLD: WeakSet[nn.Module] = WeakSet()


def tell_what_stays(
    stage: int, module: Any, deferred: Sequence[nn.Parameter], say: Callable[[str], None] = _LOG.info
) -> None:
    """Report, once for a module, which matrices' gradients are made in I: for the `on_deferred` of a stage's program.

    The reported share is that of their elements in those of all trained matrices, which is also the share of the weight
    gradients' FLOPs if every matrix meets the same tokens. Modules that defer their own gradients count as deferred.
    """
    if module not in _TOLD:
        _TOLD.add(module)
        say(what_stays(stage, module, deferred))


def what_stays(stage: int, module: nn.Module, deferred: Sequence[nn.Parameter]) -> str:
    """A line: `stage 1 defers 17 of 18 matrices to W; 3.1 % of weight gradients' FLOPs stay in I: router.weight`."""
    later = {id(each) for each in deferred}
    for each in module.modules():
        if delays(each):
            later |= {id(parameter) for parameter in each.parameters(recurse=False)}
    matrices = {name: p for name, p in module.named_parameters() if p.requires_grad and p.dim() > 1}
    stay = {name: p.numel() for name, p in matrices.items() if id(p) not in later}
    text = f"stage {stage} defers {len(matrices) - len(stay)} of {len(matrices)} matrices to W"
    if not stay:
        return text
    share = 100 * sum(stay.values()) / sum(p.numel() for p in matrices.values())
    names = sorted(stay, key=lambda name: -stay[name])
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{text}; {share:.3g} % of weight gradients' FLOPs stay in I: {', '.join(names[:_SHOWN])}{more}"
