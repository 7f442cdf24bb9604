"""What a checkpoint of a config holds, told without torch, is what its ranks save."""

from __future__ import annotations

from pathlib import Path

import torch
from expert_runs import MODELS, SEQ, SIZES
from one_save import save_checkpoint
from ranks import run_ranks

from ppctl.cli.main import main
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.launch.weights import checkpoint_tensors
from ppctl.plan.build import build_plan
from ppctl.train.session import build_session
from ppctl.train.snapshot import session_shards

KINDS = {**MODELS, "biases": dict(add_bias_linear=True, normalization="LayerNorm", gated_linear_unit=False)}
DTYPES = {
    "float32": {},
    "bfloat16": {"bf16": True},
    "float64": {"params_dtype": "float64", "pipeline_dtype": "float64"},
}


def config_of(kind: str, dtype: str, text: Path) -> RunConfig:
    config = RunConfig(model=ModelConfig(**(SIZES | KINDS[kind])))
    for key, value in DTYPES[dtype].items():
        setattr(config.parallel, key, value)
    config.data.path, config.data.seq_length, config.launch.device = str(text), SEQ, "cpu"
    return config


def saved(mappings: list[dict], directory: str) -> list[dict[str, tuple]]:
    """In a rank that is alone: name -> kind of all that a session saves, of each config; the last one is saved."""
    found = []
    for mapping in mappings:
        config = from_mapping(mapping)
        session = build_session(config, build_plan(config, {}), 0, torch.device("cpu"))
        shards = session_shards(session)
        found.append({s.name: (tuple(s.shape), str(s.tensor.dtype).removeprefix("torch.")) for s in shards})
    save_checkpoint(session, Path(directory), 0, 0)
    return found


def test_ranks_save_the_tensors_that_their_config_tells(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text of some words " * 40)
    configs = [config_of(kind, dtype, text) for dtype in DTYPES for kind in KINDS] + [
        config_of("softmax", "float32", text)
    ]
    (found,) = run_ranks(saved, 1, [to_mapping(config) for config in configs], str(tmp_path / "checkpoints"))
    for config, tensors in zip(configs, found, strict=True):
        assert tensors == checkpoint_tensors(config)
        weights = {name for name in tensors if name.startswith("model.")}
        assert weights == checkpoint_tensors(config, optimizer=False).keys()
    words = [f"model.{key}={value}" for key, value in (SIZES | KINDS["softmax"]).items()]
    words += [f"data.seq_length={SEQ}", f"data.path={text}"]
    path = str(tmp_path / "checkpoints" / "step-0")
    assert main(["ckpt", "verify", path, "--for", *words, "parallel.bf16=true", "pp=1"]) == 0
    assert main(["ckpt", "verify", path, "--for", *words, "model.qk_layernorm=true"]) == 3
