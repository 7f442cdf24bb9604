"""The value that a child process makes of a model: parameters, parts, costs; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from foreign_models import FEW, OTHERS, config_of
from foreign_models import described as described_once

from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.cost.activations import stage_activations
from ppctl.cost.flops import stage_flops
from ppctl.cost.parameter_counts import active_parameters, total_parameters
from ppctl.cost.setting import TORCH_ON_CPU, Setting
from ppctl.errors import ConfigError
from ppctl.foreign.describe import _experts, describe, main
from ppctl.foreign.library import make_model, read_own_config
from ppctl.geometry.canonical_names import parameter_of
from ppctl.geometry.foreign_model import ForeignModel
from ppctl.geometry.layers import Layer
from ppctl.launch.described import other_version
from ppctl.plan.build import build_plan


def described(kind: str, tmp_path: Path, **overrides: str) -> ForeignModel:
    config_of(kind).save_pretrained(tmp_path / kind)
    return described_once(tmp_path / kind, overrides)


def config_with(found: ForeignModel) -> ModelConfig:
    return ModelConfig(**found.sizes, transformers=found.to_text())


@pytest.mark.parametrize("kind", [*FEW, *(pytest.param(kind, marks=pytest.mark.whole) for kind in OTHERS)])
def test_a_description_has_all_parameters_and_comes_back_from_its_text(kind: str, tmp_path: Path) -> None:
    found = described(kind, tmp_path)
    assert ForeignModel.from_text(found.to_text()) == found
    assert not any("estimated" in note for note in found.notes), "its own code was not measured"
    model, whole = config_with(found), make_model(config_of(kind), "meta")
    assert total_parameters(model) == sum(p.numel() for p in whole.parameters()) + sum(
        buffer.numel() for name, buffer in whole.named_buffers() if name in whole.state_dict()
    )
    # By this, as of ppctl's own blocks, a run knows that products have other sizes in every step.
    assert (active_parameters(model) < total_parameters(model)) == (_experts(config_of(kind)) is not None)
    for name, parameter in whole.named_parameters():
        assert parameter_of(name, model).shape == tuple(parameter.shape)


def test_products_and_causal_scores_are_counted_as_for_ppctls_own_blocks(tmp_path: Path) -> None:
    ours = ModelConfig(
        num_layers=4, hidden_size=24, ffn_hidden_size=40, num_attention_heads=4, num_query_groups=2, vocab_size=320
    )
    layers = [Layer("decoder", 0), Layer("decoder", 1), Layer("loss")]
    theirs = config_with(described("Llama", tmp_path))
    assert stage_flops(theirs, layers, 2, 32) == stage_flops(ours, layers, 2, 32)


def test_another_version_of_the_library_than_the_one_that_was_proved_is_told(tmp_path: Path) -> None:
    found = described("Llama", tmp_path)
    assert other_version(config_with(found)) is None and other_version(ModelConfig()) is None
    said = other_version(config_with(found._replace(transformers="5.0.0")))
    assert said is not None and f"transformers 5.0.0, but {found.transformers} is installed" in said


def test_layers_are_told_apart_by_structure(tmp_path: Path) -> None:
    found = described("DeepseekV3", tmp_path)
    assert found.layers == (0, 0, 1, 1)
    (said,) = (
        each for each in build_plan(RunConfig(model=config_with(found))).derived if each.key == "kinds of layers"
    )
    assert said.value == 2 and "2 with mlp=DeepseekV3MoE" in said.equation and "(layers 2, 3)" in said.equation


def test_dropout_is_refused_with_the_keys_that_set_it_to_0(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_layer=2, n_embd=24, n_head=4, vocab_size=320).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        describe(tmp_path, {"attn_pdrop": "0"})
    (problem,) = caught.value.problems
    assert problem.code == "PP-E529"
    assert problem.remedy == "model.hf_overrides.resid_pdrop=0 model.hf_overrides.embd_pdrop=0"
    overrides = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), "0")
    assert json.loads(describe(tmp_path, overrides).config)["attn_pdrop"] == 0


def test_noise_of_routers_is_refused_with_a_number_that_the_config_takes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.PhimoeConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        describe(tmp_path, {})
    (problem,) = caught.value.problems
    assert problem.code == "PP-E529"
    words = [word.removeprefix("model.hf_overrides.").split("=") for word in problem.remedy.split()]
    assert [name for name, _ in words] == ["router_jitter_noise"]
    assert read_own_config(tmp_path, dict(words)).router_jitter_noise == 0.0


def test_a_child_writes_a_description_or_its_problems(tmp_path: Path) -> None:
    config_of("Llama").save_pretrained(tmp_path)
    out = tmp_path / "answer.json"
    assert main([str(tmp_path), str(out)]) == 0
    assert ForeignModel.from_text(json.loads(out.read_text())["model"]).anatomy.layers == "model.layers"
    assert main([str(tmp_path), str(out), "--overrides", '{"nothing": "1"}']) == 0
    assert "nothing: the config of llama has no such field" in json.loads(out.read_text())["problems"][0]["message"]


def test_measured_bytes_are_those_of_the_same_blocks_of_ppctls_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=176, num_attention_heads=4, vocab_size=320)
    transformers.LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=1024).save_pretrained(tmp_path)
    found = describe(tmp_path, {})
    ours = ModelConfig(
        num_layers=2, hidden_size=64, ffn_hidden_size=176, num_attention_heads=4, num_query_groups=2, vocab_size=320
    )
    setting = Setting(2, 512, 4, allocator=TORCH_ON_CPU)
    tables = 2 * 512 * 16 * 4  # cosines and sines, which every forward makes anew
    gate = 2 * 512 * 176 * 4  # activated, of each layer, which ppctl's own backward computes again
    for layers in ([Layer("decoder", 0), Layer("decoder", 1)], [Layer("decoder", 1)]):
        theirs, own = (stage_activations(model, layers, setting) for model in (config_with(found), ours))
        assert (theirs.kept - tables - gate * len(layers), theirs.in_backward) == (own.kept, own.in_backward)


def test_modules_are_named_as_the_model_names_them(tmp_path: Path) -> None:
    model = config_with(described("GPT2", tmp_path))
    parts = [["transformer.wte", "wpe", "h.0"], ["transformer.h.1", "h.2", "h.3", "transformer.ln_f", "lm_head"]]
    config = RunConfig(model=model)
    config.parallel.pipeline_model_parallel_size = 2
    config.pipeline.module_fqns_per_model_part = parts
    assert build_plan(config).layout == "Et|t*3L"
    config.pipeline.module_fqns_per_model_part = [*parts, ["vision"]]
    with pytest.raises(ConfigError, match=r"'vision' in part 2; this model has transformer\.wte"):
        build_plan(config)


@pytest.mark.parametrize(
    ("kind", "method", "remedy"),
    [("Cohere", "gptq", ""), ("DeepseekV3", "fp8", "model.implementation=ppctl")],
)
def test_weights_in_few_bits_are_refused_by_name(kind: str, method: str, remedy: str, tmp_path: Path) -> None:
    config_of(kind).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    quantised = {"quantization_config": {"quant_method": method, "bits": 8}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantised))
    with pytest.raises(ConfigError, match=rf"quantization_config \({method}\)") as caught:
        describe(tmp_path, {})
    (problem,) = caught.value.problems
    assert (problem.code, problem.remedy) == ("PP-E550", remedy)
    assert read_own_config(tmp_path, {"quantization_config": "null"}).quantization_config is None


def test_a_plan_counts_what_a_hop_carries_of_the_routers_before_it(tmp_path: Path) -> None:
    plans, models = {}, {}
    for loss in ("true", "false"):
        (tmp_path / loss).mkdir()
        found = described("Qwen2Moe balanced", tmp_path / loss, output_router_logits=loss)
        models[loss] = config_with(found)
        config = RunConfig(model=models[loss])
        config.parallel.pipeline_model_parallel_size = 4
        config.parallel.pipeline_model_parallel_layout = "Et|t|t|tL"
        config.data.seq_length, config.train.micro_batch_size = 16, 2
        config.launch.device, config.launch.gpus_per_node = "cpu", 4
        plans[loss] = build_plan(config)
    state = (2, 16, 24)
    edges = [[spec.shape for spec in stage.sends] for stage in plans["true"].stages]
    assert edges == [[state], [state, (1, 32, 4)], [state, (1, 32, 4)], []]
    assert all(len(stage.sends) <= 1 for stage in plans["false"].stages)
    one = 32 * 4 * 4
    more = [
        a.message_bytes - b.message_bytes for a, b in zip(plans["true"].pp_ranks, plans["false"].pp_ranks, strict=True)
    ]
    # A rank receives activations from the one before it and gradients from the one behind it.
    assert [each > 0 for each in more] == [False, True, True, True]
    kept = [
        stage_activations(models["true"], stage.layers, Setting(2, 16, 4)).kept
        - stage_activations(models["false"], stage.layers, Setting(2, 16, 4)).kept
        for stage in plans["true"].stages
    ]
    assert kept == [0, 0, one, one + 2 * one]


def test_routers_that_record_what_no_hop_carries_are_refused_with_the_way_to_do_without(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    experts = dict(is_moe=True, num_experts=16, num_experts_per_tok=2, output_router_logits=True)
    sizes = dict(vocab_size=320, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40)
    transformers.DogeConfig(**sizes, **experts).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"record \[2, 15, 4\] for 3 x 5 tokens") as caught:
        describe(tmp_path, {})
    (problem,) = caught.value.problems
    assert (problem.code, problem.remedy) == ("PP-E528", "model.hf_overrides.output_router_logits=false")
    assert describe(tmp_path, {"output_router_logits": "false"}).router_logits is None
