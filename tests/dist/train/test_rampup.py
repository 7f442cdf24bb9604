"""A run whose batch grows, in any cut, beside one process that does the same; and continued in another."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dense_runs import CPU, config_of
from one_save import save_checkpoint
from oracle.data import microbatches
from oracle.reference import train_reference
from ranks import run_ranks

from ppctl.config.batch_sizes import BatchSizes, steps_for_tokens
from ppctl.config.learning_rate import lr_at, mtp_weight
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.plan import build_plan
from ppctl.train.session import build_session
from ppctl.train.snapshot import load_checkpoint
from ppctl.train.step import Trainer

STEPS = 7
SIZES = [4, 4, 4, 8, 8, 12, 12]


def growing(text, **cut):
    config = config_of(text, m=6, **cut)
    config.train.batch_rampup, config.train.steps = [4, 4, 24], STEPS
    config.model.mtp_num_layers, config.model.mtp_loss_scaling_factor = 1, 0.1
    config.model.mtp_loss_scaling_pieces = [{"until": 2, "weight": 0.4}, {"until": "384 tokens", "weight": 0.3}]
    config.optim.lr_decay_tokens = 620.0
    return config


def run(mapping, until, save=None, load=None):
    config = from_mapping(mapping)
    plan = build_plan(config, {})
    assert not plan.problems, plan.problems
    session = build_session(config, plan, dist.get_rank(), CPU)
    first = consumed = 0
    if load:
        state = load_checkpoint(session, Path(load))
        first, consumed = state["step"], state["consumed_samples"]
    sizes = BatchSizes.of(config.train, first, consumed)
    trainer = Trainer(session, session.data.batches(first, consumed), sizes)
    records = [trainer.step(step).record for step in range(first, until)]
    if save:
        save_checkpoint(session, Path(save), until, sizes.position(until))
    weights = {name: p.detach().numpy().copy() for name, p in session.replica.weights.master.items()}
    return records, weights


@pytest.fixture(scope="module")
def expected(text):
    config = growing(text, pp=1, vpp=1)
    steps_for = steps_for_tokens(config)
    weights = [mtp_weight(step, config.model, steps_for) for step in range(STEPS)]
    assert weights == [0.4, 0.4, 0.3, 0.3, 0.3, 0.1, 0.1]
    config.optim.lr_decay_steps, config.optim.lr_decay_tokens = steps_for(620.0), None
    assert config.optim.lr_decay_steps == 6
    batches = microbatches(config, STEPS)
    assert [len(each) * 2 for each in batches] == SIZES
    trained = train_reference(config.model, config.optim, config.train.seed, batches, steps=STEPS, mtp_weights=weights)
    rates = [lr_at(step, config.optim, STEPS) for step in range(STEPS)]
    return trained, rates, weights


def held(expected, records, weights, first=0):
    trained, rates, mtp = expected
    assert [r["loss"] for r in records] == trained.losses[first:]
    assert [r["grad_norm"] for r in records] == trained.norms[first:]
    assert [r["lr"] for r in records] == rates[first:]
    assert [r["mtp_weight"] for r in records] == mtp[first:]
    assert [r["tokens"] for r in records] == [16 * size for size in SIZES[first:]]
    for name, value in weights.items():
        assert (torch.from_numpy(value) == trained.weights[name]).all(), name


def test_a_batch_that_grows_through_three_sizes_has_the_bits_of_one_process(text, expected):
    for records, weights in run_ranks(run, 2, to_mapping(growing(text, pp=2, vpp=2)), STEPS):
        held(expected, records, weights)


def test_a_run_goes_on_in_another_cut_within_the_ramp(text, expected, tmp_path):
    run_ranks(run, 2, to_mapping(growing(text, pp=2, vpp=2)), 4, str(tmp_path))
    again = to_mapping(growing(text, pp=1, vpp=1))
    ((records, weights),) = run_ranks(run, 1, again, STEPS, None, str(tmp_path / "step-4"))
    held(expected, records, weights, 4)
