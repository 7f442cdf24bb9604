"""The table of parameters and the modules: the same names, shapes and order, and the same parts recomputed."""

import itertools

import pytest
import torch
from cuts import tiny
from torch import nn

from ppctl.geometry.canonical_names import stage_parameters
from ppctl.geometry.layers import Layer, parse_layers
from ppctl.geometry.rows import WHOLE, Parts, Place
from ppctl.model.feed_forward import Experts, FeedForward
from ppctl.model.initialize import initialize
from ppctl.model.layer import DecoderLayer
from ppctl.model.recompute import CHECKPOINTED, MADE_AGAIN
from ppctl.model.stage import build_stage, meta_stage
from ppctl.plan import StageSpec

LATENT = dict(multi_latent_attention=True, kv_lora_rank=10, qk_head_dim=8, qk_pos_emb_head_dim=6, v_head_dim=7)
ATTENTION = {
    "grouped": {},
    "a key per query": {"num_query_groups": None},
    "biases": {"add_qkv_bias": True},
    "norms of heads": {"qk_layernorm": True, "kv_channels": 10},
    "biases everywhere": {"add_bias_linear": True},
    "latent": LATENT | {"q_lora_rank": 12},
    "latent, queries direct": LATENT,
}
FEED_FORWARD = {
    "dense": {},
    "as GPT-3": {"gated_linear_unit": False, "normalization": "LayerNorm"},
    "experts": {"num_moe_experts": 4},
    "experts without gates": {"num_moe_experts": 4, "gated_linear_unit": False},
    "experts in some layers": {"num_moe_experts": 4, "moe_layer_freq": [0, 1, 0, 1], "moe_ffn_hidden_size": 9},
    "shared": {"num_moe_experts": 6, "moe_shared_expert_intermediate_size": 20, "moe_router_enable_expert_bias": True},
}
MODELS = [
    pytest.param(a | f, id=f"{x}, {y}")
    for (x, a), (y, f) in itertools.product(ATTENTION.items(), FEED_FORWARD.items())
    if x != "biases everywhere" or "num_moe_experts" not in f
]
STAGES = (["embedding", "decoder.0"], [], ["decoder.1", "decoder.2"], ["decoder.3", "mtp.0", "mtp.1"], ["loss"])


def of(stage: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in (*stage.named_parameters(), *stage.named_buffers())}


@pytest.mark.parametrize("sizes", MODELS)
@pytest.mark.parametrize("tied", [False, True])
def test_modules_have_the_parameters_of_the_table(sizes, tied):
    model = tiny(**sizes, mtp_num_layers=2, share_embeddings_and_output_weights=tied)
    size = 2 if model.num_moe_experts else 1
    for layers in map(parse_layers, STAGES):
        table = stage_parameters(model, layers)
        stage = meta_stage(layers, model, Parts(ep=Place(size - 1, size)))
        shapes = {n: ((r.experts // size,) if r.experts else ()) + r.shape for n, r in table.items()}
        assert of(stage) == shapes
        assert [n for n, r in table.items() if r.gradient != "none"] == [n for n, _ in stage.named_parameters()]


def rogue_block(self, model, width, kernels):
    """FeedForward with a parameter that nobody told the table of."""
    nn.Module.__init__(self)
    hidden = model.hidden_size
    self.w1 = nn.Linear(hidden, width, bias=False)
    self.w2 = nn.Linear(width, hidden, bias=False)
    self.w3 = nn.Linear(hidden, width, bias=False)
    self.rogue = nn.Parameter(torch.empty(3))


def narrow_block(self, model, width, kernels):
    """FeedForward without a matrix that the table has, and with one of another shape."""
    nn.Module.__init__(self)
    hidden = model.hidden_size
    self.w1 = nn.Linear(hidden, width, bias=False)
    self.w2 = nn.Linear(width + 1, hidden, bias=False)


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (rogue_block, ["layers.0.feed_forward.rogue is (3,) in ppctl/model and no row in the table"]),
        (
            narrow_block,
            [
                "layers.0.feed_forward.w2.weight is (24, 41) in ppctl/model and (24, 40) in the table",
                "layers.0.feed_forward.w3.weight is not there in ppctl/model and (40, 24) in the table",
            ],
        ),
    ],
)
def test_a_stage_with_other_parameters_than_the_table_is_not_built(block, says, monkeypatch):
    spec = StageSpec(0, 0, 0, parse_layers(["embedding", "decoder.0"]), (), (), 0, 0, 0)
    build_stage(spec, tiny(), seed=1, dtype=torch.float32, device="cpu")
    monkeypatch.setattr(FeedForward, "__init__", block)
    with pytest.raises(LookupError) as caught:
        build_stage(spec, tiny(), seed=1, dtype=torch.float32, device="cpu")
    assert all(each in str(caught.value) for each in says)
    assert "ppctl/geometry/parameters.py" in str(caught.value)


def test_a_parameter_without_a_row_has_no_initial_value():
    with pytest.raises(LookupError, match=r"layers\.0\.rogue"):
        initialize({"layers.0.rogue": nn.Parameter(torch.empty(3))}, tiny(), 1, WHOLE)


@pytest.mark.parametrize("sizes", MODELS)
def test_a_row_names_the_recomputed_module_whose_forward_reads_the_parameter(sizes):
    """The part of a layer that is called again is run alone, and gives gradients to what it read."""
    model = tiny(**sizes)
    (layer,) = (Layer("decoder", 1),)
    table = stage_parameters(model, [layer])
    module = build_stage(
        StageSpec(0, 0, 0, (layer,), (), (), 0, 0, 0), model, seed=1, dtype=torch.float32, device="cpu"
    ).layers["1"]
    found = {}
    for name, places in (CHECKPOINTED | MADE_AGAIN).items():
        for path, method in places:
            owner = dict(module.named_modules()).get(path)
            if owner is not None and hasattr(owner, method):
                found = dict.fromkeys(read_by(owner, method, module, model), name) | found  # `experts` is within `moe`
    named = {name.removeprefix("layers.1."): row.recomputed for name, row in table.items() if row.gradient != "none"}
    assert {name: found.get(name) for name in named} == named


def read_by(owner: nn.Module, method: str, layer: DecoderLayer, model) -> list[str]:
    """The parameters of the layer that get a gradient from this method alone."""
    x = torch.randn(1, 64, model.hidden_size)
    if method in ("mix", "activate"):  # no parameters are in reach of these: they are given activations
        return []
    layer.zero_grad()
    if method == "expand":
        turned = model.qk_pos_emb_head_dim
        width = model.q_lora_rank or model.num_attention_heads * (model.qk_head_dim + turned)
        queries, latent = torch.randn(1, 64, width), torch.randn(1, 64, model.kv_lora_rank + turned)
        outputs = owner.expand(queries, latent, torch.ones(64, 2, turned // 2))
    elif isinstance(owner, Experts):
        counts = torch.tensor([64, *[0] * (model.num_moe_experts - 1)])
        outputs = (owner(x[0], torch.ones(64, 1), counts),)
    else:
        outputs = (getattr(owner, method)(x),)
    sum(out.square().sum() for out in outputs if out.requires_grad).backward()
    return [name for name, parameter in layer.named_parameters() if parameter.grad is not None]
