"""Documents kept apart, in any cut: stages in the middle find them for themselves."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expert_runs import STEPS, config_of, hold, train_cut
from observed_runs import train_noted
from oracle.data import whole_batches
from oracle.reference import train_reference
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import RunConfig
from ppctl.model.packing import Packing
from ppctl.plan.build import build_plan
from ppctl.train.generate import write_samples
from ppctl.train.session import build_session

MLA = dict(multi_latent_attention=True, q_lora_rank=10, kv_lora_rank=14, qk_head_dim=6, qk_pos_emb_head_dim=8)
TIED = "deepseek, tied, two MTP modules"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of a few words: most sequences hold several."""
    path, words = tmp_path_factory.mktemp("text") / "corpus.jsonl", random.Random(4)
    lines = [" ".join(words.choices(["of", "a", "I"], k=words.randrange(1, 4))) for _ in range(400)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def packed(text: Path, kind: str, layout: str, pp: int, m: int, **model: object) -> RunConfig:
    config = config_of(text, kind, m, layout, pp)
    config.data.reset_position_ids = config.data.reset_attention_mask = config.data.eod_mask_loss = True
    for key, value in model.items():
        setattr(config.model, key, value)
    return config


def reference_of(config: RunConfig):
    """What one process makes of the same documents."""
    train, batches = config.train, whole_batches(config)
    read = [batches.step(step) for step in range(STEPS)]
    assert sum(len(row) for b in read for rows in b.documents for row in rows) > 2 * STEPS * train.global_batch_size
    given = [
        [
            (b.tokens[i], b.labels[i], b.loss_mask[i], Packing.of(b.positions, b.documents, i))
            for i in range(len(b.tokens))
        ]
        for b in read
    ]
    return train_reference(config.model, config.optim, train.seed, given, train.steps)


@pytest.mark.shows("data.reset_position_ids", "data.reset_attention_mask")
@pytest.mark.parametrize(
    ("kind", "layout", "pp", "m", "changes"),
    [
        pytest.param(TIED, "E|t|t*2|t*2|mm|L", 3, 3, {}, id="MTP alone, two chunks a rank"),
        pytest.param("deepseek", "E|t*3|t*2m|L", 4, 2, MLA, id="latent attention; two stages in the middle"),
        pytest.param("dense, MTP", "Et*5mL", 1, 2, {"num_query_groups": 1}, id="one stage", marks=pytest.mark.whole),
    ],
)
def test_any_cut_of_packed_documents_gives_the_same_bits(text, kind, layout, pp, m, changes):
    config = packed(text, kind, layout, pp, m, **changes)
    if pp == 4:
        config.train.recompute_granularity, config.train.recompute_modules = "selective", ["core_attn", "mla_up_proj"]
    hold(config, reference_of(config))


def test_replicas_whose_documents_differ_agree_with_one_process_to_a_millionth(text):
    """They count unequally many tokens; only the order of sums differs, and eps is 1e-4 as in the law of replicas."""
    config, one = (packed(text, "dense, MTP", layout, pp, m) for layout, pp, m in (("Et*3|t*2mL", 2, 2), ("", 1, 4)))
    config.parallel.data_parallel_size, config.launch.gpus_per_node, config.train.global_batch_size = 2, 4, 8
    config.parallel.data_parallel_sharding = "full"
    config.optim.eps = one.optim.eps = 1e-4
    expected = reference_of(one)
    for records, _ in run_ranks(train_cut, 4, to_mapping(config)):
        assert [r["loss"] for r in records] == pytest.approx(expected.losses, rel=1e-6)
        assert [r["mtp_loss"] for r in records] == pytest.approx(expected.mtp_losses, rel=1e-6)
        assert [r["grad_norm"] for r in records] == pytest.approx(expected.norms, rel=1e-6)


def whole_run(mapping: dict, directory: str) -> tuple[list[float | None], list[dict]]:
    """In a rank: what evaluations said, and the sample at the end."""
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), dist.get_rank(), torch.device("cpu"))
    _, notes = train_noted(session, Path(directory))
    return [record.get("eval_loss") for record in notes.records], write_samples(session)


def test_evaluation_and_the_sample_keep_documents_apart_in_any_cut(text, tmp_path):
    found = []
    for layout, pp in (("Et*5L", 1), ("E|t*3|t*2|L", 4)):
        config = packed(text, "dense, MTP", layout, pp, 2, mtp_num_layers=None)
        config.scale = "smoke"  # a short sample
        config.data.validation_split, config.train.eval_interval, config.train.eval_steps = 0.1, 2, 3
        found.append(run_ranks(whole_run, pp, to_mapping(config), str(tmp_path / str(pp)))[0])
    assert found[0] == found[1]
    losses, (sample,) = found[0]
    assert losses[3] < losses[1] and len(sample["text"]) > 0
