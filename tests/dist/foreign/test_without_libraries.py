"""A machine without transformers or peft: one error with the line that installs it, on each way to what needs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from command import ppctl
from foreign_models import KEPT, model_of

from ppctl.errors import PpctlError
from ppctl.modules.python_pipeline import pipeline

RUN = (
    "data.path=corpus.txt",
    "data.tokenizer=byte",
    "seq=16",
    "gbs=4",
    "mbs=1",
    "launch.device=cpu",
    "pp=2",
    "steps=1",
)
DIRECTORY = ("model.from=cohere", *RUN)
LORA = ("model.lora.rank=2", "model.lora.targets=[q_proj]")
HIDES = "import os, sys\nsys.modules.update(dict.fromkeys(os.environ.get('HIDDEN', '').split()))\n"
"""A sitecustomize.py: what is None there counts as not installed, in every process that a command starts."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("without")
    model_of("Cohere").save_pretrained(path / "cohere")
    (path / "corpus.txt").write_text("what a person types who has not installed everything " * 40)
    (path / "site").mkdir()
    (path / "site" / "sitecustomize.py").write_text(HIDES)
    (path / KNOWN).symlink_to(os.environ[KEPT])
    done = ppctl("ckpt", "import", "--hf", "cohere", "kept", cwd=path, timeout=300, XDG_CACHE_HOME=str(path / KNOWN))
    assert done.returncode == 0, done.stderr
    return path


NEW, KNOWN = "new", "cache"
"""A machine that has never seen the model, and one that has kept its description."""

WAYS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "plan": (NEW, "transformers", "transformers", ("plan", *DIRECTORY)),
    "train": (NEW, "transformers", "transformers", ("train", *DIRECTORY)),
    "rehearse": (NEW, "transformers", "transformers", ("rehearse", *DIRECTORY)),
    "import": (NEW, "transformers", "transformers", ("ckpt", "import", "--hf", "cohere", "out")),
    "import of a known one": (KNOWN, "transformers", "transformers", ("ckpt", "import", "--hf", "cohere", "out")),
    "train from a checkpoint": (NEW, "transformers", "transformers", ("train", "model.from=kept", *RUN)),
    "train of a known one": (KNOWN, "transformers", "transformers", ("train", *DIRECTORY)),
    "rehearse of a known one": (KNOWN, "transformers", "transformers", ("rehearse", *DIRECTORY)),
    "plan with adapters": (KNOWN, "peft", "lora", ("plan", *DIRECTORY, *LORA)),
    "train with adapters": (KNOWN, "peft", "lora", ("train", *DIRECTORY, *LORA)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_library_that_is_missing_is_one_error_with_the_line_that_installs_it(here: Path, way: str) -> None:
    cache, hidden, extra, words = WAYS[way]
    where = dict(PYTHONPATH=str(here / "site"), HIDDEN=hidden, XDG_CACHE_HOME=str(here / cache))
    done = ppctl(*words, cwd=here, timeout=120, **where)
    code = {"transformers": "PP-E526", "lora": "PP-E541"}[extra]
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("error PP-") == 1 and f"error {code}" in done.stderr, done.stderr
    assert f"-m pip install 'ppctl[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr and not (here / "runs").exists() and not (here / "out").exists()


@pytest.mark.parametrize(
    "words", [("plan", "model.from=kept", *RUN), ("ckpt", "export", "--hf", "kept/checkpoints/step-0", "exported")]
)
def test_what_needs_no_code_of_the_library_does_without_it(here: Path, words: tuple[str, ...]) -> None:
    where = dict(PYTHONPATH=str(here / "site"), HIDDEN="transformers peft", XDG_CACHE_HOME=str(here / NEW))
    done = ppctl(*words, cwd=here, timeout=120, **where)
    assert done.returncode == 0, done.stderr


def test_a_pipeline_from_python_says_it_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PpctlError, match=r"PP-E526.*\n.*pip install 'ppctl\[transformers\]'"):
        pipeline(here / "cohere")
