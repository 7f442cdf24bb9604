"""Bytes are tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppctl.data.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


@given(st.text())
def test_every_text_survives_the_round_trip(text):
    (pieces,) = TOKENIZER.encode_pieces([text], around=False)
    assert TOKENIZER.decode(pieces.ids) == text


@given(st.binary())
def test_every_byte_is_one_token_of_its_own_value(data):
    assert TOKENIZER.encode_bytes(data).tolist() == list(data)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([256, 104, 105, 257, 258], "hi"),
        ([104, 0xC3, 105], "h\ufffdi"),
        ([0xC3, 0xA9], "é"),
        ([104, 300, 105, -1], "h\ufffdi\ufffd"),
        (np.array([104, 105]), "hi"),
        ([], ""),
    ],
    ids=["marks vanish", "invalid", "two bytes", "beyond the vocabulary", "an array", "nothing"],
)
def test_any_ids_decode(ids, text):
    assert TOKENIZER.decode(ids) == text


def test_marks_are_the_ids_after_the_bytes():
    assert (TOKENIZER.bos, TOKENIZER.eos, TOKENIZER.pad, TOKENIZER.vocab_size) == (256, 257, 258, 259)


def test_a_lone_surrogate_of_a_json_text_has_an_encoding():
    (pieces,) = TOKENIZER.encode_pieces(["\ud800"], around=False)
    assert pieces.ids.tolist() == [0xED, 0xA0, 0x80]
