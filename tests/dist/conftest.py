"""A text to train on, for every test that does not want one of its own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    words = random.Random(0).choices(["the", "of", "stage", "rank", "bubble", "and", "a", "layer"], k=3000)
    path.write_text(" ".join(words))
    return path
