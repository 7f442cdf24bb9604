"""Under which name what was found of a model is kept: all that an answer depends on, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ppctl.geometry.foreign_model import Adapters
from ppctl.launch import described


def test_what_is_kept_depends_on_config_overrides_versions_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "granite", "hidden_size": 24}
    first = described._digest(config, {}, None)
    assert described._digest({"hidden_size": 24, "model_type": "granite"}, {}, None) == first
    others = {
        described._digest({**config, "hidden_size": 32}, {}, None),
        described._digest(config, {"hidden_size": "32"}, None),
    }
    others.add(described._digest(config, {}, Adapters(2, 4.0, ("q_proj",))))
    for package in ("torch", "transformers"):
        with monkeypatch.context() as patch:
            patch.setattr(described.metadata, "version", lambda name, this=package: f"{name} {name == this}")
            others.add(described._digest(config, {}, None))
    with monkeypatch.context() as patch:
        patch.setattr(described, "package_digest", lambda package: "of another commit")
        others.add(described._digest(config, {}, None))
    assert len(others | {first}) == 7


def test_a_person_sees_each_step_of_an_examination(capsys: pytest.CaptureFixture[str]) -> None:
    child = "import sys; print('reading', file=sys.stderr); print('\x1bproving', file=sys.stderr); sys.exit(3)"
    assert described._watched([sys.executable, "-c", child], {}, Path("dir")) == (["reading", "\x1bproving"], 3)
    said = capsys.readouterr().err.splitlines()
    assert said == ["note: 0 s, examining dir: " + step for step in ("starting torch", "reading", "\\x1bproving")]
