"""Products in 8 bits: errors, gradients, what is kept, and CUDA's arguments by torch's own checks."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cuts import tiny
from groups_in_float32 import multiply_groups_in_float32
from torch._subclasses.fake_tensor import FakeTensorMode

from ppctl.config.compose import compose
from ppctl.config.schema import TrainConfig
from ppctl.errors import ConfigError
from ppctl.geometry.layers import parse_layers
from ppctl.model import linear
from ppctl.model.fp8 import E4M3, E5M2, LARGEST, Fp8, quantise
from ppctl.model.kernels import Capability, Kernels, choose_kernels
from ppctl.model.linear import (
    Linear,
    columns,
    for_each_group,
    multiply_groups_scaled,
    multiply_in_float32,
    multiply_scaled,
    product_in_fp8,
)
from ppctl.model.recompute import recompute
from ppctl.model.stage import build_stage
from ppctl.plan import StageSpec
from ppctl.weight_gradients.deferred import DeferredGradients, collecting

RECIPES = {
    "rowwise": Fp8(E4M3, False, multiply_in_float32),
    "rowwise, hybrid": Fp8(E5M2, False, multiply_in_float32),
    "blockwise": Fp8(E4M3, True, multiply_in_float32),
}
ROUNDING = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Half of the distance between neighbours, over the number: 3 and 2 bits behind the point."""
H100 = Capability("cuda", (9, 0), cuda=(13, 0))


@pytest.mark.parametrize("tile", [(1, 0), (1, 128), (128, 128)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_number_is_rounded_by_at_most_half_a_step_of_its_tile(dtype, tile):
    matrix = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 200)[:, None]
    matrix[5] = 0.0
    found = quantise(matrix, dtype, tile)
    back = found.dequantised()
    assert back.shape == matrix.shape and found.values.element_size() == 1 and found.scales.dtype == torch.float32
    # Small numbers of a tile are subnormal: their distance is fixed, by the tile's scale.
    rows, columns = tile[0], tile[1] or 304
    scales = found.scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:200, :300]
    smallest = {E4M3: 2.0**-10, E5M2: 2.0**-17}[dtype]
    assert ((back - matrix).abs() <= ROUNDING[dtype] * 1.001 * matrix.abs() + smallest * scales).all()
    assert (found.values.float().abs().max() == LARGEST[dtype]) and not back[5].any()
    # One outlier takes precision from its own tile alone.
    assert found.scales.shape == (-(-200 // rows), -(-300 // columns))


def test_what_is_not_finite_is_not_hidden():
    for value in (torch.inf, torch.nan):
        matrix = torch.ones(2, 16)
        matrix[1, 3] = value
        back = quantise(matrix, E4M3, (1, 0)).dequantised()
        assert back[0].isfinite().all() and back[1].isnan().any()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(2, 9, 48, 64), (1, 130, 256, 144)])
def test_products_and_gradients_are_near_those_in_float32(name, shape):
    """The errors of single numbers add up as independent ones: a sum of n products errs by the root of n of them."""
    fp8, (b, s, inside, outside) = RECIPES[name], shape
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(b, s, inside, generator=generator), torch.randn(outside, inside, generator=generator)
    gradient = torch.randn(b, s, outside, generator=generator).bfloat16()
    results = []
    for multiply in (lambda x, w: F.linear(x.float(), w.float()), partial(product_in_fp8, fp8=fp8)):
        inputs = [tensor.bfloat16().requires_grad_() for tensor in given]
        out = multiply(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, gradient.to(out.dtype))])
    for exact, got in zip(*results, strict=True):
        error = ((got.float() - exact.float()).square().mean() / exact.float().square().mean()).sqrt()
        # Evenly spread, a rounding errs by 1/sqrt(3) of its bound in the mean; three meet in dW: of g, and twice of x.
        assert 0.005 < error < ROUNDING[fp8.gradients]
        assert got.dtype == torch.bfloat16 and got.shape == exact.shape


def test_gradients_are_those_of_the_rounded_matrices():
    """By formula: dX = Q(dY) Q(W), dW = Q(dY^T) Q(Q(X)^T)."""
    fp8, generator = RECIPES["rowwise, hybrid"], torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=generator).bfloat16().requires_grad_() for shape in ((20, 48), (32, 48)))
    g = torch.randn(20, 32, generator=generator).bfloat16()
    of_x, of_w = torch.autograd.grad(product_in_fp8(x, w, fp8), (x, w), g)

    def q(matrix, dtype):
        return quantise(matrix, dtype, (1, 0)).dequantised()

    assert torch.equal(of_x, (F.linear(q(g, E5M2), q(w.t(), E4M3))).bfloat16())
    twice = q(q(x, E4M3).t(), E4M3)
    assert torch.equal(of_w, F.linear(q(g.t(), E5M2), twice).bfloat16())


def kept_by(run):
    storages = {}

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = run()
    assert all(one.requires_grad for one in out)
    return sum(storage.nbytes() for storage in storages.values())


def test_an_input_is_kept_once_in_a_byte_an_element_for_all_its_products():
    fp8 = RECIPES["rowwise"]
    x = torch.randn(2, 16, 64).bfloat16().requires_grad_()
    projections = [Linear(64, 32, fp8=fp8).bfloat16() for _ in range(3)]
    weights = sum(one.weight.nbytes for one in projections)
    assert kept_by(lambda: columns(x, *projections)) == weights + 32 * 64 + 32 * 4
    plain = [Linear(64, 32).bfloat16() for _ in range(3)]
    assert kept_by(lambda: columns(x, *plain)) == weights + 32 * 64 * 2


@pytest.mark.parametrize("name", RECIPES)
def test_a_group_gets_the_same_bits_whatever_groups_stand_beside_it(name):
    fp8, generator = RECIPES[name], torch.Generator().manual_seed(0)
    counts = torch.tensor([3, 0, 5, 1])
    rows = torch.randn(9, 16, generator=generator).bfloat16().requires_grad_()
    stack = torch.randn(4, 32, 16, generator=generator).bfloat16().requires_grad_()

    factors = torch.rand(9, 1, generator=generator).bfloat16()

    def block(product, rows, factors, weight):
        return F.silu(product(rows, weight)) * product(rows, weight) * factors

    together = for_each_group(block, rows, counts, stack, beside=factors, fp8=fp8)
    of_rows, of_stack = torch.autograd.grad(together.float().square().sum(), (rows, stack))
    begin = 0
    for group, count in enumerate(counts.tolist()):
        part = rows.detach()[begin : begin + count].requires_grad_()
        weight = stack.detach()[group : group + 1].requires_grad_()
        beside = factors[begin : begin + count]
        alone = for_each_group(block, part, counts[group : group + 1], weight, beside=beside, fp8=fp8)
        assert torch.equal(alone, together[begin : begin + count])
        of_part, of_weight = torch.autograd.grad(alone.float().square().sum(), (part, weight))
        assert torch.equal(of_part, of_rows[begin : begin + count]) and torch.equal(of_weight[0], of_stack[group])
        begin += count


AT_ONCE = Fp8(E4M3, False, multiply_in_float32, multiply_groups_in_float32)


@pytest.mark.parametrize("counts", [[3, 0, 37, 16, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [16, 32, 16, 16, 16]])
@pytest.mark.parametrize("later", [False, True])
def test_all_groups_at_once_have_the_numbers_of_one_product_for_each(counts, later):
    """Scales, padding and what goes where are those of the kernel; sums are in another order, and rounded the same."""
    generator, found = torch.Generator().manual_seed(0), []
    counts, n = torch.tensor(counts), sum(counts)
    given = [torch.randn(*shape, generator=generator) for shape in ((n, 48), (5, 32, 48), (5, 32, 48), (5, 48, 32))]
    factors = torch.rand(n, 1, generator=generator).bfloat16()

    def block(product, rows, factors, w1, w3, w2):
        return product(F.silu(product(rows, w1)) * product(rows, w3) * factors, w2)

    for fp8 in (RECIPES["rowwise"], AT_ONCE):
        rows, *stacks = [torch.nn.Parameter(each.bfloat16()) for each in given]
        deferred, at_once = DeferredGradients(), fp8 is AT_ONCE
        with collecting(deferred) if later and at_once else nullcontext():
            out = for_each_group(block, rows * 1, counts, *stacks, beside=factors, at_once=at_once, fp8=fp8)
        with collecting(deferred, backward=True) if later and at_once else nullcontext():
            out.backward(out.detach() + 1)
        deferred.deliver()
        found.append([out.detach(), rows.grad, *(stack.grad for stack in stacks)])
    for one_by_one, at_once in zip(*found, strict=True):
        assert torch.equal(one_by_one, at_once)


def test_weights_of_groups_are_rounded_once_for_each_change_of_them():
    rounded = []

    class Noting(Fp8):
        def weight(self, matrix):
            rounded.append(matrix.shape)
            return super().weight(matrix)

    fp8 = Noting(E4M3, False, multiply_in_float32, multiply_groups_in_float32)
    stack, counts = torch.nn.Parameter(torch.randn(2, 32, 16).bfloat16()), torch.tensor([4, 5])
    for step in range(1, 3):
        for _ in range(3):
            rows = torch.randn(9, 16).bfloat16().requires_grad_()
            product = partial(for_each_group, beside=rows, at_once=True, fp8=fp8)
            product(lambda multiply, rows, _, weight: multiply(rows, weight), rows, counts, stack).sum().backward()
        assert rounded == 2 * step * [(32, 16), (16, 32)]
        with torch.no_grad():
            stack.copy_(stack.grad)


@pytest.mark.parametrize("counts", [[130, 0, 7], [0, 0, 0]])
def test_cudas_grouped_product_gets_what_torch_checks_for(counts):
    """As below: the checks of `_scaled_grouped_mm`, on tensors that have no values."""
    rows, fp8 = sum(counts), Fp8(E4M3, False, multiply_in_float32, multiply_groups_scaled)
    x, w = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta").requires_grad_() for shape in ((rows, 64), (3, 48, 64))
    )
    out = for_each_group(
        lambda product, rows, _, weight: product(rows, weight),
        *(x, torch.empty(3, dtype=torch.int64, device="meta"), w),
        beside=x.detach(),
        at_once=True,
        fp8=fp8,
    )
    out.backward(torch.empty_like(out))
    assert out.shape == (rows, 48) and x.grad.shape == x.shape and w.grad.shape == w.shape


MODEL = dict(hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2, kv_channels=16)
EXPERTS = dict(
    num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16, moe_layer_freq=[0, 1, 1, 1],
    moe_shared_expert_intermediate_size=32, multi_latent_attention=True, num_query_groups=None, kv_channels=None,
    q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=16, v_head_dim=8,
)  # fmt: skip


def stage(fp8, **sizes):
    layers = parse_layers(["embedding", *(f"decoder.{i}" for i in range(4)), "loss"])
    spec = StageSpec(0, 0, 0, layers, (), (), 0, 0, 0)
    kernels = Kernels(fp8=fp8)
    return build_stage(spec, tiny(**MODEL | sizes), seed=1, dtype=torch.bfloat16, device="cpu", kernels=kernels)


def gradients(module):
    (logits,) = module(torch.arange(32).view(2, 16))
    logits.float().log_softmax(-1)[..., 3].sum().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()} | {"logits": logits.detach()}


@pytest.mark.parametrize("sizes", [{}, EXPERTS], ids=["dense", "latent attention and experts"])
def test_embedding_output_router_and_norms_are_as_without(sizes):
    multiplied = []

    def note(a, b):
        multiplied.append((a.shape, b.shape))
        return multiply_in_float32(a, b)

    module = stage(Fp8(E4M3, False, note), **sizes)
    names = {name for name, one in module.named_modules() if isinstance(one, Linear) and one.fp8 is not None}
    assert all(name.startswith("layers.") and "router" not in name for name in names)
    dense = {name.split(".", 2)[2] for name in names if name.startswith("layers.0.")}
    attention = {"wq_a", "wq_b", "wkv_a", "wkv_b", "wo"} if sizes else {"wq", "wk", "wv", "wo"}
    assert dense == {f"attention.{name}" for name in attention} | {f"feed_forward.w{n}" for n in (1, 2, 3)}
    gradients(module)
    assert multiplied and all(52 not in (*a, *b) for a, b in multiplied)


MODULES = ["core_attn", "layernorm", "mlp", "moe_act", "mla_up_proj"]


@pytest.mark.parametrize("way", [{"granularity": "full"}, {"granularity": "selective", "modules": MODULES}])
@pytest.mark.parametrize("sizes", [{}, EXPERTS], ids=["dense", "latent attention and experts"])
def test_recompute_changes_no_bit(sizes, way):
    train = TrainConfig(**{f"recompute_{name}": value for name, value in way.items()})
    plain, again = stage(RECIPES["blockwise"], **sizes), stage(RECIPES["blockwise"], **sizes)
    recompute(again, train, 0)
    expected, got = gradients(plain), gradients(again)
    for name, value in expected.items():
        assert value is not None and torch.equal(got[name], value), name


@pytest.mark.parametrize("gradient", [E4M3, E5M2])
@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize("shape", [(256, 512, 384), (130, 144, 576), (7, 128, 1024)])
def test_cudas_products_get_what_torch_checks_for(shape, blockwise, gradient):
    """torch's own checks of scaled_mm, run on tensors that only say that they are on a GPU: shapes, strides, dtypes."""
    tokens, inside, outside = shape
    products = []

    def noted(a, b):
        out = multiply_scaled(a, b)
        products.append(tuple(out.shape))
        return out

    with FakeTensorMode():
        x = torch.empty(1, tokens, inside, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        w = torch.empty(outside, inside, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        out = forward_and_backward(Fp8(gradient, blockwise, noted), x, w)
    assert out == ((1, tokens, inside), (outside, inside))
    assert products == [(tokens, outside), (tokens, inside), (outside, inside)]


def forward_and_backward(fp8, x, w):
    """Shapes of the gradients. Without autograd, which needs a device's guard."""

    class Context:
        def save_for_backward(self, *tensors):
            self.saved_tensors = tensors

    with torch.no_grad():
        context, (x, *kept) = Context(), fp8.rounded(x).parts
        out = linear._WholeProduct.forward(context, x, w, linear._rule(fp8), *kept)
        assert out.dtype == torch.bfloat16
        of_x, of_weight, *_ = linear._WholeProduct.backward(context, out)
    return tuple(of_x.shape), tuple(of_weight.shape)


@pytest.mark.parametrize("name", RECIPES)
def test_a_weight_gradient_in_8_bits_can_wait_and_keeps_8_bits_of_the_input(name):
    """The same bits, from the rounded input: the input itself is free behind I."""
    found = []
    for later in (False, True):
        torch.manual_seed(0)
        projections = [Linear(64, 32, fp8=RECIPES[name]).bfloat16() for _ in range(2)]
        for projection in projections:
            torch.nn.init.normal_(projection.weight)
        x, deferred = torch.randn(2, 16, 64, dtype=torch.bfloat16).requires_grad_(), DeferredGradients()
        with collecting(deferred) if later else nullcontext():
            first, second = columns(x * 1, *projections)
            out = first * second.sigmoid()
        with collecting(deferred, backward=True) if later else nullcontext():
            out.backward(torch.randn_like(out))
        assert all((projection.weight.grad is None) == later for projection in projections)
        kept = {t.untyped_storage().data_ptr(): t for t in deferred._kept()}.values()
        assert sum(t.numel() for t in kept if t.dtype == torch.bfloat16) == 2 * out.numel() * later
        deferred.deliver()
        found.append([x.grad, *(projection.weight.grad for projection in projections)])
    assert all(map(torch.equal, *found))


def test_the_scaled_product_is_the_emulated_one_where_a_cpu_has_it():
    """torch's CPU build has scaled_mm with a scale for each row."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(24, 64, generator=generator), torch.randn(32, 64, generator=generator)
    a, b = quantise(a, E4M3, (1, 0)), quantise(b, E4M3, (1, 0))
    assert torch.allclose(multiply_scaled(a, b).float(), multiply_in_float32(a, b), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    ("typed", "can", "reason"),
    [
        ("", Capability("cuda", (8, 0)), "capability 8.9"),
        ("model.fp8_recipe=blockwise", Capability("cuda", (10, 0), cuda=(13, 0)), "need Hopper"),
        ("model.fp8_recipe=blockwise", Capability("cuda", (9, 0), cuda=(12, 8)), "CUDA 12.9"),
        ("model.fp8=hybrid model.fp8_recipe=blockwise launch.device=any", H100, "in e4m3 alone"),
        ("model.num_moe_experts=4", Capability("cuda", (10, 0), cuda=(13, 0)), "scaled grouped product, which is for"),
        ("model.num_moe_experts=4 model.fp8_recipe=blockwise", H100, "only in e4m3 with a scale for each row"),
        ("model.num_moe_experts=4 model.fp8=hybrid", H100, "only in e4m3 with a scale for each row"),
        ("", Capability("cuda", (9, 0), scaled_products=False), "no scaled_mm"),
    ],
)
def test_a_gpu_that_cannot_is_refused_by_name(typed, can, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        choose_kernels(compose(["model.fp8=e4m3", "parallel.bf16=true", *typed.split()]).config, can)
    assert error.value.problems[0].code == "PP-E772"


def test_the_kernels_line_says_how_weights_are_multiplied():
    typed = ["model.fp8=e4m3", "parallel.bf16=true", "model.fp8_recipe=blockwise"]
    config = compose(typed).config
    assert choose_kernels(config, H100).names()["weights"] == "fp8 blockwise scaled"
    assert choose_kernels(config, Capability("cpu")).names()["weights"] == "fp8 blockwise emulated"
    of_experts = choose_kernels(compose(["model.fp8=e4m3", "model.num_moe_experts=4", typed[1]]).config, H100)
    assert of_experts.names() | {"experts": "grouped", "weights": "fp8 rowwise scaled"} == of_experts.names()
    assert choose_kernels(compose(["model.fp8=hybrid", *typed[1:2]]).config, H100).fp8.gradients == E5M2


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("model.fp8=e4m3", "bfloat16 weights"),
        ("model.fp8=e4m3 parallel.bf16=true parallel.enable_autocast=true", "without autocast"),
        ("model.fp8=e4m3 parallel.bf16=true model.ffn_hidden_size=712", "multiples of 16, but this is 712"),
        ("model.fp8=e4m3 parallel.bf16=true model.num_query_groups=1 model.kv_channels=24", "this is 24"),
        ("model.fp8_recipe=blockwise", "has an effect only with model.fp8"),
        ("model.fp8=e4m3 parallel.bf16=true model.fp8_recipe=delayed", "rowwise"),
        ("model.fp8=e5m2 parallel.bf16=true", "hybrid"),
    ],
)
def test_what_cannot_be_in_8_bits_is_refused_with_the_config(typed, reason):
    with pytest.raises(ConfigError, match=reason):
        compose(typed.split())


def test_megatrons_flags_set_it():
    config = compose(["--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "parallel.bf16=true"]).config
    assert (config.model.fp8, config.model.fp8_recipe) == ("e4m3", "blockwise")
