"""Each benchmark still finds what it imports of ppctl: nobody runs all of them after a name has moved."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda script: script.stem)
def test_names_that_a_benchmark_imports_exist(script):
    tree = ast.parse(script.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    ours = [(node.module, alias.name) for node in imports if node.module.startswith("ppctl") for alias in node.names]
    for module, name in ours:
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), f"{module} has no {name}"
