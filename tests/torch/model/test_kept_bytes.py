"""What a block keeps for its backward beyond what the plan counts: storages, each once, whoever looks into them. And
what a layer's forward holds."""

import pytest
import torch
from cuts import tiny
from live_memory import kept_by
from torch.utils._pytree import tree_leaves

from ppctl.config.schema import ModelConfig
from ppctl.cost.activations import stage_activations
from ppctl.cost.setting import Setting
from ppctl.geometry.layers import parse_layers
from ppctl.model.attention import LatentAttention
from ppctl.model.kernels import Kernels
from ppctl.model.linear import in_two, product_in_float32
from ppctl.model.stage import build_stage
from ppctl.plan import StageSpec
from ppctl.rehearsal.ledger import DeviceLedger
from ppctl.rehearsal.stand_ins import FusedKernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_in_float32_keeps_its_inputs_as_they_are(dtype):
    x = torch.randn(2, 7, 16).to(dtype).requires_grad_()
    weight = torch.randn(6, 16).to(dtype).requires_grad_()
    kept, out = kept_by(lambda: product_in_float32(x, weight)[0])
    assert kept == x.nbytes + weight.nbytes

    gradient = torch.randn(2, 7, 6)
    out.backward(gradient)
    wide_x, wide_weight = (tensor.detach().float().requires_grad_() for tensor in (x, weight))
    torch.nn.functional.linear(wide_x, wide_weight).backward(gradient)
    assert torch.equal(x.grad, wide_x.grad.to(dtype))
    assert torch.equal(weight.grad, wide_weight.grad.to(dtype))


def test_on_a_device_a_product_in_float32_keeps_and_reads_them_as_they_are():
    x, weight = (torch.empty(n, 16, dtype=torch.bfloat16, device="meta").requires_grad_() for n in (14, 6))
    kept, made = [], []

    class Results(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.extend(tree_leaves(result))
            return result

    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.dtype) or tensor, lambda same: same
    ):
        out, _ = product_in_float32(x.view(2, 7, 16), weight)
    with Results():
        gradients = torch.autograd.grad(out, [x, weight], torch.empty_like(out))
    assert (out.shape, out.dtype, kept) == ((2, 7, 6), torch.float32, [torch.bfloat16] * 2)
    assert [(each.shape, each.dtype) for each in gradients] == [(x.shape, x.dtype), (weight.shape, weight.dtype)]
    assert not [each for each in made if each.dtype == torch.float32 and each.numel() == x.numel()], "no copy of x"


def test_a_gradient_in_two_narrow_numbers_lacks_nothing_that_its_products_results_could_hold():
    gradient = torch.randn(50, 30, dtype=torch.float32) * torch.logspace(-20, 10, 30)
    high, low = in_two(gradient, torch.bfloat16).double().split(30, dim=-1)
    assert torch.equal(high, gradient.bfloat16().double())
    assert ((high + low - gradient.double()).abs() <= 2**-16 * gradient.double().abs()).all()


def test_the_values_of_latent_attention_do_not_keep_the_keys_alive():
    model = tiny(
        multi_latent_attention=True,
        q_lora_rank=None,
        kv_lora_rank=8,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=8,
    )
    attention = LatentAttention(model)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_()
    tokens, heads = 10, model.num_attention_heads
    queries = torch.randn(1, tokens, heads * 12, requires_grad=True)
    latent = torch.randn(1, tokens, 12, requires_grad=True)
    _, _, v = attention.expand(queries, latent, torch.ones(tokens, 2, 2))
    assert v.untyped_storage().nbytes() == tokens * heads * 8 * v.element_size()


EXPERTS = {"num_moe_experts": 8, "moe_ffn_hidden_size": 896, "moe_router_topk": 2, "add_bias_linear": False}
WIDE = {
    "dense": {"ffn_hidden_size": 1024},
    "experts": {**EXPERTS, "moe_layer_freq": 1},
    "a wide shared expert": {**EXPERTS, "moe_layer_freq": 1, "moe_shared_expert_intermediate_size": 1536},
}


@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("fused", [False, True], ids=["step by step", "fused"])
def test_a_forward_on_a_device_holds_what_the_plan_says_with_silu_of_a_gate_by_steps(kind, fused):
    sizes = dict(num_layers=2, hidden_size=256, num_attention_heads=4, vocab_size=320)
    model, layers, device = ModelConfig(**sizes | WIDE[kind]), parse_layers(["decoder.0"]), torch.device("meta")
    plan = stage_activations(model, layers, Setting(2, 512, 2))
    spec = StageSpec(0, 0, 0, layers, (), (), 0, 0, 0)
    kernels = Kernels(groups_experts=True, fuses_swiglu=fused)
    with FusedKernels(), DeviceLedger() as ledger:
        stage = build_stage(spec, model, seed=1, dtype=torch.bfloat16, device=device, kernels=kernels)
        stage(torch.empty(2, 512, 256, dtype=torch.bfloat16, device=device))  # makes what is shared
        ledger.begin_step()
        before = ledger.live
        _out = stage(torch.empty(2, 512, 256, dtype=torch.bfloat16, device=device, requires_grad=True))
        most = ledger.restart_peak() - before
    assert most < plan.in_forward * 0.99 if fused else most == pytest.approx(plan.in_forward, rel=0.01)
