"""Closed forms of parameter counts, whole and cut into stages, against the golden file and our own frozen counts.

The golden file is computed from public configs as well; its rows with `hf_total_size` are confirmed by what Hugging
Face publishes of the files (both Llama 3, Mixtral-8x7B, Qwen3-8B and 30B-A3B, DeepSeek-V3).
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from published_models import CONF, MODELS, NAMES, TOTALS, published

from ppctl.config.schema import ModelConfig
from ppctl.cost import parameter_counts as count
from ppctl.geometry.layers import parse_layers
from ppctl.topology import ParallelSizes

GOLDEN = {
    row["model"]: row
    for row in json.loads((Path(__file__).parents[2] / "golden" / "param_counts.json").read_text())["models"]
}
DEEPSEEK = MODELS["DeepSeek-V3"]


def counted(model: ModelConfig, layer: str = "decoder.0") -> count.Count:
    """The parameters of one layer."""
    return count.stage_count(model, parse_layers([layer]))


def test_every_golden_model_is_tested() -> None:
    assert GOLDEN.keys() == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_the_total_is_exact(name: str) -> None:
    assert count.total_parameters(MODELS[name]) == GOLDEN[name]["params"]


@pytest.mark.parametrize("file", TOTALS)
def test_the_count_of_all_stored_tensors_is_the_frozen_one(file: str) -> None:
    assert count.hugging_face_parameters(published(file)) == TOTALS[file]


def test_every_model_that_is_shipped_is_held_against_a_total() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} - {*NAMES.values(), *TOTALS} == {"tiny"}


@pytest.mark.parametrize("name", [name for name in MODELS if "active" in GOLDEN[name]])
def test_the_active_count_is_exact(name: str) -> None:
    assert count.active_parameters(MODELS[name]) == GOLDEN[name]["active"]


@pytest.mark.parametrize("name", [name for name in MODELS if "active" not in GOLDEN[name]])
def test_all_parameters_of_a_dense_model_are_active(name: str) -> None:
    assert count.active_parameters(MODELS[name]) == count.total_parameters(MODELS[name])


@pytest.mark.parametrize("name", [name for name in MODELS if "hf_total_size" in GOLDEN[name] and name != "DeepSeek-V3"])
def test_hugging_face_stores_two_bytes_for_each_parameter(name: str) -> None:
    assert 2 * count.hugging_face_parameters(MODELS[name]) == GOLDEN[name]["hf_total_size"]


def test_deepseek_v3_to_the_last_parameter() -> None:
    assert count.mtp_parameters(DEEPSEEK) == 11_610_068_224
    assert count.hugging_face_parameters(DEEPSEEK) == GOLDEN["DeepSeek-V3"]["params_with_mtp_hf"] == 684_489_845_504
    assert counted(DEEPSEEK, "decoder.0").total() == 583_483_392
    assert counted(DEEPSEEK, "decoder.3").total() == 11_507_286_272
    assert counted(DEEPSEEK, "embedding").total() == 926_679_040


@pytest.mark.parametrize(
    ("layers", "params", "replicated"),
    [
        (("embedding", "decoder.0", "decoder.1", "decoder.2"), 926_679_040 + 3 * 583_483_392, 0),
        (("decoder.3", "decoder.4"), 2 * 11_507_286_272, 0),
        (("mtp.0",), 11_610_068_224 + 926_679_040, 926_679_040),
        (("decoder.60",), 11_507_286_272 + 7168, 0),  # and the final norm, which MTP reads
        (("loss",), 926_679_040, 0),
        ((), 0, 0),
    ],
)
def test_a_stage_holds_its_layers_and_its_copies(layers: tuple[str, ...], params: int, replicated: int) -> None:
    assert count.stage_count(DEEPSEEK, parse_layers(layers)).total() == params
    assert count.replicated_parameters(DEEPSEEK, parse_layers(layers)) == replicated


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tied", [False, True])
def test_stages_without_their_copies_add_up_to_the_model(name: str, tied: bool) -> None:
    model = replace(MODELS[name], share_embeddings_and_output_weights=tied)
    decoders = [f"decoder.{i}" for i in range(model.num_layers)]
    mtp = [f"mtp.{i}" for i in range(model.mtp_num_layers or 0)]
    cut = [["embedding", *decoders[:3]], decoders[3:10], [], [*decoders[10:], *mtp], ["loss"]]
    stages = [parse_layers(stage) for stage in cut]
    built = sum(count.stage_count(model, stage).total() - count.replicated_parameters(model, stage) for stage in stages)
    assert built == count.total_parameters(model) + count.mtp_parameters(model)


def test_tying_saves_one_table_and_counts_as_a_copy() -> None:
    model = ModelConfig()
    tied = replace(model, share_embeddings_and_output_weights=True)
    table = model.vocab_size * model.hidden_size
    assert count.total_parameters(model) - count.total_parameters(tied) == table
    assert count.replicated_parameters(tied, parse_layers(["embedding", "decoder.0", "loss"])) == table


@pytest.mark.parametrize(
    ("option", "more"),
    [
        (dict(add_qkv_bias=True), 256 + 2 * 64),
        (dict(qk_layernorm=True), 2 * 32),
        (dict(num_query_groups=8), 2 * 256 * (256 - 64)),
        (dict(kv_channels=64), 256 * 32 * (2 * 8 + 2 * 2)),
    ],
)
def test_what_an_option_adds_to_an_attention_block(option: dict[str, int], more: int) -> None:
    plain = ModelConfig(hidden_size=256, num_attention_heads=8, num_query_groups=2)
    assert counted(replace(plain, **option)).total() - counted(plain).total() == more


def test_latent_attention_without_a_compressed_query() -> None:
    model = replace(DEEPSEEK, q_lora_rank=None)
    with_q, without = counted(DEEPSEEK).total(), counted(model).total()
    assert without - with_q == 7168 * 128 * 192 - (7168 * 1536 + 1536 + 1536 * 128 * 192)


def test_tensor_and_expert_parallelism_divide_what_they_split() -> None:
    layer = counted(DEEPSEEK, "decoder.3")
    split, whole, experts = layer["tp",], layer[()], layer["ep", "etp"]
    assert split + whole + experts == layer.total()
    assert count.on_device(layer, ParallelSizes(1)) == (split + whole, experts)
    assert count.on_device(layer, ParallelSizes(2, tp=2, edp=2)) == (split // 2 + whole, experts)
    assert count.on_device(layer, ParallelSizes(64, dp=64, ep=64)) == (split + whole, experts // 64)
    assert count.on_device(layer, ParallelSizes(4, tp=4, etp=2, ep=2)) == (split // 4 + whole, experts // 4)
    assert experts == 256 * 3 * 7168 * 2048
