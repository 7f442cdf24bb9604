"""A run with Muon in cuts, beside one process with torch's two optimizers; its checkpoints in other cuts."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dense_runs import CPU, STEPS, config_of
from oracle.data import microbatches
from oracle.reference import train_reference
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.errors import CheckpointError
from ppctl.plan import build_plan
from ppctl.train.session import build_session
from ppctl.train.snapshot import load_checkpoint, save_checkpoint
from ppctl.train.step import Trainer


def run(mapping, until, save=None, load=None):
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), dist.get_rank(), CPU)
    first = 0 if load is None else load_checkpoint(session, Path(load))["step"]
    size = config.train.global_batch_size
    trainer = Trainer(session, session.batches(first, first * size), lambda: False)
    records = [trainer.step(step).record for step in range(first, until)]
    if save:
        save_checkpoint(session, Path(save), until, until * size)
    return records, {name: p.detach().numpy().copy() for name, p in session.weights.master.items()}


def refusal(mapping, load):
    with pytest.raises(CheckpointError) as caught:
        run(mapping, STEPS, None, load)
    return [(problem.code, problem.remedy) for problem in caught.value.problems]


def test_muon_has_the_bits_of_one_process_in_cuts_and_goes_on_in_others(text, tmp_path):
    config = config_of(text, pp=1, vpp=1, m=4, name="muon")
    expected = train_reference(config.model, config.optim, config.train.seed, microbatches(config, STEPS))
    cut = to_mapping(config_of(text, pp=2, vpp=2, m=4, name="muon"))
    for records, weights in run_ranks(run, 2, cut, STEPS):
        assert [record["loss"] for record in records] == expected.losses
        assert [record["grad_norm"] for record in records] == expected.norms
        assert all((torch.from_numpy(value) == expected.weights[name]).all() for name, value in weights.items())
    run_ranks(run, 2, cut, 2, str(tmp_path))
    saved = str(tmp_path / "step-2")
    ((records, weights),) = run_ranks(run, 1, to_mapping(config), STEPS, None, saved)
    assert [record["loss"] for record in records] == expected.losses[2:]
    assert all((torch.from_numpy(value) == expected.weights[name]).all() for name, value in weights.items())
    other = to_mapping(config_of(text, pp=1, vpp=1, m=4))
    assert run_ranks(refusal, 1, other, saved) == [[("PP-E774", f"optim.name=muon\nmodel.from={saved}")]]
