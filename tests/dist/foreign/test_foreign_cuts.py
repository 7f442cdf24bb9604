"""Models of transformers in a pipeline have the bits of a plain loop over the whole model: losses, gradients, norms,
weights, and the logits of what is exported."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from dense_runs import config_of as run_of
from foreign_models import FEW, OTHERS, described_here, model_of
from one_save import save_checkpoint
from oracle.data import microbatches
from oracle.reference import muon_of, update
from ranks import run_ranks
from torch import Tensor, nn

from ppctl.config.learning_rate import lr_at
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.launch.weights import model_values
from ppctl.model.loss import microbatch_loss
from ppctl.plan.build import build_plan
from ppctl.pretrained.hugging_face import export_checkpoint
from ppctl.runs.checkpoint_folder import step_path
from ppctl.train.session import build_session
from ppctl.train.snapshot import start_from
from ppctl.train.step import Trainer

# Each model is described, which takes ten seconds of a quiet machine, trained in two or three ranks, and exported.
pytestmark = pytest.mark.timeout(480)
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


class Run(NamedTuple):
    """What a run did: by step, and its weights at the end."""

    losses: list[float]
    norms: list[float]
    auxiliary: list[float | None]
    gradients: list[dict[str, Tensor]]
    """By parameter, as they are clipped; zeros where nothing reached it."""
    weights: dict[str, Tensor]


TOKENS = torch.arange(32).view(2, 16)
"""What logits are compared on."""


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


def train_all(mappings: list[dict], out: Path | None = None) -> list[Run]:
    """Runs in a rank: every architecture, one after another. Checkpoints are written into directories of `out`."""
    found = []
    for place, mapping in enumerate(mappings):
        config = from_mapping(mapping)
        session = build_session(config, build_plan(config, {}), dist.get_rank(), CPU)
        start_from(session, Path(str(config.model.from_)))
        trainer = Trainer(session, session.data.batches())
        records, gradients = list[dict[str, Any]](), list[dict[str, Tensor]]()
        for step in range(STEPS):
            records.append(trainer.step(step).record)
            gradients.append(gradients_of(session.replica.weights.master))
        if out is not None:
            save_checkpoint(session, out / str(place), STEPS, STEPS * config.train.global_batch_size)
        weights = {name: p.detach().clone() for name, p in session.replica.weights.master.items()}
        losses, norms, added = ([r.get(name) for r in records] for name in ("loss", "grad_norm", "aux_loss"))
        found.append(Run(losses, norms, added, gradients, weights))
    return found


def gradients_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    trained = {name: p for name, p in weights.items() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}


@cache
def by_a_plain_loop(
    text: Path, kind: str, dp: int = 1, optimizer: str = "adamw", uses_apart: bool = True
) -> tuple[Run, Tensor]:
    """The whole model in one process: forward, backward, clip, AdamW; and its logits of TOKENS at the end.

    A tied weight is one parameter for each use, or with `uses_apart` False one parameter, as transformers has it. What
    the model adds for its routers is made by its own function, from the routers of one microbatch, and is averaged over
    the microbatches of all `dp` replicas.
    """
    config = run_config(text, dict(pp=2, vpp=1, dp=dp), kind)
    model, optim = model_of(kind), config.optim
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = uses_apart and table.weight is head.weight
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
    losses, norms, auxiliary, gradients = [], [], list[float | None](), []
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
        # What no loss reaches (the second bias of an untied Bert's head) counts as 0: an addend more, an ulp at most.
        counted = [torch.zeros_like(p) if p.grad is None else p.grad for p in own if p.requires_grad]
        norm = nn.utils.get_total_norm(counted)
        nn.utils.clip_grads_with_norm_(weights.values(), optim.clip_grad, norm)
        gradients.append(gradients_of(weights))
        losses.append(loss_of_step)
        norms.append(norm.item())
        update(optimizers, lr_at(step, optim, STEPS))
    trained = {name: p.detach() for name, p in weights.items() if p.requires_grad}
    with torch.no_grad():
        logits = model.eval()(TOKENS).logits
    return Run(losses, norms, auxiliary, gradients, trained), logits


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """What is multiplied with in the layers: not embeddings, head, filters, rates of decay, norms and biases."""
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 4)
    others = ("bias", "A_log", "conv1d.weight")
    return [p for name, p in layers.named_parameters() if p.dim() > 1 and not name.endswith(others)]


def trained(text: Path, cut: Mapping[str, Any], kinds: list[str], out: Path | None = None) -> list[list[Run]]:
    """By rank what `train_all` finds."""
    mappings = [to_mapping(run_config(text, cut, kind)) for kind in kinds]
    return run_ranks(train_all, cut["pp"] * cut.get("dp", 1), mappings, out, timeout=SECONDS)


def hold_to_a_plain_loop(text: Path, out: Path, cut: str, kinds: list[str], optimizer: str = "adamw") -> None:
    ranks = trained(text, CUTS[cut] | dict(name=optimizer), kinds, out)
    for place, kind in enumerate(kinds):
        expected, logits = by_a_plain_loop(text, kind, optimizer=optimizer)
        assert len(set(expected.losses)) == STEPS, kind
        assert (None in expected.auxiliary) == ("balanced" not in kind), kind
        seen: set[str] = set()
        for found in (rank[place] for rank in ranks):
            assert found[:3] == expected[:3], kind
            assert differing(found.weights, expected.weights) == [], kind
            for own, gradients in zip(found.gradients, expected.gradients, strict=True):
                assert differing(own, gradients) == [], kind
                assert own.keys() == found.weights.keys(), kind
            seen |= found.weights.keys()
        assert seen == expected.weights.keys(), kind
        assert torch.equal(exported_logits(out / str(place)), logits), kind
        if optimizer == "adamw":
            hold_to_one_parameter(text, kind, expected)


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    return [name for name, value in found.items() if not torch.equal(value, expected[name])]


def exported_logits(checkpoints: Path) -> Tensor:
    """Of the last checkpoint, exported, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    out = checkpoints.with_name(f"{checkpoints.name}-exported")
    export_checkpoint(step_path(checkpoints, STEPS), out, lambda *_: None)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    for parameter in model.parameters():  # mapped from the file at odd places, where products round otherwise
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        logits: Tensor = model.eval()(TOKENS).logits
    return logits


def hold_to_one_parameter(text: Path, kind: str, found: Run) -> None:
    """A shared weight that is one parameter, whose uses are added in every microbatch, gives nearly the same."""
    one, _ = by_a_plain_loop(text, kind, uses_apart=False)
    shared = found.weights.keys() - one.weights.keys()
    assert len(shared) == model_of(kind).config.get_text_config().tie_word_embeddings, kind
    assert found.losses == pytest.approx(one.losses, rel=1e-6), kind
    assert found.norms == pytest.approx(one.norms, rel=1e-6), kind
    for name, value in one.gradients[0].items():
        torch.testing.assert_close(found.gradients[0][name], value, rtol=0, atol=1e-6, msg=f"{kind}: {name}")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign") / "corpus.txt"
    path.write_text("every stage runs the model's own code " * 60)
    return path


@pytest.fixture(autouse=True, scope="module")
def own_cache() -> Iterator[None]:
    with described_here():
        yield


@pytest.mark.parametrize("cut", FIRST)
def test_a_models_own_code_has_the_bits_of_one_process_in_any_cut(text: Path, tmp_path: Path, cut: str) -> None:
    hold_to_a_plain_loop(text, tmp_path, cut, list(FEW))


def test_a_models_matrices_have_the_bits_of_torchs_muon(text: Path, tmp_path: Path) -> None:
    """Products of several matrices in one, stacks of experts, and beside them what is no matrix: rates, filters."""
    hold_to_a_plain_loop(
        text, tmp_path, FIRST[1], ["Llama", "GPT2", "Mixtral balanced", "GptOss", "Jamba balanced"], "muon"
    )


TOGETHER = 10
"""Architectures in one test: more would not end within its time on a busy machine."""
GROUPS = [list(OTHERS)[start : start + TOGETHER] for start in range(0, len(OTHERS), TOGETHER)]


@pytest.mark.whole
@pytest.mark.parametrize("kinds", GROUPS, ids=lambda kinds: kinds[0])
@pytest.mark.parametrize("cut", CUTS)
def test_every_architecture_has_the_bits_of_one_process_in_any_cut(
    text: Path, tmp_path: Path, cut: str, kinds: list[str]
) -> None:
    hold_to_a_plain_loop(text, tmp_path, cut, kinds)


@pytest.mark.whole
@pytest.mark.parametrize("cut", list(CUTS)[2:])
def test_the_few_have_the_bits_of_one_process_in_further_cuts(text: Path, tmp_path: Path, cut: str) -> None:
    hold_to_a_plain_loop(text, tmp_path, cut, list(FEW))


@pytest.mark.whole
@pytest.mark.parametrize("kinds", [list(FEW), *GROUPS], ids=lambda kinds: kinds[0])
def test_every_architecture_has_the_bits_of_one_process_tied_and_untied(
    text: Path, tmp_path: Path, kinds: list[str]
) -> None:
    hold_to_a_plain_loop(text, tmp_path, FIRST[1], [f"{kind}, retied" for kind in kinds])


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
        whole, seen = one[0][place], set[str]()
        for found in (rank[place] for rank in cut):
            assert found[:3] == whole[:3], kind
            seen |= found.weights.keys()
            if "sharded" not in way:  # of which each replica has other parts
                assert differing(found.weights, whole.weights) == [], kind
                for own, gradients in zip(found.gradients, whole.gradients, strict=True):
                    assert differing(own, gradients) == [], kind
        assert seen == whole.weights.keys(), kind
        assert None not in whole.auxiliary, kind


@pytest.mark.whole
def test_replicas_average_a_loss_over_all_routers_as_a_plain_loop_over_all_microbatches_does(text: Path) -> None:
    kind = "Qwen2Moe balanced"
    whole, _ = by_a_plain_loop(text, kind, 2)
    for (found,) in trained(text, dict(pp=2, vpp=2, dp=2), [kind]):
        for own, expected in zip(found[:3], whole[:3], strict=True):
            assert own == pytest.approx(expected, rel=1e-6)
        for name, value in found.weights.items():
            torch.testing.assert_close(value, whole.weights[name], rtol=0, atol=1e-6)
