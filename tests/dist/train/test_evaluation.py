"""Evaluation: the loss of the held-out samples, in any cut, and nothing that training could notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from evaluated_runs import SEQ, config_of, records_of

from ppctl.config.schema import RunConfig
from ppctl.data.load import load_data
from ppctl.model.loss import token_losses
from ppctl.model.stage import build_stage
from ppctl.plan.build import build_plan


def evaluated(text: Path, directory: Path, **sizes: int) -> list[dict]:
    return records_of(config_of(text, eval_interval=2, eval_steps=50, **sizes), directory)[0]


def test_the_initial_loss_is_the_plain_mean_over_all_held_out_tokens(text: Path, tmp_path: Path) -> None:
    config = config_of(text, pp=2, vpp=2, steps=1, eval_interval=1, eval_steps=50)
    config.optim.lr = config.optim.min_lr = 1e-30  # the update of the one step is lost in rounding
    (record,), _ = records_of(config, tmp_path)
    whole = build_plan(config_of(text), {}).stages[0]
    module = build_stage(whole, config.model, seed=config.train.seed, dtype=torch.float32, device="cpu")
    held_out = load_data(config.data).held_out
    number = held_out.num_samples(SEQ)
    windows = torch.from_numpy(held_out.samples(torch.arange(number).numpy(), SEQ))
    with torch.no_grad():
        output = module(windows[:, :-1])
        logits = output[0] if isinstance(output, tuple) else output
        mean = token_losses(logits, windows[:, 1:]).double().mean().item()
    assert record["eval_samples"] == number and number % 8
    assert record["eval_loss"] == pytest.approx(mean, rel=1e-6)


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return evaluated(text, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("sizes", [{"pp": 2, "vpp": 2}, {"pp": 4}], ids=str)
def test_no_cut_changes_a_bit_of_it(text: Path, tmp_path: Path, whole: list[dict], sizes: dict[str, int]) -> None:
    one = [r.get("eval_loss") for r in whole]
    assert [value is None for value in one] == [True, False, True, False] and one[3] < one[1]
    assert [r.get("eval_loss") for r in evaluated(text, tmp_path / "cut", **sizes)] == one


def test_two_replicas_agree_to_a_millionth(text: Path, tmp_path: Path, whole: list[dict]) -> None:
    one, two = whole, evaluated(text, tmp_path / "two", dp=2)
    assert two[3]["eval_loss"] == pytest.approx(one[3]["eval_loss"], rel=1e-6)
    assert two[3]["eval_samples"] == one[3]["eval_samples"]


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "mtp_num_layers": 1,
}


@pytest.mark.shows("train.eval_interval")
@pytest.mark.parametrize("model", [{}, EXPERTS], ids=["dense", "experts and MTP"])
def test_training_does_not_notice(text: Path, tmp_path: Path, model: dict[str, object]) -> None:
    configs = [config_of(text, pp=2, vpp=2, **more) for more in ({"eval_interval": 1, "eval_steps": 2}, {})]
    for config in configs:
        for key, value in model.items():
            setattr(config.model, key, value)
    (with_it, _), (without, states) = (records_of(c, tmp_path / str(i)) for i, c in enumerate(configs))
    keys = {"loss", "grad_norm", "lr", "consumed_samples"} | {"mtp_loss", "aux_loss"} & set(without[0])
    for key in keys:
        assert [r[key] for r in with_it] == [r[key] for r in without]
    assert len(keys) == (6 if model else 4) and all("eval_loss" in r for r in with_it)
    assert "evaluating" not in states and not any("eval_loss" in r for r in without)


@pytest.mark.shows("train.eval_steps")
def test_there_is_one_at_the_end_and_a_sample_counts_once(text: Path, tmp_path: Path) -> None:
    config = config_of(text, steps=3, eval_interval=2, eval_steps=1)
    records, states = records_of(config, tmp_path)
    assert [r.get("eval_samples") for r in records] == [None, 8, 8]
    assert states == ["training", "training", "evaluating", "training", "evaluating", "saving"]


@pytest.mark.shows("data.validation_split")
def test_a_held_out_sample_is_never_trained_on(text: Path) -> None:
    data = load_data(config_of(text).data)
    whole = load_data(RunConfig(data=config_of(text).data).data).training
    kept, held_out = data.training.num_samples(SEQ), data.held_out.num_samples(SEQ)
    assert held_out == round(0.1 * (kept + held_out)) and data.training.digest != data.held_out.digest
    seen = data.training.order(7, 0, 10 * kept, SEQ)
    assert sorted(set(seen.tolist())) == list(range(kept))
    # What is trained on ends where what is held out begins: one token is the label of the one, the input of the other.
    assert len(whole.corpora[0].tokens) == kept * SEQ + 1


def test_lines_of_an_interval_are_those_of_every_step_and_of_evaluations(text: Path, tmp_path: Path) -> None:
    settings = {"steps": 7, "eval_interval": 4, "eval_steps": 1}
    every, _ = records_of(config_of(text, **settings), tmp_path / "every")
    config = config_of(text, **settings)
    config.log.interval, config.checkpoint.interval, config.checkpoint.async_ = 3, 2, False
    some, _ = records_of(config, tmp_path / "some")
    assert [record["step"] for record in some] == [1, 3, 4, 6, 7]
    assert [record["loss"] for record in some] == [each["loss"] for each in every if each["step"] in (1, 3, 4, 6, 7)]
    # The line that follows a save has its figures, although the step right behind it has none.
    assert [record.get("saved_step") for record in some] == [None, 2, None, 4, 6]
