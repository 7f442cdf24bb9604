"""`train.replay`: a flipped bit in what is computed twice is found before the update, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from axis_runs import MaskedBatches, world_of
from axis_runs import config_of as config_over
from command import TINY, ppctl
from dense_runs import config_of, session_of
from own_worlds import in_own_worlds
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.engine.stage import StageProgram
from ppctl.errors import TrainingError
from ppctl.plan.build import build_plan
from ppctl.train.callback import Callback, Callbacks
from ppctl.train.replay import ReplayCheck
from ppctl.train.session import Session, build_session
from ppctl.train.step import Trainer

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its last bit but twenty of one element turned: a small error of a large model's device."""
    out = tensor.detach().clone().contiguous()
    out.view(-1).view(INTEGERS[out.element_size()])[out.numel() // 2] ^= 4
    return out


class Flip(Callback):
    """Turns one bit, once, in what a stage computes for a microbatch in a step: `where` says in what."""

    def __init__(self, session: Session, where: str, stage: int, mb: int, step: int) -> None:
        self.session, self.where, self.place, self.step = session, where, (stage, mb), step
        self.armed = False
        if where == "weight":
            name = next(n for n in session.model.stages[stage].canonical_parameters() if n.endswith("wo.weight"))
            session.model.stages[stage].canonical_parameters()[name].register_hook(self._once)
        if where == "inside":
            block = next(iter(session.model.stages[stage].decoder_layers().values()))
            block.register_forward_hook(lambda module, args, out: self._passed(out))
        self.running = False

    def pre_step(self, step: int) -> None:
        self.armed = step == self.step

    def _once(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (self.armed and self.running):
            return tensor
        self.armed = False
        return flipped(tensor)

    def _passed(self, out: torch.Tensor) -> torch.Tensor:
        if self.armed and self.running and torch.is_grad_enabled():
            self.armed = False
            return out + (flipped(out) - out.detach())
        return out

    def stage_program(self, program: StageProgram, first: int) -> StageProgram:
        def forward(mb: int, inputs: Any) -> Any:
            self.running = (program.stage, mb) == self.place
            if self.where == "input" and self.running:
                inputs[0].register_hook(self._once)
            outputs = program.forward(mb, inputs)
            if self.where == "output" and self.running and self.armed:
                self.armed = False
                outputs[0].data.copy_(flipped(outputs[0]))
            return outputs

        def around(mb: int, run: Any) -> None:
            self.running = (program.stage, mb) == self.place
            run()

        return replace(program, forward=forward, around_backward=around)


def struck(mapping: dict, rank: int, *flip: Any) -> tuple[int, str, bool]:
    """The steps that a rank has done, the error that ended the run, and whether the weights are those before it."""
    session = session_of(mapping)
    own = [Flip(session, *flip)] if dist.get_rank() == rank else []
    trainer = Trainer(session, session.data.batches(), callback=Callbacks(*own, ReplayCheck(session)))
    for step in range(6):
        before = {name: p.detach().clone() for name, p in session.replica.weights.master.items()}
        for one in (*own, *trainer.callback.each[-1:]):
            one.pre_step(step + 1)
        try:
            trainer.step(step)
        except TrainingError as error:
            same = all(torch.equal(before[n], p) for n, p in session.replica.weights.master.items())
            return step, str(error), same
    return 6, "", True


def mapping_of(text: Path, **changes: Any) -> dict:
    return to_mapping(config_of(text, pp=2, m=4, replay=2, deterministic_mode=True, **{"vpp": 1, **changes}))


FLIPS = {
    "output": ("output", "its output"),
    "inside": ("inside", "the gradient of"),
    "input": ("input", "the gradient of its input"),
    "weight": ("weight", "attention.wo.weight"),
}


@pytest.mark.parametrize(
    ("where", "says"),
    [pytest.param(*each, marks=[pytest.mark.whole] * (each[0] != "weight")) for each in FLIPS.values()],
)
def test_a_bit_that_turns_in_the_replayed_work_is_found_before_the_update(text: Path, where: str, says: str) -> None:
    """On rank 1, but for a stage's output, of which the last stage has a loss alone."""
    rank = int(where != "output")
    answers = run_ranks(struck, 2, mapping_of(text), rank, where, rank, 0, 4)
    for steps, error, unchanged in answers:
        assert steps == 3 and unchanged
        assert f"PP-E737: step 4: rank {rank} computed microbatch 0 of stage {rank} twice" in error and says in error


@pytest.mark.parametrize(("mb", "step"), [(1, 4), (0, 3)], ids=["another microbatch", "another step"])
def test_a_bit_that_turns_elsewhere_is_not_claimed(text: Path, mb: int, step: int) -> None:
    assert run_ranks(struck, 2, mapping_of(text), 1, "weight", 1, mb, step) == [(6, "", True)] * 2


@pytest.mark.whole
def test_the_stages_of_a_rank_follow_each_other(text: Path) -> None:
    for step, stage in ((2, 3), (4, 1)):
        answers = run_ranks(struck, 2, mapping_of(text, vpp=2), 1, "weight", stage, 0, step)
        assert all(f"step {step}: rank 1 computed microbatch 0 of stage {stage}" in error for _, error, _ in answers)


# Nothing else changes

CUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts with losses of their own": ("experts", dict(pp=2, ep=2, dp=2)),
    "MLA, biases of experts, two predicted": ("deepseek", dict(pp=2, tp=2, sp=True)),
    "dropout, tied": ("gpt3", dict(pp=2, cp=2)),
    "halves of backwards": ("grouped", dict(pp=2, dp=2, pp_schedule="zb-h1")),
    "halves, experts, two chunks": ("experts", dict(pp=2, ep=2, dp=2, pp_schedule="zbv")),
    "recomputed": ("grouped", dict(pp=2, tp=2, recompute_granularity="full", recompute_num_layers=1)),
    "sharded weights in 16 bits": (
        "grouped",
        dict(pp=2, dp=2, params_dtype="bfloat16", bf16=True, data_parallel_sharding="full"),
    ),
    "sharded gradients": ("grouped", dict(pp=2, dp=2, data_parallel_sharding="optimizer_gradients")),
    "pairs": ("experts", dict(pp=2, ep=2, dp=2, overlap_moe_expert_parallel_comm=True)),
    "on the host": ("grouped", dict(pp=2, dp=2, cpu_offloading=True, cpu_offloading_num_layers=1)),
    "float16": ("grouped", dict(pp=2, dp=2, params_dtype=None, fp16=True, initial_loss_scale=1024.0)),
    "two calls": ("grouped", dict(pp=2, tp=2, pp_batch_size=4)),
}


def both_ways(mapping: dict) -> tuple[list, list]:
    """Records and weights of a run with a replay in every step, and of one without."""
    told = []
    for replay in (1, 0):
        config = from_mapping(mapping)
        config.train.replay = replay
        given = {"pipeline.pp_batch_size": "command line"} if config.pipeline.pp_batch_size > 1 else {}
        plan = build_plan(config, given)
        assert not plan.problems, plan.problems
        session = build_session(config, plan, dist.get_rank(), torch.device("cpu"))
        check = ReplayCheck(session)
        trainer = Trainer(session, MaskedBatches(config, session.own.dp_rank), callback=check)
        said: list[Any] = []
        for step in range(3):
            check.pre_step(step + 1)
            record = trainer.step(step).record
            assert len(check.unequal) > 3 or not replay
            said.append([record["loss"], record["grad_norm"], record.get("aux_loss"), record.get("mtp_loss")])
        tensors = dict(session.replica.weights.master)
        for stage in session.model.stages.values():
            tensors |= stage.canonical_buffers()
        session.pipeline.close()
        told.append((said, {name: tensor.detach().clone() for name, tensor in tensors.items()}))
    return told[0], told[1]


def all_both_ways(mappings: list[dict]) -> list:
    return in_own_worlds(both_ways, mappings)


@cache
def answers() -> list[list]:
    mappings = [to_mapping(config_over(kind, deterministic_mode=True, **axes)) for kind, axes in CUTS.values()]
    assert {world_of(from_mapping(mapping)) for mapping in mappings} == {4}
    return run_ranks(all_both_ways, 4, mappings, timeout=270)


@pytest.mark.whole
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cut", CUTS)
def test_a_run_with_replays_has_the_bits_of_one_without(cut: str) -> None:
    for rank in answers():
        (said, weights), (plain, without) = rank[list(CUTS).index(cut)]
        assert said == plain
        assert all(torch.equal(weights[name], without[name]) for name in without), "and no bit of a weight"


def quiet(mapping: dict, steps: int) -> int:
    """How many results were compared in the last of so many steps."""
    session = session_of(mapping)
    check = ReplayCheck(session)
    trainer = Trainer(session, session.data.batches(), callback=check)
    for step in range(steps):
        check.pre_step(step + 1)
        trainer.step(step)
    return len(check.unequal)


def test_two_hundred_quiet_steps_raise_no_alarm(text: Path) -> None:
    config = config_of(text, pp=2, vpp=1, m=2, replay=1, deterministic_mode=True)
    config.train.steps = 200
    assert min(run_ranks(quiet, 2, to_mapping(config), 200)) > 20


@pytest.mark.whole  # the compiler takes minutes
@pytest.mark.timeout(600)
def test_compiled_layers_have_the_same_bits_twice(text: Path) -> None:
    config = config_of(text, pp=1, vpp=1, m=2, replay=1, deterministic_mode=True, compile=True)
    config.model.num_layers = 2
    assert run_ranks(quiet, 1, to_mapping(config), 3, timeout=500) > [15]


@pytest.mark.whole
def test_what_a_step_keeps_of_its_messages_has_no_replay_in_it(tmp_path: Path) -> None:
    kept = {}
    for replay in (0, 1):
        words = ("+recipe=quickstart", *TINY, "pp=2", "vpp=1", "layout=null", "steps=2", "log.gradients=2:3")
        words += ("parallel.deterministic_mode=true", f"train.replay={replay}")
        (own := tmp_path / str(replay)).mkdir()
        run = ppctl("train", *words, cwd=own)
        assert run.returncode == 0, run.stdout + run.stderr
        (file,) = own.rglob("gradients/step-2/messages.json")
        kept[replay] = file.read_text()
    assert kept[1] == kept[0]
