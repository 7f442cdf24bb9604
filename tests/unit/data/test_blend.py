"""Blends: proportions, epochs of each corpus, and what is held out of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppctl.config.schema import DataConfig
from ppctl.data.blend import Blend
from ppctl.data.corpus import Corpus
from ppctl.data.load import load_data
from ppctl.data.sampler import order
from ppctl.errors import DataError

SEQ = 4


def corpus(samples, first=0):
    """A corpus of as many samples whose tokens count upwards from `first`."""
    tokens = np.arange(first, first + samples * SEQ + 1, dtype=np.uint16)
    return Corpus(tokens, f"digest {first}", f"{samples} samples")


SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@given(SIZES, st.data(), st.integers(0, 2**64 - 1))
def test_each_corpus_comes_in_its_proportion_and_each_of_its_samples_once_an_epoch(sizes, data, seed):
    quotas = tuple(data.draw(st.integers(1, 9)) for _ in sizes)
    blend = Blend(tuple(corpus(size) for size in sizes), quotas)
    cycles = 12
    ids = blend.order(seed, 0, cycles * sum(quotas), SEQ)
    firsts = np.cumsum([0, *sizes])
    which = np.searchsorted(firsts, ids, side="right") - 1
    for cycle in which.reshape(cycles, -1):
        assert [int((cycle == number).sum()) for number in range(len(sizes))] == list(quotas)
    for number, size in enumerate(sizes):
        own = (ids[which == number] - firsts[number]).tolist()
        for epoch in (own[i : i + size] for i in range(0, len(own) - size + 1, size)):
            assert sorted(epoch) == list(range(size))


@given(SIZES, st.data(), st.integers(0, 50), st.integers(0, 30), st.integers(0, 30))
def test_positions_do_not_depend_on_how_they_are_grouped(sizes, data, first, one, two):
    quotas = data.draw(st.none() | st.just(tuple(range(1, len(sizes) + 1))))
    blend = Blend(tuple(corpus(size) for size in sizes), quotas)
    whole = blend.order(5, first, one + two, SEQ).tolist()
    assert whole == [*blend.order(5, first, one, SEQ), *blend.order(5, first + one, two, SEQ)]


@given(SIZES, st.data())
def test_after_its_span_every_sample_has_come(sizes, data):
    quotas = data.draw(st.none() | st.tuples(*(st.integers(1, 5) for _ in sizes)))
    blend = Blend(tuple(corpus(size) for size in sizes), quotas)
    assert len(set(blend.order(2, 0, blend.span(SEQ), SEQ).tolist())) == sum(sizes)


def test_every_stretch_of_a_cycle_is_mixed():
    blend = Blend((corpus(500), corpus(500)), (3, 7))
    which = blend.order(1, 0, 1000, SEQ) >= 500
    assert {int(which[i : i + 10].sum()) for i in range(990)} <= {6, 7, 8}


def test_without_weights_a_blend_is_one_corpus():
    blend = Blend((corpus(3), corpus(9)))
    assert sorted(blend.order(1, 0, 12, SEQ).tolist()) == list(range(12))
    assert blend.num_samples(SEQ) == 12


def test_a_corpus_alone_has_the_order_that_it_always_had():
    alone = corpus(40)
    assert Blend((alone,), (1,)).order(9, 0, 100, SEQ).tolist() == order(9, 0, 100, alone.num_samples(SEQ)).tolist()


def test_a_sample_is_cut_from_its_own_corpus():
    blend = Blend((corpus(2), corpus(3, first=100)), (1, 1))
    windows = blend.samples(np.array([[0, 4], [2, 1]]), SEQ)
    assert windows[:, :, 0].tolist() == [[0, 108], [100, 4]] and windows.shape == (2, 2, SEQ + 1)


def test_the_digest_names_corpora_order_and_weights():
    a, b = corpus(2), corpus(3, first=100)
    blends = [Blend((a, b), (1, 1)), Blend((b, a), (1, 1)), Blend((a, b), (1, 2)), Blend((a, b)), Blend((a, a), (1, 1))]
    assert len({blend.digest for blend in blends}) == len(blends)


def test_a_token_beyond_the_vocabulary_is_found_in_any_of_them():
    blend = Blend((corpus(2), corpus(3, first=100)), (1, 1))
    blend.check_vocabulary(200)
    with pytest.raises(DataError, match="token 110"):
        blend.check_vocabulary(110)


@pytest.mark.parametrize(("fraction", "held_out"), [(0.1, [1, 3]), (0.5, [5, 15]), (0.001, [1, 1])])
def test_the_same_share_of_each_is_held_out_and_never_trained_on(fraction, held_out):
    blend = Blend((corpus(10), corpus(30, first=100)), (1, 1))
    training, rest = blend.split(SEQ, fraction)
    assert [part.num_samples(SEQ) for part in rest.corpora] == held_out
    assert [part.num_samples(SEQ) for part in training.corpora] == [10 - held_out[0], 30 - held_out[1]]
    every = [set(part.samples(np.arange(part.num_samples(SEQ)), SEQ)[:, 0].tolist()) for part in (training, rest)]
    assert not every[0] & every[1] and len(every[0] | every[1]) == 40
    assert len({training.digest, rest.digest, blend.digest}) == 3


def test_a_split_that_leaves_nothing_is_refused():
    with pytest.raises(DataError, match=r"PP-E414.*holds out 1 of 1 samples"):
        corpus(1).split(SEQ, 0.1)


def test_what_is_held_out_names_its_documents(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 40)
    (tmp_path / "b.txt").write_text("b" * 40)
    data = load_data(DataConfig(path=str(tmp_path / "*.txt"), seq_length=SEQ, validation_split=0.4))
    (training,), (held_out,) = data.training.corpora, data.held_out.corpora
    assert training.place_of(0) == str(tmp_path / "a.txt")
    assert held_out.place_of(0) == held_out.place_of(20) == str(tmp_path / "b.txt")


def test_other_files_can_be_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 40)
    (tmp_path / "b.txt").write_text("b" * 40)
    data = load_data(DataConfig(path=str(tmp_path / "a.txt"), validation_path=f"[1,{tmp_path}/b.txt]"))
    assert data.training.corpora[0].tokens[0] == ord("a") and data.held_out.corpora[0].tokens[0] == ord("b")
