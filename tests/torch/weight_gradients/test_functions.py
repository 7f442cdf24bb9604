"""Others' autograd functions and modules in I and W, by `ppctl.split_backward`: whole bits, each thing once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ppctl
from ppctl.errors import ConfigError
from ppctl.weight_gradients.deferred import DeferredGradients, WeightGradStore, collecting
from ppctl.weight_gradients.functions import split_backward, what_stays
from ppctl.weight_gradients.intercept import intercepting

H = 6
CALLS = []


def flat(x):
    return x.reshape(-1, x.shape[-1])


class Both(torch.autograd.Function):
    """Computes all gradients in any case, as Megatron's linear layer does."""

    @staticmethod
    def forward(ctx, x, weight, bias, scale):
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return scale * (x @ weight.t()) + bias

    @staticmethod
    def backward(ctx, gradient):
        CALLS.append("whole")
        return (*of_input(ctx, gradient)[:1], *of_weights(ctx, gradient), flat(gradient).sum(0), None)


def of_input(ctx, gradient):
    CALLS.append("I")
    _, weight = ctx.saved_tensors
    return ctx.scale * (gradient @ weight), None, flat(gradient).sum(0), None


def of_weights(ctx, gradient):
    CALLS.append("W")
    x, _ = ctx.saved_tensors
    return (ctx.scale * (flat(gradient).t() @ flat(x)),)


class Needed(torch.autograd.Function):
    """Two weights; computes what is needed. Of the newer form, with `setup_context`."""

    @staticmethod
    def forward(first, x, second):
        return torch.tanh(x @ first) @ second

    @staticmethod
    def setup_context(ctx, inputs, output):
        first, x, second = inputs
        ctx.save_for_backward(first, x, second)

    @staticmethod
    def backward(ctx, gradient):
        first, x, second = ctx.saved_tensors
        middle = torch.tanh(flat(x) @ first)
        inner = (flat(gradient) @ second.t()) * (1 - middle * middle)
        CALLS.append(tuple(ctx.needs_input_grad))
        of_first = flat(x).t() @ inner if ctx.needs_input_grad[0] else None
        of_x = (inner @ first.t()).reshape(x.shape) if ctx.needs_input_grad[1] else None
        return of_first, of_x, middle.t() @ flat(gradient) if ctx.needs_input_grad[2] else None


class Model(nn.Module):
    """Products of both functions, one whose weight a product of torch has as well, and a norm."""

    def __init__(self, shares):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(H, H), nn.Linear(H, H)
        self.first, self.second = (nn.Parameter(torch.randn(H, H) / H) for _ in range(2))
        self.norm, self.shares = nn.LayerNorm(H), shares

    def forward(self, x):
        x = Both.apply(x, self.a.weight, self.a.bias, 0.5)
        x = self.norm(Needed.apply(self.first, x, self.second))
        x = self.b(x)
        if self.shares:
            x = F.linear(x, self.a.weight) + Both.apply(x, self.a.weight, self.b.bias, 2.0)
        return x


@pytest.fixture(autouse=True)
def registered():
    split_backward(Both, weights=("weight",), of_input=of_input, of_weights=of_weights)
    split_backward(Needed, weights=(0, "second"))
    CALLS.clear()
    yield
    del Both.apply, Needed.apply


def trained(model, x, split, watch=intercepting):
    """Gradients after two microbatches, and those that were there before W."""
    seen, waiting, before = {}, [], set()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.update({name: seen.get(name, 0) + 1}))
    for scale in (1.0, 0.3):
        leaf = (scale * x).requires_grad_()
        deferred = DeferredGradients()
        if not split:
            model(leaf).sin().sum().backward()
            continue
        with watch(deferred):
            out = model(leaf).sin().sum()
        with watch(deferred, backward=True):
            out.backward()
        before |= {name for name, p in model.named_parameters() if p.grad is not None}
        waiting.append(deferred)
    for deferred in waiting:
        deferred.deliver()
    return {name: p.grad for name, p in model.named_parameters()} | {"x": leaf.grad}, before, seen


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("shape", [(4, H), (2, 3, H)])
def test_a_registered_function_has_the_bits_of_a_whole_backward_and_its_weights_wait_for_w(shares, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    whole, _, _ = trained(Model(shares), x, split=False)
    assert CALLS.count("whole") == (4 if shares else 2) and (True, True, True) in CALLS
    CALLS.clear()
    found, before, seen = trained(Model(shares), x, split=True)
    assert {name for name in whole if not torch.equal(whole[name], found[name])} == set()
    assert before == {"a.bias", "b.bias", "norm.weight", "norm.bias"}
    assert set(seen.values()) == {2}, "hooks run once for each microbatch"
    assert "whole" not in CALLS and CALLS.count("I") == CALLS.count("W") == (4 if shares else 2)
    assert CALLS.count((False, True, False)) == CALLS.count((True, False, True)) == 2


def test_without_a_collector_and_for_weights_that_stay_whole_the_function_is_itself():
    x = torch.randn(3, H)
    model = Model(False)
    deferred = DeferredGradients(whole=[model.a.weight])
    with intercepting(deferred):
        out = model(x)
    assert "SplitBackward" not in str(type(Both.apply(x, model.a.weight, model.a.bias, 1.0).grad_fn))
    with intercepting(deferred, backward=True):
        out.sum().backward()
    assert model.a.weight.grad is not None and model.first.grad is None
    with torch.no_grad(), collecting(DeferredGradients()):
        assert not Both.apply(x, model.a.weight, model.a.bias, 1.0).requires_grad


class Tenfold(Both):
    @staticmethod
    def forward(ctx, x, weight, bias, scale):
        return Both.forward(ctx, x, weight, bias, 10 * scale)


@pytest.mark.parametrize("itself", [False, True])
def test_a_subclass_of_a_registered_function_computes_its_own_and_waits_for_w_if_it_is_registered(itself):
    if itself:
        split_backward(Tenfold, weights=("weight",), of_input=of_input, of_weights=of_weights)
    layer, x = nn.Linear(H, H), torch.randn(3, H)
    outputs = []
    for function, scale, split in ((Both, 10.0, True), (Tenfold, 1.0, itself)):
        outputs.append(function.apply(x, layer.weight, layer.bias, scale))
        with intercepting(DeferredGradients()):
            outputs.append(function.apply(x, layer.weight, layer.bias, scale))
        assert ("_SplitBackward" in str(outputs[-1].grad_fn)) == split
    assert all(torch.equal(outputs[0], each) for each in outputs)
    if itself:
        del Tenfold.apply


def test_calls_to_which_the_rule_does_not_apply_are_whole():
    split_backward(
        Both, weights=("weight",), of_input=of_input, of_weights=of_weights, applies=lambda *args: args[3] > 1
    )
    model, x = Model(False), torch.randn(3, H)
    _, before, _ = trained(model, x, split=True)
    assert "a.weight" in before and "whole" in CALLS


def test_a_gradient_that_a_rule_has_stored_itself_is_none_to_autograd():
    stored = []

    def store(ctx, gradient):
        stored.append(of_weights(ctx, gradient)[0])
        return (None,)

    split_backward(Both, weights=("weight",), of_input=of_input, of_weights=store)
    model, x = Model(False), torch.randn(3, H)
    found, _, _ = trained(model, x, split=True)
    assert found["a.weight"] is None and len(stored) == 2


class Store:
    def __init__(self):
        self.queue = []

    def delay_wgrad_compute(self):
        return True


class Delays(nn.Module):
    """A stand-in for Transformer Engine's modules with `delay_wgrad_compute`: operands wait in a queue."""

    def __init__(self):
        super().__init__()
        self.weight, self.wgrad_store = nn.Parameter(torch.eye(H) / 2), Store()

    def forward(self, x):
        return _Delayed.apply(x, self.weight, self.wgrad_store.queue).view_as(x)

    def backward_dw(self):
        x, gradient = self.wgrad_store.queue.pop(0)
        torch.autograd.backward([self.weight], [gradient.t() @ x])


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, queue):
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.queue.append((x, gradient))
        return gradient @ weight, None, None


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(Delays(), nn.Tanh(), Delays()), reentrant

    def backward_dw(self):
        raise AssertionError("Megatron's layers have it, for a schedule of their own: the modules inside are called")

    def forward(self, x):
        return self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_module_with_backward_dw_computes_its_weights_in_w_or_at_the_end_of_a_whole_backward(reentrant):
    x = torch.randn(4, H, generator=torch.Generator().manual_seed(1))
    model = Recomputed(reentrant)
    split_backward(model)
    split_backward(model)  # once is enough, and twice is no more
    whole, _, _ = trained(model, x, split=False)
    model = Recomputed(reentrant)
    split_backward(model)
    found, before, _ = trained(model, x, split=True)
    assert before == set()
    assert all(torch.equal(whole[name], found[name]) for name in whole)
    assert not any(each.wgrad_store.queue for each in model.inner if isinstance(each, Delays))


def test_what_is_no_function_and_weights_that_are_no_arguments_are_refused_by_name():
    with pytest.raises(ConfigError, match="neither an autograd function nor a module"):
        ppctl.split_backward(of_input)
    for weights in ((), ("wieght",), (4,), (-5,), (1, "weight"), (-3, "weight")):
        with pytest.raises(ConfigError, match=r"whose arguments are x, weight, bias, scale") as refused:
            ppctl.split_backward(Both, weights=weights)
        assert refused.value.problems[0].code == "PP-E130"
    assert not WeightGradStore.enabled


class Optional(torch.autograd.Function):
    """Of the newer form, whose arguments torch binds to names and defaults."""

    @staticmethod
    def forward(x, weight, bias=None, scale=1.0):
        return scale * (x @ weight.t()) if bias is None else scale * (x @ weight.t() + bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, ctx.scale = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = ctx.scale * gradient
        of_bias = gradient.sum(0) if ctx.needs_input_grad[2:3] == (True,) else None
        return gradient @ weight, gradient.t() @ x if ctx.needs_input_grad[1] else None, of_bias, None


class Starred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        x, weight, *_, ctx.scale = inputs
        ctx.save_for_backward(x, weight)
        return Optional.forward(*inputs)

    backward = Optional.backward


class Older(Starred):
    @staticmethod
    def forward(ctx, x, weight, bias=None, scale=1.0):
        return Starred.forward(ctx, x, weight, bias, scale)


class Called(nn.Linear):
    def forward(self, x):
        given = [getattr(self, each) if isinstance(each, str) else each for each in self.args]
        return self.function.apply(x, *given, **{name: getattr(self, each) for name, each in self.named.items()})


BOTH = {"weight", "bias"}


@pytest.mark.parametrize(
    ("function", "weights", "args", "named", "wait"),
    [
        (Optional, ("weight",), ["weight"], {}, {"weight"}),
        (Optional, (-3, -2), ["weight", "bias"], {}, BOTH),
        (Optional, (1,), [], {"bias": "bias", "weight": "weight"}, {"weight"}),
        (Optional, ("weight", "bias"), ["weight"], {}, set()),
        (Older, (-3, "bias"), ["weight", "bias", 2.0], {}, BOTH),
        (Older, ("weight", "bias"), ["weight"], {}, set()),
        (Older, ("weight", "bias"), ["weight", None], {}, set()),
        (Starred, (1, 2), ["weight", "bias", 2.0], {}, BOTH),
    ],
)
def test_weights_have_places_or_names_and_a_call_without_one_of_them_is_whole(function, weights, args, named, wait):
    found = []
    for split in (False, True):
        torch.manual_seed(0)
        model = Called(H, H)
        model.function, model.args, model.named = function, args, named
        if split:
            split_backward(function, weights=weights)
        found.append(trained(model, torch.randn(3, H), split))
    del function.apply
    (whole, *_), (gradients, before, _) = found
    used = {*args, *named.values()} & BOTH
    assert before == used - wait
    assert all(torch.equal(whole[name], gradients[name]) for name in used | {"x"})


def test_places_of_a_forward_that_takes_any_number_of_arguments_are_counted_from_the_first():
    with pytest.raises(ConfigError, match=r"\*inputs"):
        split_backward(Starred, weights=(-1,))


def test_what_stays_in_i_is_named_with_its_share_of_all_matrices():
    model = Model(False)
    taken = [model.a.weight, model.first, model.second]
    text = what_stays(3, model, taken)
    assert text == "stage 3 defers 3 of 4 matrices to W; 25 % of weight gradients' FLOPs stay in I: b.weight"
    assert what_stays(0, model, [*taken, model.b.weight]) == "stage 0 defers 4 of 4 matrices to W"
    assert what_stays(1, Recomputed(None), ()) == "stage 1 defers 2 of 2 matrices to W"
