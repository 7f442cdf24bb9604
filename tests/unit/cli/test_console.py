"""What a terminal shows: lines end between words, and what is to be pasted stays in one line."""

from __future__ import annotations

import sys

import pytest

from ppctl.cli.console import print_problems
from ppctl.cli.main import main
from ppctl.errors import Problem


@pytest.fixture
def terminal(monkeypatch, capsys):
    """60 columns; returns what was shown."""
    monkeypatch.setenv("COLUMNS", "60")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    return lambda: "".join(capsys.readouterr()).splitlines()


def test_a_message_is_folded_between_words_and_its_remedy_is_not(terminal):
    remedy = "ppctl plan " + " ".join(f"key{n}=value" for n in range(9))
    message = "there is no key model.num_layerz; did you mean model.num_layers or model.mtp_num_layers?"
    print_problems([Problem("PP-E101", message, remedy, "command line")])
    lines = terminal()
    assert lines[-1] == f"  try: {remedy}" and lines[-2] == "  command line"
    assert len(lines) == 4 and max(map(len, lines[:-1])) <= 60
    assert f"{lines[0]} {lines[1].strip()}" == f"error PP-E101: {message}"


@pytest.mark.parametrize("command", ["--help", "recipes"])
def test_lists_of_names_fit_a_narrow_terminal(command, terminal):
    assert main([command]) == 0
    assert max(map(len, terminal())) <= 60
