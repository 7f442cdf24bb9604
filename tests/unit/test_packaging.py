"""What is shipped: a wheel that holds everything and works without the checkout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import omegaconf
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the sources, so that no build folder is left in them."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    source.mkdir()
    for name in ("ppctl", "conf", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build, str(home)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    (made,) = home.glob("*.whl")
    return made


def test_the_wheel_holds_every_module_page_config_and_recipe(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
    expected = {f"ppctl/{p.relative_to(ROOT / 'ppctl').as_posix()}" for p in (ROOT / "ppctl").rglob("*.py")}
    expected |= {f"ppctl/pages/{path.name}" for path in (ROOT / "ppctl" / "pages").glob("*.md")}
    expected |= {"ppctl/launch/job.sbatch", "ppctl/launch/health_check.sbatch", "ppctl/launch/requeue.sbatch"}
    expected |= {f"ppctl/cli/completion.{shell}" for shell in ("bash", "zsh", "fish")}
    for folder in ("conf", "recipes"):
        paths = (path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*.yaml"))
        expected |= {f"ppctl/_{folder}/{path}" for path in paths}
    assert {"ppctl/_recipes/quickstart.yaml", "ppctl/_conf/config.yaml"} <= expected
    assert expected - shipped == set()
    assert not [name for name in shipped if name.startswith(("tests", "conf/", "recipes/"))]


def test_the_wheel_plans_and_explains_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = "import sys; sys.path[:0] = sys.argv[1:3]; from ppctl.cli.main import main; sys.exit(main(sys.argv[3:]))"

    requirements = str(Path(omegaconf.__file__).parents[1])

    def run(*arguments: str) -> str:
        command = [sys.executable, "-I", "-S", "-c", program, str(tmp_path / "site"), requirements, *arguments]
        return subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout

    assert json.loads(run("plan", "+recipe=deepseek_v3", "--json"))["params_total"] == 671_026_419_200
    assert "PP-E101 There is no such key" in run("explain", "PP-E101")
    assert "llama3_8b" in run("recipes")


def test_the_entry_point_is_the_front_door() -> None:
    (entry,) = (point for point in metadata.entry_points(group="console_scripts") if point.name == "ppctl")
    assert entry.load()(["--version"]) == 0
