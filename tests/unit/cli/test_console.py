"""What a terminal shows: lines end between words, and what is to be pasted stays in one line."""

from __future__ import annotations

import io
import sys

import pytest

from ppctl.cli.console import duration, print_problems, prose
from ppctl.cli.main import main
from ppctl.errors import Problem


def shown(monkeypatch, call):
    """The lines that `call` writes on a terminal of 72 columns."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    with monkeypatch.context() as patched:
        patched.setenv("COLUMNS", "72")
        patched.setattr(sys, "stdout", screen)
        patched.setattr(sys, "stderr", screen)
        call()
    return screen.getvalue().splitlines()


def test_a_message_is_folded_between_words_and_its_remedy_is_not(monkeypatch):
    remedy = "ppctl plan " + " ".join(f"key{n}=value" for n in range(9))
    message = "there is no key model.num_layerz; did you mean model.num_layers or model.mtp_num_layers?"
    problem = Problem("PP-E101", message, remedy, "command line")
    lines = shown(monkeypatch, lambda: print_problems([problem]))
    assert lines[-1] == f"  try: {remedy}" and lines[-2] == "  command line"
    assert len(lines) == 4 and max(map(len, lines[:-1])) <= 72
    assert f"{lines[0]} {lines[1].strip()}" == f"error PP-E101: {message}"


@pytest.mark.parametrize("command", ["--help", "recipes"])
def test_lists_of_names_fit_a_narrow_terminal(command, monkeypatch):
    assert max(map(len, shown(monkeypatch, lambda: main([command])))) <= 72


def test_a_time_has_three_digits_and_no_line_ends_before_a_unit() -> None:
    assert [duration(each) for each in (12.345, 0.1, 0.0228, 8.58e-5, 0.0)] == [
        "12.3 s",
        "0.1 s",
        "22.8 ms",
        "85.8 µs",
        "0 µs",
    ]
    text = prose(["forward 41.7 ms, backward 86.8 ms; 20.5 GiB of 80 GiB, 12 TFLOP/s, 3 steps"], 12)
    assert not [line for line in text.splitlines() if line.split()[0].strip(",;") in ("ms", "GiB", "TFLOP/s")]
    assert "\u00a0" not in text and "41.7 ms," in text
