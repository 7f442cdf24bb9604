"""`+recipe=deepseek_v3 +scale=smoke`: DeepSeek-V3's 16 ranks x 2 chunks, to the bits of one plain-torch process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from oracle.data import microbatches
from oracle.reference import train_reference
from ranks import run_ranks

from ppctl.cli.main import main
from ppctl.config.compose import compose
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import RunConfig
from ppctl.plan.build import build_plan
from ppctl.train.session import build_session
from ppctl.train.step import Trainer

STEPS = 5


def miniature(recipe: str, *typed: str) -> RunConfig:
    """The recipe's miniature in float32, in which the law of bits is stated."""
    typed = ("parallel.bf16=false", f"steps={STEPS}", "launch.device=cpu", *typed)
    return compose([f"+recipe={recipe}", "+scale=smoke", *typed], for_training=True).config


def train(mapping: dict) -> tuple[list[dict], dict[str, torch.Tensor], dict[str, list[float]]]:
    """(records, weights, largest gradient of every parameter in the first step, per expert where there are some)."""
    config = from_mapping(mapping)
    plan = build_plan(config, {})
    assert not plan.problems, plan.problems
    session = build_session(config, plan, dist.get_rank(), torch.device("cpu"))
    trainer, largest = Trainer(session, session.data.batches()), {}
    records = []
    for step in range(STEPS):
        records.append(trainer.step(step).record)
        for name, master in session.replica.weights.master.items():
            gradients = master.grad.flatten(1) if ".experts." in name else master.grad.reshape(1, -1)
            before = largest.get(name, torch.zeros(len(gradients)))
            largest[name] = torch.maximum(before, gradients.abs().amax(1))
    weights = {name: p.detach().numpy().copy() for name, p in session.replica.weights.master.items()}
    return records, weights, {name: values.tolist() for name, values in largest.items()}


def reference(config: RunConfig):
    return train_reference(config.model, config.optim, config.train.seed, microbatches(config, STEPS))


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_deepseek_v3_in_small_has_the_bits_of_one_process_and_every_expert_learns(tmp_path):
    (tmp_path / "text.txt").write_text(
        "".join(f"{n} bottles of beer on the wall, take {n % 7} down\n" for n in range(3000))
    )
    config = miniature("deepseek_v3", f"data.path={tmp_path}/text.txt")
    expected = reference(config)
    results = run_ranks(train, 16, to_mapping(config), timeout=560)
    seen = {}
    for records, weights, gradients in results:
        assert [r["loss"] for r in records] == expected.losses
        assert [r["grad_norm"] for r in records] == expected.norms
        assert [r["mtp_loss"] for r in records] == expected.mtp_losses
        assert [r["aux_loss"] for r in records] == expected.aux_losses
        assert all((value == expected.weights[name].numpy()).all() for name, value in weights.items())
        seen |= gradients
    assert expected.losses[-1] < expected.losses[0]
    assert all(min(values) > 0 for values in seen.values()), "every expert and every parameter got a gradient"
    assert sum(".experts." in name for name in seen) == 3 * (58 + 1)
    assert any(name.startswith("mtp.0.layer.") for name in seen)


@pytest.mark.parametrize(("recipe", "ranks"), [("deepseek_v3", 2048), ("llama3_405b", 16384), ("gpt3_175b", 1024)])
def test_at_full_size_a_recipe_is_refused_for_nothing_but_the_machine(recipe, ranks, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["train", f"+recipe={recipe}"]) == 2
    told = capsys.readouterr().err
    errors = [line for line in told.splitlines() if line.startswith("error ")]
    assert len(errors) == 1
    assert str(ranks) in errors[0].replace(",", "")
    assert "GPU" in errors[0]
