"""Models of transformers in a pipeline have the bits of a plain loop over the whole model: losses, norms, weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_runs import config_of as run_of
from foreign_models import FEW, OTHERS, model_of
from oracle.data import microbatches
from oracle.reference import muon_of, update
from ranks import run_ranks
from torch import Tensor, nn

from ppctl.comm.groups import make_group
from ppctl.config.learning_rate import lr_at
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.foreign.describe import describe
from ppctl.launch import weights
from ppctl.launch.weights import model_values
from ppctl.model.loss import microbatch_loss
from ppctl.plan.build import build_plan
from ppctl.train.session import build_session
from ppctl.train.snapshot import start_from
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

Run = tuple[list[float], list[float], list[float | None], dict[str, Tensor]]
"""Losses, norms of gradients, auxiliary losses, weights."""


def run_config(text: Path, cut: Mapping[str, Any], kind: str) -> RunConfig:
    """The run of a cut, as `model.from=DIR` makes it."""
    config = run_of(text, m=3, **cut)
    directory = directory_of(text, kind)
    model = asdict(config.model) | dict(_values(directory))
    config.model = ModelConfig(**model | {"from_": str(directory)})
    config.train.steps = STEPS
    return config


@cache
def _values(directory: Path) -> Mapping[str, Any]:
    return model_values(str(directory), "transformers")


@cache
def directory_of(text: Path, kind: str) -> Path:
    """The model as transformers saves it: with older names of experts, a tied weight once."""
    directory = text.parent / kind
    model_of(kind).save_pretrained(directory)
    return directory


def train_all(mappings: list[dict]) -> list[Run]:
    """Runs in a rank: every architecture, one after another."""
    found = []
    for mapping in mappings:
        config = from_mapping(mapping)
        session = build_session(config, build_plan(config, {}), dist.get_rank(), CPU)
        start_from(session, Path(str(config.model.from_)))
        if session.plan.tie_groups and session.ties.group is None:
            make_group([(dist.get_rank(),)])  # ranks that train one model after another must make equally many groups
        trainer = Trainer(session, session.batches(), lambda: 0)
        records = [trainer.step(step).record for step in range(STEPS)]
        weights = {name: p.detach().clone() for name, p in session.weights.master.items()}
        figures = ([r[name] for r in records] for name in ("loss", "grad_norm"))
        found.append((*figures, [r.get("aux_loss") for r in records], weights))
    return found


@cache
def by_a_plain_loop(text: Path, kind: str, dp: int = 1, optimizer: str = "adamw") -> Run:
    """The whole model in one process: forward, backward, clip, AdamW. A tied weight is one parameter for each use.
    With `muon` torch's Muon moves the layers' matrices.

    What the model adds for its routers is made by its own function, from the routers of one microbatch, and is averaged
    over the microbatches of all `dp` replicas.
    """
    config = run_config(text, dict(pp=2, vpp=1, dp=dp), kind)
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
    hidden = {id(p): p for p in matrices_of(model) if optimizer == "muon"}
    groups = [
        {
            "params": [p for name, p in weights.items() if decays[name] == decayed and id(p) not in hidden],
            "weight_decay": rate,
        }
        for decayed, rate in ((True, optim.weight_decay), (False, 0.0))
    ]
    optimizers = [torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps)]
    if hidden:
        optimizers.append(muon_of(optim, list(hidden.values())))
    losses, norms, auxiliary = [], [], list[float | None]()
    for step, batch in enumerate(microbatches(config, STEPS)):
        total, loss_of_step, added_in_step = float(sum(mask.sum() for _, _, mask in batch)), 0.0, list[float]()
        for tokens, labels, mask in batch:
            result = model(input_ids=tokens, use_cache=False)
            loss = microbatch_loss(result.logits, labels, mask, total)
            loss_of_step += loss.item()
            if "aux_loss" in result:
                added = model.router_aux_loss_coef * result.aux_loss
                added_in_step.append(added.item())
                loss = loss + added / len(batch)
            loss.backward()
        auxiliary.append(math.fsum(added_in_step) / len(batch) if added_in_step else None)
        if tied:
            table.weight.grad += head.weight.grad
            head.weight.grad = table.weight.grad.clone()
        own = [p for p in weights.values() if not (tied and p is head.weight)]
        norm = nn.utils.get_total_norm([p.grad for p in own if p.grad is not None])
        nn.utils.clip_grads_with_norm_(weights.values(), optim.clip_grad, norm)
        losses.append(loss_of_step)
        norms.append(norm.item())
        update(optimizers, lr_at(step, optim, STEPS))
    return losses, norms, auxiliary, {name: p.detach() for name, p in weights.items() if p.requires_grad}


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """What is multiplied with in the layers: not embeddings, head, filters, rates of decay, norms and biases."""
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 4)
    others = ("bias", "A_log", "conv1d.weight")
    return [p for name, p in layers.named_parameters() if p.dim() > 1 and not name.endswith(others)]


def trained(text: Path, cut: Mapping[str, Any], kinds: list[str]) -> list[list[Run]]:
    """By rank what `train_all` finds."""
    mappings = [to_mapping(run_config(text, cut, kind)) for kind in kinds]
    return run_ranks(train_all, cut["pp"] * cut.get("dp", 1), mappings, timeout=SECONDS)


def hold_to_a_plain_loop(text: Path, cut: str, kinds: list[str], optimizer: str = "adamw") -> None:
    ranks = trained(text, CUTS[cut] | dict(name=optimizer), kinds)
    for place, kind in enumerate(kinds):
        losses, norms, auxiliary, expected = by_a_plain_loop(text, kind, optimizer=optimizer)
        assert len(set(losses)) == STEPS, kind
        assert (None in auxiliary) == ("balanced" not in kind), kind
        seen: set[str] = set()
        for found in ranks:
            own_losses, own_norms, own_auxiliary, own = found[place]
            assert own_losses == losses, kind
            assert own_norms == norms, kind
            assert own_auxiliary == auxiliary, kind
            assert [name for name, value in own.items() if not torch.equal(value, expected[name])] == [], kind
            seen |= own.keys()
        assert seen == expected.keys(), kind


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign") / "corpus.txt"
    path.write_text("every stage runs the model's own code " * 60)
    return path


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Descriptions are made here, in this process, and kept for this module alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "describe", lambda *asked: describe(*asked).to_text())
        yield


@pytest.mark.parametrize("cut", FIRST)
def test_a_models_own_code_has_the_bits_of_one_process_in_any_cut(text: Path, cut: str) -> None:
    hold_to_a_plain_loop(text, cut, list(FEW))


def test_a_models_matrices_have_the_bits_of_torchs_muon(text: Path) -> None:
    """Products of several matrices in one, stacks of experts, and beside them what is no matrix: rates, filters."""
    hold_to_a_plain_loop(text, FIRST[1], ["Llama", "GPT2", "Mixtral balanced", "GptOss", "Jamba balanced"], "muon")


TOGETHER = 10
"""Architectures in one test: more would not end within its time on a busy machine."""
GROUPS = [list(OTHERS)[start : start + TOGETHER] for start in range(0, len(OTHERS), TOGETHER)]


@pytest.mark.whole
@pytest.mark.parametrize("kinds", GROUPS, ids=lambda kinds: kinds[0])
@pytest.mark.parametrize("cut", CUTS)
def test_every_architecture_has_the_bits_of_one_process_in_any_cut(text: Path, cut: str, kinds: list[str]) -> None:
    hold_to_a_plain_loop(text, cut, kinds)


@pytest.mark.whole
@pytest.mark.parametrize("cut", list(CUTS)[2:])
def test_the_few_have_the_bits_of_one_process_in_further_cuts(text: Path, cut: str) -> None:
    hold_to_a_plain_loop(text, cut, list(FEW))


@pytest.mark.whole
@pytest.mark.parametrize("kinds", [list(FEW), *GROUPS], ids=lambda kinds: kinds[0])
def test_every_architecture_has_the_bits_of_one_process_tied_and_untied(text: Path, kinds: list[str]) -> None:
    hold_to_a_plain_loop(text, FIRST[1], [f"{kind}, retied" for kind in kinds])


WAYS: dict[str, dict[str, Any]] = {
    "bfloat16 with masters": dict(params_dtype="bfloat16"),
    "bfloat16 by autocast": dict(enable_autocast=True, autocast_dtype="bfloat16"),
    "two replicas": dict(dp=2),
    "two replicas with everything sharded": dict(dp=2, data_parallel_sharding="full"),
    "gradients scaled by the schedule": dict(scale_grads_in_schedule=True),
}


@pytest.mark.whole
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_over_all_routers_has_the_bits_of_one_stage_in_other_ways_of_training(text: Path, way: str) -> None:
    kinds = ["Qwen2Moe balanced", "GraniteMoe balanced"]
    one = trained(text, dict(pp=1, vpp=1) | WAYS[way], kinds)
    cut = trained(text, dict(pp=2, vpp=2) | WAYS[way], kinds)
    for place, kind in enumerate(kinds):
        *figures, weights = one[0][place]
        seen: set[str] = set()
        for rank in cut:
            *own_figures, own = rank[place]
            assert own_figures == figures, kind
            seen |= own.keys()
            if "sharded" not in way:  # of which each replica has other parts
                assert [name for name, value in own.items() if not torch.equal(value, weights[name])] == [], kind
        assert seen == weights.keys(), kind
        assert None not in figures[2], kind


@pytest.mark.whole
def test_replicas_average_a_loss_over_all_routers_as_a_plain_loop_over_all_microbatches_does(text: Path) -> None:
    kind = "Qwen2Moe balanced"
    losses, norms, auxiliary, weights = by_a_plain_loop(text, kind, 2)
    for ((own_losses, own_norms, own_auxiliary, own),) in trained(text, dict(pp=2, vpp=2, dp=2), [kind]):
        assert own_losses == pytest.approx(losses, rel=1e-6)
        assert own_norms == pytest.approx(norms, rel=1e-6)
        assert own_auxiliary == pytest.approx(auxiliary, rel=1e-6)
        for name, value in own.items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)
