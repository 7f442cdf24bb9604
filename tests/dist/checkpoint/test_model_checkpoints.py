"""Checkpoints of models with experts and MTP: biases and replicas come back, and nobody's name knows who held what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expert_runs import config_of, together
from one_save import save_checkpoint
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.plan.build import build_plan
from ppctl.train.generate import Generator
from ppctl.train.session import build_session
from ppctl.train.snapshot import load_checkpoint
from ppctl.train.step import Trainer


def some_steps(mapping: dict, directory: str, resume: str | None, steps: int) -> tuple[list[dict], dict, list[int]]:
    """Runs in a rank: `steps` steps, after a checkpoint or from the start; saves; what was said, held and generated."""
    config = from_mapping(mapping)
    rank = torch.distributed.get_rank()
    session = build_session(config, build_plan(config, {}), rank, torch.device("cpu"))
    first = 0 if resume is None else load_checkpoint(session, Path(resume))["step"]
    trainer = Trainer(session, session.data.batches(first, first * config.train.global_batch_size))
    records = [trainer.step(first + i).record for i in range(steps)]
    save_checkpoint(session, Path(directory), first + steps, (first + steps) * config.train.global_batch_size)
    tensors = dict(session.replica.weights.master)
    for stage in session.model.stages.values():
        tensors |= stage.canonical_buffers()
    spoken = Generator(session).continue_prompt([1, 2, 3], 2)
    return records, {name: t.detach().numpy().copy() for name, t in tensors.items()}, spoken


SPREAD = dict(layout="Et*5mL", pp=1, dp=4, ep=4)
ALONE = dict(layout="Et*2|t*3|m|L", pp=2, dp=1, ep=1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(SPREAD, ALONE, id="ep 4 to 1"),
        pytest.param(ALONE, SPREAD, id="ep 1 to 4", marks=pytest.mark.whole),
    ],
)
def test_training_goes_on_where_experts_are_spread_differently(text, tmp_path, before, after):
    def run(cut: dict, name: str, resume: Path | None, steps: int) -> list:
        config = config_of(text, "deepseek", 4 // cut["dp"], cut["layout"], cut["pp"], cut["dp"], cut["ep"])
        arguments = (to_mapping(config), str(tmp_path / name), None if resume is None else str(resume), steps)
        return run_ranks(some_steps, cut["pp"] * cut["dp"], *arguments)

    saved = run(before, "saved", None, 2)
    path = tmp_path / "saved" / "step-2"
    as_it_was = run(after, "same", path, 0)
    ours, theirs = (together([result[:2] for result in results]) for results in (as_it_was, saved))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert (value == theirs[name]).all(), name
    assert any(value.any() for name, value in ours.items() if name.endswith("expert_bias"))
    assert {tuple(spoken) for *_, spoken in as_it_was} == {tuple(spoken) for *_, spoken in saved}
    went_on, changed = run(before, "on", path, 1), run(after, "changed", path, 1)
    for key in ("loss", "mtp_loss", "aux_loss", "grad_norm"):
        assert changed[0][0][0][key] == pytest.approx(went_on[0][0][0][key], rel=1e-6), key


def test_the_embedding_beside_mtp_stays_bit_equal_for_twenty_steps(text, tmp_path):
    config = config_of(text, "deepseek, tied, two MTP modules", 2, "Et*2|t*2|t|mm|L", 5)
    config.train.steps, config.train.micro_batch_size, config.train.global_batch_size = 20, 1, 2
    results = run_ranks(some_steps, 5, to_mapping(config), str(tmp_path), None, 20)
    held = {name: value for _, tensors, _ in results for name, value in tensors.items()}
    uses = [held[name] for name in ("tok_embeddings.weight", "output.weight", "mtp.tok_embeddings.weight")]
    assert all((use == uses[0]).all() for use in uses)
    records = results[0][0]
    assert records[-1]["loss"] < records[0]["loss"] and records[-1]["mtp_loss"] < records[0]["mtp_loss"]
