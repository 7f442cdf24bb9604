"""`model.from`: a run that takes sizes and weights from somewhere else, as a person starts it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from command import metrics, ppctl
from hugging_face_models import hugging_face_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ppctl.checkpoint.manifest import read_manifest
from ppctl.checkpoint.reading import CheckpointReader
from ppctl.cli import main as front
from ppctl.cli import train
from ppctl.cli.main import main
from ppctl.config.compose import compose
from ppctl.errors import ConfigError
from ppctl.launch.environment import Started
from ppctl.launch.run_directory import new_run
from ppctl.launch.weights import values_of

RUN = (
    "seq=16", "gbs=4", "mbs=1", "steps=2", "launch.device=cpu", "data.path=corpus.txt", "data.tokenizer=words",
    "--reset-attention-mask",
)  # fmt: skip

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("here")
    words = random.Random(0).choices(["the", "of", "stage", "rank", "bubble", "and", "a", "layer"], k=2000)
    (directory / "corpus.txt").write_text(" ".join(words))
    own_tokenizer(words, directory / "words")
    hugging_face_model("qwen3", vocab_size=320).save_pretrained(directory / "qwen3", max_shard_size="40KB")
    return directory


def own_tokenizer(words: list[str], directory: Path) -> None:
    """A tokenizer.json, and nothing beside it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))


def losses(here: Path, name: str, *arguments: str) -> list[object]:
    done = ppctl("train", *RUN, f"log.name={name}", *arguments, cwd=here)
    assert done.returncode == 0, done.stderr
    (run,) = (here / "runs" / name).iterdir()
    return [record["loss"] for record in metrics(run)]


@pytest.fixture(scope="module")
def run(here: Path) -> Path:
    """A run that took its weights from the directory."""
    losses(here, "direct", "model.from=qwen3", "pp=2", "vpp=2")
    (run,) = (here / "runs" / "direct").iterdir()
    return run


Refused = Callable[..., str]


@pytest.fixture
def refused(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """`refused(code, arguments...)`: what `train` says when it leaves with this code and has written nothing."""
    monkeypatch.chdir(here)

    def refused(code: int, *arguments: str) -> str:
        assert main(["train", *RUN, "log.dir=nothing", *arguments]) == code
        assert not (here / "nothing").exists()
        return capsys.readouterr().err

    return refused


def test_a_run_is_a_source_too(here: Path, run: Path, refused: Refused) -> None:
    """In another cut, its weights arrive as they were; nothing is left of its position."""
    losses(here, "from", f"model.from={run.name}", "pp=1", "vpp=3", "optim.lr=1e-30")
    (other,) = (here / "runs" / "from").iterdir()
    assert metrics(other)[0]["consumed_samples"] == 4
    weights = [latest(each) for each in (run, other)]
    readers = [CheckpointReader(path, read_manifest(path)) for path in weights]
    names = [name for name in read_manifest(weights[0]).tensors if name.startswith("model.")]
    assert len(names) == 47
    for name in names:
        assert torch.equal(*(reader.tensor(name) for reader in readers)), name
    experts = refused(3, f"model.from={run}", "model.num_moe_experts=4", "model.moe_router_topk=2")
    assert "PP-E524" in experts and "layers.0.moe.router.weight: not stored, [4, 24] needed" in experts
    shutil.copytree(run, here / "short")
    file = next(latest(here / "short").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert f"PP-E503: the checkpoint at {file.parent}" in (told := refused(3, "model.from=short"))
    assert str(file) in told


def latest(run: Path) -> Path:
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    return checkpoint


def test_what_is_exported_opens_in_transformers(here: Path, run: Path) -> None:
    """Weights and tokenizer in one directory: what was trained takes text."""
    done = ppctl("ckpt", "export", "--hf", str(run), "exported", cwd=here)
    assert done.returncode == 0 and f"with the tokenizer of {here / 'words'}" in done.stdout, done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(here / "exported")
    reader = CheckpointReader(latest(run), read_manifest(latest(run)))
    assert torch.equal(model.lm_head.weight, reader.tensor("model.output.weight"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(here / "exported")
    text = "the bubble of a stage and layer"
    assert tokenizer(text)["input_ids"] == Tokenizer.from_file(str(here / "words" / "tokenizer.json")).encode(text).ids
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.decode(tokenizer(text)["input_ids"]).strip() == text
    assert model(**tokenizer(text, return_tensors="pt")).logits.isfinite().all()


def test_a_directory_and_what_is_imported_from_it_train_alike(here: Path, run: Path) -> None:
    direct = [record["loss"] for record in metrics(run)]
    assert ppctl("ckpt", "import", "--hf", "qwen3", "imported", cwd=here).returncode == 0
    # The sizes are the checkpoint's; its weights are taken twice, by each of the two ways that there are.
    assert losses(here, "imported", "model.from=imported", "pp=1", "vpp=1") == direct
    resumed = losses(here, "resumed", "model.from=imported", "checkpoint.resume=imported", "pp=1", "vpp=1")
    assert resumed == direct


@pytest.mark.whole
def test_a_run_with_weights_from_elsewhere_goes_on_like_any_other(here: Path, run: Path) -> None:
    done = ppctl("resume", str(run), "steps=3", cwd=here)
    assert done.returncode == 0 and len(metrics(run)) == 3, done.stderr


def test_sizes_come_from_the_directory_and_the_command_line_is_stronger(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ppctl("plan", "model.from=qwen3", "seq=16", "model.rotary_base=70", "--json", cwd=here)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["params_total"] == 36_376
    monkeypatch.chdir(here)
    typed = front.parse("train", train, [*RUN, "log.name=base", "model.from=qwen3", "model.rotary_base=70"])
    new_run(train.prepare(typed, Started("person")), Started("person"))
    (config,) = (here / "runs" / "base").glob("*/config.yaml")
    assert "rotary_base: 70.0" in config.read_text() and "norm_epsilon: 1.0e-06" in config.read_text()


def test_the_tokenizer_of_the_weights_is_used_unless_one_is_named(
    here: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    shutil.copytree("qwen3", "whole")
    shutil.copy("words/tokenizer.json", "whole")
    Path("own.yaml").write_text("data:\n  tokenizer: words\n")

    def tokenizer(*arguments: str, for_training: bool = True) -> str:
        found = compose(("seq=16", *arguments), for_training=for_training, read_model=values_of)
        return found.config.data.tokenizer

    assert tokenizer("model.from=whole") == str(here / "whole")
    assert tokenizer(f"model.from={run}") == str(here / "words"), "a run's own"
    assert tokenizer("model.from=whole", "data.tokenizer=byte") == "byte"
    assert tokenizer("+recipe=own.yaml", "model.from=whole") == "words"
    with pytest.raises(ConfigError, match="PP-E417: qwen3 has no tokenizer"):
        tokenizer("model.from=qwen3")
    assert tokenizer("model.from=qwen3", for_training=False) == "byte", "a plan reads no text"


def test_what_does_not_fit_is_refused_before_anything_is_written(here: Path, refused: Refused) -> None:
    assert "PP-E520: model.from=nowhere" in refused(2, "model.from=nowhere")
    assert "exclude each other" in refused(2, "model.from=qwen3", "+scale=smoke")
    narrow = refused(3, "model.from=qwen3", "model.ffn_hidden_size=48")
    assert "PP-E524" in narrow and "model.layers.0.mlp.gate_proj.weight (model-0000" in narrow
    assert "PP-E524" in refused(3, "model.from=qwen3", "model.num_layers=2")
    shutil.copytree(here / "qwen3", here / "cut")
    shard = sorted((here / "cut").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-4])
    told = refused(3, "model.from=cut")
    assert f"PP-E523: {shard}" in told and "\n  model.layers." in told
    shutil.copytree(here / "qwen3", here / "lacking")
    index = here / "lacking" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.layers.2.mlp.up_proj.weight"]
    index.write_text(json.dumps(content))
    told = refused(3, "model.from=lacking")
    assert f"PP-E524: {here / 'lacking'} lacks tensors" in told and "\n  model.layers.2.mlp.up_proj.weight" in told
    config = json.loads((here / "cut" / "config.json").read_text())
    (here / "cut" / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    unknown = refused(2, "model.from=cut", "model.implementation=ppctl")
    assert "PP-E520: model_type 'bert'" in unknown and "deepseek_v3, glm4_moe, kimi_k2, llama" in unknown
