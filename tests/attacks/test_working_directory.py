"""A command that is started in a directory into which others can write runs no module of theirs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from command import TINY, environment, metrics, only_run

import ppctl

PACKAGE = Path(ppctl.__file__).parent
TAKEN = ("torch", "numpy", "json", "ppctl", "sitecustomize")
HARM = "from pathlib import Path\nPath(__file__).with_name('harm').touch()\nraise SystemExit(9)\n"


@pytest.mark.parametrize(
    "words", [("train", "+recipe=quickstart", *TINY, "pp=1", "vpp=1", "steps=1"), ("doctor", "--ranks", "1")],
    ids=lambda words: words[0],
)  # fmt: skip
def test_processes_that_a_command_starts_take_no_modules_from_the_working_directory(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """`ppctl` as it is installed: the directory of the script, not the working directory, is on its path."""
    for name in TAKEN:
        (tmp_path / f"{name}.py").write_text(HARM)
    path = environment(PYTHONPATH=str(PACKAGE.parent))
    command = [sys.executable, "-P", "-m", "ppctl", *words]
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=90, check=False)
    assert not (tmp_path / "harm").exists(), done.stderr
    assert done.returncode == 0, done.stderr
    assert words[0] != "train" or len(metrics(only_run(tmp_path))) == 1


def test_all_processes_of_python_are_started_by_the_one_function_that_leaves_it_out() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List | ast.Tuple) and {"sys.executable", "'-m'"} <= set(map(ast.unparse, node.elts))
    }
    assert found == {"host/processes.py"}
