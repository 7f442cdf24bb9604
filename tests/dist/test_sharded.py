"""Sharded data parallelism: the numbers of replicas, parts of the state on each rank, checkpoints that know no cut."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_bitwise_law import STEPS, config_of
from test_bitwise_models import config_of as config_with_experts
from test_plan_is_what_happens import session_of, trainer_of

from ppctl.config.mapping import to_mapping
from ppctl.parallel.shard import gather_into, part_of, scatter_sums
from ppctl.train.snapshot import load_checkpoint, named_tensors, save_checkpoint


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(" ".join(random.Random(0).choices(["stage", "rank", "bubble", "layer"], k=3000)))
    return path


def mapping_of(text: Path, sharding: str, *, pp: int = 2, dp: int = 2, vpp: int = 1, **changes: object) -> dict:
    config = config_of(text, pp=pp, vpp=vpp, m=4, dp=dp, data_parallel_sharding=sharding, **changes)
    config.optim.eps = 1e-4  # else the last bit of a nearly zero gradient decides about a whole step of its weight
    return to_mapping(config)


def train(mapping: dict) -> tuple[list[float], list[float], dict[str, torch.Tensor], int]:
    """(losses, norms, the model's weights, elements of this rank's masters and moments)."""
    session = session_of(mapping)
    trainer = trainer_of(session)
    records = [trainer.step(step).record for step in range(STEPS)]
    weights = {name: p.detach().clone() for name, p in session.weights.model.items()}
    state = [t for entry in session.optimizer.state.values() for t in entry.values() if t.dim()]
    elements = sum(t.numel() for t in (*state, *session.weights.master.values()))
    return [r["loss"] for r in records], [r["grad_norm"] for r in records], weights, elements


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param({}, id="pp 2"),
        pytest.param({"vpp": 3, "tied": True}, id="interleaved, tied"),
        pytest.param({"scale_grads_in_schedule": True, "pp": 1}, id="scaled in the schedule"),
    ],
)
def test_sharding_agrees_with_replicas_to_a_millionth_and_holds_half_of_the_state(text: Path, cut: dict) -> None:
    ranks = 2 * cut.get("pp", 2)
    plain = run_ranks(train, ranks, mapping_of(text, "none", **cut))
    shared = run_ranks(train, ranks, mapping_of(text, "optimizer_gradients", **cut))
    for (losses, norms, weights, whole), (got_losses, got_norms, got, part) in zip(plain, shared, strict=True):
        assert got_losses == pytest.approx(losses, rel=1e-6)
        assert got_norms == pytest.approx(norms, rel=1e-6)
        for name, value in weights.items():
            assert (got[name] - value).abs().max() <= 1e-6 * value.abs().max(), name
        assert whole / 2 <= part <= whole / 2 + 3 * len(weights), "no more than padding beyond a half"
    for _, _, weights, _ in shared:
        (twin,) = [other for _, _, other, _ in shared if other is not weights and other.keys() == weights.keys()]
        assert all(torch.equal(twin[name], value) for name, value in weights.items()), "replicas stay equal to the bit"


@pytest.mark.parametrize(("dp", "ep"), [pytest.param(4, 2, id="two copies"), pytest.param(2, 2, id="one copy")])
def test_experts_are_shared_by_the_ranks_that_hold_them(text: Path, dp: int, ep: int) -> None:
    results = []
    for sharding in ("none", "optimizer_gradients"):
        config = config_with_experts(text, "deepseek", 2, "Et*5mL", 1, dp, ep)
        config.parallel.data_parallel_sharding, config.optim.eps = sharding, 1e-4
        results.append(run_ranks(train, dp, to_mapping(config)))
    for (losses, norms, weights, whole), (got_losses, got_norms, got, part) in zip(*results, strict=True):
        assert got_losses == pytest.approx(losses, rel=1e-6)
        assert got_norms == pytest.approx(norms, rel=1e-6)
        assert all((got[name] - w).abs().max() <= 1e-6 * w.abs().max() for name, w in weights.items())
        assert part < whole


@pytest.mark.parametrize("switch", ["bf16", "fp16"])
def test_sharded_half_precision_follows_its_replicas(text: Path, switch: str) -> None:
    plain = run_ranks(train, 4, mapping_of(text, "none", **{switch: True, **_scale(switch)}))
    shared = run_ranks(train, 4, mapping_of(text, "optimizer_gradients", **{switch: True, **_scale(switch)}))
    for (losses, norms, weights, _), (got_losses, got_norms, got, _) in zip(plain, shared, strict=True):
        assert got_losses == pytest.approx(losses, rel=1e-3)
        assert got_norms == pytest.approx(norms, rel=1e-2)
        assert all(got[name].dtype == weights[name].dtype != torch.float32 for name in weights)


def _scale(switch: str) -> dict:
    return {} if switch == "bf16" else {"loss_scale": 256.0}


def save(mapping: dict, directory: str) -> dict[str, torch.Tensor]:
    session = session_of(mapping)
    trainer = trainer_of(session)
    for step in range(2):
        trainer.step(step)
    save_checkpoint(session, Path(directory), 2, 16)
    return tensors_of(session)


def load(mapping: dict, directory: str) -> tuple[dict[str, torch.Tensor], float]:
    """(all state that the rank has, by name; the loss of the next step)."""
    session = session_of(mapping)
    load_checkpoint(session, Path(directory) / "step-2")
    return tensors_of(session), trainer_of(session, 2).step(2).record["loss"]


def tensors_of(session) -> dict[str, torch.Tensor]:
    return {name: value[0].clone() for name, value in named_tensors(session).items()}


@pytest.mark.parametrize(
    ("saved", "loaded"), [("optimizer_gradients", "none"), ("none", "optimizer_gradients")], ids=["apart", "together"]
)
def test_a_checkpoint_knows_nothing_of_sharding(text: Path, tmp_path: Path, saved: str, loaded: str) -> None:
    everything: dict[str, torch.Tensor] = {}
    for tensors in run_ranks(save, 4, mapping_of(text, saved), str(tmp_path)):
        everything |= tensors
    results = [
        run_ranks(load, 4, mapping_of(text, loaded), str(tmp_path)),
        run_ranks(load, 4, mapping_of(text, saved, vpp=3), str(tmp_path)),
    ]
    for result in results:
        for tensors, _ in result:
            for name, value in tensors.items():
                assert torch.equal(value, everything[name]), name
    assert results[0][0][1] == pytest.approx(results[1][0][1], rel=1e-6)


def sum_and_gather() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    wholes = [torch.arange(7.0).view(7, 1), torch.ones(3), torch.arange(6.0).view(2, 3)]
    parts = scatter_sums([tensor * (rank + 1) for tensor in wholes], group).wait()
    back = [torch.empty_like(tensor) for tensor in wholes]
    gather_into(back, parts, group)
    for tensor, part, made in zip(wholes, parts, back, strict=True):
        assert torch.equal(made, tensor * 6)
        assert torch.equal(part, part_of(tensor * 6, group))


def test_parts_of_uneven_tensors_become_whole_again() -> None:
    run_ranks(sum_and_gather, 3)
