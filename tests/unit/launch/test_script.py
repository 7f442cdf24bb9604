"""The batch script: what it asks for, what it quotes, and that a shell takes it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ppctl.cli.main import main
from ppctl.config.compose import compose
from ppctl.launch.script import SlurmJob, directives, render

GOLDEN = Path(__file__).parents[2] / "golden" / "submit_deepseek_v3.sbatch"
CONTAINER = GOLDEN.with_name("submit_container.sbatch")
QUICK = ("+recipe=quickstart", "launch.device=cpu")


def job(*overrides: str, run: str = "/shared/runs/run/7", **more: str) -> SlurmJob:
    config = compose([*QUICK, *overrides]).config
    return SlurmJob(config, run, 2, 4, "ppctl submit", "/env/bin/python", "0123", **more)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "--nodes=2"),
        ([], "--ntasks-per-node=4"),
        ([], "--signal=USR1@300"),
        ([], "--requeue"),
        ([], "--open-mode=append"),
        ([], "--output=/shared/runs/run/7/logs/job.log"),
        (["launch.account=mine"], "--account=mine"),
        (["launch.qos=high"], "--qos=high"),
        (["launch.partition=a,b"], "--partition=a,b"),
        (["launch.time=2-00:00:00"], "--time=2-00:00:00"),
        (["launch.constraint=[a|b]*2"], '--constraint="[a|b]*2"'),
        (["launch.exclusive=true"], "--exclusive"),
        (["launch.cpus_per_task=12"], "--cpus-per-task=12"),
        (["launch.device=cuda"], "--gpus-per-node=4"),
        (["launch.signal_lead=60"], "--signal=USR1@60"),
        (['launch.sbatch_args=["--mail-type=END"]'], "--mail-type=END"),
        (['log.name="two words"'], '--job-name="ppctl-two words"'),
    ],
)
def test_every_option_is_a_directive(overrides: list[str], line: str) -> None:
    given = [*overrides] if overrides[:1] != ["launch.device=cuda"] else []
    made = job(*given)
    if overrides[:1] == ["launch.device=cuda"]:
        made.config.launch.device = "cuda"
    assert line in list(directives(made))
    assert f"#SBATCH {line}\n" in render(made)


def test_ranks_that_share_a_gpu_ask_for_one() -> None:
    made = job()
    made.config.launch.device, made.config.launch.share_gpu = "cuda", True
    assert {"--gpus-per-node=1", "--ntasks-per-node=4"} <= set(directives(made))


def test_a_node_is_one_task_that_outlives_the_others_and_has_all_cpus_of_its_ranks() -> None:
    text = render(job("launch.cpus_per_task=12"))
    agents = next(line for line in text.splitlines() if line.startswith("agents="))
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0" in agents
    assert "--cpus-per-task=48" in agents
    assert "#SBATCH --no-kill" not in text


@pytest.mark.parametrize("override", ["launch.spares=1", "launch.shrink=smaller"])
def test_the_job_outlives_a_node_where_it_can_go_on_without(override: str) -> None:
    assert "--no-kill" in set(directives(job(override)))


def test_a_run_that_is_waited_for_is_a_dependency_that_cannot_pend_for_ever() -> None:
    found = list(directives(job(after="41")))
    assert {"--dependency=afterok:41", "--kill-on-invalid-dep=yes"} <= set(found)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["launch.container_image=nvcr.io#nvidia/pytorch:25.01"], "'--container-image=nvcr.io#nvidia/pytorch:25.01'"),
        (
            ["launch.container_image=a", 'launch.container_mounts=["/d:/d","/e:/f:ro"]'],
            "--container-mounts=/d:/d,/e:/f:ro",
        ),
        (["launch.container_image=a", "launch.container_workdir=/w"], "--container-workdir=/w"),
        (['launch.srun_args=["--mpi=none"]'], "--mpi=none"),
        (['launch.setup=["module load cuda"]'], "\nmodule load cuda\n"),
        (['launch.health_check="nvidia-smi && true"'], "check='nvidia-smi && true'"),
        (["launch.env.NCCL_DEBUG=INFO"], "export NCCL_DEBUG=INFO"),
        (["launch.max_requeues=3"], "most=3 "),
    ],
)
def test_every_other_option_stands_in_the_script(overrides: list[str], line: str) -> None:
    assert line in render(job(*overrides))


def test_no_variable_of_the_environment_and_no_secret_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    text = render(job())
    assert "hunter2" not in text
    assert not re.search(r"^\s*(env|printenv|set -x)\b", text, re.MULTILINE)


@pytest.mark.parametrize("run", ["/a b/$(touch x)/`id`", "/q'uote", '/d"ouble', "/100%"])
def test_a_strange_path_stays_one_word(run: str, tmp_path: Path) -> None:
    text = render(job(run=run))
    assigned = next(line for line in text.splitlines() if line.startswith("run="))
    done = subprocess.run(["bash", "-c", f'{assigned}; printf %s "$run"'], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == run
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def dry_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    """`ppctl submit --dry-run` for the largest recipe, with what differs between machines named instead."""
    monkeypatch.chdir(tmp_path)
    assert main(["submit", "+recipe=deepseek_v3", "launch.time=12:00:00", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    text = re.sub(r"^# \S*ppctl submit|^# \S+ -m ppctl submit", "# ppctl submit", text, flags=re.MULTILINE)
    text = re.sub(r"^code=[0-9a-f]{16} ", "code=DIGEST ", text, flags=re.MULTILINE)
    return text.replace(str(tmp_path), "/home/user").replace(sys.executable, "/env/bin/python")


def test_the_script_for_the_largest_recipe_is_as_recorded(dry_run: str) -> None:
    if os.environ.get("PPCTL_GOLDEN") == "write":
        GOLDEN.write_text(dry_run)
    assert dry_run == GOLDEN.read_text()


@pytest.mark.shows("launch.container_image", "launch.container_mounts", "launch.container_workdir")
def test_the_script_with_every_option_is_as_recorded() -> None:
    """pyxis is not here: what it gets are srun's arguments as they stand in this file."""
    if os.environ.get("PPCTL_GOLDEN") == "write":
        CONTAINER.write_text(render(job(*FULL)))
    assert render(job(*FULL)) == CONTAINER.read_text()


FULL = (
    "launch.account=a", "launch.qos=b", "launch.partition=c", "launch.time=1:00:00", "launch.exclusive=true",
    "launch.container_image=nvcr.io#nvidia/pytorch:25.01", 'launch.container_mounts=["/d:/d","/e e:/f:ro"]',
    "launch.container_workdir=/d", 'launch.setup=["module load x"]',
    'launch.health_check="true && echo $HOME"', "launch.env.A=b c", 'launch.srun_args=["--mpi=none"]',
)  # fmt: skip


def scripts() -> dict[str, str]:
    root = Path(__file__).parents[3]
    shipped = {path.name: path.read_text() for path in root.glob("recipes/sbatch/*.sbatch")}
    assert len(shipped) == 2
    own = (root / "tests/slurm/cluster.sh").read_text()
    return shipped | {"golden": GOLDEN.read_text(), "container": CONTAINER.read_text(), "cluster.sh": own}


@pytest.mark.parametrize("name", ["single_node.sbatch", "multi_node.sbatch", "golden", "container", "cluster.sh"])
def test_shells_and_shellcheck_accept_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "script.sh"
    path.write_text(scripts()[name])
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: tests/slurm/cluster.sh install")
    done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
