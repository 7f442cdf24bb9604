"""The order of samples: a permutation per epoch, pure, independent of the cut."""

import struct
import zlib
from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppctl.data.sampler import SHUFFLED, checksum, microbatches, order


def sample_ids(seed, step, global_batch_size, num_samples):
    """The global batch of a step."""
    return order(seed, step * global_batch_size, global_batch_size, num_samples)


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


def chi_square(counts):
    """Pearson's statistic of counts that ought to be equal; its degrees of freedom are one less than the counts."""
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2).sum() / expected)


def of_permutations(orders):
    """The counts of all n! orders, of `orders` [how many, n]."""
    n = orders.shape[1]
    kinds, counts = np.unique(orders @ n ** np.arange(n), return_counts=True)
    return np.append(counts, np.zeros(factorial(n) - len(kinds)))


def epochs(seed, how_many, n):
    return order(seed, 0, how_many * n, n).reshape(how_many, n)


QUANTILES = {2: 10.828, 3: 20.515, 4: 49.728, 5: 172.42, 6: 841.91}
"""n -> the 0.999 quantile of chi-square with n! - 1 degrees of freedom."""


@pytest.mark.parametrize("n", QUANTILES)
def test_every_order_of_a_tiny_corpus_is_as_frequent_as_any_other(n):
    assert chi_square(of_permutations(epochs(1, 200 * factorial(n), n))) < QUANTILES[n], "over epochs"
    first = np.array([order(seed, 0, n, n) for seed in range(20 * factorial(n))])
    assert chi_square(of_permutations(first)) < QUANTILES[n], "over seeds"


@pytest.mark.parametrize(("n", "quantile"), [(8, 22.458), (16, 36.123), (64, 102.17)])
def test_the_first_sample_says_nothing_of_the_one_in_the_middle(n, quantile):
    """How far it is from one to the other, round the corpus: n - 1 distances. Version 1: 26, 183 and 123."""
    orders = epochs(1, 40_000, n)
    distances = np.bincount((orders[:, n // 2] - orders[:, 0]) % n, minlength=n)
    assert distances[0] == 0 and chi_square(distances[1:]) < quantile


@pytest.mark.parametrize(
    ("n", "blocks", "how_many"),
    [(7, 7, 20_000), (100, 100, 2000), (1000, 50, 300), (SHUFFLED + 26, 50, 300), (100_000, 100, 5)],
)
def test_every_sample_comes_at_every_place_equally_often(n, blocks, how_many):
    """Places and samples in blocks of neighbours: (blocks - 1)^2 degrees of freedom, after a factor of (n - 1) / n."""
    cells = np.arange(n) * blocks // n * blocks + epochs(1, how_many, n) * blocks // n
    statistic = chi_square(np.bincount(cells.ravel(), minlength=blocks**2)) * (n - 1) / n
    freedom = (blocks - 1) ** 2
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.0902 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty, 1931
    assert statistic < quantile


@pytest.mark.parametrize(
    ("how", "version_1", "now"),
    [
        ((1234, 0, 10, 5), [3, 2, 1, 0, 4, 1, 4, 3, 2, 0], [4, 1, 2, 0, 3, 0, 1, 4, 3, 2]),
        ((1234, 7, 8, 1000), [246, 780, 561, 395, 65, 350, 266, 0], [575, 71, 799, 505, 456, 415, 720, 918]),
        ((7, 3 * SHUFFLED, 4, SHUFFLED), [567, 591, 358, 825], [569, 683, 205, 760]),
        ((1234, 5000, 6, SHUFFLED + 1), [2, 206, 252, 422, 53, 159], [2, 206, 252, 422, 53, 159]),
    ],
)
def test_a_run_keeps_the_order_that_it_began_with_and_large_corpora_have_kept_theirs(how, version_1, now):
    assert order(*how, 1).tolist() == version_1
    assert order(*how, 2).tolist() == order(*how).tolist() == now


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
