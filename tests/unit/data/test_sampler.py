"""The order of samples: a permutation per epoch, pure, independent of the cut."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppctl.data.sampler import checksum, microbatches, order, sample_ids

SEEDS = st.integers(-(2**63), 2**64)


@given(SEEDS, st.integers(1, 300), st.integers(0, 5))
def test_an_epoch_visits_every_sample_once(seed, num_samples, epoch):
    ids = order(seed, epoch * num_samples, num_samples, num_samples)
    assert sorted(ids.tolist()) == list(range(num_samples))


@given(SEEDS, st.integers(0, 10**12), st.integers(0, 40), st.integers(0, 40), st.integers(1, 10**12))
def test_positions_do_not_depend_on_how_they_are_grouped(seed, first, one, two, num_samples):
    whole = order(seed, first, one + two, num_samples)
    parts = [order(seed, first, one, num_samples), order(seed, first + one, two, num_samples)]
    assert whole.tolist() == np.concatenate(parts).tolist()
    assert all(0 <= sample < num_samples for sample in whole)


def test_the_order_is_fixed_for_ever():
    assert sample_ids(1234, 0, 8, 44_000).tolist() == [9318, 26778, 26722, 36521, 22187, 12922, 1887, 3377]
    assert sample_ids(1234, 10**6, 4, 44_000).tolist() == [12282, 35682, 30481, 15389]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(order(seed, epoch * 50, 50, 50)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_small_permutations_are_about_equally_frequent():
    counts = {}
    for seed in range(3000):
        key = tuple(order(seed, 0, 3, 3))
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 6 and all(400 < count < 600 for count in counts.values())


def test_neighbours_are_not_left_together():
    ids = order(5, 0, 10_000, 10_000)
    assert np.sum(np.abs(np.diff(ids)) == 1) < 20
    assert abs(np.corrcoef(ids, np.arange(10_000))[0, 1]) < 0.05


def test_a_batch_larger_than_the_corpus_repeats_it():
    ids = sample_ids(3, 1, 10, 4)  # positions 10..19: the rest of epoch 2, epoch 3, epoch 4
    assert sorted(ids[2:6].tolist()) == sorted(ids[6:10].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [(1, 0, 4, 0), (1, -1, 4, 5), (1, 0, -1, 5)])
def test_nonsense_is_refused(bad):
    with pytest.raises(ValueError, match=r"cannot draw|not positions"):
        order(*bad)


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_every_cut_deals_the_same_samples(dp_size):
    ids = sample_ids(9, 4, 12, 1000)
    shares = [microbatches(ids, 2, dp_rank, dp_size) for dp_rank in range(dp_size)]
    assert all(share.shape == (6 // dp_size, 2) for share in shares)
    dealt = np.stack(shares, axis=1).reshape(-1, 2)
    assert dealt.tolist() == microbatches(ids, 2, 0, 1).tolist() == ids.reshape(6, 2).tolist()


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="10 samples are not whole micro-batches of 2 on 3 dp ranks"):
        microbatches(sample_ids(9, 0, 10, 100), 2, 0, 3)


def test_the_checksum_sees_order_and_value():
    ids = np.array([1, 2, 3])
    assert checksum(ids) == checksum(np.array([1, 2, 3], dtype=np.int32)) == zlib.crc32(struct.pack("<3q", 1, 2, 3))
    assert len({checksum(ids), checksum(ids[::-1]), checksum(ids + 1), checksum(ids[:2])}) == 4
