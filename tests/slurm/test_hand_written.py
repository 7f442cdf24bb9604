"""The batch scripts of recipes/sbatch/: for people who write their own around `ppctl train`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ROOT, SMALL, Cluster, Submitted, wait

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

HAND_WRITTEN = {"single_node.sbatch": ("--nodes=1", "2"), "multi_node.sbatch": ("--nodes=2", "2")}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_a_hand_written_script_trains_saves_and_goes_on(cluster: Cluster, name: str, tmp_path: Path) -> None:
    nodes, ranks = HAND_WRITTEN[name]
    text = (ROOT / "recipes" / "sbatch" / name).read_text()
    assert "+recipe=quickstart" in text
    script = tmp_path / name
    overrides = " ".join([*SMALL, f"log.name={script.stem}", "steps=6", "pp=2" if nodes == "--nodes=1" else "pp=4"])
    script.write_text(text.replace("+recipe=quickstart", overrides).replace("ppctl ", "python -m ppctl "))
    tasks = [] if nodes == "--nodes=1" else [f"--ntasks-per-node={ranks}"]
    options = ["--parsable", nodes, *tasks, "--gpus-per-node=0", "--time=10", "--exclusive=user"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = cluster.command("sbatch", *options, str(script), SLOW_STEP="0.5", PATH=path)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()

    def found() -> Path | None:
        return next(iter(cluster.cwd.glob(f"runs/{script.stem}/*/metrics.jsonl")), None)

    run = Submitted(cluster, wait(found, f"steps of {name}").parent, job)
    full = ["--full"] if nodes == "--nodes=1" else []
    assert cluster.command("scancel", *full, "--signal=USR1", job).returncode == 0
    assert run.ends() == "COMPLETED", "".join(path.read_text() for path in cluster.cwd.glob(f"*{job}*"))
    assert run.restarts() == 1
    assert [step for step, *_ in run.numbers()] == list(range(1, 7))
    assert len(list(cluster.cwd.glob(f"runs/{script.stem}/*/"))) == 1


def test_the_scripts_are_sound_bash() -> None:
    for script in (*ROOT.glob("recipes/sbatch/*.sbatch"), ROOT / "tests/slurm/cluster.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)
