"""The prompt of the sample: text that the corpus holds, whatever the corpus is; and who gets a sample."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppctl.config.schema import RunConfig
from ppctl.data.tokenizer import ByteTokenizer
from ppctl.train import generate
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


def test_a_large_model_is_not_sampled_and_the_run_says_so_of_its_prompts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "MOST_PARAMETERS", 1000)
    config, plan = RunConfig(), SimpleNamespace(params_total=1001)
    session: Any = SimpleNamespace(config=config, plan=plan, device=torch.device("cpu"))
    assert generate.write_samples(session, Path("step-1")) == [] and not capsys.readouterr().out
    config.log.prompts = ["def"]
    assert generate.write_samples(session, Path("step-1")) == []
    assert "log.prompts are continued by models of at most 1,000 parameters" in capsys.readouterr().out
