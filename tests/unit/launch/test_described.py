"""Under which name what was found of a model is kept: all that an answer depends on, and nothing else."""

from __future__ import annotations

import pytest

from ppctl.launch import described


def test_what_is_kept_depends_on_config_overrides_versions_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "granite", "hidden_size": 24}
    first = described._digest(config, {})
    assert described._digest({"hidden_size": 24, "model_type": "granite"}, {}) == first
    others = {described._digest({**config, "hidden_size": 32}, {}), described._digest(config, {"hidden_size": "32"})}
    for package in ("torch", "transformers"):
        with monkeypatch.context() as patch:
            patch.setattr(described.metadata, "version", lambda name, this=package: f"{name} {name == this}")
            others.add(described._digest(config, {}))
    with monkeypatch.context() as patch:
        patch.setattr(described, "_digest_of_code", lambda: "of another commit")
        others.add(described._digest(config, {}))
    assert len(others | {first}) == 6
