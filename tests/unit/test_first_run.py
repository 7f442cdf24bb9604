"""The script of the first run on a GPU: its commands, what it does when one fails, and the page that it writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from ppctl.config.keys import text_keys
from ppctl.launch.planning import planned

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/gpu/first_run.sh"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
        timeout=100,
    )


@pytest.fixture(scope="module")
def steps() -> dict[str, tuple[int, str]]:
    """(limit, command) of each step on a GPU, by name."""
    done = run("--dry-run", "--python", sys.executable)
    assert done.returncode == 0, done.stderr
    rows = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    return {name: (int(limit), command) for name, limit, _, command in rows}


def test_all_limits_together_are_45_minutes(steps: dict[str, tuple[int, str]]) -> None:
    assert sum(limit for limit, _ in steps.values()) <= 45 * 60
    assert {"facts", "tests", "stage", "mfu-dense", "mfu-moe", "share-pp2", "share-pp4"} <= steps.keys()


def test_what_it_trains_can_be_planned_and_fits(steps: dict[str, tuple[int, str]]) -> None:
    trained = {name: command.partition(" -- ")[2].split() for name, (_, command) in steps.items() if " -- " in command}
    assert len(trained) == 8
    for name, overrides in trained.items():
        known = [each for each in overrides if not each.startswith("model.fp8") or "model.fp8" in text_keys()]
        _, plan, problems = planned(known, for_training=True)
        assert problems == [], name
        assert plan is not None
        assert not plan.tight, name


def test_a_rehearsal_runs_the_same_steps_on_the_cpu(steps: dict[str, tuple[int, str]]) -> None:
    done = run("--dry-run", "--cpu", "--python", sys.executable)
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == list(steps)
    assert "launch.device=cuda" not in done.stdout


def test_a_dry_run_leaves_nothing(tmp_path: Path) -> None:
    run("--dry-run", "--out", str(tmp_path / "logs"), "--page", str(tmp_path / "page.md"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--what"], "unknown: --what"), (["--out"], "--out wants a value"), (["wheels"], "where to")],
)
def test_an_option_that_it_does_not_have_is_refused(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


PYTHON = """#!/bin/sh
case "$*" in
  *results_page*) exec {real} "$@" ;;
  *facts*) echo '{{"step": "facts", "name": "", "device": "H9", "torch": "9.9"}}' ;;
  *nccl*) echo '{{"step": "nccl", "name": "pp2", "skipped": "NCCL takes one rank"}}'; exit 77 ;;
  *" train dense"*) echo "out of memory"; exit 1 ;;
  *" train moe"*) echo '{{"step": "train", "name": "moe", "mfu": 0.2, "planned_mfu": 0.4, "floor": 0.25'; exit 1 ;;
  *stage.py*) echo "H9: 0.991x" ;;
  *) kill -9 $$ ;;
esac
"""


def test_it_goes_on_after_failures_and_its_page_has_nothing_that_was_not_measured(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON.format(real=sys.executable))
    python.chmod(0o755)
    page = tmp_path / "page.md"
    done = run("--python", str(python), "--out", str(tmp_path / "logs"), "--page", str(page))
    assert done.returncode == 1, "a step failed"
    ends = dict(line.split("\t")[::3] for line in (tmp_path / "logs/steps.tsv").read_text().splitlines())
    assert len(ends) == 16, "every step ran"
    assert (ends["facts"], ends["nccl-one-gpu"], ends["mfu-dense"], ends["queues-8"]) == ("0", "77", "1", "137")
    text = page.read_text()
    assert "First run on H9" in text
    assert "NCCL takes one rank" in text
    assert "out of memory" in text
    assert "H9: 0.991x" in text
    assert text.count("Nothing was measured") == 4, "rates, losses, launches, queues"
    assert "None" not in text


def test_steps_that_run_alone_add_to_the_record_of_the_others(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON.format(real=sys.executable))
    python.chmod(0o755)
    paths = ("--python", str(python), "--out", str(tmp_path / "logs"), "--page", str(tmp_path / "page.md"))
    for only in ("facts,stage", "queues-8", "facts"):
        run(*paths, "--only", only)
    lines = (tmp_path / "logs/steps.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["stage", "queues-8", "facts"]
    assert all(name in (tmp_path / "page.md").read_text() for name in ("| stage ", "| queues-8 ", "| facts "))


def page_of(rows: list[dict], code: str = "0") -> str:
    spec = spec_from_file_location("results_page", ROOT / "tests/gpu/results_page.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    logs = {f"{row['step']}-{row['name']}": f"noise\n{json.dumps(row)}\n" for row in rows}
    make: Callable[..., list[str]] = module.page
    return "\n".join(make([[name, "60", "5", code] for name in logs], logs))


def test_measured_numbers_are_on_the_page() -> None:
    train = {
        **{"step": "train", "name": "dense", "mfu": 0.421, "planned_mfu": 0.47, "floor": 0.38, "goal": 0.5},
        **{"tokens_per_s": 12345.6, "measured_bytes": 3 * 2**20, "planned_bytes": 2**21, "losses": [1.0]},
    }
    action = {"action": "0F0", "measured_bytes": None, "planned_bytes": 2**20}
    text = page_of(
        [
            train,
            {"step": "memory", "name": "moe", "actions": [action]},
            {"step": "same", "name": "pp2", "losses": [2.5], "apart": 1e-6},
            {"step": "queues", "name": "8", "queues": "8", "spins": 3.98},
        ]
    )
    assert "| dense | 42.1% | 47.0% | 38.0% | 50.0% | 12,346 | 3.0 | 2.0 |" in text
    assert "| 0F0 | not measured | 1.0 |" in text
    assert "| pp2 | same | 2.50000 | 1.0e-06 |" in text
    assert "| 8 | 3.98 |" in text


def test_a_rate_below_its_floor_is_shown_as_failed() -> None:
    row = {
        **{"step": "train", "name": "moe", "mfu": 0.2, "planned_mfu": 0.4, "floor": 0.25, "goal": 0.35},
        **{
            "tokens_per_s": 1.0,
            "measured_bytes": 0,
            "planned_bytes": 0,
            "failed": "mfu 0.2 is below the floor of 0.25",
        },
    }
    assert "| failed (1) | mfu 0.2 is below the floor of 0.25 |" in page_of([row], code="1")


def test_shellcheck_accepts_it() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: tests/slurm/cluster.sh install")
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
