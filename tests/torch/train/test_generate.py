"""The prompt of the sample: text that the corpus holds, whatever the corpus is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppctl.data.tokenizer import ByteTokenizer
from ppctl.train.generate import prompt_from


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("one line " * 40, ("one line " * 40)[180:244]),
        ("a" * 500 + "b\n" + "c" * 500, "c" * 64),
        ("short", "short"),
        ("a\nshort", "short"),
    ],
    ids=["no lines", "a line begins near the middle", "shorter than a prompt", "short, with a line"],
)
def test_the_prompt_is_a_line_from_the_middle(text: str, prompt: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = np.array([*text.encode(), tokenizer.eos], dtype=np.uint16)
    assert tokenizer.decode(prompt_from(tokens)) == prompt


@given(st.lists(st.sampled_from([10, 65, 257]), min_size=1, max_size=400))
def test_there_is_always_a_prompt_and_it_stands_in_the_corpus(ids: list[int]) -> None:
    tokens = np.array([*ids, 257], dtype=np.uint16)
    found = prompt_from(tokens)
    assert 1 <= len(found) <= 64
    assert len(found) == 64 or len(tokens) < 128
    assert found.tobytes() in tokens.tobytes()
