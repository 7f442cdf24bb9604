"""The plan against ppctl's own model, counted from outside while it trains: activations in flight, bytes of state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accumulated import accumulated
from dense_runs import config_of, session_of, trainer_of
from live_memory import LiveBytes, count_in_flight
from one_save import save_checkpoint
from ranks import run_ranks

from ppctl.config.mapping import to_mapping
from ppctl.train.snapshot import load_checkpoint

CUTS = [
    pytest.param({"pp": 2, "vpp": 1, "m": 5}, id="1f1b"),
    pytest.param({"pp": 2, "vpp": 1, "m": 5, "pp_schedule": "gpipe"}, id="gpipe"),
    pytest.param({"pp": 2, "vpp": 3, "m": 6}, id="interleaved"),
    pytest.param({"pp": 4, "vpp": 1, "m": 9, "layout": "E|t*3|t*3|L"}, id="E alone and L alone"),
]


@pytest.mark.parametrize("cut", CUTS)
def test_activations_in_flight_are_the_plans_on_every_rank(text: Path, cut: dict) -> None:
    for rank, (measured, planned) in enumerate(
        run_ranks(count_in_flight, cut["pp"], to_mapping(config_of(text, **cut)))
    ):
        assert measured == planned > 0, f"rank {rank}"


def peak_bytes(mapping):
    """(most bytes alive in a step, bytes of the step's own batch) on this rank, once all state exists."""
    trainer = trainer_of(session_of(mapping))
    trainer.step(0)
    with LiveBytes() as live:
        trainer.step(1)
    batch = trainer.stages.batch
    return live.peak, 0 if batch is None else sum(t.nbytes for t in (batch.tokens, batch.labels, batch.loss_mask))


@pytest.mark.parametrize(
    "cut", [{"pp": 2, "vpp": 1}, {"pp": 2, "vpp": 2, "layout": "Et|tt|tt|tL"}], ids=["1f1b", "interleaved"]
)
def test_peak_bytes_at_4_pp_microbatches_are_those_at_2_pp(text: Path, cut: dict) -> None:
    short, long = (run_ranks(peak_bytes, 2, to_mapping(config_of(text, m=m, **cut))) for m in (4, 8))
    for rank, ((fewer, small), (more, large)) in enumerate(zip(short, long, strict=True)):
        losses = 4 * 4 * 3  # one scalar each, kept until they are added up
        assert 0 <= more - fewer <= large - small + losses, f"rank {rank}"


def test_the_meter_sees_gpipe_grow(text: Path) -> None:
    cut = {"pp": 2, "vpp": 1, "pp_schedule": "gpipe"}
    short, long = (run_ranks(peak_bytes, 2, to_mapping(config_of(text, m=m, **cut))) for m in (4, 8))
    assert all(more > 1.3 * fewer for (fewer, _), (more, _) in zip(short, long, strict=True))


def bytes_of_state(mapping):
    """(weights, gradients, optimizer) in bytes on this rank after a step, and what the plan says."""
    session = session_of(mapping)
    trainer_of(session).step(0)
    weights, plan = session.replica.weights, session.plan.pp_ranks[session.own.pp_rank]
    moments = [state[key] for state in session.replica.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    masters = [weights.master[name] for name, own in weights.model.items() if own is not weights.master[name]]
    held = (weights.model.values(), accumulated(weights).values(), [*moments, *masters])
    measured = tuple(sum(tensor.nbytes for tensor in tensors) for tensors in held)
    return measured, (plan.weight_bytes, plan.gradient_bytes, plan.optimizer_bytes)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_state_are_the_plans(text: Path, bf16: bool, tied: bool) -> None:
    for measured, planned in run_ranks(
        bytes_of_state, 2, to_mapping(config_of(text, pp=2, vpp=1, m=2, tied=tied, bf16=bf16))
    ):
        assert measured == planned


def train_in_one_go_and_in_two(mapping, directory):
    """Losses and final masters of four steps, once uninterrupted and once through a checkpoint after two."""
    session = session_of(mapping)
    trainer = trainer_of(session)
    records = [trainer.step(step).record for step in range(2)]
    path = save_checkpoint(session, Path(directory), 2, 2 * session.config.train.global_batch_size)
    records += [trainer.step(step).record for step in (2, 3)]
    again = session_of(mapping)
    assert load_checkpoint(again, path)["step"] == 2
    resumed = trainer_of(again, 2)
    second = [resumed.step(step).record for step in (2, 3)]
    same = all(
        torch.equal(own, again.replica.weights.master[name]) for name, own in session.replica.weights.master.items()
    )
    kinds = {str(own.dtype) for own in session.replica.weights.model.values()}
    return [r["loss"] for r in records], [r["loss"] for r in second], same, kinds


def test_bfloat16_trains_and_resumes_bitwise(text: Path, tmp_path: Path) -> None:
    mapping = to_mapping(config_of(text, pp=2, vpp=2, m=4, bf16=True, layout="Et|tt|tt|tL"))
    for whole, second, same, kinds in run_ranks(train_in_one_go_and_in_two, 2, mapping, str(tmp_path)):
        assert kinds == {"torch.bfloat16"}
        assert whole[-1] < whole[0]
        assert second == whole[2:]
        assert same
