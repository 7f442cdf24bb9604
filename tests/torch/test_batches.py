"""Batches: labels follow tokens, shares add up, the position is one integer."""

import numpy as np
import pytest
import torch

from ppctl.data.batches import Batches, check_same_samples
from ppctl.data.corpus import Corpus
from ppctl.errors import DataError, TrainingError

CORPUS = Corpus(np.arange(101, dtype=np.uint16), "digest", "a hundred tokens and one")


def batches(**changes):
    sizes = {"seq_length": 5, "global_batch_size": 12, "micro_batch_size": 2, "dp_rank": 0, "dp_size": 1}
    return Batches(CORPUS, **(sizes | {"seed": 3, "vocab_size": 320} | changes))


def test_shapes_types_and_labels():
    batch = batches().step(0)
    assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == (6, 2, 5)
    assert (batch.tokens.dtype, batch.labels.dtype, batch.loss_mask.dtype) == (torch.int64, torch.int64, torch.float32)
    assert torch.equal(batch.labels, batch.tokens + 1)  # the corpus counts upwards
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    assert batch.loss_mask.sum() == batch.total_tokens == 60


@pytest.mark.parametrize("dp_size", [2, 3, 6])
def test_data_parallel_ranks_share_the_batch_of_one(dp_size):
    whole = batches().step(7)
    shares = [batches(dp_rank=rank, dp_size=dp_size).step(7) for rank in range(dp_size)]
    together = torch.stack([share.tokens for share in shares], dim=1).reshape(6, 2, 5)
    assert torch.equal(together, whole.tokens)
    assert {share.checksum for share in shares} == {whole.checksum}
    assert {share.total_tokens for share in shares} == {60}


def test_micro_batch_size_does_not_change_the_samples():
    one, four = batches(micro_batch_size=1).step(2), batches(micro_batch_size=4).step(2)
    assert torch.equal(one.tokens.reshape(12, 5), four.tokens.reshape(12, 5))


def test_an_epoch_reads_every_token_once():
    reader = batches(global_batch_size=10)
    tokens = torch.cat([reader.step(step).tokens.flatten() for step in (0, 1)])
    assert sorted(tokens.tolist()) == list(range(100))


def test_a_resumed_run_goes_on_where_it_was_also_with_another_batch_size():
    start = batches()
    assert [start.consumed_samples(step) for step in (0, 1, 5)] == [0, 12, 60]
    same = batches(first_step=5, consumed_samples=60)
    assert same.sample_ids(6).tolist() == start.sample_ids(6).tolist() and same.consumed_samples(6) == 72
    smaller = batches(first_step=5, consumed_samples=60, global_batch_size=6)
    halves = np.concatenate([smaller.sample_ids(5), smaller.sample_ids(6)])
    assert halves.tolist() == start.sample_ids(5).tolist()


def test_a_token_beyond_the_vocabulary_is_refused_with_a_size_that_works():
    with pytest.raises(DataError) as caught:
        batches(vocab_size=100)
    (problem,) = caught.value.problems
    assert problem.code == "PP-E406" and "token 100" in problem.message
    batches(vocab_size=int(problem.remedy.removeprefix("model.vocab_size=")))
    batches(vocab_size=101)


def test_a_corpus_without_a_whole_sample_is_refused():
    with pytest.raises(DataError, match="PP-E404"):
        batches(seq_length=101)


def test_ranks_that_drew_different_samples_are_named():
    check_same_samples(3, {})
    check_same_samples(3, {0: 5, 3: 5})
    with pytest.raises(TrainingError, match=r"PP-E407: .* step 3") as caught:
        check_same_samples(3, {3: 5, 0: 6})
    assert caught.value.problems[0].place == "rank 0: 00000006, rank 3: 00000005"
