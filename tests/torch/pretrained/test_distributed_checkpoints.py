"""torch's distributed checkpoints: what Megatron-core wrote (`golden/torch_dist/make.py`), and torchtitan's."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path, PosixPath

import pytest
import torch
from full_disk import files_of_at_most
from one_save import save
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from verified import verify

from ppctl.checkpoint.manifest import read_manifest
from ppctl.checkpoint.reading import CheckpointReader
from ppctl.checkpoint.run_state import read_state
from ppctl.checkpoint.shards import whole_shards
from ppctl.cli.main import main
from ppctl.config.schema import ModelConfig
from ppctl.errors import CheckpointError, PpctlError
from ppctl.families.directory import model_tensors
from ppctl.pretrained.from_dcp import DcpReader, import_dcp, in_our_order, in_titans_order
from ppctl.pretrained.to_dcp import export_dcp

GOLDEN = Path(__file__).parents[2] / "golden" / "torch_dist"
DENSE = dict(num_layers=2, hidden_size=8, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=12, vocab_size=16)
EXPERTS = dict(
    **DENSE, num_moe_experts=2, moe_router_topk=1, moe_ffn_hidden_size=6, add_qkv_bias=True, qk_layernorm=True
)
KINDS = {"stacked": DENSE, "alone": DENSE, "experts": EXPERTS, "mixed": {**EXPERTS, "moe_layer_freq": [0, 1]}}


def silent(*_: object) -> None:
    """Progress that nobody watches."""


def model_of(kind: str, **more: object) -> ModelConfig:
    return ModelConfig(**{**KINDS[kind], **more})


def values(path: Path) -> dict[str, torch.Tensor]:
    verify(path)
    reader = CheckpointReader(path, read_manifest(path))
    return {name.removeprefix("model."): reader.tensor(name) for name in read_manifest(path).tensors}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_what_megatron_core_wrote_is_imported_bit_by_bit(kind: str, tmp_path: Path) -> None:
    done = import_dcp(GOLDEN / kind, tmp_path / "ours", model_of(kind), silent, megatron=True)
    assert_equal(values(done.path), load_file(GOLDEN / kind / "expected.safetensors"))
    state = read_state(done.path)
    assert ModelConfig(**state["model"]) == model_of(kind) and state["source"] == str(GOLDEN / kind)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exported_has_the_keys_shapes_and_values_of_megatron_cores_own(kind: str, tmp_path: Path) -> None:
    """`make.py check` loads it with Megatron-core; here the two checkpoints are compared as torch reads them."""
    imported = import_dcp(GOLDEN / kind, tmp_path / "ours", model_of(kind), silent, megatron=True)
    out = tmp_path / "theirs"
    export_dcp(imported.path, out, silent, megatron=True)
    theirs, ours = DcpReader(GOLDEN / ("stacked" if kind == "alone" else kind)), DcpReader(out)
    assert theirs.tensors.keys() <= ours.tensors.keys()
    assert theirs._metadata.state_dict_metadata.keys() <= ours._metadata.state_dict_metadata.keys()
    assert all("norm" in key for key in ours.tensors.keys() - theirs.tensors.keys())
    state = {key: torch.empty(theirs.kind(key)[0]) for key in theirs.tensors}
    expected = {key: torch.empty(theirs.kind(key)[0]) for key in theirs.tensors}
    load(state, storage_reader=FileSystemReader(out), no_dist=True)
    load(expected, storage_reader=FileSystemReader(theirs.path), no_dist=True)
    assert_equal(state, expected)
    assert json.loads((out / "metadata.json").read_text()) == json.loads((theirs.path / "metadata.json").read_text())
    again = import_dcp(out, tmp_path / "again", model_of(kind), silent, megatron=True)
    assert_equal(values(again.path), values(imported.path))


def test_rows_behind_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    done = import_dcp(GOLDEN / "stacked", tmp_path / "ours", model_of("stacked", vocab_size=13), silent, megatron=True)
    expected = load_file(GOLDEN / "stacked" / "expected.safetensors")
    for name in ("tok_embeddings.weight", "output.weight"):
        assert torch.equal(values(done.path)[name], expected[name][:13])


def test_only_the_bytes_of_what_is_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = torch.load
    monkeypatch.setattr(torch, "load", lambda file, **more: read.append(len(file.getvalue())) or original(file, **more))
    import_dcp(GOLDEN / "stacked", tmp_path / "ours", model_of("stacked"), silent, megatron=True)
    parts = sum(len(entry.chunks) for entry in DcpReader(GOLDEN / "stacked").tensors.values())
    assert len(read) == parts  # each part once


def titan(tmp_path: Path, model: ModelConfig, rename: object = lambda name: name) -> dict[str, torch.Tensor]:
    """A checkpoint as torchtitan writes it: names as they are there, other state beside them."""
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(shape, generator=generator) for name, shape in model_tensors(model).items()}
    stored = {rename(name): in_titans_order(name, value, model) for name, value in state.items()}
    extra = {"optimizer.state.norm.weight.exp_avg": torch.zeros(8), "train_state": {"step": 3}}
    save_dcp({**stored, **extra}, storage_writer=FileSystemWriter(tmp_path / "titan"), no_dist=True)
    return state


RENAMES = {
    "as they are": lambda name: name,
    "with a prefix": lambda name: f"model.{name}",
    "one level deeper": lambda name: name.replace("attention.w", "attention.qkv_linear.w").replace(
        "qkv_linear.wo", "wo"
    ),
}


@pytest.mark.parametrize("rename", RENAMES)
def test_torchtitans_llama_is_imported_and_exported(tmp_path: Path, rename: str) -> None:
    model = model_of("stacked")
    state = titan(tmp_path, model, RENAMES[rename])
    done = import_dcp(tmp_path / "titan", tmp_path / "ours", model, silent, megatron=False)
    assert_equal(values(done.path), state)
    export_dcp(done.path, tmp_path / "back", silent, megatron=False, dtype=torch.bfloat16)
    back = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in model_tensors(model).items()}
    load(back, storage_reader=FileSystemReader(tmp_path / "back"), no_dist=True)
    assert_equal(back, {name: in_titans_order(name, value, model).bfloat16() for name, value in state.items()})


def test_positions_pair_neighbours_there_and_halves_here() -> None:
    model = model_of("stacked", hidden_size=16)  # heads of 4
    value = torch.arange(16.0)[:, None].expand(16, 16)
    name = "layers.0.attention.wq.weight"
    there = in_titans_order(name, value, model)
    assert there[:4, 0].tolist() == [0, 2, 1, 3]
    assert torch.equal(in_our_order(name, there, model), value)
    assert torch.equal(in_titans_order("layers.0.attention.wv.weight", value, model), value)
    interleaved = model_of("stacked", hidden_size=16, rotary_interleaved=True)
    assert torch.equal(in_titans_order(name, value, interleaved), value)


def refused(*args: object, **more: object) -> list[str]:
    with pytest.raises(PpctlError) as caught:
        import_dcp(*args, silent, **more)
    return [str(problem) for problem in caught.value.problems]


def test_another_models_tensors_are_all_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    sizes = dict(ffn_hidden_size=10, num_layers=1, qk_layernorm=True, share_embeddings_and_output_weights=True)
    missing, unknown, wrong = refused(GOLDEN / "stacked", out, model_of("stacked", **sizes), megatron=True)
    assert "PP-E533" in missing and "layers.0.attention.q_norm.weight: decoder.layers.0.self_attention." in missing
    assert "output_layer.weight" in unknown
    assert "decoder.layers.mlp.linear_fc1.weight): stored [2, 24, 8], expected [1, 20, 8]" in wrong
    assert not out.exists()
    (missing,) = refused(GOLDEN / "stacked", out, model_of("stacked", num_layers=3), megatron=True)
    assert "layers.2.attention.wq.weight: decoder.layers.self_attention.linear_qkv.weight at [2]" in missing


@pytest.mark.parametrize(
    ("kind", "fewer", "line"),
    [
        ("stacked", dict(num_layers=1), "layers.0.attention.wo.weight (decoder.layers.self_attention.linear_proj."),
        ("experts", dict(num_layers=1), "mlp.experts.experts.linear_fc2.weight): stored [2, 2, 8, 6], expected [1, 2,"),
        ("experts", dict(num_moe_experts=1), "linear_fc2.weight): stored [2, 2, 8, 6], expected [2, 1, 8, 6]"),
        ("mixed", dict(num_moe_experts=1), "linear_fc2.weight): stored [2, 8, 6], expected [1, 8, 6]"),
    ],
)
def test_layers_and_experts_that_the_model_lacks_are_not_dropped(
    tmp_path: Path, kind: str, fewer: dict[str, int], line: str
) -> None:
    *_, wrong = refused(GOLDEN / kind, tmp_path / "out", model_of(kind, **fewer), megatron=True)
    assert "PP-E533" in wrong and line in wrong
    assert not (tmp_path / "out").exists()


class Harm:
    """Runs a program when it is unpickled."""

    def __reduce__(self) -> tuple:
        return (os.system, ("touch harmed",))


class Attribute:
    """Is unpickled as an attribute."""

    def __init__(self, owner: object, name: str) -> None:
        self.of = (owner, name)

    def __reduce__(self) -> tuple:
        return (getattr, self.of)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (Harm(), "posix.system is no class of a distributed checkpoint"),
        (Attribute(PosixPath, "unlink"), "builtins.getattr of <class 'pathlib.PosixPath'> is no part of"),
        (
            Attribute(_MEM_FORMAT_ENCODING, "__members__"),
            "builtins.getattr of <enum '_MEM_FORMAT_ENCODING'> is no part",
        ),
    ],
)
def test_a_pickle_of_anything_else_is_refused_by_name_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: object, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(GOLDEN / "stacked", tmp_path / "copy")
    (copy / ".metadata").write_bytes(pickle.dumps(harm))
    (problem,) = refused(copy, tmp_path / "out", model_of("stacked"), megatron=True)
    assert "PP-E532" in problem and why in problem
    assert not (tmp_path / "harmed").exists()


def test_a_member_of_an_enum_is_read_as_any_release_of_python_writes_it(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")))
    (problem,) = refused(tmp_path, tmp_path / "out", model_of("stacked"), megatron=True)
    assert "PP-E532" in problem and ".metadata holds no description of tensors" in problem


def test_damage_is_told_with_file_bytes_and_key(tmp_path: Path) -> None:
    copy = shutil.copytree(GOLDEN / "stacked", tmp_path / "copy")
    for file in copy.glob("*.distcp"):
        os.truncate(file, file.stat().st_size // 2)
    (problem,) = refused(copy, tmp_path / "out", model_of("stacked"), megatron=True)
    assert "PP-E532" in problem and ".distcp, of " in problem and "cannot be read" in problem
    (copy / ".metadata").unlink()
    assert (
        ".metadata cannot be read: No such file" in refused(copy, tmp_path / "o", model_of("stacked"), megatron=True)[0]
    )


def test_the_command_imports_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"model.{key}={value}" for key, value in DENSE.items()]
    assert main(["ckpt", "import", "--torch-dist", str(GOLDEN / "alone"), "ours", "--for", *words]) == 0
    found = read_state(tmp_path / "ours" / "checkpoints" / "step-0")["model"]
    assert {key: found[key] for key in DENSE} == DENSE and found.keys() == asdict(ModelConfig()).keys()
    assert main(["ckpt", "export", "--dcp", "ours", "titan"]) == 0 and (tmp_path / "titan" / ".metadata").is_file()
    assert main(["ckpt", "import", "--dcp", "titan", "again", "--for", *words]) == 0
    assert main(["ckpt", "diff", "ours", "again"]) == 0
    assert main(["ckpt", "import", "--dcp", "titan", "again", "--for", *words[1:]]) in (2, 3)
    assert main(["ckpt", "import", "--hf", "titan", "more", "--for", *words]) == 2
    with pytest.raises(CheckpointError):
        DcpReader(tmp_path)


@pytest.mark.parametrize("megatron", [True, False])
def test_what_stops_an_export_is_told_as_itself(tmp_path: Path, megatron: bool) -> None:
    """torch's library catches every error and raises one of its own, which is no Exception."""
    model = model_of("stacked", vocab_size=2048)
    held = {f"model.{name}": torch.zeros(shape) for name, shape in model_tensors(model).items()}
    path = save(tmp_path / "run", 1, whole_shards(held), {"model": asdict(model)}, keep=0)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def export(progress: object = silent) -> None:
        export_dcp(path, tmp_path / "out", progress, megatron=megatron)

    with pytest.raises(KeyboardInterrupt):
        export(interrupted)
    for most in (1000, 2**16):  # where a file is closed, and within a tensor
        with files_of_at_most(most), pytest.raises(OSError, match="File too large"):
            export()
    (file,) = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="PP-E503"):
        export()
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_optimizer_states_that_are_left_out_are_counted(tmp_path: Path) -> None:
    """torchtitan's, as its optimizers flatten them; and ours."""
    model = model_of("stacked")
    state = {name: torch.zeros(shape) for name, shape in model_tensors(model).items()}
    theirs = {f"optimizer.state.{name}.exp_avg": value for name, value in state.items()}
    save_dcp(state | theirs, checkpoint_id=tmp_path / "titan", no_dist=True)
    done = import_dcp(tmp_path / "titan", tmp_path / "ours", model, silent, megatron=False)
    first = f"optimizer.state.{min(state)}.exp_avg"
    assert done.left == f"weights alone; left out: {len(state)} tensors of optimizer states ({first}, …)"
    assert export_dcp(done.path, tmp_path / "back", silent, megatron=False).left == ""
    held = {f"model.{name}": value for name, value in state.items()}
    held |= {f"optim.{name}.exp_avg": value for name, value in state.items()}
    trained = save(tmp_path / "run", 1, whole_shards(held), {"model": asdict(model)}, keep=0)
    for megatron in (False, True):
        left = export_dcp(trained, tmp_path / f"trained {megatron}", silent, megatron=megatron).left
        assert f"left out: {len(state)} tensors" in left
