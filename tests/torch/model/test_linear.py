"""Weights meet activations in ppctl/model/linear.py and nowhere else in ppctl's own models."""

import ast
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from cuts import tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ppctl
from ppctl.config.schema import TrainConfig
from ppctl.geometry.layers import parse_layers
from ppctl.model.fp8 import E4M3, Fp8
from ppctl.model.linear import (
    Linear,
    columns,
    for_each_group,
    from_columns,
    grouped_product,
    multiply_in_float32,
    product,
    product_in_float32,
)
from ppctl.model.recompute import recompute
from ppctl.model.split import ALONE
from ppctl.model.stage import build_stage
from ppctl.plan import StageSpec
from ppctl.weight_gradients.deferred import DeferredGradients, collecting

PPCTL = Path(ppctl.__file__).parent
MODEL = PPCTL / "model"
LINEAR = MODEL / "linear.py"
HEADS = {MODEL / "block_attention.py", MODEL / "dropped_attention.py"}
"""Scores and values: these multiply activations with activations."""

MODULES = {"Linear", "LazyLinear", "Bilinear", "Embedding", "EmbeddingBag", "MultiheadAttention"}
FUNCTIONS = {
    "linear", "bilinear", "embedding", "embedding_bag", "grouped_mm", "scaled_mm", "scaled_grouped_mm",
    "multi_head_attention_forward", "matmul", "mm", "mv", "bmm", "addmm", "addbmm", "baddbmm", "einsum", "tensordot",
    "chain_matmul", "multi_dot",
}  # fmt: skip


def products_in(source: str) -> list[str]:
    """What a module's text multiplies with, or could multiply weights with: `line: what`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
            names = ["@"]
        found += [f"{node.lineno}: {name}" for name in names if name.lstrip("_") in MODULES | FUNCTIONS | {"@"}]
    return found


@pytest.mark.parametrize("path", sorted(MODEL.glob("*.py")), ids=lambda path: path.name)
def test_the_text_of_no_other_module_multiplies(path):
    found = products_in(path.read_text())
    if path == LINEAR:
        scaled = {"scaled_mm", "_scaled_grouped_mm"}
        assert {line.split(": ")[1] for line in found} == {
            "linear",
            "mm",
            "addmm",
            "grouped_mm",
            "embedding",
            "@",
        } | scaled
    elif path in HEADS:
        assert {line.split(": ")[1] for line in found} == {"@"}
    else:
        assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "w = nn.Linear(2, 3)",
        "y = F.linear(x, w)",
        "y = torch._grouped_mm(x, w)",
        "y = x @ w",
        "x @= w",
        "y = x.matmul(w)",
        "from torch.nn.functional import embedding as look",
    ],
)
def test_the_search_in_the_text_finds(line):
    assert len(products_in(line)) == 1


class Readers(TorchDispatchMode):
    """Which file of ppctl reads which matrix, whatever operation of torch it calls; a view reads nothing."""

    def __init__(self, parameters):
        super().__init__()
        self.names = {p.untyped_storage().data_ptr(): name for name, p in parameters.items() if p.dim() > 1}
        assert len(self.names) == sum(p.dim() > 1 for p in parameters.values())
        self.found: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        results = {t.untyped_storage().data_ptr() for t in tree_leaves(made) if isinstance(t, torch.Tensor)}
        for operand in tree_leaves((args, kwargs)):
            if isinstance(operand, torch.Tensor):
                address = operand.untyped_storage().data_ptr()
                if address in self.names and address not in results:
                    self.found.add((self.names[address], file_of_ppctl()))
        return made


def file_of_ppctl() -> str:
    """The file of ppctl whose code called torch, the innermost one; "" where autograd computes gradients by itself."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PPCTL in path.parents:
            return path.name
        frame = frame.f_back
    return ""


KINDS = {
    "biases": dict(add_qkv_bias=True, qk_layernorm=True),
    "latent attention": dict(
        multi_latent_attention=True, q_lora_rank=12, kv_lora_rank=8, qk_head_dim=4, qk_pos_emb_head_dim=4, v_head_dim=8,
        share_embeddings_and_output_weights=True, num_query_groups=None,
    ),
    "experts, shared ones, multi-token prediction": dict(
        num_moe_experts=6, moe_router_topk=2, moe_ffn_hidden_size=10, moe_layer_freq=[0, 1, 1, 1],
        moe_shared_expert_intermediate_size=14, moe_aux_loss_coeff=0.3, mtp_num_layers=1,
    ),
}  # fmt: skip
RECOMPUTE = {
    "nothing": TrainConfig(),
    "layers": TrainConfig(recompute_granularity="full"),
    "modules": TrainConfig(
        recompute_granularity="selective",
        recompute_modules=["core_attn", "layernorm", "mlp", "mla_up_proj", "moe_act"],
    ),
}


@pytest.mark.parametrize("way", RECOMPUTE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_is_read_there_and_nowhere_else(kind, dtype, way):
    """In a forward and in what a backward computes again; the gradients themselves are autograd's."""
    model = tiny(**KINDS[kind])
    names = ("embedding", *(f"decoder.{i}" for i in range(4)), *["mtp.0"] * bool(model.mtp_num_layers), "loss")
    layers = parse_layers(names)
    stored = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    stage = build_stage(StageSpec(0, 0, 0, layers, (), (), 0, 0, 0), model, seed=1, dtype=stored, device="cpu")
    recompute(stage, RECOMPUTE[way], 0)
    with Readers(stage.canonical_parameters()) as readers:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            outputs = stage(torch.arange(22).view(2, 11))
        forward = set(readers.found)
        torch.stack([out.float().square().mean() for out in outputs]).sum().backward()
    assert forward == {(name, LINEAR.name) for name in readers.names.values()}
    assert {file for _, file in readers.found - forward} <= {""}


def test_a_group_meets_its_own_matrices_one_by_one_and_in_one_kernel():
    generator = torch.Generator().manual_seed(0)
    counts, ends = torch.tensor([3, 0, 5, 1]), torch.tensor([3, 3, 8, 9], dtype=torch.int32)
    rows = torch.randn(9, 16, generator=generator).bfloat16()
    up = torch.randn(4, 32, 16, generator=generator).bfloat16()
    down = torch.randn(4, 16, 32, generator=generator).bfloat16()

    factors = torch.rand(9, 1, generator=generator).bfloat16()

    def block(product, rows, factors, up, down):
        return product(product(rows, up).tanh() * factors, down)

    one_by_one = for_each_group(block, rows, counts, up, down, beside=factors)
    group_of = torch.repeat_interleave(torch.arange(4), counts)
    for row, factor, group, result in zip(rows, factors, group_of, one_by_one, strict=True):
        expected = down[group].float() @ ((up[group].float() @ row.float()).tanh() * factor.float())
        assert torch.allclose(result.float(), expected, atol=0.1)
    in_one = for_each_group(block, rows, counts, up, down, beside=factors, at_once=True)
    assert torch.allclose(in_one, one_by_one, atol=1e-1)
    assert torch.equal(in_one, block(partial(grouped_product, ends=ends), rows, factors, up, down))


GRADIENTS = {
    "in one piece": lambda n, out: torch.randn(n, out),
    "expanded, as a sum's": lambda n, out: torch.randn(1, 1).expand(n, out),
    "expanded over columns": lambda n, out: torch.randn(n, 1).expand(n, out),
    "transposed": lambda n, out: torch.randn(out, n).t(),
    "a part of wider rows": lambda n, out: torch.randn(n, 2 * out)[:, ::2],
}


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("counts", [[0, 3, 0, 5, 1, 0], [9, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0] * 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_grouped_product_agrees_with_one_for_each_group_whatever_gradient_comes(dtype, counts, gradient):
    """Groups without rows, first, between and last. torch's products of the backward refuse most of these gradients."""
    torch.manual_seed(0)
    rows, weights = torch.randn(sum(counts), 16).to(dtype), torch.randn(6, 24, 16).to(dtype)
    arriving, results = GRADIENTS[gradient](len(rows), 24).to(dtype), []
    for at_once in (False, True):
        inputs = [tensor.clone().requires_grad_() for tensor in (rows, weights)]
        out = for_each_group(
            lambda product, part, _, weight: product(part, weight),
            inputs[0],
            torch.tensor(counts),
            inputs[1],
            beside=torch.ones(len(rows), 1),
            at_once=at_once,
        )
        results.append([out, *torch.autograd.grad(out, inputs, arriving)])
    for one_by_one, together in zip(*results, strict=True):
        assert together.shape == one_by_one.shape and together.dtype == one_by_one.dtype
        bound = 2.0 ** (-20 if dtype == torch.float32 else -7)
        assert (together - one_by_one).abs().sum() <= bound * one_by_one.abs().sum()


def test_a_group_gets_the_same_bits_whatever_groups_stand_beside_it():
    """Experts may live on other ranks. One silu over all rows would round some of them otherwise."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([3, 0, 5, 1])
    rows, weights = torch.randn(9, 16, generator=generator), torch.randn(4, 10, 16, generator=generator)

    factors = torch.rand(9, 1, generator=generator)

    def block(product, rows, factors, weight):
        return torch.nn.functional.silu(product(rows, weight)) * factors

    together = for_each_group(block, rows, counts, weights, beside=factors).split(counts.tolist())
    parts = zip(*(each.split(counts.tolist()) for each in (rows, factors)), together, weights, counts, strict=True)
    for part, beside, group, weight, count in parts:
        assert torch.equal(group, for_each_group(block, part, count[None], weight[None], beside=beside))


@pytest.mark.parametrize("cast", [False, True], ids=["as it is", "autocast"])
def test_split_products_with_biases_have_the_dtype_and_where_nothing_is_rounded_the_bits_of_whole_ones(cast):
    """Small whole numbers: products and sums of them are exact in bfloat16."""
    numbers = partial(torch.randint, -2, 3, generator=torch.Generator().manual_seed(0))
    first, last = Linear(8, 8, bias=True), Linear(8, 8, bias=True)
    for parameter in (*first.parameters(), *last.parameters()):
        parameter.data = numbers(parameter.shape).float()
    x, results = numbers((1, 3, 8)).float().requires_grad_(), []
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        for split in (None, type(ALONE)()):  # of one rank, as a split of several is used
            (inside,) = columns(x, first, split=split)
            out = from_columns(inside, last, split)
            of_all = torch.autograd.grad(out.sum(), [x, *first.parameters(), *last.parameters()])
            results.append([inside, out, *of_all])
    assert results[0][1].dtype == (torch.bfloat16 if cast else torch.float32)
    for whole, parts in zip(*results, strict=True):
        assert whole.dtype == parts.dtype and torch.equal(whole, parts)


def test_a_product_in_float32_rounds_nothing_under_autocast_nor_with_weights_in_bfloat16():
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        rounded, kept = product(x, weight), product_in_float32(x, weight)[0]
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(kept, product(x, weight))
    narrow, _ = product_in_float32(x.bfloat16(), weight.bfloat16())
    assert torch.equal(narrow, product(x.bfloat16().float(), weight.bfloat16().float()))


class OneOfOne:
    """A split over one rank, which makes sums in the memory of what it is given."""

    rank, size, sequence = 0, 1, False

    def start_gather(self, x):
        return lambda: x

    def start_sum(self, x):
        total = x.contiguous()
        return lambda: total


@pytest.mark.parametrize("fp8", [None, *(Fp8(E4M3, by, multiply_in_float32) for by in (False, True))])
@pytest.mark.parametrize("shape", [(2, 16, 32), (5, 32)])
@pytest.mark.parametrize("later", [False, True])
def test_a_product_of_a_ranks_own_columns_can_be_summed_in_its_memory(fp8, shape, later):
    torch.manual_seed(0)
    projection = Linear(32, 48, fp8=fp8).bfloat16()
    torch.nn.init.normal_(projection.weight)
    given, found = torch.randn(shape).bfloat16(), []
    for split in (None, OneOfOne()):
        x, deferred = given.clone().requires_grad_(), DeferredGradients()
        with collecting(deferred) if later else nullcontext():
            out = from_columns(x, projection, split)
        with collecting(deferred, backward=True) if later else nullcontext():
            out.backward(torch.ones_like(out))
        deferred.deliver()
        found.append((out.detach(), x.grad, projection.weight.grad))
        projection.weight.grad = None
    assert all(map(torch.equal, *found))
