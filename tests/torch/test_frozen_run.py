"""What users rely on and torch is needed for: Megatron's functions, names of parameters, checkpoints, a run's files.

The list is tests/golden/frozen.json, as in tests/unit/test_frozen.py: additions are free. There is one real run, and
then a life of it that fails; it has whatever leaves a trace in a file: experts, MTP, a tied weight, fp16, evaluation.
"""

from __future__ import annotations

import json
import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from command import only_run, ppctl
from frozen import IS_WRITTEN, fields, frozen, hold, hold_calls, members, signature
from verified import verify

import ppctl as package
from ppctl import P2PCommunicator, TorchSchedule, megatron
from ppctl.checkpoint.reading import load
from ppctl.checkpoint.run_state import read_state
from ppctl.checkpoint.shards import whole_shards
from ppctl.config.compose import compose
from ppctl.model.stage import meta_stage
from ppctl.plan import build_plan
from ppctl.train.callback import Callback, Start, StepResult, TrainingEnd, TrainingRun

OLD_CHECKPOINT = Path(__file__).parents[1] / "golden" / "checkpoint" / "step-3"
ENGINES_OWN = ("batch", "batched", "end", "end_in", "ends")
"""What the communicator has for the engine alone."""

pytestmark = pytest.mark.timeout(240)


# Names in Python


def test_every_name_comes_from_its_home_and_the_public_ones_from_the_top_as_well() -> None:
    homes = {home: list(names) for home, names in frozen("homes").items()}
    if IS_WRITTEN:
        homes["ppctl.megatron"] = megatron.__all__  # what else is documented stays as it was once written
    hold("homes", {home: _found(home, names) for home, names in homes.items()})


def _found(home: str, names: list[str]) -> dict[str, Any]:
    """Name -> whether the same thing comes from the top, of those that the module `home` has."""
    module, nothing = import_module(home), object()
    there = {name: getattr(module, name) for name in names if hasattr(module, name)}
    top = {name for name, value in there.items() if getattr(package, name, nothing) is value}
    return {name: {"at the top": True} if name in top else {} for name in there}


def test_calls_of_megatrons_functions() -> None:
    top = [getattr(package, name) for name in package.__all__ if name.islower() and not name.startswith("_")]
    now = {function.__name__: signature(function) for function in top}
    hold_calls("signatures", now | members(P2PCommunicator, *ENGINES_OWN) | members(TorchSchedule))


def test_a_callback_is_called_as_it_was() -> None:
    """Users' classes override these methods: here a parameter that is added breaks them as one that goes does."""
    methods = {name: value for name, value in vars(Callback).items() if not name.startswith("_")}
    now: dict[str, Any] = {name: ", ".join(signature(method)) for name, method in methods.items()}
    for kind in (Start, StepResult, TrainingEnd, TrainingRun):
        now[kind.__name__] = [*signature(kind)]
    hold("callbacks", now)


# Names of parameters

PLAIN = (
    *("model.num_layers=1", "model.hidden_size=24", "model.ffn_hidden_size=40", "model.num_attention_heads=4"),
    *("model.vocab_size=52", "model.num_query_groups=2"),
)
LATENT = (
    *(*PLAIN[:-1], "model.num_query_groups=null", "model.multi_latent_attention=true", "model.kv_lora_rank=10"),
    *("model.qk_head_dim=6", "model.qk_pos_emb_head_dim=4", "model.v_head_dim=5"),
)
EXPERTS = ("model.num_moe_experts=3", "model.moe_ffn_hidden_size=7", "model.moe_layer_freq=1")
MODELS = {
    "dense": PLAIN,
    "dense, biases and norms of queries and keys": (*PLAIN, "model.add_qkv_bias=true", "model.qk_layernorm=true"),
    "tied": (*PLAIN, "model.share_embeddings_and_output_weights=true"),
    "latent attention": LATENT,
    "latent attention, compressed queries": (*LATENT, "model.q_lora_rank=9"),
    "experts": (*PLAIN, *EXPERTS),
    "experts, shared ones and biases": (
        *(*PLAIN, *EXPERTS, "model.moe_shared_expert_intermediate_size=11"),
        *("model.moe_router_enable_expert_bias=true", "model.moe_router_score_function=sigmoid"),
    ),
    "multi-token prediction": (*PLAIN, "model.mtp_num_layers=2"),
    "multi-token prediction, experts": (*PLAIN, *EXPERTS, "model.mtp_num_layers=1"),
}


def test_canonical_names_and_shapes_of_every_kind_of_model() -> None:
    """Nothing may be added to a model either: its checkpoints of before would lack it."""
    hold("parameters", {name: _parameters(overrides) for name, overrides in MODELS.items()}, exact=True)


def _parameters(overrides: tuple[str, ...]) -> dict[str, str]:
    config = compose(overrides).config
    (stage,) = build_plan(config).stages
    module = meta_stage(stage.layers, config.model)
    tensors = {**module.canonical_parameters(), **module.canonical_buffers()}
    return {name: " x ".join(map(str, tensor.shape)) for name, tensor in tensors.items()}


# Checkpoints


def old_tensors() -> dict[str, torch.Tensor]:
    """What the old checkpoint holds."""
    return {
        "model.norm.weight": torch.arange(5.0) / 3,
        "model.output.weight": torch.arange(6.0).reshape(2, 3).to(torch.bfloat16),
        "optim.norm.weight.exp_avg": torch.arange(5.0) / 7,
        "optim.norm.weight.step": torch.tensor(3.0),
    }


def test_a_checkpoint_of_before_is_read(tmp_path: Path) -> None:
    """Two ranks saved it on 2026-11-26, with torch 2.13: parts of tensors, whole ones, and a copy of one that both had.

    It is never written anew: `make golden` leaves it alone.
    """
    copy = shutil.copytree(OLD_CHECKPOINT, tmp_path / "step-3")
    assert verify(copy).step == 3
    assert read_state(copy) == {"step": 3}
    tensors = {name: torch.full_like(tensor, -1) for name, tensor in old_tensors().items()}
    assert load(copy, whole_shards(tensors)) == {"step": 3}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in old_tensors().items())


# A run


RUN = (
    *("+recipe=quickstart", "launch.device=cpu", "pp=2", "vpp=2", "steps=1", "gbs=4", "mbs=1", "seq=16"),
    *(
        "layout=E|t|t|mL",
        "model.num_layers=2",
        "model.hidden_size=16",
        "model.ffn_hidden_size=24",
        "model.num_attention_heads=2",
    ),
    *(
        "model.num_query_groups=null",
        "model.multi_latent_attention=true",
        "model.kv_lora_rank=8",
        "model.qk_head_dim=8",
    ),
    *("model.v_head_dim=8", "model.qk_pos_emb_head_dim=4", "model.share_embeddings_and_output_weights=true"),
    *("model.num_moe_experts=2", "model.moe_ffn_hidden_size=8", "model.moe_shared_expert_intermediate_size=8"),
    *("model.moe_layer_freq=[0,1]", "model.moe_aux_loss_coeff=0.01", "model.mtp_num_layers=1"),
    *("parallel.fp16=true", "optim.initial_loss_scale=1.0", "optim.warmup_steps=0"),
    *("train.eval_interval=1", "train.eval_steps=1", "data.validation_split=0.2", "data.path=corpus.txt"),
)


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A copy of the run as it was when it had finished, what it printed, and what the life that failed printed."""
    cwd = tmp_path_factory.mktemp("frozen")
    (cwd / "corpus.txt").write_text("the stage of a rank " * 500)
    done = ppctl("train", *RUN, "--json", cwd=cwd, timeout=120)
    assert done.returncode == 0, done.stderr
    before = shutil.copytree(only_run(cwd), cwd / "before")
    failed = ppctl("resume", "steps=2", "pp=1", "vpp=2", "--json", cwd=cwd, timeout=120, PPCTL_FAULT="raise 0 0 0F0")
    assert failed.returncode == 1, failed.stderr
    return before, json.loads(done.stdout), json.loads(failed.stdout)


def run_of(lives: tuple[Path, Any, Any]) -> Path:
    """The run's own directory, after both lives."""
    return only_run(lives[0].parent)


def files(directory: Path) -> list[str]:
    """All that is in a run directory, with the host's name as HOST."""
    names = (str(path.relative_to(directory)) for path in directory.rglob("*"))
    return sorted(re.sub(r"^heartbeats/.+", "heartbeats/HOST.json", name) for name in names)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_json_of_train_and_of_resume(lives: tuple[Path, Any, Any]) -> None:
    hold("train --json", fields(lives[1]))
    hold("resume --json failed", fields(lives[2]))


def test_files_of_a_run(lives: tuple[Path, Any, Any]) -> None:
    hold("files of a run", {"finished": files(lives[0]), "failed in a later life": files(run_of(lives))})


MAPS = {
    "plan.json": ("schedule.capacities", "timing.critical", "provenance"),
    "env.json": ("packages", "variables"),
    "profile.json": ("subject",),
    "checkpoints/step-1/manifest.json": ("files", "tensors"),
}
"""File -> its mappings whose keys are names."""


def test_fields_of_a_runs_files(lives: tuple[Path, Any, Any]) -> None:
    now = {}
    for path in sorted(lives[0].rglob("*.json")):
        name = str(path.relative_to(lives[0])).replace(
            path.stem, "HOST" if path.parent.name == "heartbeats" else path.stem
        )
        now[name] = fields(read(path), *MAPS.get(name, ()))
    del now["env.json"]["commit"]  # text or null: not every copy of the source is a checkout
    hold("fields of a run's files", now)
    hold("errors/rank-0000.json", fields(read(run_of(lives) / "errors" / "rank-0000.json")))


def test_fields_of_metrics(lives: tuple[Path, Any, Any]) -> None:
    (line,) = (lives[0] / "metrics.jsonl").read_text().splitlines()
    hold("metrics.jsonl", fields(json.loads(line)))


def test_format_and_names_of_a_checkpoint(lives: tuple[Path, Any, Any]) -> None:
    manifest = read(lives[0] / "checkpoints" / "step-1" / "manifest.json")
    tensors = {name: f"{one['dtype']} {one['shape']}" for name, one in manifest["tensors"].items()}
    hold("tensors of a checkpoint", tensors, exact=True)
    hold("format of a checkpoint", {"format": manifest["format"]})
