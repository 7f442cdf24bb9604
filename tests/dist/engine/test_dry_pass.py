"""The dry pass: it runs every kernel that a step's stages run, and nothing of the run is different behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expert_runs import config_of
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.engine.engine_error import EngineError
from ppctl.engine.stage import Stage
from ppctl.parallel.replicate import GradientReducer
from ppctl.plan.build import build_plan
from ppctl.train.loop import Evaluator
from ppctl.train.session import build_session
from ppctl.train.step import Trainer
from ppctl.train.trained_weights import GradientScatter

STEPS = 2
LAYOUT = "Et|tt|t|tmL"
CASES = {
    "experts, MTP, two ranks of two chunks": dict(kind="deepseek", pp=2),
    "experts on two ranks": dict(kind="deepseek", pp=1, dp=2, ep=2),
    "an optimizer in shares": dict(kind="dense, MTP", pp=1, dp=2, data_parallel_sharding="optimizer_gradients"),
    "all of the state sharded": dict(kind="dense, MTP", pp=1, dp=2, data_parallel_sharding="full"),
    "auxiliary losses, bfloat16": dict(kind="softmax", pp=2, bf16=True),
    "recomputed but for one microbatch": dict(
        kind="dense, MTP", pp=2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1,
        num_microbatches_with_partial_activation_checkpoints=1,
    ),
}  # fmt: skip


def mapping_of(text: Path, kind: str, pp: int, dp: int = 1, ep: int = 1, **fields: object) -> dict:
    layout = LAYOUT if kind != "softmax" else LAYOUT.replace("m", "")
    config = config_of(text, kind, 4, layout, pp, dp, ep)
    for name, value in fields.items():
        setattr(config.train if hasattr(config.train, name) else config.parallel, name, value)
    config.train.eval_interval, config.train.eval_steps, config.data.validation_split = 1, 1, 0.2
    return to_mapping(config)


def trainer_of(mapping: dict) -> Trainer:
    config = from_mapping(mapping)
    plan = build_plan(config, {})
    assert not plan.problems, plan.problems
    session = build_session(config, plan, dist.get_rank(), torch.device("cpu"))
    return Trainer(session, session.data.batches())


def state_of(trainer: Trainer) -> dict:
    tensors = {name: t.detach().clone() for name, t in trainer.session.replica.weights.master.items()}
    for stage in trainer.session.model.stages.values():
        tensors |= {name: t.clone() for name, t in stage.canonical_buffers().items()}
    return tensors


class Operations(TorchDispatchMode):
    """Every operation, with the dtypes of its arguments: what has a kernel of its own on a GPU."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        dtypes = tuple(str(each.dtype) for each in args if isinstance(each, torch.Tensor))
        self.seen.add((str(function), dtypes))
        return function(*args, **(kwargs or {}))


def watched(operations: Operations):
    """Patch what a list runs, so that its operations are noted: forwards, backwards and the sums of gradients."""
    for name in ("forward", "backward"):
        original = getattr(Stage, name)

        def run(stage, mb, original=original):
            with operations:
                original(stage, mb)

        setattr(Stage, name, run)
    for kind in (GradientReducer, GradientScatter):
        reduce = kind.reduce

        def summed(self, *arguments, reduce=reduce):
            with operations:
                reduce(self, *arguments)

        kind.reduce = summed
    return operations


def with_and_without(mapping: dict) -> tuple[bool, set, int]:
    """(whether both runs are alike, operations that a step had and the dry pass had not, operations of a step)."""
    ends, operations = [], watched(Operations())
    for dry in (False, True):
        trainer = trainer_of(mapping)
        dice = torch.get_rng_state()
        operations.seen = rehearsed = set()
        if dry:
            before = state_of(trainer)
            trainer.dry_pass(0)
            after = state_of(trainer)
            assert all(torch.equal(before[name], after[name]) for name in before)
            assert all(p.grad is None for p in trainer.session.replica.weights.master.values())
            assert torch.equal(dice, torch.get_rng_state())
            assert all(stage.training for stage in trainer.session.model.stages.values())
        operations.seen = executed = set()
        trainer._run_pipeline(0)
        losses = [Evaluator(trainer.session)()["eval_loss"]]
        losses += [trainer.step(step).record["loss"] for step in range(STEPS)]
        ends.append((losses, state_of(trainer)))
    (losses, tensors), (dry_losses, dry_tensors) = ends
    same = losses == dry_losses and all(torch.equal(t, dry_tensors[name]) for name, t in tensors.items())
    return same, executed - rehearsed, len(executed)


SAMPLE = {"experts on two ranks", "all of the state sharded", "recomputed but for one microbatch"}


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=() if each in SAMPLE else pytest.mark.whole) for each in CASES]
)
def test_a_dry_pass_runs_every_kernel_of_the_stages_and_changes_nothing(case: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("a stage, a rank and a microbatch " * 60)
    mapping = mapping_of(tmp_path / "corpus.txt", **CASES[case])
    for same, missed, executed in run_ranks(with_and_without, 2, mapping):
        assert same and executed > 20
        assert missed == set()


def fails_in_a_dry_pass(mapping: dict) -> str:
    trainer = trainer_of(mapping)
    module = trainer.session.model.stages[3]
    module.forward = lambda *_, **__: 1 / 0
    with pytest.raises(EngineError) as caught:
        trainer.dry_pass(0)
    return str(caught.value)


def test_a_stage_that_fails_in_it_is_named_as_in_a_step(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("a stage, a rank and a microbatch " * 60)
    mapping = mapping_of(tmp_path / "corpus.txt", "dense, MTP", pp=1)
    (message,) = run_ranks(fails_in_a_dry_pass, 1, mapping)
    assert "(stage 3) failed in 3F" in message and "ZeroDivisionError" in message
