"""Which samples a step reads: a pure function of the seed and the data position, in any cut.

The order of an epoch is computed, not stored, and no state but the position (one integer) and the version of the rule
goes into a checkpoint. Up to SHUFFLED samples every permutation is equally likely: as many random words are sorted.
Beyond, the order is a keyed permutation that costs a few integer operations for a sample, whatever the corpus's size
(decision 26). Written in unsigned 64-bit arithmetic only, so that it does not change with numpy's random generators.

Sources: a balanced Feistel network is a permutation for any round function (Luby and Rackoff, 1988); walking the cycle
until the value falls into the range makes it one of any size (Black and Rogaway, 2002); random words and the mixing
function are splitmix64's (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

SAMPLE_ORDER = 2
"""The version of the rule for new runs. Version 1 used the keyed permutation for every size; a run that began with
version 1 keeps it, since other samples would follow its checkpoint's position."""
SHUFFLED = 1024
"""Samples up to which an epoch's words are sorted. With few bits per half, Feistel orders are visibly not uniform (up
to 256 samples in a million epochs); sorting 1024 words costs no more."""
ROUNDS = 6
"""Feistel rounds; four suffice in theory."""
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF


def order(seed: int, first: int, count: int, num_samples: int, sample_order: int = SAMPLE_ORDER) -> Ids:
    """Sample ids at positions first .. first + count - 1 of the run, shape [count], each in [0, num_samples); epochs
    follow each other, each in an order of its own. `sample_order` is the version of the rule. Raises ValueError if
    there is no sample to draw from or a number is negative."""
    if first < 0 or count < 0:
        raise ValueError(f"{count} positions from {first} are not positions of a run")
    return draw(seed, np.arange(first, first + count, dtype=np.int64), num_samples, sample_order)


def draw(seed: int, positions: Ids, num_samples: int, sample_order: int = SAMPLE_ORDER) -> Ids:
    """Sample ids at any positions of a run, shape of `positions`, each in [0, num_samples). Raises as `order` does."""
    if num_samples < 1:
        raise ValueError(f"cannot draw from {num_samples} samples")
    words, size = positions.astype(np.uint64), np.uint64(num_samples)
    permute = _shuffle if sample_order > 1 and num_samples <= SHUFFLED else _permute
    return permute(words % size, _epoch_keys(seed, words // size), num_samples).astype(np.int64)


def seed_of(seed: int, number: int) -> int:
    """The seed of the `number`-th of several orders; the first order has the run's own seed."""
    return seed ^ (number * _GOLDEN & _MASK)


def microbatches(ids: Ids, micro_batch_size: int, dp_rank: int, dp_size: int) -> Ids:
    """The ids that one data-parallel rank reads, shape [num_microbatches, micro_batch_size].

    The global batch is cut into micro-batches in order and dealt to the dp ranks in turn: micro-batch m of dp_rank d is
    the (m * dp_size + d)-th. One dp rank with dp_size times the micro-batches reads the same samples.
    Raises ValueError if micro_batch_size * dp_size does not divide the batch.
    """
    if len(ids) % (micro_batch_size * dp_size):
        raise ValueError(f"{len(ids)} samples are not whole micro-batches of {micro_batch_size} on {dp_size} dp ranks")
    return ids.reshape(-1, dp_size, micro_batch_size)[:, dp_rank, :]


def checksum(ids: Ids) -> int:
    """CRC-32 of the ids as little-endian 64-bit integers: equal on every rank that reads the same global batch."""
    return zlib.crc32(np.ascontiguousarray(ids, dtype="<i8").tobytes())


def _mix(words: _Words) -> _Words:
    """Splitmix64's finaliser: a bijection of 64-bit words that spreads every bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _epoch_keys(seed: int, epochs: _Words) -> _Words:
    start = _mix(np.array([seed & _MASK], dtype=np.uint64) + np.uint64(_GOLDEN))
    return _mix(start + (epochs + np.uint64(1)) * np.uint64(_GOLDEN))


def _shuffle(values: _Words, keys: _Words, size: int) -> _Words:
    """Map each value (< size) by its key's permutation of 0 .. size - 1: the order of `size` words of the key's stream.
    Two words are equal with a probability below 2^-45; the earlier one then comes first."""
    epochs, row = np.unique(keys, return_inverse=True)
    words = _mix(epochs[:, None] + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
    return words.argsort(axis=1, kind="stable")[row.reshape(keys.shape), values].astype(np.uint64)


def _permute(values: _Words, keys: _Words, size: int) -> _Words:
    """Map each value (< size) by its key's keyed permutation of 0 .. size - 1, computed without the other values."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)  # two halves of `half` bits hold at least `size` values
    result = _feistel(values, keys, half)
    while (outside := result >= np.uint64(size)).any():
        result[outside] = _feistel(result[outside], keys[outside], half)
    return result


def _feistel(values: _Words, keys: _Words, half: int) -> _Words:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for number in range(1, ROUNDS + 1):
        constant = np.uint64(number * _GOLDEN & _MASK)
        left, right = right, left ^ (_mix(right ^ _mix(keys + constant)) & mask)
    return (left << shift) | right
