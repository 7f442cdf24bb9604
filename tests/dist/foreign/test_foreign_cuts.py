"""Models of transformers in a pipeline have the bits of a plain loop over the whole model: losses, norms, weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dense_runs import config_of as run_of
from foreign_models import FEW, HIDDEN, LAYERS, OTHERS, WORDS, config_of, model_of
from oracle.data import microbatches
from ranks import run_ranks
from torch import Tensor, nn

from ppctl.comm.groups import make_group
from ppctl.config.learning_rate import lr_at
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import RunConfig
from ppctl.foreign.anatomy import Anatomy, survey
from ppctl.foreign.library import make_model
from ppctl.foreign.stage import ForeignStage
from ppctl.geometry.layers import Layer
from ppctl.model.loss import microbatch_loss
from ppctl.model.recompute import recompute
from ppctl.parallel.replicate import GradientReducer
from ppctl.parallel.ties import TiedGradients, TiedUse
from ppctl.plan import Plan
from ppctl.plan.build import build_plan
from ppctl.train.grad_norm import GradientNorm, Location
from ppctl.train.optimizer import AdamW
from ppctl.train.precision import Weights
from ppctl.train.session import Session, build_session
from ppctl.train.step import Trainer

CPU = torch.device("cpu")
STEPS = 3
SECONDS = 300.0
"""That ranks may take: each imports transformers, which takes a minute on a busy machine."""

CUTS = {
    "pp=2, recomputed": dict(pp=2, vpp=1, recompute_granularity="full", recompute_method="uniform"),
    "pp=3, vpp=2, embedding and head alone": dict(pp=3, vpp=2, layout="E|t|t|t|t|L"),
    "pp=2, split backwards": dict(pp=2, vpp=1, pp_schedule="zb_h1"),
}
FIRST = list(CUTS)[:2]

Run = tuple[list[float], list[float], dict[str, Tensor]]


def run_config(text: Path, cut: str) -> RunConfig:
    """The run of a cut; the model's sizes are what messages and batches are made by."""
    config = run_of(text, m=3, **CUTS[cut])  # type: ignore[arg-type]
    config.model.num_layers, config.model.hidden_size, config.model.vocab_size = LAYERS, HIDDEN, WORDS
    config.train.steps = STEPS
    return config


def session_of(config: RunConfig, kind: str) -> Session:
    """A session whose stages are those of a model of transformers."""
    plan = build_plan(config, {})
    session = build_session(config, plan, dist.get_rank(), CPU)
    whole = model_of(kind)
    anatomy, values = survey(whole), whole.state_dict()
    stages = {
        spec.stage: ForeignStage(make_model(config_of(kind), "meta").train(), anatomy, spec.layers)
        for spec in session.own.stages
    }
    with torch.no_grad():
        for stage in stages.values():
            for name, tensor in (*stage.canonical_parameters().items(), *stage.canonical_buffers().items()):
                tensor.copy_(values[name])
    rows = {name: row for stage in stages.values() for name, row in stage.parameter_rows().items()}
    weights = Weights({name: p for stage in stages.values() for name, p in stage.canonical_parameters().items()})
    masters = {n: [weights.master[name] for name in stage.canonical_parameters()] for n, stage in stages.items()}
    where = homes(whole, anatomy, plan)
    tied = [TiedUse(where[name][1], name) for name in (f"{anatomy.embedding}.weight", f"{anatomy.head}.weight")]
    ties = TiedGradients(tied if anatomy.tied else (), weights.master, dist.get_rank())
    if anatomy.tied and ties.group is None:
        make_group([(dist.get_rank(),)])  # ranks that train one model after another must make equally many groups
    return replace(
        session,
        stages=stages,
        rows=rows,
        recompute={number: recompute(stage, config.train, number) for number, stage in stages.items()},
        weights=weights,
        optimizer=AdamW(weights.master, config.optim, rows),
        reducer=GradientReducer(masters, None),
        ties=ties,
        norm=GradientNorm(
            [Location(name, *where[name]) for name, _ in whole.named_parameters()],
            device=CPU,
            group=session.groups["pp"],
        ),
    )


def homes(whole: nn.Module, anatomy: Anatomy, plan: Plan) -> dict[str, tuple[int, int]]:
    """Name of every parameter, a tied one's uses apart -> its stage and pp_rank."""
    found = {}
    for name, _ in whole.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        layer = Layer("embedding") if module in anatomy.first else Layer("loss")
        if name.startswith(f"{anatomy.layers}."):
            layer = Layer("decoder", int(name.removeprefix(f"{anatomy.layers}.").split(".")[0]))
        found[name] = next((spec.stage, spec.pp_rank) for spec in plan.stages if layer in spec.layers)
    return found


def train_all(mapping: dict, kinds: list[str]) -> list[Run]:
    """Runs in a rank: every architecture, one after another."""
    found = []
    for kind in kinds:
        session = session_of(from_mapping(mapping), kind)
        trainer = Trainer(session, session.batches(), lambda: 0)
        records = [trainer.step(step).record for step in range(STEPS)]
        weights = {name: p.detach().clone() for name, p in session.weights.master.items()}
        found.append(([r["loss"] for r in records], [r["grad_norm"] for r in records], weights))
    return found


@cache
def by_a_plain_loop(text: Path, kind: str) -> Run:
    """The whole model in one process: forward, backward, clip, AdamW. A tied weight is one parameter for each use."""
    config = run_config(text, FIRST[0])
    model, optim = model_of(kind), config.optim
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = table.weight is head.weight
    if tied:
        head.weight = nn.Parameter(table.weight.detach().clone())
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    if tied:
        embeddings.add(id(head.weight))
    weights = dict(model.named_parameters())
    decays = {
        name: p.dim() > 1 and id(p) not in embeddings and not name.endswith("bias") for name, p in weights.items()
    }
    groups = [
        {"params": [p for name, p in weights.items() if decays[name] == decayed], "weight_decay": rate}
        for decayed, rate in ((True, optim.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    losses, norms = [], []
    for step, batch in enumerate(microbatches(config, STEPS)):
        total, loss_of_step = float(sum(mask.sum() for _, _, mask in batch)), 0.0
        for tokens, labels, mask in batch:
            loss = microbatch_loss(model(input_ids=tokens, use_cache=False).logits, labels, mask, total)
            loss_of_step += loss.item()
            loss.backward()
        if tied:
            table.weight.grad += head.weight.grad
            head.weight.grad = table.weight.grad.clone()
        own = [p for p in weights.values() if not (tied and p is head.weight)]
        norm = nn.utils.get_total_norm([p.grad for p in own if p.grad is not None])
        nn.utils.clip_grads_with_norm_(weights.values(), optim.clip_grad, norm)
        losses.append(loss_of_step)
        norms.append(norm.item())
        for group in adamw.param_groups:
            group["lr"] = lr_at(step, optim, STEPS)
        adamw.step()
        adamw.zero_grad()
    return losses, norms, {name: p.detach() for name, p in weights.items()}


def hold_to_a_plain_loop(text: Path, cut: str, kinds: list[str]) -> None:
    ranks = run_ranks(train_all, int(str(CUTS[cut]["pp"])), to_mapping(run_config(text, cut)), kinds, timeout=SECONDS)
    for place, kind in enumerate(kinds):
        losses, norms, weights = by_a_plain_loop(text, kind)
        assert len(set(losses)) == STEPS, kind
        seen: set[str] = set()
        for found in ranks:
            own_losses, own_norms, own = found[place]
            assert own_losses == losses, kind
            assert own_norms == norms, kind
            assert [name for name, value in own.items() if not torch.equal(value, weights[name])] == [], kind
            seen |= own.keys()
        assert seen == weights.keys(), kind


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign") / "corpus.txt"
    path.write_text("every stage runs the model's own code " * 60)
    return path


@pytest.mark.parametrize("cut", FIRST)
def test_a_models_own_code_has_the_bits_of_one_process_in_any_cut(text: Path, cut: str) -> None:
    hold_to_a_plain_loop(text, cut, list(FEW))


@pytest.mark.whole
@pytest.mark.parametrize("cut", CUTS)
def test_every_architecture_has_the_bits_of_one_process_in_any_cut(text: Path, cut: str) -> None:
    hold_to_a_plain_loop(text, cut, list(OTHERS) if cut in FIRST else [*FEW, *OTHERS])
