"""`train -m` and `submit -m` before and between runs: all checked at once, begun runs found again, one array job."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from ppctl.cli import main as front
from ppctl.cli import train
from ppctl.cli.main import main
from ppctl.cli.sweep import SweptRun, find_begun, prepare_all
from ppctl.launch.environment import Started
from ppctl.launch.run_directory import go_on, new_run
from ppctl.runs.finding import list_runs
from ppctl.runs.run_starts import hold
from ppctl.runs.rundir import RunDir

QUICK = ("+recipe=quickstart", "launch.device=cpu")
SWEEP = ("-m", *QUICK, "lr=1e-3,3e-3", "train.seed=1,2")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def swept(*typed: str) -> list[SweptRun]:
    args = front.parse("train", train, list(typed))
    return prepare_all(args, partial(train.prepare, started=Started("person")))


def begun(typed: tuple[str, ...] = SWEEP) -> list[tuple[str, str | None]]:
    """State and id of each run of a sweep, as the same command finds them."""
    found = swept(*typed)
    find_begun(found)
    return [(each.state, each.run and each.run.id) for each in found]


def test_all_runs_are_prepared_each_with_its_own_command_and_label() -> None:
    runs = swept(*SWEEP)
    assert [run.label for run in runs] == [
        "lr=0.001 seed=1", "lr=0.001 seed=2", "lr=0.003 seed=1", "lr=0.003 seed=2"
    ]  # fmt: skip
    assert [(run.launch.config.optim.lr, run.launch.config.train.seed) for run in runs] == [
        (1e-3, 1), (1e-3, 2), (3e-3, 1), (3e-3, 2)
    ]  # fmt: skip
    assert runs[3].launch.command.endswith("train +recipe=quickstart launch.device=cpu optim.lr=0.003 train.seed=2")


def test_all_problems_of_all_runs_are_told_once_and_nothing_starts(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "-m", *QUICK, "optim.lrr=1", "lr=1,-1", "pp=2,3", "train.seed=1,2"]) == 2
    err = capsys.readouterr().err
    assert err.count("PP-E101") == 1 and err.count("error PP-E103: optim.lr must be") == 1
    told = [re.sub(r"\n  try.*", "", part, flags=re.DOTALL) for part in err.split("error ")[1:]]
    assert "in " not in told[0].partition("command line")[2], "of all runs alike"
    assert any("in 4 of 8 runs: lr=-1 pp=2 seed=1; lr=-1 pp=2 seed=2; lr=-1 pp=3 seed=1; and 1 more" in t for t in told)
    assert list(here.iterdir()) == []
    assert main(["train", "-m", *QUICK, "launch.device_memory=1MiB", "train.seed=1,2"]) == 4
    assert capsys.readouterr().err.count("PP-E801") == 1


def test_notes_that_several_runs_share_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train.global_batch_size=8", "model.num_layers=6", "layout=null")
    swept("-m", *QUICK, *words, "train.seed=1,2,3")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(set(lines))


def test_a_task_of_an_array_job_takes_its_own_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert [run.label for run in swept(*SWEEP)] == ["lr=0.003 seed=1"]
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    assert main(["train", *SWEEP]) == 2
    assert "try: sbatch --array=0-3" in capsys.readouterr().err


def test_ranks_of_another_launcher_are_those_of_one_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = front.parse("train", train, list(SWEEP))
    with pytest.raises(Exception, match="PP-E106: -m starts several runs, but torchrun has started the ranks of one"):
        train.train_all(args, Started("torchrun", 0, 2), partial(train.prepare, started=Started("person")))


def test_a_run_is_found_again_by_its_config_whatever_has_become_of_it(here: Path) -> None:
    assert begun() == [("new", None)] * 4
    made = [new_run(each.launch, Started("person")) for each in swept(*SWEEP)[:3]]
    finished, stopped, going = made
    finished.write_status("finished", step=400)
    stopped.write_status("stopped", step=3)
    going.write_status("running", step=3)
    with hold(going):
        found = begun()
    assert found == [("finished", finished.id), ("stopped", stopped.id), ("running", going.id), ("new", None)]
    # A run that was resumed, from its checkpoint and for longer, is still the one that began like this.
    launch = swept(*SWEEP)[1].launch
    launch.config.train.steps = 9
    go_on(stopped, launch, stopped.checkpoints / "step-3")
    assert begun()[1][1] == stopped.id
    again = new_run(swept(*SWEEP)[1].launch, Started("person"))
    again.write_status("finished", step=400)
    assert begun()[1] == ("finished", again.id), "what has finished counts before what has not"
    assert begun((*SWEEP, "steps=7")) == [("new", None)] * 4, "another config"
    (finished.path / "config.yaml").write_text("{")
    assert begun()[0] == ("new", None), "a damaged run is none of the sweep's"


def test_runs_of_other_users_are_not_taken_for_those_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    new_run(swept(*SWEEP)[0].launch, Started("person")).write_status("finished", step=400)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert begun()[0] == ("new", None)


@pytest.fixture
def slurm(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the commands of a cluster that takes every job, where all jobs wait."""
    for name, line in {"sbatch": 'echo "$@" >>"$LOG"; echo 77', "squeue": "echo 'PENDING|Resources|N/A|N/A|'"}.items():
        (here / name).write_text(f"#!/bin/sh\n{line}\n")
        (here / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(here / "log"))
    return here


def test_an_array_job_runs_each_runs_own_script(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", *SWEEP, "launch.time=30", "launch.signal_lead=60"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:4] for row in rows] == [
        [f"77_{n}", f"lr={lr}", f"seed={seed}", "submitted"]
        for n, (lr, seed) in enumerate([(0.001, 1), (0.001, 2), (0.003, 1), (0.003, 2)])
    ]
    runs = [RunDir(slurm / row[4]) for row in rows]
    (submitted,) = (slurm / "log").read_text().splitlines()
    script = Path(submitted.split()[-1])
    assert script == runs[0].path / "array.sbatch"
    text = script.read_text()
    assert "#SBATCH --array=0-3\n" in text and "#SBATCH --time=30\n" in text and text.count("--output=") == 1
    assert [run.job()["job"] for run in runs] == [f"77_{n}" for n in range(4)]
    for number, run in enumerate(runs):
        run.submit_script.write_text(f"echo task {number}; echo $PPID >&2")
        task = {"SLURM_ARRAY_TASK_ID": str(number)}
        subprocess.run(["bash", script], env=os.environ | task, check=True, cwd="/")
        assert run.job_log.read_text().startswith(f"task {number}\n")
    assert main(["status", "77_2"]) == 0
    assert "lr" not in (said := capsys.readouterr().out) and f"run {runs[2].id}" in said and "job 77_2: PENDING" in said


def test_the_same_command_submits_what_has_no_job_and_has_not_finished(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["submit", *SWEEP]) == 0
    runs = list_runs(slurm / "runs")[::-1]
    assert main(["submit", *SWEEP]) == 0
    assert len((slurm / "log").read_text().splitlines()) == 1, "all are queued"
    by_job = {run.job()["job"]: run for run in runs}
    (slurm / "squeue").write_text("#!/bin/sh\necho 'COMPLETED|None|N/A|N/A|'\n")
    for number, state in enumerate(("finished", "failed", "finished", "stopped")):
        by_job[f"77_{number}"].write_status(state)
    capsys.readouterr()
    assert main(["submit", *SWEEP, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert main(["submit", *SWEEP, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["runs"]
    assert [run["job"] for run in told] == ["77_0", "77_0", "77_2", "77_1"]
    assert [run["id"] for run in told] == [by_job[f"77_{number}"].id for number in range(4)]
    array = Path((slurm / "log").read_text().splitlines()[1].split()[-1]).read_text()
    assert "#SBATCH --array=0-1\n" in array
    for text in (array, shown):
        assert re.findall(r"^  (\S+)$", text, re.MULTILINE) == [told[n]["run"] for n in (1, 3)]
    for run in runs:
        run.write_status("finished")
    assert main(["submit", *SWEEP, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "every run of this command line has a job or has finished" in err


def test_a_dry_run_prints_the_script_of_the_array_and_a_line_on_each_plan_and_writes_nothing(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *SWEEP, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "#SBATCH --array=0-3\n" in out and len(re.findall(r"^  \S+/ID$", out, re.MULTILINE)) == 4
    assert subprocess.run(["bash", "-n"], input=out, text=True, check=False).returncode == 0
    lines = [line.split() for line in err.splitlines() if line.startswith("task ")]
    assert [(line[1], *line[2:4]) for line in lines] == [
        (str(task), f"lr={lr}", f"seed={seed}")
        for task, (lr, seed) in enumerate((lr, seed) for lr in (0.001, 0.003) for seed in (1, 2))
    ]
    assert all(line[-1] == "tokens/s" and float(line[-2].replace(",", "")) > 0 for line in lines)
    assert not (slurm / "runs").exists()
    assert main(["submit", "-m", *QUICK, "launch.time=10,20", "--dry-run"]) == 2


def test_a_refused_array_leaves_nothing_and_other_sizes_are_refused_before(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (slurm / "sbatch").write_text("#!/bin/sh\necho no such partition >&2; echo Batch job failed >&2; exit 1\n")
    assert main(["submit", *SWEEP]) == 2
    assert "PP-E621: SLURM refused the job: no such partition; Batch job failed" in capsys.readouterr().err
    assert list_runs(slurm / "runs") == []
    assert main(["submit", "-m", *QUICK, "launch.time=10,20"]) == 2
    err = capsys.readouterr().err
    assert "PP-E629" in err and "these differ: --time=10, --time=20" in err
    shutil.rmtree(slurm / "runs")
    (slurm / "sbatch").unlink()
    monkeypatch.setenv("PATH", "")
    assert main(["submit", *SWEEP, "--on", "slurm"]) == 2
    assert "PP-E620" in (err := capsys.readouterr().err) and "try: ppctl train -m +recipe=quickstart" in err
    assert "--on" not in err and "slurm" not in err.partition("try:")[2]
    assert not (slurm / "runs").exists()
