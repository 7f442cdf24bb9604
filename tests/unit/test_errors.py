"""What every problem is made of: places that are not endless, and remedies that a shell reads as they were meant."""

import subprocess

import pytest

from ppctl.errors import Problem, listed, pasted


def test_a_value_of_megabytes_is_not_repeated():
    assert len(str(Problem("PP-E102", f"it takes a number, not {'x' * 10**7}"))) < 10_000


def test_a_place_lists_the_first_ones():
    assert listed(["a", "b"]) == "a\nb"
    assert listed(list("abcd"), 2) == "a\nb\nand 2 more"


@pytest.mark.parametrize(
    "word", ["plain", "", "two words", "it's", '"', "$HOME", "a\nb", "é", "\u202e\x1b'\\", "-x", "*"]
)
def test_words_are_read_by_a_shell_as_they_were(word):
    line = pasted("end", word)
    assert line.isprintable() and "\n" not in line
    done = subprocess.run(["bash", "-c", f"printf '%s|' {line}"], capture_output=True, check=True)
    assert done.stdout.decode() == f"end|{word}|"
