"""Sharded data parallelism: the numbers of replicas, parts of the state on each rank, checkpoints that know no cut."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from dense_runs import STEPS, config_of, reference, session_of, trainer_of
from expert_runs import config_of as config_with_experts
from one_save import save_checkpoint
from own_worlds import in_own_worlds
from ranks import run_ranks
from whole_tensors import all_held, whole_of

from ppctl.config.mapping import to_mapping
from ppctl.parallel.shard import part_of, scatter_sums, start_gather
from ppctl.train.generate import write_samples
from ppctl.train.loop import Evaluator
from ppctl.train.snapshot import load_checkpoint
from ppctl.train.trained_weights import GatheredWeights


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(" ".join(random.Random(0).choices(["stage", "rank", "bubble", "layer"], k=3000)))
    return path


def mapping_of(
    text: Path, sharding: str, *, pp: int = 2, dp: int = 2, vpp: int = 1, m: int = 4, **changes: object
) -> dict:
    config = config_of(text, pp=pp, vpp=vpp, m=m, dp=dp, data_parallel_sharding=sharding, **changes)
    config.optim.eps = 1e-4  # else the last bit of a nearly zero gradient decides about a whole step of its weight
    return to_mapping(config)


WAYS = ("none", "optimizer_gradients", "full")


class Trained(NamedTuple):
    """What a rank has after STEPS steps."""

    losses: list[float]
    norms: list[float]
    evaluated: list[float]
    """The losses of the first batch, forward only, before the last step."""
    weights: dict[str, torch.Tensor]
    state: int
    """Elements of masters and moments."""


def train(mapping: dict) -> Trained:
    session = session_of(mapping)
    trainer = trainer_of(session)
    records = [trainer.step(step).record for step in range(STEPS - 1)]
    batches = session.data.batches()
    evaluated = Evaluator(session).losses(None if batches is None else batches.step(0))
    records.append(trainer.step(STEPS - 1).record)
    gathered = session.replica.gathered
    assert not isinstance(gathered, GatheredWeights) or all(p.isnan().all() for p in gathered.model.values()), (
        "nothing between steps"
    )
    with nullcontext() if gathered is None else all_held(gathered):
        weights = {name: p.detach().clone() for name, p in session.replica.weights.model.items()}
    state = [t for entry in session.replica.optimizer.state.values() for t in entry.values() if t.dim()]
    elements = sum(t.numel() for t in (*state, *session.replica.weights.master.values()))
    return Trained([r["loss"] for r in records], [r["grad_norm"] for r in records], evaluated, weights, elements)


def train_each(mappings: list[dict]) -> list[Trained]:
    return in_own_worlds(train, mappings)


def agree(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (got[name] - value).abs().max() <= 1e-6 * value.abs().max(), name


def hold_to_replicas(found: list[list[Trained]], *, half: bool) -> None:
    """Every rank's results of WAYS: to a millionth; of the two ways to share, to the bit."""
    for rank, (plain, *shared) in enumerate(found):
        for way in shared:
            assert way.losses == pytest.approx(plain.losses, rel=1e-6)
            assert way.norms == pytest.approx(plain.norms, rel=1e-6)
            assert way.evaluated == pytest.approx(plain.evaluated, rel=1e-6)
            agree(way.weights, plain.weights)
            padding = 3 * len(plain.weights)
            assert not half or plain.state / 2 <= way.state <= plain.state / 2 + padding, "no more than padding beyond"
            assert way.state < plain.state
        first, second = shared
        assert first[:3] == second[:3]
        assert all(torch.equal(second.weights[name], value) for name, value in first.weights.items())
        twins = [other[-1].weights for other in found if other[-1].weights.keys() == plain.weights.keys()]
        for twin in twins if half else ():
            assert all(torch.equal(twin[name], value) for name, value in shared[-1].weights.items()), f"rank {rank}"


CUTS = [
    pytest.param({"vpp": 3, "tied": True}, id="interleaved, tied"),
    pytest.param({"scale_grads_in_schedule": True, "pp": 1}, id="scaled in the schedule"),
    pytest.param({"pp_schedule": "gpipe", "vpp": 3}, id="one chunk after the other", marks=pytest.mark.whole),
    pytest.param({"vpp": 3, "batch_p2p_comm": True, "overlap_p2p_comm": False}, id="batched", marks=pytest.mark.whole),
    pytest.param({"dp": 4, "pp": 2, "tied": True}, id="four replicas", marks=pytest.mark.whole),
    pytest.param({"dp": 3, "pp": 1}, id="uneven parts", marks=pytest.mark.whole),
]


@pytest.mark.shows("parallel.data_parallel_sharding")
@pytest.mark.parametrize("cut", CUTS)
def test_every_way_of_sharding_agrees_with_replicas(text: Path, cut: dict) -> None:
    dp = cut.get("dp", 2)
    mappings = [mapping_of(text, way, **cut) for way in WAYS]
    hold_to_replicas(run_ranks(train_each, dp * cut.get("pp", 2), mappings, timeout=240.0), half=dp == 2)


def test_without_clipping_sharded_weights_have_the_bits_of_replicas_and_those_of_one_process_to_a_millionth(
    text: Path,
) -> None:
    """Two gradients have one sum; only the norm, which clipping reads, is added up in another order."""
    losses, norms, weights, *_ = reference(text, 8, False, eps=1e-4, clip_grad=0.0)
    recomputed = {"recompute_granularity": "full", "deallocate_pipeline_outputs": False}
    mappings = [mapping_of(text, way, clip_grad=0.0, **recomputed) for way in WAYS]
    for plain, *shared in run_ranks(train_each, 4, mappings):
        for way in shared:
            assert way.losses == plain.losses
            assert all(torch.equal(way.weights[name], value) for name, value in plain.weights.items())
            assert way.losses == pytest.approx(losses, rel=1e-6)
            assert way.norms == pytest.approx(norms, rel=1e-6)
            agree(way.weights, {name: weights[name] for name in way.weights})


@pytest.mark.whole  # the compiler takes minutes
@pytest.mark.timeout(900)
def test_compiled_layers_compute_with_gathered_weights(text: Path) -> None:
    plain, full = (
        run_ranks(train, 2, mapping_of(text, way, pp=1, compile=True), timeout=400.0) for way in ("none", "full")
    )
    for way, wanted in zip(full, plain, strict=True):
        assert way.losses == pytest.approx(wanted.losses, rel=1e-6)
        agree(way.weights, wanted.weights)


EXPERTS = [
    pytest.param("deepseek", "Et*5mL", 1, 4, 2, id="two copies"),
    pytest.param("deepseek", "Et*5mL", 1, 2, 2, id="one copy", marks=pytest.mark.whole),
    pytest.param("softmax", "Et*2|t*3|L", 1, 4, 4, id="four shares", marks=pytest.mark.whole),
    pytest.param("deepseek", "Et*2|t*3|m|L", 2, 2, 2, id="two chunks a rank", marks=pytest.mark.whole),
    pytest.param("deepseek, tied, two MTP modules", "Et*3|t*2mmL", 2, 4, 2, id="tied", marks=pytest.mark.whole),
]


@pytest.mark.parametrize(("kind", "layout", "pp", "dp", "ep"), EXPERTS)
def test_experts_are_shared_by_the_ranks_that_hold_them(
    text: Path, kind: str, layout: str, pp: int, dp: int, ep: int
) -> None:
    mappings = []
    for way in WAYS:
        config = config_with_experts(text, kind, 2 * pp, layout, pp, dp, ep)
        config.parallel.data_parallel_sharding, config.optim.eps = way, 1e-4
        mappings.append(to_mapping(config))
    hold_to_replicas(run_ranks(train_each, pp * dp, mappings, timeout=240.0), half=False)


@pytest.mark.parametrize("switch", ["bf16", "fp16"])
def test_sharded_half_precision_follows_its_replicas(text: Path, switch: str) -> None:
    changes = {switch: True} | ({} if switch == "bf16" else {"loss_scale": 256.0})
    for plain, *shared in run_ranks(train_each, 4, [mapping_of(text, way, **changes) for way in WAYS]):
        for way in shared:
            assert way.losses == pytest.approx(plain.losses, rel=1e-3)
            assert way.norms == pytest.approx(plain.norms, rel=1e-2)
            assert all(way.weights[name].dtype == w.dtype != torch.float32 for name, w in plain.weights.items())
        first, second = shared
        assert first[:3] == second[:3]
        assert all(torch.equal(second.weights[name], value) for name, value in first.weights.items())


def save_and_load(saves: list[dict], loads: list[tuple[dict, int]], root: str) -> tuple[list[dict], list[tuple]]:
    """(each save's tensors, each load's tensors with its sample and the next step's loss); a load names its save."""
    saved, loaded = [], []
    for number, mapping in enumerate(saves):
        session = session_of(mapping)
        trainer = trainer_of(session)
        for step in range(2):
            trainer.step(step)
        save_checkpoint(session, Path(root) / str(number), 2, 32)
        saved.append(tensors_of(session))
    for mapping, number in loads:
        session = session_of(mapping)
        load_checkpoint(session, Path(root) / str(number) / "step-2")
        sample = write_samples(session)
        loaded.append((tensors_of(session), sample, trainer_of(session, 2).step(2).record["loss"]))
    return saved, loaded


def tensors_of(session) -> dict[str, torch.Tensor]:
    """Masters and moments, whole, and what is trained without a gradient."""
    found = {
        name: buffer.clone()
        for stage in session.model.stages.values()
        for name, buffer in stage.canonical_buffers().items()
    }
    for name, master in session.replica.weights.master.items():
        for key, own in {"master": master.detach(), **session.replica.optimizer.state[name]}.items():
            found[f"{name} {key}"] = whole_of(session, name, own).clone()
    return found


def test_a_checkpoint_knows_nothing_of_sharding(text: Path, tmp_path: Path) -> None:
    """Saved by either way, loaded by every one, in another cut and with another number of replicas."""
    saves = [mapping_of(text, way) for way in ("optimizer_gradients", "full")]
    other = {"pp": 1, "dp": 4, "m": 2}
    loads = [
        (mapping_of(text, "none"), 0),
        (mapping_of(text, "full", vpp=3), 0),
        (mapping_of(text, "none", **other), 1),
        (mapping_of(text, "optimizer_gradients"), 1),
        (mapping_of(text, "full", **other), 1),
    ]
    for mapping, _ in loads:
        mapping["scale"] = "smoke"  # a short sample
    results = run_ranks(save_and_load, 4, saves, loads, str(tmp_path))
    everything = [{}, {}]
    for saved, _ in results:
        for whole, tensors in zip(everything, saved, strict=True):
            whole |= tensors
    for _, loaded in results:
        for (_, number), (tensors, _, loss) in zip(loads, loaded, strict=True):
            assert all(torch.equal(value, everything[number][name]) for name, value in tensors.items())
            assert loss == pytest.approx(results[0][1][0][2], rel=1e-6)
    samples = [sample for _, sample, _ in results[0][1]]
    assert samples[0] is not None
    assert all(sample == samples[0] for sample in samples)


def sum_and_gather() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    wholes = [torch.arange(7.0).view(7, 1), torch.ones(3), torch.arange(6.0).view(2, 3)]
    widths = [part_of(tensor, group).numel() for tensor in wholes]
    parts = scatter_sums([tensor * (rank + 1) for tensor in wholes], widths, group)()
    back = [torch.empty_like(tensor) for tensor in wholes]
    start_gather(parts, back[0].dtype, group)(back)
    for tensor, part, made in zip(wholes, parts, back, strict=True):
        assert torch.equal(made, tensor * 6)
        assert torch.equal(part, part_of(tensor * 6, group))


def test_parts_of_uneven_tensors_become_whole_again() -> None:
    run_ranks(sum_and_gather, 3)
