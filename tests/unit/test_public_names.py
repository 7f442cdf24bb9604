"""What `from ppctl import ...` offers: the seeds' names, loaded when asked for."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ppctl

NAMES = [name for name in ppctl.__all__ if name != "__version__"]
TORCH_FREE = [
    *("LayerType", "PipelineParallelLayerLayout", "ModelParallelConfig", "PipelineConfig", "RunConfig", "Plan"),
    *("Action", "Schedule", "make_schedule", "lower", "verify", "Costs", "simulate", "bubble_fraction"),
    *("compose", "build_plan"),
]


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_imports_nothing_of_it():
    assert (
        python("import sys, ppctl; print(*(m for m in sys.modules if m.startswith(('ppctl.', 'torch', 'hydra'))))")
        == []
    )


def test_every_public_name_comes_from_its_home():
    for name in NAMES:
        home = ppctl._HOME_OF[name]
        text = (Path(ppctl.__file__).parent / (home.removeprefix("ppctl.").replace(".", "/") + ".py")).with_suffix("")
        source = text / "__init__.py" if text.is_dir() else text.with_suffix(".py")
        assert re.search(rf"\b{name}\b", source.read_text()), f"{home} does not have {name}"
    assert len(set(NAMES)) == len(NAMES) == 51


def test_what_plans_and_schedules_comes_without_torch():
    code = f"import sys; from ppctl import {', '.join(TORCH_FREE)}; print('torch' in sys.modules)"
    assert python(code) == ["False"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'ppctl' has no attribute 'no_such_name'"):
        _ = ppctl.no_such_name
    assert set(NAMES) <= set(dir(ppctl))
