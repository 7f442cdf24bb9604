"""A run with Muon in cuts and shared out over replicas, beside one process with torch's two optimizers; its
checkpoints in other cuts."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from axis_runs import MaskedBatches, differences, train_all, whole, world_of
from axis_runs import config_of as config_over_axes
from dense_runs import CPU, STEPS, config_of
from one_save import save_checkpoint
from oracle.data import microbatches
from oracle.reference import train_reference
from own_worlds import in_own_worlds
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.errors import CheckpointError
from ppctl.plan import build_plan
from ppctl.train.session import build_session
from ppctl.train.snapshot import load_checkpoint
from ppctl.train.step import Trainer


def run(mapping, until, save=None, load=None):
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), dist.get_rank(), CPU)
    first = 0 if load is None else load_checkpoint(session, Path(load))["step"]
    size = config.train.global_batch_size
    trainer = Trainer(session, session.data.batches(first, first * size))
    records = [trainer.step(step).record for step in range(first, until)]
    if save:
        save_checkpoint(session, Path(save), until, until * size)
    return records, {name: p.detach().numpy().copy() for name, p in session.replica.weights.master.items()}


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


OG, FULL = dict(data_parallel_sharding="optimizer_gradients"), dict(data_parallel_sharding="full")
SHARED = {
    "replicas": ("grouped", dict(dp=2)),
    "optimizer": ("grouped", dict(dp=2, **OG)),
    "full": ("biases", dict(dp=2, **FULL)),
    "experts on one rank": ("experts", dict(dp=2, **OG)),
    "experts on two, copies on none": ("deepseek", dict(dp=2, ep=2, **OG)),
    "experts on two, copies on two": ("deepseek", dict(dp=4, ep=2, **OG)),
    "experts, full": ("experts", dict(dp=4, ep=2, **FULL)),
    "more ranks than experts": ("experts", dict(dp=4, **OG)),
    "with cp": ("grouped", dict(dp=2, cp=2, **OG)),
    "pp, tied": ("biases", dict(dp=2, pp=2, layout="Et*2|t*2L", **OG)),
    "pp, full, interleaved": (
        "grouped",
        dict(dp=2, pp=2, layout="Et|t|t|tL", virtual_pipeline_model_parallel_size=2, **FULL),
    ),
    "zero bubble": ("latent", dict(dp=2, pp=2, layout="Et*2|t*2mmL", pp_schedule="zb_h1", **OG)),
}


def shared(name):
    kind, axes = SHARED[name]
    return config_over_axes(kind, name="muon", **axes)


@pytest.fixture(scope="module")
def trained():
    found = {}
    for world in (2, 4):
        names = [name for name in SHARED if world_of(shared(name)) == world]
        ranks = run_ranks(train_all, world, [to_mapping(shared(name)) for name in names], timeout=300)
        found |= {name: [rank[number] for rank in ranks] for number, name in enumerate(names)}
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SHARED)
def test_matrices_owned_whole_agree_with_one_process(trained, name):
    far = differences(SHARED[name][0], trained[name], optimizer="muon")
    assert {what: value for what, value in far.items() if not value <= 1e-12} == {}


def through(mapping, until, save=None, load=None):
    """Steps of a config from a checkpoint on; a rank's losses, and its weights made whole."""
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), dist.get_rank(), CPU)
    first = 0 if load is None else load_checkpoint(session, Path(load))["step"]
    trainer = Trainer(session, MaskedBatches(config, session.own.dp_rank))
    losses = [trainer.step(step).record["loss"] for step in range(first, until)]
    if save:
        save_checkpoint(session, Path(save), until, until * config.train.global_batch_size)
    weights = {}
    for name, master in session.replica.weights.master.items():
        weights.update(whole(session, name, master))
    session.pipeline.close()
    return losses, weights


def through_each(mappings, until, load):
    return in_own_worlds(lambda mapping: through(mapping, until, None, load), mappings)


@pytest.mark.timeout(400)
def test_a_matrix_moves_to_its_owner_in_another_cut_and_with_sharding_on_and_off(tmp_path):
    kind = "deepseek"
    cuts = {
        1: [{}],
        2: [dict(dp=2, **OG), dict(dp=2, ep=2, **FULL), dict(pp=2, layout="Et*2|t*2mL")],
        4: [dict(dp=4, **FULL), dict(dp=2, pp=2, layout="Et*2|t*2mL", ep=2, **OG)],
    }
    mapping_of = lambda axes: to_mapping(config_over_axes(kind, name="muon", **axes))  # noqa: E731
    run_ranks(through, 4, mapping_of(dict(dp=4, ep=2, **OG)), 2, str(tmp_path), timeout=120)
    saved = str(tmp_path / "step-2")
    ((expected, wanted),) = run_ranks(through, 1, mapping_of({}), 3, timeout=120)
    for world, given in cuts.items():
        for rank in run_ranks(through_each, world, list(map(mapping_of, given)), 3, saved, timeout=200):
            for losses, weights in rank:
                assert losses == pytest.approx(expected[2:], rel=1e-12)
                for name, value in weights.items():
                    assert abs(value - wanted[name]).max() <= 1e-12 * abs(wanted[name]).max(), name
