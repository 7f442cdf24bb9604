"""A checkpoint of any axes loads into any others: every bit comes back, and the run goes on, speaks and is evaluated.

All cuts of 8 ranks run in one set of processes. Models are in float64, so that what differs by the order of sums alone
differs by nothing that can be seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from axis_runs import config_of
from one_save import save_checkpoint
from ranks import run_ranks

from ppctl.checkpoint.manifest import read_manifest
from ppctl.checkpoint.reading import CheckpointReader
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import RunConfig
from ppctl.plan.build import build_plan
from ppctl.train.generate import Generator
from ppctl.train.loop import Evaluator
from ppctl.train.session import build_session
from ppctl.train.snapshot import load_checkpoint
from ppctl.train.step import Trainer

STEPS, SAMPLES = 2, 8
CUTS: dict[str, dict[str, dict[str, Any]]] = {
    "grouped": {
        "tp 4, sp, cp 2": dict(tp=4, sp=True, cp=2),  # every rank has all groups of keys
        "pp 2 x vpp 2, tp 2, dp 2": dict(
            pp=2, virtual_pipeline_model_parallel_size=2, tp=2, dp=2, layout="Et|t|t|tL",
            data_parallel_sharding="optimizer_gradients",
        ),
        "cp 4, a2a+p2p, dp 2": dict(cp=4, ways="a2a+p2p", levels=[2, 2], dp=2, data_parallel_sharding="full"),
    },
    "deepseek": {
        "pp 2, tp 2, cp 2, ep 2, etp 2": dict(pp=2, tp=2, sp=True, cp=2, ep=2, etp=2, layout="Et*2|t*2mL"),
        "dp 8, ep 4": dict(dp=8, ep=4, data_parallel_sharding="full"),
        "pp 2 x vpp 2, tp 4, ep 4, etp 1": dict(
            pp=2, virtual_pipeline_model_parallel_size=2, tp=4, sp=True, ep=4, etp=1, layout="Et|t|t*2|mL"
        ),
        "tp 2, cp 2, dp 2, ep 2": dict(
            tp=2, sp=True, cp=2, ways="all_gather", dp=2, ep=2, data_parallel_sharding="optimizer_gradients"
        ),
    },
}  # fmt: skip
ALONE = "one process"


def run_of(text: Path, kind: str, cut: str) -> dict[str, Any]:
    config = config_of(kind, **({} if cut == ALONE else CUTS[kind][cut]))
    config.model.vocab_size = 320
    config.data.path, config.data.validation_split = str(text), 0.02
    config.train.micro_batch_size, config.train.global_batch_size = 1, SAMPLES
    config.train.eval_interval, config.train.eval_steps, config.optim.lr = 1, 2, 1e-2
    return to_mapping(config)


def through(mappings: dict[str, dict[str, Any]], directory: str, first: str | None) -> dict[str, Any]:
    """Runs in a rank: two steps of the first cut, where there is no checkpoint; each cut then loads it and goes on."""
    if first is None:
        first = next(iter(mappings))
        session = build(from_mapping(mappings[first]))
        trainer = Trainer(session, session.data.batches())
        for step in range(STEPS):
            trainer.step(step)
        save_checkpoint(session, Path(directory) / "first", STEPS, STEPS * SAMPLES)
        session.pipeline.close()
    return {cut: one_cut(from_mapping(mapping), Path(directory), cut) for cut, mapping in mappings.items()}


def one_cut(config: RunConfig, directory: Path, cut: str) -> dict[str, Any]:
    session = build(config)
    load_checkpoint(session, directory / "first" / f"step-{STEPS}")
    save_checkpoint(session, directory / cut, STEPS, STEPS * SAMPLES)
    spoken = Generator(session).continue_prompt([1, 2, 3], 4)
    if session.replica.gathered is not None:
        session.replica.gathered.release_all()
    trainer = Trainer(session, session.data.batches(STEPS, STEPS * SAMPLES))
    evaluated = Evaluator(session)()
    record = trainer.step(STEPS).record
    session.pipeline.close()
    return {"spoken": spoken, **evaluated, **{key: record[key] for key in ("loss", "grad_norm")}}


def build(config: RunConfig) -> Any:
    etp = config.parallel.expert_tensor_parallel_size
    plan = build_plan(config, {} if etp is None else {"parallel.expert_tensor_parallel_size": "command line"})
    assert not plan.problems, plan.problems
    return build_session(config, plan, dist.get_rank(), torch.device("cpu"))


def tensors_at(directory: Path) -> dict[str, torch.Tensor]:
    path = directory / f"step-{STEPS}"
    reader = CheckpointReader(path, read_manifest(path))
    return {name: reader.tensor(name) for name in reader.manifest.tensors}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [pytest.param("grouped", marks=pytest.mark.whole), "deepseek"])
def test_every_bit_comes_back_in_other_axes_and_the_run_goes_on(text: Path, tmp_path: Path, kind: str) -> None:
    mappings = {cut: run_of(text, kind, cut) for cut in CUTS[kind]}
    ranks = run_ranks(through, 8, mappings, str(tmp_path), None, timeout=200)
    alone = run_ranks(through, 1, {ALONE: run_of(text, kind, ALONE)}, str(tmp_path), "saved")[0][ALONE]
    saved = tensors_at(tmp_path / "first")
    assert any(name.endswith(".exp_avg_sq") for name in saved)
    assert any(name.endswith(".step") for name in saved)
    for cut in (*mappings, ALONE):
        again = tensors_at(tmp_path / cut)
        assert again.keys() == saved.keys()
        for name, tensor in again.items():
            assert tensor.dtype == saved[name].dtype and torch.equal(tensor, saved[name]), (cut, name)
    for rank in ranks:
        for cut, found in rank.items():
            assert found["spoken"] == alone["spoken"], cut
            assert found["eval_samples"] == alone["eval_samples"] > 0, cut
            for key in ("eval_loss", "loss", "grad_norm"):
                assert found[key] == pytest.approx(alone[key], rel=1e-11), (cut, key)
