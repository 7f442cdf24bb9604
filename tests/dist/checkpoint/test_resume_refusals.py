"""A checkpoint that does not fit what is to go on from it: told with what makes it fit, and nothing is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command import TINY, metrics, only_run, ppctl
from dense_runs import config_of
from one_save import save_checkpoint
from ranks import run_ranks

from ppctl.config.compose import override
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.errors import CheckpointError
from ppctl.plan.build import build_plan
from ppctl.train.session import build_session
from ppctl.train.snapshot import load_checkpoint


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(" ".join(random.Random(0).choices(["stage", "rank", "bubble", "layer"], k=3000)))
    path.with_name("other.txt").write_text("another text " * 300)
    return path


def session_of(mapping):
    config = from_mapping(mapping)
    return build_session(config, build_plan(config, {}), dist.get_rank(), torch.device("cpu"))


def save_and_load(saved, wanted, directory):
    """The problems of loading into another config, and of loading into it once their remedies were typed."""
    path = save_checkpoint(session_of(saved), Path(directory), 2, 8)
    try:
        load_checkpoint(session_of(wanted), path)
    except CheckpointError as error:
        problems = [(problem.code, problem.remedy) for problem in error.problems]
    typed = [word for remedy in dict.fromkeys(remedy for _, remedy in problems) for word in remedy.split()]
    mended = override(from_mapping(wanted), {}, typed).config
    return problems, load_checkpoint(session_of(to_mapping(mended)), path)["step"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train.seed": 5}, [("PP-E741", "train.seed=1234")]),
        ({"data.seq_length": 8}, [("PP-E741", "data.seq_length=16")]),
        ({"data.path": "other.txt"}, [("PP-E741", "data.path={text}")]),
        ({"model.ffn_hidden_size": 32}, [("PP-E502", "model.ffn_hidden_size=24")]),
        (
            {"model.num_layers": 5, "model.hidden_size": 32},
            [("PP-E502", "model.num_layers=6 model.hidden_size=16")] * 2,
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_what_does_not_fit_is_told_with_the_override_that_makes_it_fit(text, tmp_path, changes, expected):
    saved = to_mapping(config_of(text, pp=1, vpp=1, m=2))
    wanted = to_mapping(config_of(text, pp=1, vpp=1, m=2))
    for key, value in changes.items():
        section, field = key.split(".")
        wanted[section][field] = str(text.with_name(value)) if key == "data.path" else value
    ((problems, step),) = run_ranks(save_and_load, 1, saved, wanted, str(tmp_path))
    assert problems == [(code, remedy.format(text=text)) for code, remedy in expected]
    assert step == 2


def test_a_checkpoint_that_is_refused_takes_nothing_from_the_run(text, tmp_path):
    train = ("train", "+recipe=quickstart", *TINY, f"data.path={text}", "pp=1", "vpp=1", "checkpoint.interval=2")
    assert ppctl(*train, "steps=4", cwd=tmp_path).returncode == 0
    run = only_run(tmp_path)
    before = metrics(run)
    damaged = next((run / "checkpoints" / "step-2").glob("*.safetensors"))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + b"?")
    again = ("resume", f"checkpoint.resume={run / 'checkpoints' / 'step-2'}", "steps=6")
    done = ppctl(*again, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert metrics(run) == before
    damaged.write_bytes(whole)
    assert ppctl(*again, cwd=tmp_path).returncode == 0
    assert [record["step"] for record in metrics(run)] == list(range(1, 7))
    assert metrics(run)[:2] == before[:2]
