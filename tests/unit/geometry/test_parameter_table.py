"""The table of parameters: what each row says of tensor parallelism, gradients, starts, decay and recompute."""

import pytest

from ppctl.config.parallel_rules import MODULES
from ppctl.config.schema import ModelConfig
from ppctl.geometry.canonical_names import (
    canonical_names,
    embedding_uses,
    expert_name,
    owner_of,
    parameter_of,
    stage_parameters,
)
from ppctl.geometry.layers import Kind, Layer, parse_layers
from ppctl.geometry.parameters import Sizes, kind_parameters
from ppctl.geometry.rows import Parameter

SMALL = dict(num_layers=4, hidden_size=24, ffn_hidden_size=40, num_attention_heads=4, num_query_groups=2, vocab_size=52)
LATENT = dict(multi_latent_attention=True, q_lora_rank=12, kv_lora_rank=10, qk_head_dim=8, qk_pos_emb_head_dim=6)
ROUTED = dict(num_moe_experts=4, moe_ffn_hidden_size=9, moe_router_enable_expert_bias=True)
GPT = dict(
    normalization="LayerNorm",
    add_bias_linear=True,
    gated_linear_unit=False,
    position_embedding_type="learned_absolute",
    max_position_embeddings=33,
)
GROUPED = ModelConfig(**SMALL, qk_layernorm=True, add_qkv_bias=True)
MLA = ModelConfig(**SMALL, **LATENT, v_head_dim=7)
MOE = ModelConfig(**SMALL, **ROUTED, moe_shared_expert_intermediate_size=20, mtp_num_layers=1)
GPT3 = ModelConfig(**SMALL, **GPT)
WHOLE: tuple[tuple[str, int], ...] = ()
TP0, TP1 = (("tp", 0),), (("tp", 1),)


@pytest.mark.parametrize(
    ("model", "name", "row"),
    [
        (GROUPED, "tok_embeddings.weight", ((52, 24), "embedding", TP0, "complete", "normal", None)),
        (GROUPED, "output.weight", ((52, 24), "matrix", TP0, "complete", "normal", None)),
        (GROUPED, "norm.weight", ((24,), "norm", WHOLE, "tokens", "ones", None)),
        (GROUPED, "layers.1.attention.wk.weight", ((12, 24), "matrix", TP0, "complete", "normal", None)),
        (GROUPED, "layers.1.attention.wk.bias", ((12,), "bias", TP0, "complete", "zeros", None)),
        (GROUPED, "layers.1.attention.wo.weight", ((24, 24), "matrix", TP1, "complete", "residual", None)),
        (GROUPED, "layers.1.attention.q_norm.weight", ((6,), "norm", WHOLE, "heads", "ones", None)),
        (GROUPED, "layers.1.attention_norm.weight", ((24,), "norm", WHOLE, "tokens", "ones", "layernorm")),
        (GROUPED, "layers.1.feed_forward.w2.weight", ((24, 40), "matrix", TP1, "complete", "residual", "mlp")),
        (GROUPED, "layers.1.feed_forward.w3.weight", ((40, 24), "matrix", TP0, "complete", "normal", "mlp")),
        (MLA, "layers.0.attention.wq_a.weight", ((12, 24), "matrix", WHOLE, "tokens", "normal", None)),
        (MLA, "layers.0.attention.q_norm.weight", ((12,), "norm", WHOLE, "tokens", "ones", "mla_up_proj")),
        (MLA, "layers.0.attention.wkv_a.weight", ((16, 24), "matrix", WHOLE, "tokens", "normal", None)),
        (MLA, "layers.0.attention.wkv_b.weight", ((60, 10), "matrix", TP0, "complete", "normal", "mla_up_proj")),
        (MLA, "layers.0.attention.wo.weight", ((24, 28), "matrix", TP1, "complete", "residual", None)),
        (MOE, "layers.3.moe.router.weight", ((4, 24), "router", WHOLE, "tokens", "normal", "moe")),
        (MOE, "layers.3.moe.router.expert_bias", ((4,), "correction", WHOLE, "none", "zeros", "moe")),
        (
            MOE,
            "layers.3.moe.experts.2.w1.weight",
            ((9, 24), "expert", (("ep", 0), ("etp", 1)), "complete", "normal", "moe"),
        ),
        (MOE, "layers.3.moe.experts.w2", ((24, 9), "expert", (("ep", 0), ("etp", 2)), "complete", "residual", "moe")),
        (MOE, "layers.3.moe.shared_experts.w2.weight", ((24, 20), "matrix", TP1, "complete", "residual", "moe")),
        (MOE, "mtp.0.eh_proj.weight", ((24, 48), "matrix", WHOLE, "tokens", "normal", None)),
        (MOE, "mtp.0.layer.attention.wo.weight", ((24, 24), "matrix", TP1, "complete", "residual", None)),
        (MOE, "mtp.tok_embeddings.weight", ((52, 24), "embedding", TP0, "complete", "normal", None)),
        (GPT3, "position_embeddings.weight", ((33, 24), "embedding", WHOLE, "tokens", "normal", None)),
        (GPT3, "layers.0.attention.wo.bias", ((24,), "bias", WHOLE, "tokens", "zeros", None)),
        (GPT3, "layers.0.feed_forward.w1.bias", ((40,), "bias", TP0, "complete", "zeros", "mlp")),
        (GPT3, "layers.0.ffn_norm.bias", ((24,), "bias", WHOLE, "tokens", "zeros", "layernorm")),
        (GPT3, "norm.bias", ((24,), "bias", WHOLE, "tokens", "zeros", None)),
    ],
)
def test_a_row_says_all_of_a_parameter(model: ModelConfig, name: str, row: tuple[object, ...]) -> None:
    found = parameter_of(name, model)
    assert (found.shape, found.role, found.splits, found.gradient, found.start, found.recomputed) == row


ALL = (GROUPED, MLA, MOE, GPT3)


def rows(model: ModelConfig) -> dict[str, Parameter]:
    numbered = [Layer("decoder", i) for i in range(model.num_layers)] + [Layer("mtp")] * bool(model.mtp_num_layers)
    return stage_parameters(model, [Layer("embedding"), *numbered, Layer("loss")])


@pytest.mark.parametrize("model", ALL)
def test_every_row_is_found_by_its_names(model: ModelConfig) -> None:
    for name, row in rows(model).items():
        assert parameter_of(name, model) == row
        assert not row.experts or parameter_of(expert_name(name, 3), model) == row
        assert row.recomputed in (None, *MODULES)


@pytest.mark.parametrize("model", ALL)
def test_a_gradient_is_complete_where_the_parameter_is_split_and_nowhere_else(model: ModelConfig) -> None:
    """A rank that holds a part has all of the part's gradient; of what is whole it has seen a part of the batch."""
    for name, row in rows(model).items():
        split = any(axis in ("tp", "etp") for axis, _ in row.splits)
        assert (row.gradient == "complete") == split, name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (GROUPED, "layers.4.attention.wq.weight"),
        (GROUPED, "layers.0.attention.wq_a.weight"),
        (GROUPED, "layers.0.moe.router.weight"),
        (GROUPED, "mtp.0.eh_proj.weight"),
        (GROUPED, "norm.bias"),
        (MOE, "layers.0.feed_forward.w1.weight"),
        (MOE, "layers.0.rogue"),
        (MOE, "rogue"),
    ],
)
def test_what_the_model_does_not_have_is_no_parameter(model: ModelConfig, name: str) -> None:
    with pytest.raises(LookupError, match=name):
        parameter_of(name, model)


def test_uses_of_the_embedding_are_owned_by_the_first() -> None:
    tied = ModelConfig(**SMALL, share_embeddings_and_output_weights=True, mtp_num_layers=1)
    layers = parse_layers(["embedding", "decoder.3", "mtp.0", "loss"])
    uses = ("tok_embeddings.weight", "output.weight", "mtp.tok_embeddings.weight")
    assert embedding_uses(tied, layers) == uses
    assert embedding_uses(tied, layers[2:3]) == uses[2:]
    assert {owner_of(name, tied) for name in uses} == {"tok_embeddings.weight"}
    assert not any(parameter_of(name, tied).decayed for name in uses)
    assert owner_of("output.weight", MOE) == "output.weight" and parameter_of("output.weight", MOE).decayed


def test_stages_follow_each_other_in_the_models_order() -> None:
    whole = canonical_names(MOE, parse_layers(["embedding", *(f"decoder.{i}" for i in range(4)), "mtp.0", "loss"]))
    cut = [["embedding", "decoder.0"], [], ["decoder.1", "decoder.2", "decoder.3"], ["mtp.0"], ["loss"]]
    assert sum((canonical_names(MOE, parse_layers(stage)) for stage in cut), ()) == whole
    assert whole[:2] == ("tok_embeddings.weight", "layers.0.attention.wq.weight")
    assert "layers.0.moe.router.expert_bias" not in whole


def test_experts_are_one_row_however_many_there_are() -> None:
    few, many = (ModelConfig(**SMALL, num_moe_experts=count) for count in (4, 512))
    sizes = [kind_parameters(Sizes.of(model), Kind("decoder", True)) for model in (few, many)]
    assert len(sizes[0]) == len(sizes[1])
    assert [row.elements for row in sizes[1] if row.experts] == [128 * row.elements for row in sizes[0] if row.experts]
