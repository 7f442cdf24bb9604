"""A module of another origin that meets StageModel trains, evaluates, is saved and loaded as ppctl's own decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dense_runs import STEPS, config_of
from one_save import save_checkpoint
from oracle.data import microbatches
from ranks import run_ranks
from torch import nn

from ppctl.config.learning_rate import lr_at
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import RunConfig
from ppctl.geometry.rows import Parameter
from ppctl.model.compile import compile_stage
from ppctl.model.loss import microbatch_loss
from ppctl.model.recompute import recompute
from ppctl.model.stage_model import StageModel
from ppctl.parallel.replicate import GradientReducer
from ppctl.parallel.ties import TiedGradients
from ppctl.plan.build import build_plan
from ppctl.train.grad_norm import GradientNorm, Location
from ppctl.train.loop import Evaluator
from ppctl.train.optimizer import AdamW
from ppctl.train.session import Session, build_session
from ppctl.train.snapshot import load_checkpoint
from ppctl.train.step import Trainer
from ppctl.train.trained_weights import Weights

CPU = torch.device("cpu")


class ForeignStage(nn.Module, StageModel):
    """Half of a network that knows nothing of ppctl's layers: a table and a map, or a map and a projection."""

    def __init__(self, stage: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.stage = stage
        self.table = nn.Embedding(vocabulary, hidden) if stage == 0 else None
        self.map = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False) if stage == 1 else None

    def forward(self, *inputs, tokens=None, packing=None):
        x = inputs[0] if self.table is None else self.table(inputs[0])
        x = torch.tanh(self.map(x))
        return (x if self.head is None else self.head(x),)

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        return {f"half.{self.stage}.{name}": parameter for name, parameter in self.named_parameters()}

    def parameter_rows(self) -> Mapping[str, Parameter]:
        roles = {"table.weight": "embedding", "map.bias": "bias"}
        return {
            f"half.{self.stage}.{name}": Parameter(name, tuple(p.shape), roles.get(name, "matrix"))
            for name, p in self.named_parameters()
        }


def both_halves(config: RunConfig) -> list[ForeignStage]:
    return [ForeignStage(stage, config.model.hidden_size, config.model.vocab_size) for stage in (0, 1)]


def session_of(mapping: dict) -> Session:
    """A session whose stages are foreign ones."""
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), dist.get_rank(), CPU)
    halves = both_halves(config)
    stages = {number: halves[number] for number in session.model.stages}
    switches = {number: recompute(stage, config.train, number) for number, stage in stages.items()}
    model = replace(session.model, stages=stages, recompute=switches)
    weights = Weights({name: p for stage in stages.values() for name, p in stage.canonical_parameters().items()})
    by_stage = {n: [weights.master[name] for name in s.canonical_parameters()] for n, s in stages.items()}
    locations = [Location(name, n, n) for n, half in enumerate(halves) for name in half.canonical_parameters()]
    for stage in stages.values():
        compile_stage(stage, CPU)  # no layer that could be compiled by itself: nothing changes
    replica = replace(
        session.replica,
        weights=weights,
        optimizer=AdamW(weights.master, config.optim, model.rows),
        reducer=GradientReducer(by_stage, None),
        partial_gradients=(),
        ties=TiedGradients((), weights.master, dist.get_rank()),
        norm=GradientNorm(locations, device=CPU, group=session.groups["pp"]),
    )
    return replace(session, model=model, replica=replica)


def train_halves(mapping: dict, directory: str) -> tuple[list[dict], dict[str, torch.Tensor], float, bool]:
    """Records, weights, the loss of an evaluation, and whether a checkpoint brings the weights back."""
    session = session_of(mapping)
    trainer = Trainer(session, session.data.batches())
    records = [trainer.step(step).record for step in range(STEPS)]
    weights = {name: p.detach().clone() for name, p in session.replica.weights.master.items()}
    path = save_checkpoint(session, Path(directory), STEPS, 0)
    again = session_of(mapping)
    load_checkpoint(again, path)
    same = all(torch.equal(again.replica.weights.master[name], value) for name, value in weights.items())
    return records, weights, Evaluator(session)()["eval_loss"], same


def by_plain_torch(config: RunConfig) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    halves = both_halves(config)
    weights = {name: p for half in halves for name, p in half.canonical_parameters().items()}
    decayed = [p for name, p in weights.items() if name.endswith(("map.weight", "head.weight"))]
    spared = [p for name, p in weights.items() if not name.endswith(("map.weight", "head.weight"))]
    optim, losses, norms = config.optim, [], []
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    for step, batch in enumerate(microbatches(config, STEPS)):
        total = float(sum(mask.sum() for _, _, mask in batch))
        losses.append(0.0)
        for tokens, labels, mask in batch:
            loss = microbatch_loss(*halves[1](*halves[0](tokens)), labels, mask, total)
            losses[-1] += loss.item()
            loss.backward()
        norms.append(nn.utils.clip_grad_norm_(weights.values(), optim.clip_grad).item())
        for group in adamw.param_groups:
            group["lr"] = lr_at(step, optim, STEPS)
        adamw.step()
        adamw.zero_grad()
    return losses, norms, {name: p.detach() for name, p in weights.items()}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_foreign_stages_train_bitwise_as_one_process_and_come_back_from_a_checkpoint(
    tmp_path: Path, schedule: str
) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("a stage of another origin " * 80)
    config = config_of(text, pp=2, vpp=1, m=3, recompute_granularity="full", recompute_method="uniform")
    config.pipeline.pp_schedule = schedule
    config.data.validation_split, config.train.eval_steps = 0.1, 2
    ranks = run_ranks(train_halves, 2, to_mapping(config), str(tmp_path))
    losses, norms, weights = by_plain_torch(config)
    for records, own, eval_loss, same in ranks:
        assert [record["loss"] for record in records] == losses
        assert [record["grad_norm"] for record in records] == norms
        assert all(torch.equal(weights[name], value) for name, value in own.items())
        assert same and 0 < eval_loss < losses[0]
    assert {name for _, own, _, _ in ranks for name in own} == weights.keys()


def test_what_a_model_must_write_is_refused_where_it_is_missing() -> None:
    class Empty(nn.Module, StageModel):
        def forward(self) -> None: ...

    with pytest.raises(TypeError, match="canonical_parameters"):
        Empty()
