"""The batch script on nodes that are sick, hang or are lost: run by bash, with SLURM's commands made up."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from ppctl.config.compose import compose
from ppctl.launch import slurm
from ppctl.launch.script import SlurmJob, render
from ppctl.runs.checkpoint_folder import LATEST
from ppctl.runs.rundir import RunDir

NODES = ("n1", "n2", "n3")
SRUN = """#!/bin/bash
# Runs a command once for each node, side by side, as srun does; its own options go.
while [[ $1 == -* ]]; do echo "$1" >>"$CALLS/srun"; shift; done
for node in n1 n2 n3; do SLURMD_NODENAME=$node "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "${code:-0}"
"""
SCONTROL = """#!/bin/bash
echo "$*" >>"$CALLS/scontrol"
case "$*" in
"show hostnames"*) printf 'n1\\nn2\\nn3\\n' ;;
"show config") echo "TaskPlugin              = $TASK_PLUGIN" ;;
*"show job"*) echo "JobId=7 JobState=${STATE-RUNNING} ExcNodeList=${BEFORE-(null)} Features=(null)" ;;
requeue*) # SLURM refuses so many times
  if (($(grep -c ^requeue "$CALLS/scontrol") <= ${REFUSALS:-0})); then exit 1; fi
  kill -TERM $PPID ;; # SLURM ends the job's processes
esac
"""
PYTHON = """#!/bin/bash
case "$2" in
ppctl.launch.enter) eval "$ENTER" ;;
*) echo "$2 with $PPCTL_NODES" >>"$CALLS/python" ;;
esac
"""


class Job:
    """A script that has ended: its exit code, its log, and which commands it has called."""

    def __init__(self, at: Path, enter: str, *overrides: str, sleep: str | None = None, **more: str) -> None:
        programs = at / "bin"
        programs.mkdir()
        made = {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON} | ({} if sleep is None else {"sleep": sleep})
        for name, text in made.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        config = compose(["+recipe=quickstart", "launch.device=cpu", "launch.start_limit=3s", *overrides]).config
        script = render(SlurmJob(config, str(at), len(NODES), 1, "ppctl submit", str(programs / "python"), "live"))
        variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]"}
        variables |= {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(at), "ENTER": enter}
        done = subprocess.run(
            ["bash", "-c", script],
            env=variables | {"TASK_PLUGIN": "task/none"} | more,
            capture_output=True,
            text=True,
            timeout=100,
        )
        self.at, self.code, self.log = at, done.returncode, done.stdout + done.stderr

    def calls(self, name: str) -> str:
        file = self.at / name
        return file.read_text() if file.exists() else ""

    @property
    def without(self) -> str | None:
        """The nodes without which the job is requeued; None if it is not."""
        found = re.findall("ExcNodeList=(.*)", self.calls("scontrol"))
        return "".join(found) if "requeue 7" in self.calls("scontrol") else None


WELL = "echo $SLURMD_NODENAME"
HANGS = f"[ $SLURMD_NODENAME != n2 ] || exec sleep 50; {WELL}"
SILENT = f"[ $SLURMD_NODENAME != n2 ] || exit 1; {WELL}"
REFUSES = "[ $SLURMD_NODENAME != n2 ] || { echo 'error PP-E623: it does not see the run'; exit 2; }; " + WELL


@pytest.mark.parametrize(
    ("enter", "code", "without", "said"),
    [
        (HANGS, 0, "n2", "PP-E622"),
        (SILENT, 0, "n2", "PP-E622"),
        ("exit 127", 2, None, "PP-E622"),
        (REFUSES, 2, None, "error PP-E623: it does not see the run"),
        (WELL, 0, None, ""),
    ],
    ids=["hangs", "is silent", "starts nowhere", "is refused", "well"],
)
def test_a_node_that_does_not_enter_is_left_out(
    tmp_path: Path, enter: str, code: int, without: str | None, said: str
) -> None:
    job = Job(tmp_path, enter)
    assert (job.code, job.without) == (code, without), job.log
    assert said in job.log
    assert ("ppctl.agent with n1 n2 n3" in job.calls("python")) == (enter == WELL)


@pytest.mark.parametrize("check", ["false", "exec sleep 50"])
def test_a_node_whose_check_fails_or_does_not_end_is_left_out(tmp_path: Path, check: str) -> None:
    job = Job(tmp_path, WELL, f"launch.health_check=[ $SLURMD_NODENAME != n3 ] || {check}")
    assert (job.code, job.without) == (0, "n3"), job.log
    assert "PP-E625: the health check failed on n3" in job.log and not job.calls("python")


@pytest.mark.parametrize(
    ("check", "without"),
    [
        ("kill -HUP $$", None),
        ("kill -TERM $SCRIPT; false", None),
        ("[ $SLURMD_NODENAME != n3 ] || kill -HUP $$", "n3"),
        ("exec sleep 50", "n1,n2,n3"),
    ],
    ids=["a signal", "the job is ended", "one is silent", "none ends"],
)
def test_a_check_that_srun_or_a_signal_ends_blames_no_node(tmp_path: Path, check: str, without: str | None) -> None:
    job = Job(tmp_path, WELL, "launch.setup=['export SCRIPT=$$']", f"launch.health_check={check}")
    assert (job.code, job.without) == (0, without), job.log
    assert ("ppctl.agent with n1 n2 n3" in job.calls("python")) == (without is None)


@pytest.mark.parametrize("step", ["the health check", "the job's first step"])
@pytest.mark.parametrize("answered", ["n1", "n4"], ids=["some have answered", "none has"])
def test_a_request_before_there_are_agents_requeues_and_blames_no_node(
    tmp_path: Path, step: str, answered: str
) -> None:
    """SLURM's USR1 ends all processes of the step that still run: half a second later on the nodes that are slower."""
    told = f"[ $SLURMD_NODENAME = {answered} ] || {{ sleep 0.5; kill -USR1 $$; }}"
    checked = step == "the health check"
    job = Job(tmp_path, WELL if checked else f"{told}; {WELL}", *[f"launch.health_check={told}"] * checked)
    assert (job.code, job.without) == (0, ""), job.log
    assert f"requeue 1 of at most 10: USR1 during {step}" in job.log and "error" not in job.log
    assert not job.calls("python")


def test_a_request_that_reaches_the_check_before_its_shell_blames_no_node(tmp_path: Path) -> None:
    check = "[ $SLURMD_NODENAME != n2 ] || { (sleep 0.3; kill -USR1 $$) >/dev/null 2>&1 & exit 1; }"
    job = Job(tmp_path, WELL, f"launch.health_check={check}")
    assert (job.code, job.without) == (0, "") and "USR1 during the health check" in job.log, job.log


def test_what_sets_up_the_environment_may_read_what_is_not_set_and_end_at_an_error(tmp_path: Path) -> None:
    """As ~/.bashrc and `conda activate` do."""
    job = Job(tmp_path, SILENT, "launch.setup=['[ -z $BASHRCSOURCED ]','set -e']")
    assert (job.code, job.without) == (0, "n2") and "unbound" not in job.log, job.log


def test_a_request_to_a_job_that_is_ended_starts_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, "kill -TERM $SCRIPT; kill -USR1 $$", "launch.setup=['export SCRIPT=$$']")
    assert (job.code, job.without) == (2, None), job.log


@pytest.mark.parametrize(
    ("before", "without", "found"),
    [("(null)", "n2", ["n2"]), ("n8,n9", "n2,n3", ["n8,n9,n2,n3"]), ("n8", "", [])],
)
def test_an_agent_requeues_as_the_script_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, without: str, found: list[str]
) -> None:
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": f"{tmp_path}/calls",
        "BEFORE": before,
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "calls").mkdir()
    slurm.requeue("7", without)
    calls = (tmp_path / "calls" / "scontrol").read_text()
    assert "requeue 7\n" in calls and re.findall("JobId=7 ExcNodeList=(.*)", calls) == found


def test_a_task_of_an_array_requeues_without_the_others(tmp_path: Path) -> None:
    job = Job(tmp_path, SILENT, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2")
    assert job.code == 0 and job.without == "n2", job.log
    calls = [line for line in job.calls("scontrol").splitlines() if line.split()[0] in ("requeue", "update", "-o")]
    assert calls == ["requeue 7_2", "-o show job 7_2", "update JobId=7_2 ExcNodeList=n2"]


@pytest.mark.parametrize(
    ("refusals", "state", "code", "tries"),
    [("2", "RUNNING", 0, 3), ("99", "COMPLETING", 0, 1), ("99", "RUNNING", 75, 10)],
    ids=["for a moment", "since it is requeued already", "for good"],
)
def test_a_job_that_slurm_does_not_requeue_fails_and_says_how_it_goes_on(
    tmp_path: Path, refusals: str, state: str, code: int, tries: int
) -> None:
    job = Job(tmp_path, SILENT, sleep="#!/bin/sh\n", REFUSALS=refusals, STATE=state)
    assert job.code == code and job.calls("scontrol").count("requeue 7\n") == tries, job.log
    assert job.without == ("" if code else "n2")
    assert ("error PP-E621: SLURM does not requeue the job" in job.log) == bool(code)
    assert (f"try: ppctl requeue {tmp_path}\n" in job.log) == bool(code)


def test_requeues_are_bounded(tmp_path: Path) -> None:
    job = Job(tmp_path, HANGS, "launch.max_requeues=0")
    assert (job.code, job.without) == (2, None) and "PP-E626" in job.log
    assert f"try: ppctl requeue {tmp_path}\n" in job.log  # a job's number is looked for below `runs` alone


@pytest.mark.parametrize(("plugin", "binds"), [("task/none", False), ("task/cgroup,task/affinity", True)])
def test_srun_is_told_to_bind_nothing_where_it_would(tmp_path: Path, plugin: str, binds: bool) -> None:
    job = Job(tmp_path, WELL, TASK_PLUGIN=plugin)
    assert ("--cpu-bind=none" in job.calls("srun")) == binds, job.log


@pytest.mark.parametrize(
    ("saved", "restarts", "typed"),
    [
        ({"42": False}, 0, "train +recipe=quickstart"),
        ({"42": False}, 1, "train +recipe=quickstart"),
        ({"42": True, "421": True}, 1, "resume runs/quickstart/run-42"),
        ({"421": True}, 1, "train +recipe=quickstart"),
    ],
    ids=["first start", "no checkpoint yet", "a checkpoint", "another job's"],
)
def test_a_hand_written_script_goes_on_where_its_job_has_a_checkpoint(
    saved: dict[str, bool], restarts: int, typed: str, tmp_path: Path
) -> None:
    for job, has_checkpoint in saved.items():
        run = RunDir(tmp_path / "runs" / "quickstart" / f"run-{job}")
        run.checkpoints.mkdir(parents=True)
        run.write_environment({"variables": {"SLURM_JOB_ID": job}})
        if has_checkpoint:
            (run.checkpoints / LATEST).write_text("step-2\n")
    for name in ("ppctl", "scontrol"):
        (tmp_path / name).write_text(f'#!/bin/bash\necho "{name} $*"; exit 75\n')
        (tmp_path / name).chmod(0o755)
    script = Path(__file__).parents[3] / "recipes" / "sbatch" / "single_node.sbatch"
    variables = {"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": str(restarts), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(script)], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.stdout == f"ppctl {typed}\nscontrol requeue 42\n" and done.stderr == ""
    assert done.returncode == 75, "the requeue was refused"
