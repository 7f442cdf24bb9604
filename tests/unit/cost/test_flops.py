"""Model FLOPs: matrix products by hand, causal attention halved, and 6 x parameters where attention is small."""

from dataclasses import replace

import pytest
from published_models import MODELS

from ppctl.config.schema import ModelConfig
from ppctl.cost.flops import stage_flops
from ppctl.cost.parameter_counts import active_parameters
from ppctl.geometry.layers import parse_layers

TINY = ModelConfig(
    num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, num_query_groups=1, vocab_size=32
)


@pytest.mark.parametrize(
    ("layers", "per_token", "per_token_pair"),
    [
        (("embedding",), 0, 0),
        (("decoder.0",), 2 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16), 2 * 2 * 8 // 2),
        (("loss",), 2 * 8 * 32, 0),
        ((), 0, 0),
    ],
)
def test_a_dense_stage_by_hand(layers: tuple[str, ...], per_token: int, per_token_pair: int) -> None:
    """Scores and weighted values are 2 x 2 x width operations for each pair of tokens, half of them masked."""
    assert stage_flops(TINY, parse_layers(layers), 3, 10) == 3 * (10 * per_token + 100 * per_token_pair)


def test_a_moe_layer_counts_the_chosen_experts_only() -> None:
    moe = replace(
        TINY, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=5, moe_shared_expert_intermediate_size=6
    )
    more = stage_flops(moe, parse_layers(["decoder.0"]), 1, 10) - stage_flops(TINY, parse_layers(["decoder.0"]), 1, 10)
    assert more == 10 * 2 * (8 * 4 + 3 * 8 * (2 * 5 + 6) - 3 * 8 * 16)


def test_mtp_adds_a_projection_and_another_output() -> None:
    mtp = replace(TINY, mtp_num_layers=1)
    decoder = stage_flops(TINY, parse_layers(["decoder.1"]), 1, 10)
    assert stage_flops(mtp, parse_layers(["mtp.0"]), 1, 10) == decoder + 10 * 2 * 16 * 8
    assert stage_flops(mtp, parse_layers(["loss"]), 1, 10) == 2 * stage_flops(TINY, parse_layers(["loss"]), 1, 10)


@pytest.mark.parametrize("name", MODELS)
def test_short_sequences_cost_two_operations_per_active_parameter_and_token(name: str) -> None:
    model = replace(MODELS[name], mtp_num_layers=None, share_embeddings_and_output_weights=False)
    model = replace(model, position_embedding_type="rope")  # a table is no matrix product
    layers = ["embedding", *(f"decoder.{i}" for i in range(model.num_layers)), "loss"]
    matrices = active_parameters(model) - model.vocab_size * model.hidden_size
    assert stage_flops(model, parse_layers(layers), 1, 16) == pytest.approx(2 * 16 * matrices, rel=2e-3)
