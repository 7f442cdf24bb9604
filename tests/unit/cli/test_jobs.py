"""`ppctl cancel`, `requeue`, `status` and `runs delete` of a submitted run, with shell scripts for SLURM's commands."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ppctl.cli.main import main
from ppctl.config.schema import RunConfig
from ppctl.runs.rundir import RunDir

DOWN = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
REFUSED = "echo 'sbatch: error: Invalid account' >&2; exit 1"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of job 4242 that ended at step 3, in a directory of its own that is the first of the PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def fill(draft: RunDir) -> None:
        draft.write_config(RunConfig())
        draft.add_command("ppctl submit")
        draft.write_status("failed", step=3, message="a node was lost")
        draft.write_job("4242", "")

    return RunDir.create(Path("runs"), "job", fill, "one")


def slurm(**scripts: str) -> None:
    for name, line in scripts.items():
        Path(name).write_text(f"#!/bin/sh\n{line}\n")
        Path(name).chmod(0o755)


@pytest.mark.parametrize("scripts", [{"squeue": DOWN, "sacct": DOWN, "sbatch": "echo 1"}, {}], ids=["down", "missing"])
@pytest.mark.parametrize("command", [("cancel", "one"), ("requeue", "one"), ("runs", "delete", "one", "--yes")])
def test_a_scheduler_that_does_not_answer_has_not_ended_the_job(
    run: RunDir, scripts: dict[str, str], command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(**scripts)
    before = run.status()
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out == "" and "PP-E621: SLURM does not tell the state of job 4242: " in err and "try: squeue --me" in err
    assert run.status() == before and run.job()["job"] == "4242"
    assert main(["status", "one", "--json"]) == 0, "what the directory tells is shown all the same"
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == "failed" and told["job"]["job"] == "4242" and told["job"]["state"] is None


@pytest.mark.parametrize("command", ["cancel {}", "requeue {}", "ckpt prune {} --keep 1"])
@pytest.mark.parametrize("reference", ["typo", "o"])
def test_no_remedy_does_to_another_run_what_was_asked_of_one(
    run: RunDir, command: str, reference: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run.path, run.path.with_name("other"))
    assert main(command.format(reference).split()) == 2
    err = capsys.readouterr().err
    assert ("PP-E611" if reference == "typo" else "PP-E612") in err and "try: ppctl runs show o" in err


@pytest.mark.parametrize("squeue", [UNKNOWN, "exit 0"])
def test_a_job_that_slurm_no_longer_knows_has_ended_also_without_accounting(
    run: RunDir, squeue: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(squeue=squeue, sacct="echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert main(["cancel", "one"]) == 0
    assert capsys.readouterr().out == "job 4242 has ended: run one is failed\n"


def test_accounting_answers_for_a_controller_that_is_down(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    slurm(squeue=DOWN, sacct="echo 'COMPLETED|None|a|b|node1'")
    assert main(["cancel", "one"]) == 0
    assert capsys.readouterr().out == "job 4242 has ended: run one is failed\n"


def test_a_run_that_slurm_does_not_take_again_keeps_its_state(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    slurm(squeue=UNKNOWN, sacct="exit 0", sbatch=REFUSED)
    before = run.status()
    assert main(["requeue", "one"]) == 2
    assert "PP-E621: SLURM refused the job: Invalid account" in capsys.readouterr().err
    assert run.status() == before and before["step"] == 3
