"""A stage computes what the family's public implementation computes, however the model is cut."""

import pytest
import torch
from cuts import cut, tiny
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ppctl.geometry.canonical_names import canonical_names
from ppctl.geometry.layers import parse_layers
from ppctl.model.loss import token_losses
from ppctl.model.stage import build_stage, meta_stage
from ppctl.parallel.ties import tied_uses

HF_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "ffn_norm": "post_attention_layernorm",
}


def build(spec, model, seed=7, dtype=torch.float32):
    return build_stage(spec, model, seed=seed, dtype=dtype, device="cpu")


def hf_name(name):
    top = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not name.startswith("layers."):
        return top.get(name, "lm_head.weight")
    _, layer, rest = name.split(".", 2)
    inner, kind = rest.rsplit(".", 1)
    return f"model.layers.{layer}.{HF_NAMES[inner]}.{kind}"


def hf_model(kind, config, model):
    return kind(
        config(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_query_groups or model.num_attention_heads,
            head_dim=model.kv_channels or model.hidden_size // model.num_attention_heads,
            rms_norm_eps=model.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": model.rotary_base},
            tie_word_embeddings=model.share_embeddings_and_output_weights,
        )
    )


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


LLAMA, QWEN2, QWEN3 = (
    (LlamaForCausalLM, LlamaConfig),
    (Qwen2ForCausalLM, Qwen2Config),
    (Qwen3ForCausalLM, Qwen3Config),
)


@pytest.mark.parametrize(
    ("family", "model"),
    [
        pytest.param(LLAMA, tiny(), id="llama, grouped queries"),
        pytest.param(LLAMA, tiny(num_query_groups=None), id="llama, a key per query"),
        pytest.param(LLAMA, tiny(num_query_groups=1, kv_channels=10), id="llama, one key, wide heads"),
        pytest.param(LLAMA, tiny(rotary_base=500.0, norm_epsilon=1e-2), id="llama, other constants"),
        pytest.param(LLAMA, tiny(share_embeddings_and_output_weights=True), id="llama, tied"),
        pytest.param(QWEN2, tiny(add_qkv_bias=True), id="qwen2, bias"),
        pytest.param(QWEN3, tiny(qk_layernorm=True), id="qwen3, normalised queries and keys"),
    ],
)
@pytest.mark.parametrize("layout", ["EttttL", "E|t|tt||t|L"])
def test_logits_and_gradients_equal_those_of_transformers(family, model, layout):
    theirs = hf_model(*family, model)
    stages = [build(spec, model) for spec in cut(layout, 1)]
    ours = {name: p for stage in stages for name, p in stage.canonical_parameters().items()}
    with torch.no_grad():
        for parameter in ours.values():
            if parameter.dim() == 1:  # ones and zeros would hide a norm or bias that is not applied
                parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()))
    assert {hf_name(name) for name in ours} == set(theirs.state_dict())
    theirs.load_state_dict({hf_name(name): p.detach() for name, p in ours.items()})
    tokens, labels = torch.randint(model.vocab_size, (2, 3, 9), generator=torch.Generator().manual_seed(1))

    expected = theirs(tokens).logits
    token_losses(expected, labels).mean().backward()
    x = tokens
    for stage in stages:
        (x,) = stage(x)
    token_losses(x, labels).mean().backward()

    assert relative(x, expected) <= 1e-5
    theirs_by_name = dict(theirs.named_parameters())
    for name, parameter in ours.items():
        gradient = parameter.grad
        if model.share_embeddings_and_output_weights and name in ("tok_embeddings.weight", "output.weight"):
            gradient = ours["tok_embeddings.weight"].grad + ours["output.weight"].grad
            name = "tok_embeddings.weight"
        assert relative(gradient, theirs_by_name[hf_name(name)].grad) <= 1e-5, name


@pytest.mark.parametrize(
    ("layers", "given", "returned"),
    [
        (("embedding",), "tokens", 24),
        (("embedding", "decoder.0"), "tokens", 24),
        (("decoder.1",), "hidden", 24),
        ((), "hidden", 24),
        (("loss",), "hidden", 52),
        (("decoder.3", "loss"), "hidden", 52),
        (("embedding", "decoder.0", "loss"), "tokens", 52),
    ],
)
def test_a_stage_takes_tokens_or_hidden_states_and_returns_hidden_states_or_logits(layers, given, returned):
    stage = meta_stage(parse_layers(layers), tiny()).to_empty(device="cpu")
    x = torch.zeros(2, 5, dtype=torch.int64) if given == "tokens" else torch.zeros(2, 5, 24)
    assert stage(x)[0].shape == (2, 5, returned)


def test_an_empty_stage_passes_its_input_on_as_another_node_of_the_graph():
    stage = build(cut("Ett||ttL", 1)[1], tiny())
    x = torch.randn(1, 3, 24, requires_grad=True)
    (y,) = stage(x)
    assert torch.equal(x, y)
    assert y is not x and y.grad_fn is not None and y.data_ptr() != x.data_ptr()
    y.backward(torch.full_like(y, 2.0))
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_a_later_token_changes_no_earlier_logit():
    model = tiny()
    stage = build(cut("EttttL", 1)[0], model)
    tokens = torch.randint(model.vocab_size, (1, 8))
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % model.vocab_size
    (a,), (b,) = stage(tokens), stage(other)
    assert torch.equal(a[0, :5], b[0, :5]) and not torch.equal(a[0, 5:], b[0, 5:])


def test_rotary_tables_are_made_once_a_stage_and_are_no_parameters():
    stage = build(cut("EttttL", 1)[0], tiny())
    made = []
    compute = stage.rotary._compute
    stage.rotary._compute = lambda length, like: made.append(length) or compute(length, like)
    for length in (9, 9, 4, 9, 12, 12):
        stage(torch.zeros(1, length, dtype=torch.int64))
    assert made == [9, 12]
    assert set(stage.state_dict()) == set(stage.canonical_parameters())


def test_training_works_after_generation_made_the_rotary_tables():
    stage = build(cut("EttttL", 1)[0], tiny())
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    with torch.inference_mode():
        stage(tokens)
    stage(tokens)[0].sum().backward()
    assert stage.output.weight.grad is not None


def test_rotary_positions_do_not_depend_on_the_longest_sequence_seen():
    model = tiny()
    fresh, used = (build(cut("EttttL", 1)[0], model) for _ in range(2))
    used(torch.zeros(1, 40, dtype=torch.int64))
    tokens = torch.arange(6)[None]
    assert torch.equal(fresh(tokens)[0], used(tokens)[0])


def test_canonical_names_of_the_stages_follow_each_other_in_the_models_order():
    model = tiny()
    whole = canonical_names(model, cut("EttttL", 1)[0].layers)
    for layout in ("E|t|tt||t|L", "Ett|ttL"):
        assert tuple(name for spec in cut(layout, 1) for name in canonical_names(model, spec.layers)) == whole
    assert whole[:3] == ("tok_embeddings.weight", "layers.0.attention.wq.weight", "layers.0.attention.wk.weight")
    assert whole[-2:] == ("norm.weight", "output.weight")


def test_uses_of_a_tied_embedding_are_embedding_then_output():
    stages = cut("Et|t|t|tL", 2)
    pipeline = (6, 7)
    assert tied_uses(stages, tiny(), pipeline) == ()
    assert tied_uses(stages, tiny(share_embeddings_and_output_weights=True), pipeline) == (
        (6, "tok_embeddings.weight"),
        (7, "output.weight"),
    )
