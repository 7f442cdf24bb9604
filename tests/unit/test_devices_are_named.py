"""Every tensor that ppctl makes says where it lies: another program may have made a GPU torch's default device."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ppctl

FACTORIES = {"arange", "empty", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"}
ROOT = Path(ppctl.__file__).parent
ON_THE_DEFAULT = {
    "foreign": "miniatures of other people's models, built and called on the device of their context",
    "model/linear.py": "a layer's weights are made on the device of the context in which it is built",
    "rehearsal/ledger.py": "tensors without values, in a mode that has one device",
}
"""Where the default device is meant, by room or file, and why."""


@pytest.mark.parametrize("room", sorted({path.parent.name for path in ROOT.glob("*/*.py")}))
def test_a_tensor_names_its_device(room: str) -> None:
    unnamed = []
    for path in sorted((ROOT / room).rglob("*.py")):
        if {room, str(path.relative_to(ROOT))} & ON_THE_DEFAULT.keys():
            continue
        unnamed += [f"{path.name}:{call.lineno}" for call in made_by_torch(path) if not names_device(call)]
    assert unnamed == []


def test_the_exceptions_are_needed() -> None:
    for name in ON_THE_DEFAULT:
        paths = [ROOT / name] if name.endswith(".py") else list((ROOT / name).rglob("*.py"))
        assert any(not names_device(call) for path in paths for call in made_by_torch(path)), name


def made_by_torch(path: Path) -> list[ast.Call]:
    """The calls of torch's factories in a file."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) in {f"torch.{name}" for name in FACTORIES}]


def names_device(call: ast.Call) -> bool:
    """Whether a call has `device`, or passes on arguments that may."""
    return any(keyword.arg in ("device", None) for keyword in call.keywords)
