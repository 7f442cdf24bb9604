"""Weights move from Hugging Face's directories to checkpoints and back without losing a bit, or not at all."""

import itertools
import json
import shutil
import struct
from dataclasses import asdict, replace

import pytest
import torch
import transformers
from hugging_face_models import DENSE, LEFT_OUT, MOE, hugging_face_model, our_logits, relative, saved_model
from safetensors.torch import load_file, save_file
from verified import verify

from ppctl.checkpoint.manifest import read_manifest
from ppctl.checkpoint.reading import CheckpointReader
from ppctl.checkpoint.saver import save_streamed
from ppctl.cli.main import main
from ppctl.config.schema import ModelConfig
from ppctl.errors import CheckpointError, ConfigError
from ppctl.families.directory import model_tensors, open_directory
from ppctl.pretrained import hugging_face
from ppctl.pretrained.command import main as convert_command
from ppctl.pretrained.hugging_face import (
    DirectoryReader,
    dequantised,
    export_checkpoint,
    import_directory,
    write_shards,
)


def silent(*_):
    """Progress that nobody watches."""


def values(directory):
    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype and torch.equal(value, b[name]), name


@pytest.mark.parametrize("name", [*DENSE, *MOE])
def test_import_and_export_give_the_same_bits_and_the_same_model(name, tmp_path):
    theirs = hugging_face_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    imported = import_directory(tmp_path / "theirs", tmp_path / "ours", silent)
    verify(imported.path)
    exported = export_checkpoint(imported.path, tmp_path / "back", silent)
    assert_equal(values(tmp_path / "back"), values(tmp_path / "theirs"))
    assert exported.parameters == sum(value.numel() for value in values(tmp_path / "theirs").values())
    tokens = torch.arange(22).view(2, 11)
    assert torch.equal(type(theirs).from_pretrained(tmp_path / "back").eval()(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("name", [*DENSE, *MOE])
def test_logits_equal_those_of_transformers_in_one_stage_and_in_eight(name, tmp_path):
    theirs = hugging_face_model(name)
    theirs.save_pretrained(tmp_path)
    tokens = torch.arange(22).view(2, 11)
    expected = theirs(tokens).logits
    for layout in ("EttttL", "E|t|t||t|t||L"):
        assert relative(our_logits(tmp_path, tokens, layout), expected) <= 1e-5, layout


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_config_json_leaves_out_computes_what_it_computes_in_transformers(name, tmp_path):
    """Read by both from one file, and written by ppctl: with the numbers that were left out."""
    theirs, tokens = saved_model(name, tmp_path / "theirs"), torch.arange(44).view(2, 22)
    expected = theirs(tokens).logits
    assert relative(our_logits(tmp_path / "theirs", tokens), expected) <= 1e-5
    imported = import_directory(tmp_path / "theirs", tmp_path / "ours", silent)
    export_checkpoint(imported.path, tmp_path / "back", silent)
    assert torch.equal(type(theirs).from_pretrained(tmp_path / "back").eval()(tokens).logits, expected)


def test_many_files_are_read_and_written_through_their_index(tmp_path, monkeypatch):
    theirs = hugging_face_model("qwen3").bfloat16()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    imported = import_directory(tmp_path / "theirs", tmp_path / "ours", silent)
    monkeypatch.setattr(hugging_face, "SHARD", 9_000)
    exported = export_checkpoint(imported.path, tmp_path / "back", silent)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    assert index["metadata"]["total_size"] == exported.bytes == 2 * exported.parameters
    assert_equal(values(tmp_path / "back"), values(tmp_path / "theirs"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    begins = [8 + int.from_bytes(file.read_bytes()[:8], "little") for file in (tmp_path / "back").glob("*.safetensors")]
    assert not any(begin % 64 for begin in begins)  # a mapped file's tensors lie as tensors in memory do


def test_a_tokenizers_files_go_where_the_weights_go(tmp_path):
    hugging_face_model("llama").save_pretrained(tmp_path / "theirs")
    files = {"tokenizer.json": "{}", "tokenizer_config.json": '{"eos_token": "</s>"}', "merges.txt": "a b"}
    for name, content in (files | {"README.md": "not a tokenizer's"}).items():
        (tmp_path / "theirs" / name).write_text(content)
    imported = import_directory(tmp_path / "theirs", tmp_path / "ours", silent)
    done = export_checkpoint(imported.path, tmp_path / "back", silent)
    assert done.tokenizer == f"the tokenizer of {tmp_path / 'theirs'}"
    assert {name: (tmp_path / "back" / name).read_text() for name in files} == files
    assert not (tmp_path / "back" / "README.md").exists()
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    assert "is not there any more" in export_checkpoint(imported.path, tmp_path / "later", silent).tokenizer
    assert (tmp_path / "later" / "config.json").exists()


# --- settings that ppctl does not own ------------------------------------------------------------------------------

SETTINGS = {"bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": None, "use_cache": False, "my_own": {"a": 1}}
STALE = {"dtype": "float16", "auto_map": {"AutoConfig": "x.Y"}, "rope_parameters": {"rope_theta": 500.0}}


@pytest.fixture
def with_settings(tmp_path):
    """A model's directory as people publish it, and how it is written back by a run of given state."""
    source = tmp_path / "theirs"
    hugging_face_model("glm4_moe").save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **SETTINGS, **STALE, "num_nextn_predict_layers": 0}))
    (source / "generation_config.json").write_text('{"temperature": 0.6}')
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    model, numbers = open_directory(source).model, itertools.count()

    def exported(**state):
        """config.json that a checkpoint of this state is exported with, and what is said of it."""
        number = next(numbers)
        path, _ = checkpoint_of(model, tmp_path / f"run{number}", more=state)
        done = export_checkpoint(path, tmp_path / f"back{number}", silent)
        return json.loads((done.path / "config.json").read_text()), done

    return source, exported


def test_an_export_keeps_what_the_source_says_beside_the_model(with_settings, tmp_path):
    source, exported = with_settings
    config, done = exported(source=str(source))
    assert {key: config[key] for key in SETTINGS} == SETTINGS
    assert not {*STALE} & {*config} and config["torch_dtype"] == "float32"
    assert (done.path / "generation_config.json").read_text() == '{"temperature": 0.6}'
    assert str(source) in done.settings and "generation_config.json" in done.settings
    assert transformers.GenerationConfig.from_pretrained(done.path).temperature == 0.6
    assert transformers.AutoConfig.from_pretrained(done.path).eos_token_id == [4, 5]
    assert "bos_token_id" not in exported()[0] and exported()[1].settings == ""


def test_the_source_is_known_to_imports_and_to_runs_that_began_with_either(with_settings, tmp_path):
    source, exported = with_settings
    imported = import_directory(source, tmp_path / "ours", silent)
    config = export_checkpoint(imported.path, tmp_path / "back", silent)
    assert str(source) in config.settings
    for began in (source, imported.path):
        assert exported(from_=str(began))[0]["eos_token_id"] == [4, 5], began
    shutil.rmtree(source)
    config, done = exported(from_=str(imported.path))
    assert "eos_token_id" not in config and "is not there any more" in done.settings


def test_tokens_are_not_kept_where_training_took_another_tokenizer(with_settings, tmp_path):
    source, exported = with_settings
    config, done = exported(source=str(source), tokenizer_path=str(tmp_path / "another"))
    assert config["my_own"] == {"a": 1} and "eos_token_id" not in config
    assert not (done.path / "generation_config.json").exists() and "another tokenizer" in done.settings


# --- multi-token prediction ----------------------------------------------------------------------------------------

MTP = ModelConfig(
    num_layers=2, hidden_size=24, ffn_hidden_size=40, num_attention_heads=4, vocab_size=52, mtp_num_layers=1,
    multi_latent_attention=True, rotary_interleaved=True, q_lora_rank=10, kv_lora_rank=14, qk_head_dim=6,
    qk_pos_emb_head_dim=8, v_head_dim=6, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=16, moe_layer_freq="[0]*1+[1]*1", moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)  # fmt: skip


def checkpoint_of(model, directory, dtype=torch.float32, said=None, more=None):
    """A checkpoint of random weights, whose state says that it is of the model `said`, and `more`."""
    generator = torch.Generator().manual_seed(3)
    weights = {
        f"model.{n}": torch.randn(shape, generator=generator).to(dtype) for n, shape in model_tensors(model).items()
    }
    specs = {name: weight.to("meta") for name, weight in weights.items()}
    more = dict(more or {})
    came = {"from_": more.pop("from_", None)}
    state = {"step": 7, "model": {**asdict(said or model), **came}, **more}
    return save_streamed(directory, 7, specs, weights.__getitem__, state), weights


def test_multi_token_prediction_is_stored_with_its_copies_and_read_back(tmp_path):
    path, weights = checkpoint_of(MTP, tmp_path / "run")
    export_checkpoint(path, tmp_path / "theirs", silent)
    stored = values(tmp_path / "theirs")
    assert torch.equal(stored["model.layers.2.embed_tokens.weight"], weights["model.tok_embeddings.weight"])
    assert torch.equal(stored["model.layers.2.shared_head.head.weight"], weights["model.output.weight"])
    assert torch.equal(
        stored["model.layers.2.mlp.experts.3.up_proj.weight"], weights["model.mtp.0.layer.moe.experts.3.w3.weight"]
    )
    reader = DirectoryReader(open_directory(tmp_path / "theirs"))
    reader.check_copies()
    assert_equal({f"model.{name}": reader.tensor(name) for name in reader.directory.names}, weights)


def test_multi_token_prediction_is_left_out_where_that_is_asked_for(tmp_path):
    path, _ = checkpoint_of(MTP, tmp_path / "run")
    export_checkpoint(path, tmp_path / "with", silent)
    export_checkpoint(path, tmp_path / "without", silent, mtp=False)
    said = {name: json.loads((tmp_path / name / "config.json").read_text()) for name in ("with", "without")}
    assert [said[name]["num_nextn_predict_layers"] for name in said] == [1, 0]
    rest = values(tmp_path / "without")
    assert_equal(rest, {n: v for n, v in values(tmp_path / "with").items() if not n.startswith("model.layers.2.")})
    done = import_directory(tmp_path / "with", tmp_path / "ours", silent, mtp=False)
    assert done.parameters == sum(value.numel() for value in rest.values())


def test_copies_that_differ_are_refused(tmp_path):
    path, _ = checkpoint_of(MTP, tmp_path / "run")
    export_checkpoint(path, tmp_path / "theirs", silent)
    file = tmp_path / "theirs" / "model.safetensors"
    stored = load_file(file)
    stored["model.layers.2.embed_tokens.weight"][3, 4] += 1
    save_file(stored, file)
    with pytest.raises(CheckpointError, match="holds copies") as caught:
        import_directory(tmp_path / "theirs", tmp_path / "ours", silent)
    assert caught.value.problems[0].place == "model.layers.2.embed_tokens.weight"
    assert not (tmp_path / "ours").exists()


def test_biases_of_routers_stay_in_float32_when_weights_are_rounded(tmp_path):
    path, _ = checkpoint_of(MTP, tmp_path / "run")
    export_checkpoint(path, tmp_path / "theirs", silent, dtype=torch.bfloat16)
    dtypes = {name: value.dtype for name, value in values(tmp_path / "theirs").items()}
    assert {name for name, dtype in dtypes.items() if dtype != torch.bfloat16} == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)
    }


# --- 8-bit floats --------------------------------------------------------------------------------------------------


def test_blocks_of_8_bit_floats_are_multiplied_by_their_scales():
    weight = torch.randn(5, 7).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2) + 0.5
    found = dequantised(weight, scale, (2, 4))
    assert found.dtype == torch.bfloat16
    for i in range(5):
        for j in range(7):
            assert found[i, j] == (weight[i, j].float() * scale[i // 2, j // 4]).bfloat16()


def test_8_bit_weights_are_imported_in_bfloat16(tmp_path):
    path, weights = checkpoint_of(MTP, tmp_path / "run", torch.bfloat16)
    export_checkpoint(path, tmp_path / "theirs", silent)
    file = tmp_path / "theirs" / "model.safetensors"
    stored, name = load_file(file), "model.layers.0.self_attn.kv_b_proj.weight"
    expected = stored[name].float()
    scale = torch.full((2, 1), 0.25)  # 48 x 14 in blocks of 32 x 32
    stored[name] = (expected / 0.25).to(torch.float8_e4m3fn)
    stored[f"{name}_scale_inv"] = scale
    save_file(stored, file)
    config = tmp_path / "theirs" / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "quantization_config": {"weight_block_size": [32, 32]}})
    )
    reader = DirectoryReader(open_directory(tmp_path / "theirs"))
    found = reader.tensor("layers.0.attention.wkv_b.weight")
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected, rtol=2**-4, atol=2**-8)
    done = import_directory(tmp_path / "theirs", tmp_path / "ours", silent)
    assert done.parameters == sum(weight.numel() for weight in weights.values())


LARGER = replace(
    MTP, mtp_num_layers=None, kv_lora_rank=150, qk_head_dim=30, v_head_dim=35, q_lora_rank=None
)  # wkv_b is 260 x 150


@pytest.fixture
def eight_bits(tmp_path):
    """Like a published DeepSeek: blocks of 128 x 128, cut off at the edges, each with a scale of its own."""
    path, _ = checkpoint_of(LARGER, tmp_path / "run", torch.bfloat16)
    export_checkpoint(path, tmp_path / "theirs", silent)
    file = tmp_path / "theirs" / "model.safetensors"
    stored, name = load_file(file), "model.layers.1.self_attn.kv_b_proj.weight"
    stored[name] = (stored[name].float() * 8).to(torch.float8_e4m3fn)
    stored[f"{name}_scale_inv"] = torch.arange(1, 7).reshape(3, 2) / 16
    config = tmp_path / "theirs" / "config.json"
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": quantised}))
    save_file(stored, file)
    return file, stored, name


def test_blocks_at_the_edges_of_a_matrix_are_smaller_ones(eight_bits, tmp_path):
    file, stored, name = eight_bits
    done = import_directory(file.parent, tmp_path / "ours", silent)
    found = CheckpointReader(done.path, read_manifest(done.path)).tensor("model.layers.1.attention.wkv_b.weight")
    assert found.shape == (260, 150) and found.dtype == torch.bfloat16
    for row, column in itertools.product((0, 127, 128, 255, 256, 259), (0, 127, 128, 149)):
        scale = stored[f"{name}_scale_inv"][row // 128, column // 128]
        assert found[row, column] == (stored[name][row, column].float() * scale).bfloat16(), (row, column)


@pytest.mark.parametrize("rows", [None, 2], ids=["no scales", "scales of whole blocks alone"])
def test_8_bit_weights_whose_scales_do_not_fit_are_named(eight_bits, tmp_path, capsys, rows):
    file, stored, name = eight_bits
    scale = stored.pop(f"{name}_scale_inv")
    save_file(stored if rows is None else stored | {f"{name}_scale_inv": scale[:rows].contiguous()}, file)
    assert convert_command(["import", str(file.parent), str(tmp_path / "ours")]) == 3
    assert f"{name} (model.safetensors): F8_E4M3[260, 150] stored" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    hugging_face_model("llama").save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    return tmp_path / "theirs"


def refused(saved, error, code):
    """The problem with which an import ends, by the command as well; nothing is written."""
    with pytest.raises(error) as caught:
        import_directory(saved, saved.parent / "ours", silent)
    assert convert_command(["import", str(saved), str(saved.parent / "ours")]) == error.exit_code
    assert [path.name for path in saved.parent.iterdir()] == ["theirs"]
    (problem,) = caught.value.problems
    assert problem.code == code
    return problem


def test_a_truncated_shard_is_named_with_its_tensors(saved):
    shard = sorted(saved.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    problem = refused(saved, CheckpointError, "PP-E523")
    assert str(shard) in problem.message and problem.place.startswith("model.layers.")


def test_a_shard_that_ends_in_its_header_is_named(saved):
    shard = sorted(saved.glob("*.safetensors"))[0]
    shard.write_bytes(struct.pack("<Q", 10**6) + b"{}")
    assert str(shard) in refused(saved, CheckpointError, "PP-E523").message


def test_a_shard_that_is_gone_is_named(saved):
    shard = sorted(saved.glob("*.safetensors"))[2]
    shard.unlink()
    assert str(shard) in refused(saved, CheckpointError, "PP-E523").message


def test_an_entry_that_the_index_lacks_is_named(saved):
    index = saved / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.layers.2.mlp.up_proj.weight"]
    index.write_text(json.dumps(content))
    problem = refused(saved, CheckpointError, "PP-E524")
    assert "lacks" in problem.message and problem.place == "model.layers.2.mlp.up_proj.weight"


def test_an_entry_that_points_into_another_file_is_named(saved):
    index = saved / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    name = next(name for name, file in content["weight_map"].items() if file == files[0])
    content["weight_map"][name] = files[1]
    index.write_text(json.dumps(content))
    problem = refused(saved, CheckpointError, "PP-E523")
    assert files[1] in problem.message and problem.place == name


def test_a_wrong_shape_is_named_with_its_file(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    problem = refused(saved, CheckpointError, "PP-E524")
    assert len(problem.place.splitlines()) == 12
    assert "model.layers.0.mlp.gate_proj.weight (model-0000" in problem.place
    assert "F32[40, 24] stored, [48, 24] expected" in problem.place


def test_tensors_that_nobody_asks_for_are_named(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    problem = refused(saved, CheckpointError, "PP-E524")
    assert len(problem.place.splitlines()) == 9 and "model.layers.3.input_layernorm.weight" in problem.place


def test_a_directory_without_a_config_is_refused(saved):
    (saved / "config.json").unlink()
    assert str(saved) in refused(saved, ConfigError, "PP-E520").message


def test_a_place_that_is_taken_is_left_alone(saved):
    (saved.parent / "ours").mkdir()
    (saved.parent / "ours" / "note").write_text("mine")
    with pytest.raises(ConfigError, match="PP-E525"):
        import_directory(saved, saved.parent / "ours", silent)
    assert (saved.parent / "ours" / "note").read_text() == "mine"


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    path, _ = checkpoint_of(MTP, tmp_path / "run")
    (file,) = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="PP-E503"):
        export_checkpoint(path, tmp_path / "theirs", silent)
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_what_was_written_is_read_back_and_thrown_away_if_it_is_something_else(tmp_path, monkeypatch):
    path, _ = checkpoint_of(MTP, tmp_path / "run")

    def write(directory, parts, tensors, shard):
        others = [part._replace(dtype="float16") for part in parts]
        return write_shards(directory, others, (tensor.to(torch.float16) for tensor in tensors), shard)

    monkeypatch.setattr(hugging_face, "write_shards", write)
    with pytest.raises(CheckpointError, match="PP-E523") as caught:
        export_checkpoint(path, tmp_path / "theirs", silent, dtype=torch.bfloat16)
    assert "model.embed_tokens.weight" in caught.value.problems[0].place
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_checkpoint_of_fewer_tensors_than_its_model_is_not_exported(tmp_path):
    larger = replace(MTP, num_layers=3, moe_layer_freq="[0]*1+[1]*2")
    path, _ = checkpoint_of(MTP, tmp_path / "run", said=larger)
    with pytest.raises(CheckpointError, match="PP-E502") as caught:
        export_checkpoint(path, tmp_path / "theirs", silent)
    assert "layers.2.moe.experts.0.w1.weight" in caught.value.problems[0].place


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_command_imports_exports_and_leaves_with_the_errors_code(saved, capfd):
    there = saved.parent
    assert main(["ckpt", "import", "--hf", str(saved), str(there / "ours")]) == 0
    out, _ = capfd.readouterr()
    assert "21,144 parameters of a llama model" in out and str(there / "ours" / "checkpoints" / "step-0") in out
    assert main(["ckpt", "export", "--hf", str(there / "ours"), str(there / "back"), "--dtype", "bfloat16"]) == 0
    assert {value.dtype for value in values(there / "back").values()} == {torch.bfloat16}
    (saved / "config.json").write_text('{"model_type": "bert"}')
    assert main(["ckpt", "import", "--hf", str(saved), str(there / "more")]) == 2
    assert "error PP-E527" in capfd.readouterr().err
