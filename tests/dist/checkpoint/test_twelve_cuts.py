"""Thirteen cuts of one model, each saved and each loaded from the checkpoint of every other: all state comes back, and
the steps that follow are those of a run that nobody interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from axis_runs import config_of
from one_save import save_checkpoint
from ranks import run_ranks

from ppctl.checkpoint.reading import load
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.plan.build import build_plan
from ppctl.train.session import Session, build_session
from ppctl.train.snapshot import load_checkpoint, session_shards
from ppctl.train.step import Trainer

V = dict(pp=2, virtual_pipeline_model_parallel_size=2, pp_schedule="zbv_zero_bubble", layout="Et|t|t*2|mL")
LOOP = dict(pp=2, virtual_pipeline_model_parallel_size=2, layout="Et|t|t*2|mL")
CUTS: dict[str, dict[str, Any]] = {
    "dp 8": dict(dp=8),
    "dp 8, ep 2, gradients in parts": dict(dp=8, ep=2, data_parallel_sharding="optimizer_gradients"),
    "dp 8, ep 4, all in parts": dict(dp=8, ep=4, data_parallel_sharding="full"),
    "dp 4, cp 2, ep 2, all in parts": dict(dp=4, cp=2, ep=2, data_parallel_sharding="full"),
    "pp 2, tp 2, cp 2, ep 2, etp 2": dict(pp=2, tp=2, sp=True, cp=2, ep=2, etp=2, layout="Et*2|t*2mL"),
    "loop, tp 4, ep 4, etp 1": LOOP | dict(tp=4, sp=True, ep=4, etp=1),
    "loop, tp 2, dp 2, gradients in parts": LOOP
    | dict(tp=2, sp=True, dp=2, data_parallel_sharding="optimizer_gradients"),
    "V, dp 4": V | dict(dp=4),
    "V, tp 2, dp 2, ep 2": V | dict(tp=2, sp=True, dp=2, ep=2),
    "V, dp 4, ep 2, gradients in parts": V | dict(dp=4, ep=2, data_parallel_sharding="optimizer_gradients"),
    "tp 2, cp 2, dp 2, ep 2, gradients in parts": dict(
        tp=2, sp=True, cp=2, ways="all_gather", dp=2, ep=2, data_parallel_sharding="optimizer_gradients"
    ),
    "loop, dp 4": LOOP | dict(dp=4),  # nothing is summed in another order than in "V, dp 4"
    # The last one: its embedding's group has not all ranks, and torch names later groups by how many a rank has made.
    "pp 4, dp 2": dict(pp=4, dp=2, layout="Et|t|t|tmL"),
}  # fmt: skip


def mapping_of(text: Path, cut: str, samples: int = 16) -> dict[str, Any]:
    config = config_of("deepseek", **CUTS[cut])
    config.model.vocab_size, config.data.path = 320, str(text)
    config.train.micro_batch_size, config.train.global_batch_size = 1, samples
    return to_mapping(config)


def build(mapping: dict[str, Any]) -> Session:
    config = from_mapping(mapping)
    etp = config.parallel.expert_tensor_parallel_size
    plan = build_plan(config, {} if etp is None else {"parallel.expert_tensor_parallel_size": "command line"})
    assert not plan.problems, plan.problems
    return build_session(config, plan, dist.get_rank(), torch.device("cpu"))


def all_from_all(mappings: dict[str, dict[str, Any]], directory: str) -> list[str]:
    """In a rank: each cut saves the state of the first, then loads what every other has saved; which were not equal."""
    root, sessions, wrong = Path(directory), {}, []
    for cut, mapping in mappings.items():
        session = sessions[cut] = build(mapping)
        if len(sessions) == 1:  # moments that are no zeros, equal on replicas
            for shard in session_shards(session):
                if shard.name.startswith("optim.") and shard.tensor.dim():
                    shard.tensor.copy_(torch.arange(shard.tensor.numel(), dtype=shard.tensor.dtype).view(shard.shape))
        else:
            load(root / next(iter(mappings)) / "step-1", session_shards(session))
        save_checkpoint(session, root / cut, 1, 16)
    for cut, session in sessions.items():
        shards = session_shards(session)
        expected = [shard.tensor.clone() for shard in shards]
        for other in mappings:
            for shard in shards:
                shard.tensor.fill_(-1)
            load(root / other / "step-1", shards)
            equal = all(torch.equal(shard.tensor, own) for shard, own in zip(shards, expected, strict=True))
            wrong += [] if equal else [f"{cut} from {other}"]
        session.pipeline.close()
    return wrong


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_each_cut_loads_what_every_other_has_saved(text: Path, tmp_path: Path) -> None:
    assert len(CUTS) == 13
    mappings = {cut: mapping_of(text, cut) for cut in CUTS}
    assert run_ranks(all_from_all, 8, mappings, str(tmp_path), timeout=500) == [[]] * 8


BEFORE, AFTER, SAMPLES = 2, 5, 8
Steps = list[tuple[float, float]]


def steps_of(session: Session, first: int, count: int) -> Steps:
    """Loss and norm of the gradients of each step."""
    trainer = Trainer(session, session.data.batches(first, first * SAMPLES))
    records = [trainer.step(step).record for step in range(first, first + count)]
    return [(record["loss"], record["grad_norm"]) for record in records]


def gone_on(mappings: dict[str, dict[str, Any]], directory: str, target: str, writers: list[str]) -> dict[str, Steps]:
    """In a rank: the steps of a run in the target cut that is saved and goes on, then in that cut those behind the
    checkpoint of each writer."""
    root, found, sessions = Path(directory), {}, {}
    for cut, mapping in mappings.items():
        writer = sessions[cut] = build(mapping)
        steps_of(writer, 0, BEFORE)
        save_checkpoint(writer, root / cut, BEFORE, BEFORE * SAMPLES)
        if cut == target:
            found["uninterrupted"] = steps_of(writer, BEFORE, AFTER)
    for cut in writers:
        load_checkpoint(sessions[target], root / cut / f"step-{BEFORE}")
        found[cut] = steps_of(sessions[target], BEFORE, AFTER)
    for session in sessions.values():
        session.pipeline.close()
    return found


def sums(cut: str) -> dict[str, Any]:
    """What says in which order a cut adds up."""
    placed = ("pp", "virtual_pipeline_model_parallel_size", "pp_schedule", "layout")
    return {key: value for key, value in CUTS[cut].items() if key not in placed}


THREE = ["V, dp 4", "pp 2, tp 2, cp 2, ep 2, etp 2", "dp 8, ep 4, all in parts"]


@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("target", "writers"),
    [
        *(pytest.param(cut, THREE, marks=pytest.mark.whole, id=f"{cut} behind three") for cut in CUTS),
        *(pytest.param(cut, list(CUTS), marks=pytest.mark.soak, id=f"{cut} behind all") for cut in CUTS),
    ],
)
def test_five_steps_behind_the_checkpoint_of_any_cut_are_those_of_a_run_that_went_on(
    text: Path, tmp_path: Path, target: str, writers: list[str]
) -> None:
    """To the bit where nothing is summed in another order, placement in a V included; models are in float64."""
    mappings = {cut: mapping_of(text, cut, SAMPLES) for cut in CUTS if cut == target or cut in writers}
    for found in run_ranks(
        gone_on, 8, mappings, str(tmp_path), target, [*dict.fromkeys([target, *writers])], timeout=460
    ):
        whole = found.pop("uninterrupted")
        assert len(whole) == AFTER and set(found) == {target, *writers}
        for writer, steps in found.items():
            if sums(writer) == sums(target):
                assert steps == whole, writer
            for one, other in zip(steps, whole, strict=True):
                assert one == pytest.approx(other, rel=1e-10), writer
