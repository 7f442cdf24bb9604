"""`benchmarks/stage.py` holds a GPU to its floor, and says so."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("ratio", "kind", "code"), [(0.981, "cuda", 0), (0.98, "cuda", 0), (0.979, "cuda", 1), (0.5, "cpu", 0)]
)
def test_a_step_below_the_floor_fails_on_a_gpu(ratio, kind, code, capsys) -> None:
    spec = spec_from_file_location("stage", Path(__file__).parents[2] / "benchmarks/stage.py")
    stage = module_from_spec(spec)
    spec.loader.exec_module(stage)
    assert stage.verdict(ratio, kind) == code
    assert ("below the floor" in capsys.readouterr().out) == bool(code)
