"""`ppctl.pipeline` gives the bits of a plain loop over the whole module: losses, gradients, weights, evaluations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from own_modules import PARTS, batches, made
from ranks import run_ranks
from torch import Tensor, nn

import ppctl
from ppctl.model.loss import microbatch_loss

STEPS, ROWS, SIZE = 3, 8, 2

Result = tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]
"""Losses of steps, losses of evaluations before each, the last step's gradients, weights and buffers at the end."""

INNER = [["model.embed", "model.layers.0"], ["model.layers.1", "model.layers.2", "model.layers.3", "head"]]
FLAT = [["embed", "layers.0", "layers.1"], ["layers.2", "layers.3", "head"]]


def by_stages(kind: str, fields: dict[str, Any], mapping: bool = False) -> Result:
    pipeline = ppctl.pipeline(made(kind), ppctl.PipelineConfig(pp_microbatch_size=SIZE, **fields))
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    losses, evaluated, gradients = [], [], {}
    for tokens, labels in batches(STEPS, ROWS):
        batch = {"tokens": tokens, "labels": labels} if mapping else (tokens, labels)
        evaluated.append(pipeline.eval(batch))
        losses.append(pipeline.step(batch))
        gradients = {name: parameter.grad.clone() for name, parameter in pipeline.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    last = pipeline.info.has_last_stage
    numbers = [[float(each) for each in found] if last else [] for found in (losses, evaluated)]
    state = {name: value.clone() for name, value in pipeline.state_dict().items()}
    pipeline.close()
    return numbers[0], numbers[1], gradients, state


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor, total: Tensor) -> Tensor:
    return microbatch_loss(model(tokens), labels.clamp(min=0), (labels != -100).float(), total)


def by_a_plain_loop(model: nn.Module, ties: tuple[str, ...] = ()) -> Result:
    model = copy.deepcopy(model)
    if ties:  # one accumulator per use
        first, second = (model.get_submodule(name) for name in ties)
        second.weight = nn.Parameter(first.weight.detach().clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, evaluated, gradients = [], [], {}
    for tokens, labels in batches(STEPS, ROWS):
        total = (labels != -100).sum()
        parts = list(zip(tokens.split(SIZE), labels.split(SIZE), strict=True))
        model.eval()
        with torch.no_grad():
            evaluated.append(float(torch.stack([loss_of(model, *part, total) for part in parts]).sum()))
        model.train()
        shares = []
        for part in parts:
            shares.append(loss_of(model, *part, total))
            shares[-1].backward()
        losses.append(float(torch.stack([share.detach() for share in shares]).sum()))
        if ties:
            first.weight.grad += second.weight.grad
            second.weight.grad = first.weight.grad.clone()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, evaluated, gradients, model.state_dict()


def hold(ranks: list[Result], expected: Result) -> None:
    """Every rank has the bits of the loop, and together they have everything."""
    assert len(set(expected[0])) == STEPS
    assert [found[0] for found in ranks if found[0]] == [expected[0]]
    assert [found[1] for found in ranks if found[1]] == [expected[1]]
    for which in (2, 3):
        seen: dict[str, Tensor] = {}
        for found in ranks:
            assert not found[which].keys() & seen.keys()
            seen |= found[which]
        assert seen.keys() == expected[which].keys()
        assert [name for name, value in seen.items() if not torch.equal(value, expected[which][name])] == []


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("plain", dict(module_fqns_per_model_part=PARTS[2])),
        ("plain", dict(module_fqns_per_model_part=PARTS[4], pp_schedule="Interleaved1F1B")),
        ("plain", dict(module_fqns_per_model_part=PARTS[4], pp_schedule="zbv_zero_bubble", pp_batch_size=4)),
        ("tied", dict(module_fqns_per_model_part=PARTS[4], pp_schedule="interleaved_1f1b", pp_seq_len=10)),
        ("tied", dict(module_fqns_per_model_part=PARTS[2], pp_schedule="zb_h1", dtype=torch.float32)),
    ],
)
def test_a_users_module_cut_by_names_has_the_bits_of_a_plain_loop(kind: str, fields: dict[str, Any]) -> None:
    ties = ("embed", "head") if kind == "tied" else ()
    hold(run_ranks(by_stages, 2, kind, fields, kind == "plain"), by_a_plain_loop(made(kind), ties))


@pytest.mark.shows("pipeline.patch_inner_model", "pipeline.patch_causal_lm_model")
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("aware", dict(module_fqns_per_model_part=FLAT, patch_causal_lm_model=False)),
        ("aware", dict(module_fqns_per_model_part=FLAT, patch_inner_model=False)),
        ("aware outside", dict(module_fqns_per_model_part=INNER, patch_causal_lm_model=False)),
        ("aware inside", dict(module_fqns_per_model_part=INNER, patch_inner_model=False)),
    ],
)
def test_a_forward_that_takes_hidden_states_is_called_as_it_is(kind: str, fields: dict[str, Any]) -> None:
    hold(run_ranks(by_stages, 2, kind, fields), by_a_plain_loop(made(kind)))


def twice(fields: dict[str, Any]) -> dict[str, Tensor]:
    """Two steps without zero_grad: gradients add up, those of a shared parameter too."""
    pipeline = ppctl.pipeline(made("tied"), ppctl.PipelineConfig(pp_microbatch_size=SIZE, **fields))
    for batch in batches(2, ROWS):
        pipeline.step(batch)
    found = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    pipeline.zero_grad()
    assert all(parameter.grad is None for parameter in pipeline.parameters())
    return found


def test_gradients_of_several_steps_add_up() -> None:
    ranks = run_ranks(twice, 2, dict(module_fqns_per_model_part=PARTS[2]))
    model = made("tied")
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    shared = []
    for tokens, labels in batches(2, ROWS):
        held = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if name.endswith(("embed.weight", "head.weight"))
        }
        model.embed.weight.grad = model.head.weight.grad = None
        for part in zip(tokens.split(SIZE), labels.split(SIZE), strict=True):
            loss_of(model, *part, (labels != -100).sum()).backward()
        shared.append(model.embed.weight.grad + model.head.weight.grad)
        del held
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected["embed.weight"] = expected["head.weight"] = shared[0] + shared[1]
    found = ranks[0] | ranks[1]
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


def own_loss(fields: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    pipeline = ppctl.pipeline(made("plain"), ppctl.PipelineConfig(**fields), loss_fn=squared, device="cpu")
    tokens, labels = batches(1, ROWS)[0]
    loss = pipeline.step((tokens, labels))
    return loss if loss is None else float(loss), {n: p.grad for n, p in pipeline.named_parameters()}


def squared(output: Tensor, labels: Tensor) -> Tensor:
    return (output - (labels[..., None] % 7)).pow(2).mean()


@pytest.mark.parametrize("scales", [False, True])
def test_a_loss_of_ones_own_is_a_sum_or_with_scaling_a_mean(scales: bool) -> None:
    fields = dict(module_fqns_per_model_part=PARTS[2], pp_microbatch_size=SIZE, scale_grads_in_schedule=scales)
    (_, first), (loss, last) = run_ranks(own_loss, 2, fields)
    model, total = made("plain"), []
    tokens, labels = batches(1, ROWS)[0]
    for part in zip(tokens.split(SIZE), labels.split(SIZE), strict=True):
        share = squared(model(part[0]), part[1]) / (4 if scales else 1)
        share.backward()
        total.append(share.detach())
    assert loss == float(torch.stack(total).sum())
    found = first | last
    assert all(torch.equal(found[name], parameter.grad) for name, parameter in model.named_parameters())
