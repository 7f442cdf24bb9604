"""Conversations in any cut: the loss is the mean over the tokens that are learned, whichever rank has how many."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from chats import CHATML, chat, tokenizer_directory
from expert_runs import STEPS, config_of, hold, train_cut
from oracle.data import whole_batches
from oracle.reference import train_reference
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import RunConfig
from ppctl.model.packing import Packing
from ppctl.plan import build_plan
from ppctl.train.generate import write_samples
from ppctl.train.session import build_session


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home, words = tokenizer_directory(tmp_path_factory.mktemp("chat"), CHATML), random.Random(5)
    answers = ["".join(words.choices("ab ", k=words.randrange(1, 30))) for _ in range(60)]
    lines = [chat(("user", "q" * words.randrange(1, 6)), ("assistant", answer)) for answer in answers]
    (home / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return home


def conversing(home: Path, layout: str, pp: int, m: int, *, pack: bool) -> RunConfig:
    config = config_of(home / "chat.jsonl", "dense, MTP", m, layout, pp)
    config.model.mtp_num_layers = None
    data = config.data
    data.tokenizer, data.format, data.seq_length = str(home), "chat", 110 if pack else 60
    data.pack = data.reset_position_ids = data.reset_attention_mask = pack
    return config


def reference_of(config: RunConfig):
    train, batches = config.train, whole_batches(config)
    read = [batches.step(step) for step in range(STEPS)]
    counts = [microbatch.sum() for batch in read for microbatch in batch.loss_mask]
    assert len(set(counts)) > STEPS  # microbatches learn unequally many tokens
    given = [
        [
            (b.tokens[i], b.labels[i], b.loss_mask[i], Packing.of(b.positions, b.documents, i))
            for i in range(len(b.tokens))
        ]
        for b in read
    ]
    return train_reference(config.model, config.optim, train.seed, given, train.steps)


@pytest.mark.parametrize("pack", [False, True])
def test_any_cut_of_conversations_gives_the_bits_of_one_process(home, pack):
    config = conversing(home, "Et|t*2|t|tL", 2, 3, pack=pack)
    hold(config, reference_of(config))


def test_replicas_that_learn_unequally_many_tokens_agree_with_one_process(home):
    config, one = (conversing(home, layout, pp, m, pack=True) for layout, pp, m in (("Et*3|t*2L", 2, 2), ("", 1, 4)))
    config.parallel.data_parallel_size, config.launch.gpus_per_node, config.train.global_batch_size = 2, 4, 8
    config.optim.eps = one.optim.eps = 1e-4
    expected = reference_of(one)
    for records, _ in run_ranks(train_cut, 4, to_mapping(config)):
        assert [r["loss"] for r in records] == pytest.approx(expected.losses, rel=1e-6)
        assert [r["grad_norm"] for r in records] == pytest.approx(expected.norms, rel=1e-6)


def samples(mapping: dict) -> list[dict]:
    """In a rank: what the model writes before its first step."""
    config = from_mapping(mapping)
    return write_samples(build_session(config, build_plan(config, {}), dist.get_rank(), torch.device("cpu")))


@pytest.mark.parametrize("prompts", [None, ["Hi\nyou", "b"]], ids=["of the data", "by key"])
def test_the_model_answers_a_turn_in_any_cut(home, prompts):
    found = []
    for layout, pp in (("Et*5L", 1), ("E|t*3|t*2|L", 4)):
        config = conversing(home, layout, pp, 2, pack=True)
        config.scale, config.log.prompts = "smoke", prompts
        found.append(run_ranks(samples, pp, to_mapping(config))[0])
    assert found[0] == found[1]
    (first, *others), opened = found[0], "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    if prompts is None:
        conversations = [json.loads(line)["messages"] for line in (home / "chat.jsonl").read_text().splitlines()]
        # As a tokenizer shows it, without its marks.
        assert not others and first["prompt"] == f"user\n{conversations[30][0]['content']}\nassistant\n"
    else:
        assert [each["prompt"] for each in found[0]] == [opened.format(text) for text in prompts]
    assert first["text"]
