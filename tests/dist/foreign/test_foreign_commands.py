"""What people type for a model whose code is transformers': train, resume in another cut, export, and refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from command import ppctl
from foreign_models import KEPT, model_of
from safetensors.torch import load_file

from ppctl.checkpoint.manifest import read_manifest
from ppctl.checkpoint.reading import CheckpointReader
from ppctl.launch.planning import planned

# Each describes a model, some ten seconds of a quiet machine, and starts several runs.
pytestmark = pytest.mark.timeout(400)
RUN = ("data.tokenizer=byte", "seq=16", "gbs=4", "mbs=1", "launch.device=cpu")


LATE = (
    "model.implementation=transformers",
    "model.lora.rank=2",
    "model.lora.targets=[q_proj]",
    "model.lora.layers=[3]",
)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign")
    model_of("Cohere").save_pretrained(path / "cohere")
    (path / "cache").symlink_to(os.environ[KEPT])
    (path / "corpus.txt").write_text("the commands of a person who has a model of another library " * 40)
    return path


def run(here: Path, *arguments: str) -> str:
    """The output of a command that ends well; descriptions are those of the whole test session."""
    done = ppctl(*arguments, cwd=here, timeout=300, XDG_CACHE_HOME=str(here / "cache"))
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_directory_trains_resumes_in_another_cut_and_is_exported(here: Path) -> None:
    from transformers import AutoModelForCausalLM

    typed = ("model.from=cohere", "data.path=corpus.txt", *RUN)
    run(here, "train", *typed, "pp=2", "steps=2")
    (first,) = (here / "runs" / "run").iterdir()
    run(here, "resume", str(first), "pp=1", "steps=3")
    assert len(losses(first)) == 3
    run(here, "ckpt", "export", "--hf", str(first), "out")

    source, out = load_file(here / "cohere" / "model.safetensors"), load_file(here / "out" / "model.safetensors")
    assert source.keys() == out.keys()
    assert any(not torch.equal(source[name], out[name]) for name in source)
    assert json.loads((here / "out" / "config.json").read_text())["model_type"] == "cohere"
    exported, info = AutoModelForCausalLM.from_pretrained(here / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    checkpoint = first / "checkpoints" / "step-3"
    reader, whole = CheckpointReader(checkpoint, read_manifest(checkpoint)), model_of("Cohere")
    whole.load_state_dict({name: reader.tensor(f"model.{name}") for name in source}, strict=False)
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        assert torch.equal(exported.eval()(tokens).logits, whole.eval()(tokens).logits)


def logits(directory: Path) -> torch.Tensor:
    """Of a directory that transformers loads whole."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(32).view(2, 16)).logits
    return found


def test_an_imported_directory_trains_as_the_directory_and_is_exported(here: Path) -> None:
    run(here, "ckpt", "import", "--hf", "cohere", "imported")
    run(here, "ckpt", "export", "--hf", "imported/checkpoints/step-0", "unchanged")
    assert torch.equal(logits(here / "unchanged"), logits(here / "cohere"))
    for source in ("cohere", "imported"):
        typed = (f"model.from={source}", "data.path=corpus.txt", *RUN, "pp=2", "steps=2", f"log.name=from_{source}")
        run(here, "train", *typed)
    direct, imported = (next((here / "runs" / f"from_{source}").iterdir()) for source in ("cohere", "imported"))
    assert losses(imported) == losses(direct)
    run(here, "ckpt", "export", "--hf", str(imported), "trained")
    run(here, "ckpt", "export", "--hf", str(direct), "directly")
    assert torch.equal(logits(here / "trained"), logits(here / "directly"))
    assert not torch.equal(logits(here / "trained"), logits(here / "cohere"))


def test_plans_keep_one_proof_between_them(here: Path) -> None:
    model_of("Granite").save_pretrained(here / "granite")

    def planned(*words: str) -> tuple[str, str]:
        typed = ("plan", "model.from=granite", "model.implementation=transformers", "seq=16", *words)
        done = ppctl(*typed, cwd=here, timeout=300, XDG_CACHE_HOME=str(here / "plans"))
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    first, noted = planned()
    assert "stages gave the same bits as the whole" in first and "examining" in noted
    (kept,) = (here / "plans" / "ppctl" / "models").iterdir()
    written = kept.stat().st_mtime_ns
    again, noted = planned("pp=2")
    assert "stages gave the same bits as the whole" in again and "examining" not in noted
    assert kept.stat().st_mtime_ns == written, "the second plan read it"


def test_a_plan_says_how_a_model_with_dropout_is_tried_and_doctor_names_the_plan(here: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=2, n_embd=24, n_head=4, vocab_size=320).save_pretrained(here / "drops")
    refused = ppctl("doctor", "--model", "drops", cwd=here)
    command = ["plan", "model.from=drops", "model.implementation=transformers"]
    assert refused.returncode == 2 and f"try: ppctl {' '.join(command)}" in refused.stderr
    done = ppctl(*command, cwd=here, timeout=300, XDG_CACHE_HOME=str(here / "cache"))
    assert done.returncode == 2 and "error PP-E529" in done.stderr
    zeros = [f"model.hf_overrides.{name}=0" for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    assert all(zero in done.stderr for zero in zeros)
    assert "stages gave the same bits as the whole" in run(here, *command, *zeros)


def test_a_known_family_is_imported_for_transformers_code_where_that_is_asked_for(here: Path) -> None:
    model_of("Mixtral").save_pretrained(here / "mixtral")  # its experts are stored one by one
    run(here, "ckpt", "import", "--hf", "mixtral", "stacked", "--for", "model.implementation=transformers")
    names = read_manifest(here / "stacked" / "checkpoints" / "step-0").tensors
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    run(here, "ckpt", "export", "--hf", "stacked/checkpoints/step-0", "back")
    assert torch.equal(logits(here / "back"), logits(here / "mixtral"))


def test_an_import_says_what_it_does_not_read(here: Path) -> None:
    (here / "no_weights").mkdir()
    (here / "no_weights" / "config.json").write_text((here / "cohere" / "config.json").read_text())
    refused = {
        ("nowhere", "OUT"): "PP-E520: nowhere is no model directory",
        ("no_weights", "OUT"): "PP-E538",
        ("cohere", "OUT", "--for", "pp=2"): "PP-E105: --for pp=2",
        ("cohere", "OUT", "--for", "model.implementation=ppctl"): "PP-E520",
    }
    for words, text in refused.items():
        done = ppctl("ckpt", "import", "--hf", *words, cwd=here, timeout=120, XDG_CACHE_HOME=str(here / "cache"))
        assert done.returncode in (2, 3) and text in done.stderr and "Traceback" not in done.stderr, words
        assert not (here / "OUT").exists()


@pytest.mark.whole
def test_a_run_in_two_starts_has_the_losses_of_one(here: Path) -> None:
    typed = ("model.from=cohere", "data.path=corpus.txt", *RUN, "optim.warmup_steps=0", "optim.min_lr=3e-4")
    run(here, "train", *typed, "pp=2", "steps=4", "log.name=whole")
    run(here, "train", *typed, "pp=4", "steps=2", "log.name=halves")
    (whole,), (halves,) = (list((here / "runs" / name).iterdir()) for name in ("whole", "halves"))
    run(here, "resume", str(halves), "pp=2", "steps=4")
    assert losses(halves) == losses(whole)


WAYS: dict[str, tuple[str, ...]] = {
    "a replica more, sharded": ("dp=2", "parallel.data_parallel_sharding=full"),
    "recomputed": ("train.recompute_granularity=full", "train.recompute_method=uniform"),
    "split backwards": ("pipeline.pp_schedule=zb_h1",),
    "a layout that is found": ("layout=auto",),
    "evaluated": ("train.eval_interval=2", "train.eval_steps=1", "data.validation_split=0.5"),
}


@pytest.mark.whole
@pytest.mark.parametrize("way", WAYS)
def test_what_trains_ppctls_own_models_trains_these(here: Path, way: str) -> None:
    typed = ("model.from=cohere", "data.path=corpus.txt", *RUN, "pp=2", "steps=2")
    name = way.replace(",", "").replace(" ", "_")
    run(here, "train", *typed, *WAYS[way], f"log.name={name}")
    (found,) = (here / "runs" / name).iterdir()
    assert len(losses(found)) == 2


@pytest.mark.whole
def test_a_directory_without_weights_draws_them_independently_of_the_cut(here: Path) -> None:
    (here / "bare").mkdir()
    (here / "bare" / "config.json").write_text((here / "cohere" / "config.json").read_text())
    found = []
    for pp in (1, 2):
        run(here, "train", "model.from=bare", "data.path=corpus.txt", *RUN, f"pp={pp}", "steps=2", f"log.name=bare{pp}")
        found.append(losses(next((here / "runs" / f"bare{pp}").iterdir())))
    assert found[0] == found[1]


REFUSED: dict[str, tuple[str, str]] = {
    "tp=2": ("multiplies with whole weights", "parallel.tensor_model_parallel_size=1"),
    "cp=2": ("attends to whole sequences", "parallel.context_parallel_size=1"),
    "pipeline.patch_causal_lm_model=false": ("does not take hidden states", "pipeline.patch_causal_lm_model=true"),
    "train.recompute_granularity=selective": ("modules with other names", "train.recompute_granularity=full"),
    "model.num_layers=3": ("its config.json says", "model.num_layers=4"),
    "model.num_layers=8": ("its config.json says", "model.num_layers=4"),
    "model.implementation=ppctl": ("no family that ppctl builds", ""),
}


def test_a_plan_refuses_by_name_and_its_remedies_work(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    typed = [f"model.from={here / 'cohere'}", f"data.path={here / 'corpus.txt'}", *RUN]
    _, plan, problems = planned([*typed, "pp=2"])
    assert plan is not None and not problems
    assert plan.params_total == sum(p.numel() for p in model_of("Cohere").parameters())
    for override, (words, remedy) in REFUSED.items():
        found = [problem for problem in planned([*typed, override])[2] if words in problem.message]
        assert found, override
        if remedy:
            assert remedy in found[0].remedy.splitlines()
            assert not planned([*typed, remedy])[2]


ALONE = {
    "model.lora.rank=0": "PP-E540",
    "model.hf_overrides.hidden_size=wide": "PP-E552",
    "model.hf_overrides.rope_parameters.rope_theta=1": "PP-E101",
}


@pytest.mark.parametrize("typed", ALONE)
def test_what_stands_against_a_model_is_not_followed_by_what_is_not_wrong(
    here: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    *_, problems = planned([f"model.from={here / 'cohere'}", f"data.path={here / 'corpus.txt'}", *RUN, typed])
    assert [problem.code for problem in problems] == [ALONE[typed]]


@pytest.mark.whole
@pytest.mark.parametrize("more", [(), LATE])
def test_parity_of_a_model_of_another_library_is_equal_to_the_bit(here: Path, more: tuple[str, ...]) -> None:
    typed = ("model.from=cohere", "data.path=corpus.txt", *RUN, "pp=2", *more)
    assert "gradients of 3: equal to the bit" in run(here, "parity", *typed)


def test_what_a_frozen_stage_hands_on_is_kept_to_be_compared(here: Path) -> None:
    typed = ("model.from=cohere", "data.path=corpus.txt", *RUN, "pp=2", "steps=1", "log.name=late", "log.gradients=1:2")
    run(here, "train", *typed, *LATE)
    (kept,) = (here / "runs" / "late").glob("*/gradients/step-1/messages.json")
    handed = json.loads(kept.read_text())["messages"]
    assert sorted((forward, stage) for _, forward, stage, *_ in handed) == [(True, 0)] * 4 + [(True, 1)] * 4


@pytest.mark.whole
def test_dropout_is_refused_in_the_plan_and_the_remedy_trains(here: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=2, n_embd=24, n_head=4, n_positions=64, vocab_size=320).save_pretrained(here / "gpt2")
    typed = ("model.from=gpt2", "data.path=corpus.txt", *RUN, "pp=2", "steps=1", "log.name=gpt2")
    refused = ppctl("plan", *typed, cwd=here, timeout=300, XDG_CACHE_HOME=str(here / "cache"))
    assert refused.returncode == 2 and "PP-E529" in refused.stderr and "resid_pdrop=0.1" in refused.stderr
    remedy = [f"model.hf_overrides.{name}_pdrop=0" for name in ("resid", "embd", "attn")]
    assert " ".join(remedy) in refused.stderr
    run(here, "train", *typed, *remedy)
    assert len(losses(next((here / "runs" / "gpt2").iterdir()))) == 1
