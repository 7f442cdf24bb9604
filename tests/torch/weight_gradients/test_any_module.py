"""I and W of modules that know nothing of them: the bits of a whole backward, each thing run once, each hook once."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ppctl.errors import TrainingError
from ppctl.weight_gradients.deferred import DeferredGradients, WeightGradStore
from ppctl.weight_gradients.intercept import intercepting

H = 12


def as_dtype(value, dtype):
    return value.to(dtype) if value.is_floating_point() else value


def seeds_of(out):
    generator = torch.Generator().manual_seed(3)
    outs = out if isinstance(out, tuple) else (out,)
    return outs, [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outs]


class Watched:
    """What hooks of every parameter have seen, and how often; those of nodes as DistributedDataParallel has them."""

    def __init__(self, module):
        self.before, self.after, self.of_nodes, self.nodes = {}, {}, {}, []
        for name, parameter in ((name, p) for name, p in module.named_parameters() if p.requires_grad):
            parameter.register_hook(partial(self._arrives, name))
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name))

            node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(partial(self._passed, name))
            self.nodes.append(node)

    def _passed(self, name, *_):
        self.of_nodes[name] = self.of_nodes.get(name, 0) + 1

    def _arrives(self, name, gradient):
        assert gradient is not None, f"{name}: a hook saw no gradient"
        self.before[name] = self.before.get(name, 0) + 1

    def _accumulated(self, name, parameter):
        self.after[name] = self.after.get(name, 0) + 1


def backward_of(module, x, whole, microbatches, autocast=None):
    """Gradients of the parameters and of the last input after `microbatches` backwards; what W had in the last.

    All Ws come behind the last I.
    """
    deferred, waiting = None, []
    for mb in range(microbatches):
        leaf = x + mb if x.is_floating_point() else x
        leaf = leaf.detach().requires_grad_() if x.is_floating_point() else x
        deferred = None if whole else DeferredGradients()
        around = nullcontext() if whole else intercepting(deferred)
        cast = torch.autocast("cpu", dtype=autocast) if autocast else nullcontext()
        with around, cast:
            outs, seeds = seeds_of(module(leaf))
        with nullcontext() if whole else intercepting(deferred, backward=True):
            torch.autograd.backward(outs, seeds)
        waiting.append(deferred)
    for each in waiting if not whole else ():
        each.deliver()
    return {name: p.grad for name, p in module.named_parameters()} | {"input": leaf.grad}, deferred


def hold(make, x, *, deferred, dtype=torch.float32, autocast=None, microbatches=3):
    """The split backward has the bits of the whole one, hooks see each gradient once, and `deferred` waited for W."""
    gradients = []
    for whole in (True, False):
        torch.manual_seed(1)
        module = make().to(dtype)
        watched = Watched(module)
        found, collected = backward_of(module, as_dtype(x, dtype), whole, microbatches, autocast)
        gradients.append(found)
        counts = {name: microbatches for name, p in module.named_parameters() if p.grad is not None}
        assert watched.before == watched.after == watched.of_nodes == counts, "each arrives once a microbatch"
    names = {id(p): name for name, p in module.named_parameters()}
    assert {names[id(p)] for p in collected.parameters} == set(deferred)
    for name, expected in gradients[0].items():
        got = gradients[1][name]
        assert (got is None) == (expected is None), name
        assert expected is None or torch.equal(got, expected), name
        assert expected is None or got.stride() == expected.stride(), name


def rows(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def tokens():
    return torch.randint(0, 20, (3, 7), generator=torch.Generator().manual_seed(0))


class Mlp(nn.Sequential):
    def __init__(self, bias=True):
        super().__init__(nn.LayerNorm(H), nn.Linear(H, 20, bias=bias), nn.GELU(), nn.Linear(20, H, bias=bias))


WEIGHTS = ("1.weight", "3.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, H), (2, 3, H), (2, 2, 3, H), (1, H), (0, H)])
def test_linear_layers(shape, bias, dtype):
    hold(partial(Mlp, bias), rows(*shape), deferred=WEIGHTS, dtype=dtype)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, H), (2, 3, H)])
def test_linear_layers_under_autocast(shape, autocast):
    hold(Mlp, rows(*shape), deferred=WEIGHTS, autocast=autocast)


class Formed(nn.Module):
    """Weights that are multiplied in other forms than whole and row by row."""

    def __init__(self):
        super().__init__()
        self.both = nn.Parameter(torch.randn(2 * H, H))
        self.wide = nn.Parameter(torch.randn(H, 3 * H))
        self.square = nn.Parameter(torch.randn(H, H))
        self.bias = nn.Parameter(torch.randn(H))
        self.stack = nn.Parameter(torch.randn(3, H, H))

    def forward(self, x):
        upper, lower = self.both.chunk(2)
        x = F.linear(torch.tanh(F.linear(x, lower)), upper)
        x = torch.tanh(x @ self.wide[:, H : 2 * H]) + F.linear(x, self.wide[:, :H])
        x = torch.tanh(x.transpose(0, 1).matmul(self.square.reshape(H, H)))
        x = torch.addmm(self.bias, x.flatten(0, -2), self.square.to(x.device).t())
        x = torch.bmm(torch.tanh(x).expand(3, *x.shape), self.stack)
        return torch.stack([F.linear(each, weight) for each, weight in zip(x, self.stack.unbind(), strict=True)])


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_views_and_other_products(autocast):
    hold(Formed, rows(4, 5, H), deferred=("both", "wide", "square", "stack"), autocast=autocast)


class Named(nn.Module):
    """Products whose arguments have torch's names; products without weights, and one with an argument more."""

    def __init__(self):
        super().__init__()
        self.square, self.stack = nn.Parameter(torch.randn(H, H)), nn.Parameter(torch.randn(3, H, H))
        self.bias = nn.Parameter(torch.randn(H))

    def forward(self, x):
        x = torch.tanh(F.linear(input=x, bias=self.bias, weight=self.square) + F.linear(x, weight=self.square))
        x = torch.tanh(x.matmul(other=self.square) + torch.matmul(x, other=self.square) + x.mm(mat2=self.square))
        x = torch.tanh(torch.matmul(input=torch.matmul(input=x, other=x.t()), other=x)) + torch.mm(x, mat2=self.square)
        x = torch.addmm(self.bias, mat1=x, mat2=self.square) + torch.addmm(self.bias, x, self.square, beta=2)
        return torch.bmm(torch.tanh(x).expand(3, *x.shape), mat2=self.stack)


def test_products_whose_arguments_are_named():
    hold(Named, rows(4, H), deferred=("square", "stack"))


class Grouped(nn.Module):
    """Rows of four experts in one kernel; the third one gets none."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 24, 16))
        self.register_buffer("ends", torch.tensor([3, 8, 8, 10], dtype=torch.int32))

    def forward(self, x):
        up = F.grouped_mm(torch.tanh(x), self.w.transpose(1, 2), offs=self.ends)
        return torch._grouped_mm(torch.tanh(up), self.w, self.ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_of_which_one_has_no_tokens(dtype):
    hold(Grouped, rows(10, 16), deferred=("w",), dtype=dtype)


class Embedded(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(20, H, **options)
        self.out = nn.Linear(H, 20, bias=False)

    def forward(self, numbers):
        return self.out(torch.tanh(self.table(numbers)))


@pytest.mark.parametrize("options", [{}, {"padding_idx": -20}, {"padding_idx": 3}, {"scale_grad_by_freq": True}])
def test_a_first_stage_without_any_input_that_needs_a_gradient(options):
    hold(partial(Embedded, **options), tokens(), deferred=("table.weight", "out.weight"))


def test_a_table_whose_rows_are_normalised_in_place_is_left_whole():
    hold(partial(Embedded, max_norm=1.0), tokens(), deferred=("out.weight",))


class Tied(Embedded):
    """The table is multiplied three times, once as rows."""

    def __init__(self):
        super().__init__()
        self.out.weight = self.table.weight

    def forward(self, numbers):
        return self.out(torch.tanh(F.linear(super().forward(numbers), self.table.weight.t())))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_weight_at_several_sites_is_summed_as_autograd_sums_and_counted_once(autocast):
    """Of pytorch#180952: two sites were counted twice."""
    hold(Tied, tokens(), deferred=("table.weight",), autocast=autocast)


class UsedElsewhere(nn.Module):
    """A weight in a product and in what is none: first, or behind the product."""

    def __init__(self, order):
        super().__init__()
        self.order = order
        self.inner = nn.Linear(H, H, bias=False)

    def forward(self, x):
        for kind in self.order:
            if kind == "product":
                x = torch.tanh(self.inner(x))
            elif kind == "view":
                x = torch.tanh(F.linear(x, self.inner.weight[:H]))
            else:
                x = x + torch.cat([self.inner.weight, self.inner.weight]).square().mean(0)
        return x


@pytest.mark.parametrize("order", [("product", "other"), ("other", "product"), ("product", "other", "view", "product")])
def test_a_weight_is_put_off_everywhere_or_nowhere(order):
    hold(partial(UsedElsewhere, order), rows(4, H), deferred=("inner.weight",) if order[0] == "product" else ())


class Indexed(nn.Module):
    """A table whose rows are taken by number, and multiplied behind it or before."""

    def __init__(self, first):
        super().__init__()
        self.table, self.first = nn.Parameter(torch.randn(20, H)), first

    def forward(self, numbers):
        x = F.embedding(numbers, self.table) if self.first == "product" else self.table[numbers]
        return F.linear(torch.tanh(x + self.table[numbers]), self.table[3:])


@pytest.mark.parametrize(("first", "deferred"), [("product", ("table",)), ("index", ())])
def test_rows_taken_by_number_are_a_use_like_any_other(first, deferred):
    hold(partial(Indexed, first), tokens(), deferred=deferred)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(H, 3, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(H, 3, 2 * H, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x + self.attention(x, x, x, need_weights=False)[0])


def test_what_torch_hides_is_computed_in_i():
    """Projections inside F.multi_head_attention_forward are seen by no mode; the feed-forward is."""
    hold(Attending, rows(2, 5, H), deferred=("layer.linear1.weight", "layer.linear2.weight"))


class Counted(torch.autograd.Function):
    """A user's product that returns both gradients, and counts its backwards."""

    backwards = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        Counted.backwards += 1
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class Custom(nn.Module):
    def __init__(self, shared=False):
        super().__init__()
        self.first, self.second = nn.Linear(H, H), nn.Linear(H, H)
        if shared:
            self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(Counted.apply(x, self.first.weight)))


def test_a_users_function_runs_once_and_whole():
    Counted.backwards = 0
    hold(Custom, rows(4, H), deferred=("second.weight",), microbatches=3)
    assert Counted.backwards == 3 + 3


class Behind(Custom):
    def forward(self, x):
        return Counted.apply(torch.tanh(self.second(x)), self.first.weight)


@pytest.mark.parametrize("make", [Custom, Behind])
def test_a_weight_of_a_product_and_of_a_users_function_is_refused_by_name_and_the_remedy_works(make):
    """It would get its gradient in two parts: hooks would see both, and the sum would have other bits."""
    found = []
    for whole in (None, False, True):
        torch.manual_seed(0)
        module, x = make(shared=True), rows(4, H).requires_grad_()
        deferred = DeferredGradients([module.first.weight] * (whole is True))
        with intercepting(deferred) if whole is not None else nullcontext():
            out = module(x)
        refused = pytest.raises(
            TrainingError, match=r"(?s)PP-E717.*\[12, 12\].*split_backward.*interleaved_1f1b.*whole"
        )
        with refused if whole is False else nullcontext(), intercepting(deferred, backward=True):
            out.sum().backward()
        found.append(module.first.weight.grad)
    assert torch.equal(found[0], found[2]) and deferred.parameters == ()


class Differentiated(nn.Module):
    """A gradient taken in the forward, which no weight's `.grad` knows of."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x):
        inner = torch.tanh(self.first(x))
        (slope,) = torch.autograd.grad(inner.sum(), x, retain_graph=True)
        return self.second(inner * slope)


def test_a_gradient_that_the_forward_takes_puts_nothing_off():
    hold(Differentiated, rows(4, H), deferred=("first.weight", "second.weight"))


def test_a_view_names_its_weight_as_whole():
    module, x = Mlp(), rows(4, H)
    deferred = DeferredGradients([module[1].weight.t()])
    with intercepting(deferred):
        module(x)
    assert deferred.parameters == (module[3].weight,)


class Twice(Differentiated):
    """The gradient that the forward takes is a part of the result."""

    def forward(self, x):
        (slope,) = torch.autograd.grad(torch.tanh(self.first(x)).sum(), x, create_graph=True)
        return self.second(slope)


def test_a_product_that_is_differentiated_twice_is_refused_by_name_and_the_remedy_works():
    found = []
    for whole in (None, False, True):
        torch.manual_seed(0)
        module, x = Twice(), rows(4, H).requires_grad_()
        deferred = DeferredGradients([module.first.weight] * (whole is True))
        with intercepting(deferred) if whole is not None else nullcontext():
            out = module(x)
        refused = pytest.raises(TrainingError, match=r"PP-E717")
        with refused if whole is False else nullcontext(), intercepting(deferred, backward=True):
            out.sum().backward()
        deferred.deliver()
        found.append((module.first.weight.grad, module.second.weight.grad))
    assert all(map(torch.equal, found[0], found[2]))


class Pipelined(torch.autograd.Function):
    """A linear layer as DualPipe's users write it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors

        def of_weight():
            added = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
            weight.grad = added if weight.grad is None else weight.grad + added

        if WeightGradStore.enabled:
            WeightGradStore.put(of_weight)
        else:
            of_weight()
        return gradient @ weight, None


def test_a_users_function_can_put_off_work():
    found = []
    for split in (False, True):
        torch.manual_seed(0)
        weight, x = nn.Parameter(torch.randn(H, H)), rows(4, H).requires_grad_()
        deferred = DeferredGradients()
        with intercepting(deferred) if split else nullcontext():
            out = Pipelined.apply(x, weight)
        with intercepting(deferred, backward=True) if split else nullcontext():
            out.sum().backward()
        assert (weight.grad is None) == split and x.grad is not None
        deferred.deliver()
        found.append(weight.grad)
    assert torch.equal(*found)
    with pytest.raises(RuntimeError, match="outside an I"):
        WeightGradStore.put(lambda: None)


class Added(nn.Module):
    """A parameter whose gradient is a view of that of a product's result, which W needs."""

    def __init__(self):
        super().__init__()
        self.project, self.place = nn.Linear(H, H), nn.Parameter(torch.randn(4, H))

    def forward(self, x):
        return torch.tanh(self.project(x) + self.place.view(4, H))


def test_a_gradient_of_i_that_is_a_view_of_what_w_needs_is_not_added_to_in_its_memory():
    hold(Added, rows(4, H), deferred=("project.weight",))


class InPlace(torch.autograd.Function):
    """Its backward computes where its own result or the gradient lies."""

    @staticmethod
    def forward(ctx, x, in_result):
        out = torch.tanh(x)
        ctx.in_result = in_result
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (out,) = ctx.saved_tensors
        square = out.square_() if ctx.in_result else out.square()
        return (gradient * (1 - square) if ctx.in_result else gradient.mul_(1 - square)), None


class Overwritten(nn.Module):
    def __init__(self, in_result):
        super().__init__()
        self.first, self.second, self.in_result = nn.Linear(H, H), nn.Linear(H, H), in_result

    def forward(self, x):
        inner = InPlace.apply(self.first(x), self.in_result)
        return self.second(inner) if self.in_result else self.second(x) + inner


@pytest.mark.parametrize("in_result", [True, False])
def test_operands_that_a_backward_overwrites_are_refused_by_name_and_the_remedy_works(in_result):
    with pytest.raises(TrainingError, match=r"(?s)PP-E718.*\[12, 12\].*whole"):
        hold(partial(Overwritten, in_result), rows(4, H), deferred=("first.weight", "second.weight"))
    found = []
    for whole in (False, True):
        torch.manual_seed(0)
        module, x = Overwritten(in_result), rows(4, H).requires_grad_()
        deferred = DeferredGradients([module.second.weight])
        with nullcontext() if whole else intercepting(deferred):
            out = module(x)
        with nullcontext() if whole else intercepting(deferred, backward=True):
            out.square().sum().backward()
        deferred.deliver()
        found.append((module.first.weight.grad, module.second.weight.grad))
    assert all(map(torch.equal, *found))


class Transformed(nn.Module):
    """A weight inside of a transform of torch.func."""

    def __init__(self, order):
        super().__init__()
        self.inner, self.outer, self.order = nn.Linear(H, H), nn.Linear(H, H), order

    def forward(self, x):
        for kind in self.order:
            x = torch.tanh(torch.vmap(lambda row: self.inner(row[None])[0])(x) if kind == "vmap" else self.inner(x))
        return self.outer(x)


@pytest.mark.parametrize("order", [("vmap",), ("vmap", "product")])
def test_a_weight_in_a_transform_is_left_whole(order):
    hold(partial(Transformed, order), rows(4, H), deferred=("outer.weight",))


def test_a_weight_of_a_product_and_in_a_transform_is_refused_by_name():
    with pytest.raises(TrainingError, match=r"(?s)PP-E717.*torch.func.*whole"):
        hold(partial(Transformed, ("product", "vmap")), rows(4, H), deferred=())


class Recomputed(nn.Module):
    """Layers that are recomputed; every run of them is counted."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant, self.runs = reentrant, 0
        self.first, self.second, self.last = Mlp(), Mlp(), nn.Linear(H, H)

    def inner(self, x):
        self.runs += 1
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x):
        return self.last(checkpoint(self.inner, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_runs_once_for_each_microbatch_and_is_the_same(reentrant):
    """Of pytorch#136766: it ran twice, or kept what it should make again."""
    names = [f"{part}.{name}" for part in ("first", "second") for name in WEIGHTS]
    hold(partial(Recomputed, reentrant), rows(4, H), deferred=(*names, "last.weight"))
    module = Recomputed(reentrant)
    _, deferred = backward_of(module, rows(4, H), whole=False, microbatches=2)
    assert module.runs == 4
    assert len(deferred.parameters) == 5


class Branching(nn.Module):
    """An operation with several results, each of which goes another way: of pytorch#170277."""

    def __init__(self):
        super().__init__()
        self.qkv, self.one, self.two = nn.Linear(H, 3 * H), nn.Linear(H, H), nn.Linear(H, H)
        self.spare = nn.Linear(H, H)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        top, place = self.one(q).topk(4, dim=-1)
        return self.two(v) + F.normalize(k, dim=-1), top * place.float().mean()


def test_an_operation_with_several_results_and_an_unused_layer():
    weights = [f"{name}.weight" for name in ("qkv", "one", "two")]
    hold(Branching, rows(4, H), deferred=weights)


class Frozen(Mlp):
    def __init__(self):
        super().__init__()
        self[1].weight.requires_grad_(False)


def test_a_frozen_weight_is_nobodys_concern():
    hold(Frozen, rows(4, H), deferred=("3.weight",))


class SelfAttending(nn.Module):
    """Products of activations alone, on what the stage has received."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(H, H)

    def forward(self, x):
        return self.out((x @ x.transpose(0, 1)) @ x)


def test_an_input_is_no_weight():
    hold(SelfAttending, rows(4, H), deferred=("out.weight",))


def test_a_compiled_module_is_refused_by_name():
    module = torch.compile(Mlp(), backend="eager")
    with pytest.raises(Exception, match=r"PP-E392"), intercepting(DeferredGradients()):
        module(rows(4, H))


def test_what_waits_is_the_operands_of_the_products_and_a_shared_one_once():
    torch.manual_seed(0)
    one, two = nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)
    x, deferred = rows(4, H).requires_grad_(), DeferredGradients()
    with intercepting(deferred):
        out = torch.tanh(one(x)) * torch.sigmoid(two(x))
    with intercepting(deferred, backward=True):
        out.sum().backward()
    kept = {tensor.untyped_storage().data_ptr() for tensor in deferred._kept()}
    assert len(kept) == 3 and deferred.keeps([x]) and not deferred.keeps([out])
    assert one.weight.grad is None
    deferred.deliver()
    assert not list(deferred._kept()) and one.weight.grad is not None
