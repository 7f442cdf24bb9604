"""What works on a login node: an environment that holds all of ppctl's requirements but torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import omegaconf
import pytest

import ppctl

NEEDS_TORCH = ("torch", "functorch", "transformers", "triton")
PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:3]
from ppctl.cli.main import main
code = main(sys.argv[3:])
sys.stdout.flush()
assert not [name for name in sys.modules if name.split(".")[0] == "torch"]
sys.exit(code)
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that stands for site-packages: links to everything but torch and what is built on it."""
    home = tmp_path_factory.mktemp("site")
    for path in Path(omegaconf.__file__).parents[1].iterdir():
        if not path.name.startswith((*NEEDS_TORCH, "__editable__")) and path.suffix != ".pth":
            (home / path.name).symlink_to(path)
    return home


def run(packages: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`ppctl arguments`; the interpreter knows its own library and `packages`, and nothing else."""
    source = Path(ppctl.__file__).parents[1]
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(source), str(packages), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_there_is_no_torch_in_this_environment(packages: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(packages)!r}); import rich, torch"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "No module named 'torch'" in done.stderr


def test_the_largest_recipe_is_planned(packages: Path, tmp_path: Path) -> None:
    done = run(packages, tmp_path, "plan", "+recipe=deepseek_v3", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads(done.stdout)
    assert (plan["params_total"], plan["params_mtp"], plan["params_hf"]) == (
        671_026_419_200,
        11_610_068_224,
        684_489_845_504,
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "+recipe=llama3_8b"], "world 32"),
        (["layout", "Et*3|(tt|)*29,m|L", "--pp", "16"], "1 MTP layer"),
        (["recipes"], "quickstart"),
        (["recipes", "show", "deepseek_v3"], "Et*3|(tt|)*7t|(tt|)*8t|(tt|)*13mL"),
        (["explain", "PP-E604"], "Torch is not installed"),
        (["runs"], ""),
        (["submit", "+recipe=llama3_8b", "launch.time=1:00:00", "--dry-run"], "#SBATCH --nodes=4"),
    ],
)
def test_what_needs_no_torch_works(packages: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
    done = run(packages, tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_training_says_what_to_install(packages: Path, tmp_path: Path) -> None:
    done = run(packages, tmp_path, "train", "+recipe=quickstart")
    assert done.returncode == 2
    assert "error PP-E604: torch is not installed here" in done.stderr
    assert f"{sys.executable} -m pip install torch" in done.stderr
    assert list(tmp_path.iterdir()) == []
