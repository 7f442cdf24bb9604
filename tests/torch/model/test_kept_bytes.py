"""What a block keeps for its backward beyond what the plan counts: storages, each once, whoever looks into them."""

import pytest
import torch
from cuts import tiny
from live_memory import kept_by

from ppctl.model.latent_attention import LatentAttention
from ppctl.model.linear import product_in_float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_in_float32_keeps_its_inputs_as_they_are(dtype):
    x = torch.randn(2, 7, 16).to(dtype).requires_grad_()
    weight = torch.randn(6, 16).to(dtype).requires_grad_()
    kept, out = kept_by(lambda: product_in_float32(x, weight))
    assert kept == x.nbytes + weight.nbytes

    gradient = torch.randn(2, 7, 6)
    out.backward(gradient)
    wide_x, wide_weight = (tensor.detach().float().requires_grad_() for tensor in (x, weight))
    torch.nn.functional.linear(wide_x, wide_weight).backward(gradient)
    assert torch.equal(x.grad, wide_x.grad.to(dtype))
    assert torch.equal(weight.grad, wide_weight.grad.to(dtype))


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
