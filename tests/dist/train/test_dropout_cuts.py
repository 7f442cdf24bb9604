"""GPT-3's blocks with dropout, in any cut: the bits of one process, because no draw knows of a cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dense_runs import session_of, trainer_of
from expert_runs import EXPERTS, SIZES, STEPS, config_of, hold, reference_of
from one_save import save_checkpoint
from oracle.data import microbatches
from oracle.reference import train_reference
from ranks import run_ranks

from ppctl.config.mapping import to_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.train.loop import Evaluator
from ppctl.train.snapshot import load_checkpoint

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
GPT3 = DROPOUT | {
    "gated_linear_unit": False,
    "add_bias_linear": True,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "share_embeddings_and_output_weights": True,
    "max_position_embeddings": 20,
}
LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
MODELS = {"gpt3": GPT3, "latent, experts and mtp": DROPOUT | EXPERTS | LATENT | {"mtp_num_layers": 1}}
ALL_AGAIN = {"recompute_granularity": "full"}
PARTS_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]}


def run_of(text: Path, kind: str, layout: str = "Et*5L", pp: int = 1, m: int = 4, dp: int = 1, **options) -> RunConfig:
    config = config_of(text, "dense, MTP", m, layout, pp, dp)
    config.model = ModelConfig(**SIZES | MODELS[kind])
    for key, value in options.items():
        owner = next(part for part in (config.pipeline, config.train, config.parallel) if hasattr(part, key))
        setattr(owner, key, value)
    return config


@pytest.fixture(scope="module")
def expected(text):
    return {kind: reference_of(run_of(text, kind)) for kind in MODELS}


@pytest.mark.shows(
    "model.hidden_dropout",
    "model.attention_dropout",
    "model.gated_linear_unit",
    "model.add_bias_linear",
    "model.normalization",
    "model.position_embedding_type",
)
@pytest.mark.parametrize(
    ("kind", "layout", "pp", "options"),
    [
        ("gpt3", "Et*2|t*3L", 2, {}),
        ("gpt3", "Et|t|t|t|t|L", 2, ALL_AGAIN | {"pp_batch_size": 4}),
        ("gpt3", "Et|t*2|t|tL", 2, PARTS_AGAIN | {"pp_schedule": "interleaved_zero_bubble"}),
        ("latent, experts and mtp", "Et|t|t|t|t|mL", 3, {"recompute_granularity": "selective"}),
    ],
    ids=["1f1b", "all again, two calls", "parts again, split backwards", "latent, experts and mtp"],
)
def test_dropout_has_the_bits_of_one_process_in_any_cut(text, expected, kind, layout, pp, options):
    hold(run_of(text, kind, layout, pp, **options), expected[kind])


def masters(mapping: dict) -> tuple[list[float], dict]:
    session = session_of(mapping)
    trainer = trainer_of(session)
    losses = [trainer.step(step).record["loss"] for step in range(STEPS)]
    return losses, {name: p.detach().clone() for name, p in session.replica.weights.master.items()}


def test_replicas_drop_what_one_process_drops(text):
    config = run_of(text, "gpt3", params_dtype="float64")
    wanted = train_reference(config.model, config.optim, 1234, microbatches(config, STEPS), dtype=torch.float64)
    config = run_of(text, "gpt3", m=2, dp=2, params_dtype="float64")
    for losses, weights in run_ranks(masters, 2, to_mapping(config)):
        assert losses == pytest.approx(wanted.losses, rel=1e-12)
        for name, value in weights.items():
            # Keys' biases have a gradient of zero, that is noise: AdamW makes a thousandth of a billionth of it.
            scale = max(wanted.weights[name].abs().max(), 1e-3)
            assert (value - wanted.weights[name]).abs().max() <= 1e-11 * scale, name


def interrupted(mapping: dict, directory: str, first: int, last: int) -> tuple[list[float], dict]:
    """Steps `first` to `last`, each behind an evaluation; then a checkpoint."""
    session = session_of(mapping)
    if first:
        load_checkpoint(session, Path(directory) / f"step-{first}")
    trainer = trainer_of(session, first)
    evaluate, losses = Evaluator(session), []
    for step in range(first, last):
        assert evaluate() == evaluate(), "nothing is dropped where nothing is trained"
        losses.append(trainer.step(step).record["loss"])
    dist.barrier()
    save_checkpoint(session, Path(directory), last, last * session.config.train.global_batch_size)
    return losses, {name: p.detach().clone() for name, p in session.replica.weights.master.items()}


def test_a_run_that_goes_on_in_another_cut_drops_the_same(text, tmp_path):
    losses = []
    for first, last, layout, pp in ((0, 2, "Et*3|t*2L", 2), (2, STEPS, "Et*5L", 1)):
        config = run_of(text, "gpt3", layout, pp, eval_steps=1, eval_interval=1)
        config.data.validation_split = 0.2
        found, weights = run_ranks(interrupted, pp, to_mapping(config), str(tmp_path), first, last)[0]
        losses += found
    wanted = reference_of(config)
    assert losses == wanted.losses
    assert all(torch.equal(value, wanted.weights[name]) for name, value in weights.items())
