"""What imports what: no module needs itself, and a command's imports stand at its top."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import ppctl

PACKAGE = Path(ppctl.__file__).parent

LAZY = {
    "rich": "a terminal",
    "ppctl.cli.live": "rich, on a terminal",
    "ppctl.cli.lost": "the search, for plan --lost alone",
    "ppctl.cli.plan_from": "tables of other systems' names, for plan --from alone",
    "ppctl.launch.kubernetes": "yaml and all of a plan, for runs of a cluster alone",
    "ppctl.data": "numpy",
    "ppctl.launch.weights": "ppctl.families, for model.from alone",
    "ppctl.config.yaml_file": "yaml",
    "ppctl.launch.planning": "the planner and Hydra, for layout --suggest and ckpt verify --for alone",
    "ppctl.checkpoint.arrays": "numpy, for ckpt diff alone",
    "ppctl.config": "the schema, for an option or a problem alone",
    "difflib": "a misspelt command",
    "statistics": "fractions and decimals, for comparing runs alone",
}
"""What a function of a command may import, and what stands behind it."""


class Import(NamedTuple):
    target: str
    line: int
    inside: bool
    """Whether it stands in a function."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


def imports_of(node: ast.AST, inside: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.module is not None and not child.level, "imports are absolute"
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield Import(inner if inner in MODULES else child.module, child.lineno, inside)
        else:
            yield from imports_of(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def imports_in(text: str) -> list[Import]:
    return list(imports_of(ast.parse(text)))


def test_no_module_needs_itself_lazy_imports_and_those_for_types_included() -> None:
    needs = {
        name: {found.target for found in imports_in(path.read_text()) if found.target in MODULES} - {name}
        for name, path in MODULES.items()
    }
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(" needs ".join(reversed(error.args[1])))


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.startswith("ppctl.cli.")))
def test_a_command_imports_at_its_top_all_but_what_few_calls_need(name: str) -> None:
    lazy = [found for found in imports_in(MODULES[name].read_text()) if found.inside]
    assert [found for found in lazy if not any(f"{found.target}.".startswith(f"{known}.") for known in LAZY)] == []


def test_an_import_in_a_function_is_found() -> None:
    text = "import os\nclass A:\n    def b(self):\n        if os:\n            from ppctl.plan import build\n"
    assert imports_in(text) == [Import("os", 1, False), Import("ppctl.plan.build", 5, True)]
