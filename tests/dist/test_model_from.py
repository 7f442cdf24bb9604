"""`model.from`: a run that takes sizes and weights from somewhere else, as a person starts it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from command import metrics, ppctl
from hugging_face_models import hugging_face_model

RUN = ("seq=16", "gbs=4", "mbs=1", "steps=2", "launch.device=cpu", "data.path=corpus.txt")

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("here")
    words = random.Random(0).choices(["the", "of", "stage", "rank", "bubble", "and", "a", "layer"], k=2000)
    (directory / "corpus.txt").write_text(" ".join(words))
    hugging_face_model("qwen3", vocab_size=320).save_pretrained(directory / "qwen3", max_shard_size="40KB")
    return directory


def losses(here: Path, name: str, *arguments: str) -> list[object]:
    done = ppctl("train", *RUN, f"log.name={name}", *arguments, cwd=here)
    assert done.returncode == 0, done.stderr
    (run,) = (here / "runs" / name).iterdir()
    return [record["loss"] for record in metrics(run)]


def test_a_directory_and_what_is_imported_from_it_train_alike(here: Path) -> None:
    direct = losses(here, "direct", "model.from=qwen3", "pp=2", "vpp=2")
    assert ppctl("ckpt", "import", "--hf", "qwen3", "imported", cwd=here).returncode == 0
    # The sizes are the checkpoint's; its weights are taken twice, by each of the two ways that there are.
    assert losses(here, "imported", "model.from=imported", "pp=1", "vpp=1") == direct
    resumed = losses(here, "resumed", "model.from=imported", "checkpoint.resume=imported", "pp=1", "vpp=1")
    assert resumed == direct
    (run,) = (here / "runs" / "direct").iterdir()
    done = ppctl("resume", str(run), "steps=3", cwd=here)
    assert done.returncode == 0 and len(metrics(run)) == 3, done.stderr


def test_sizes_come_from_the_directory_and_the_command_line_is_stronger(here: Path) -> None:
    told = ppctl("plan", "model.from=qwen3", "seq=16", "model.rotary_base=70", "--json", cwd=here)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["params_total"] == 36_376
    done = ppctl("train", *RUN, "log.name=base", "model.from=qwen3", "model.rotary_base=70", cwd=here)
    assert done.returncode == 0, done.stderr
    (config,) = (here / "runs" / "base").glob("*/config.yaml")
    assert "rotary_base: 70.0" in config.read_text() and "norm_epsilon: 1.0e-06" in config.read_text()


def refused(here: Path, code: int, *arguments: str) -> str:
    done = ppctl("train", *RUN, "log.dir=nothing", *arguments, cwd=here)
    assert done.returncode == code, done.stderr
    assert not (here / "nothing").exists()
    assert "Traceback" not in done.stderr
    return done.stderr


def test_what_does_not_fit_is_refused_before_anything_is_written(here: Path) -> None:
    assert "PP-E520: model.from=nowhere" in refused(here, 2, "model.from=nowhere")
    assert "exclude each other" in refused(here, 2, "model.from=qwen3", "+scale=smoke")
    narrow = refused(here, 3, "model.from=qwen3", "model.ffn_hidden_size=48")
    assert "PP-E524" in narrow and "model.layers.0.mlp.gate_proj.weight (model-0000" in narrow
    assert "PP-E524" in refused(here, 3, "model.from=qwen3", "model.num_layers=2")
    shutil.copytree(here / "qwen3", here / "cut")
    shard = sorted((here / "cut").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-4])
    assert f"PP-E523: {shard}" in refused(here, 3, "model.from=cut")
    config = json.loads((here / "cut" / "config.json").read_text())
    (here / "cut" / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    unknown = refused(here, 2, "model.from=cut")
    assert "PP-E520: model_type 'bert'" in unknown and "deepseek_v3, glm4_moe, kimi_k2, llama" in unknown
