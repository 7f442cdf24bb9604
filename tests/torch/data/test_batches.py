"""Batches: labels follow tokens, shares add up, the position is one integer."""

import numpy as np
import pytest
import torch

from ppctl.data.batches import Batches, HeldOutBatches, check_same_samples
from ppctl.data.blend import Blend
from ppctl.data.corpus import Corpus
from ppctl.data.load import DocumentEnd
from ppctl.errors import DataError, TrainingError

CORPUS = Blend((Corpus(np.arange(101, dtype=np.uint16), "digest", "a hundred tokens and one"),))


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
    assert [start.sizes.position(step) for step in (0, 1, 5)] == [0, 12, 60]
    same = batches(first_step=5, consumed_samples=60)
    assert same.sample_ids(6).tolist() == start.sample_ids(6).tolist() and same.sizes.position(6) == 72
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


def test_a_token_that_no_check_before_training_has_read_ends_the_run_at_its_step(monkeypatch):
    monkeypatch.setattr("ppctl.data.corpus.WHOLE", 64)
    reader = batches(vocab_size=100, global_batch_size=10)
    with pytest.raises(DataError, match=r"PP-E406: the data holds token 100, .*") as caught:
        for step in (0, 1):
            reader.step(step)
    assert caught.value.problems[0].place.startswith("step ")


def test_a_corpus_without_a_whole_sample_is_refused():
    with pytest.raises(DataError, match="PP-E404"):
        batches(seq_length=101)


def test_ranks_that_drew_different_samples_are_named():
    check_same_samples(3, {})
    check_same_samples(3, {0: 5, 3: 5})
    with pytest.raises(TrainingError, match=r"PP-E407: .* step 3") as caught:
        check_same_samples(3, {3: 5, 0: 6})
    assert caught.value.problems[0].place == "rank 0: 00000006, rank 3: 00000005"


@pytest.mark.parametrize(("steps", "batches_read", "counted"), [(1, 1, 12), (2, 2, 20), (10**9, 2, 20)])
def test_an_evaluation_counts_each_held_out_sample_once_and_ends(steps, batches_read, counted):
    held_out = HeldOutBatches(batches(), steps)
    assert (held_out.num_batches, held_out.num_samples) == (batches_read, counted)
    read = [held_out.batch(number) for number in range(held_out.num_batches)]
    tokens = torch.cat([batch.tokens[batch.loss_mask > 0] for batch in read])
    assert len(tokens) == len(set(tokens.tolist())) == 5 * counted
    assert {batch.total_tokens for batch in read} == {1}


def test_the_ranks_of_an_evaluation_share_its_batches():
    whole = HeldOutBatches(batches(), 2)
    shares = [HeldOutBatches(batches(dp_rank=rank, dp_size=3), 2) for rank in range(3)]
    masks = torch.stack([share.batch(1).loss_mask for share in shares], dim=1).reshape(6, 2, 5)
    assert torch.equal(masks, whole.batch(1).loss_mask) and masks.sum() == 8 * 5
    assert {share.checksum for share in shares} == {whole.checksum}


def test_a_blend_that_repeats_a_small_corpus_counts_it_once():
    small = Corpus(np.arange(6, dtype=np.uint16), "small", "one sample")
    blend = Blend((small, *CORPUS.corpora), (1, 1))
    sizes = {"seq_length": 5, "global_batch_size": 4, "micro_batch_size": 1, "dp_rank": 0, "dp_size": 1}
    held_out = HeldOutBatches(Batches(blend, **sizes, seed=3, vocab_size=320), 100)
    assert held_out.num_samples == 21 and held_out.num_batches == 10


@pytest.mark.parametrize("dp_size", [1, 3])
def test_what_follows_a_documents_end_does_not_count_and_all_ranks_know_how_much_does(dp_size):
    marked = Blend((Corpus(np.arange(101, dtype=np.uint16) % 7, "digest", "a mark every seven tokens"),))
    sizes = {"seq_length": 5, "global_batch_size": 12, "micro_batch_size": 2, "dp_size": dp_size}
    ranks = [
        Batches(marked, **sizes, seed=3, vocab_size=320, dp_rank=r, end=DocumentEnd(6, True)) for r in range(dp_size)
    ]
    read = [rank.step(2) for rank in ranks]
    for batch in read:
        assert torch.equal(batch.loss_mask == 0, batch.tokens == 6) and (batch.labels[batch.tokens == 6] == 0).all()
    assert {batch.total_tokens for batch in read} == {int(sum(batch.loss_mask.sum() for batch in read))} != {60}
