"""SLURM's commands: sbatch, squeue, sacct, scancel. Their text forms only: --json differs between versions."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ppctl.errors import ConfigError, Problem

_TIMEOUT = 60.0

ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
    | {"PREEMPTED", "REVOKED", "TIMEOUT"}
)
"""States of a job that has ended for good."""

NEVER = {
    "PartitionNodeLimit": "it asks for more nodes than its partition has or allows",
    "PartitionTimeLimit": "its time limit is longer than its partition's",
    "PartitionConfig": "it asks for what its partition does not have",
    "BadConstraints": "no node has what it asks for",
    "DependencyNeverSatisfied": "the run that it waits for has failed",
    "InvalidAccount": "there is no such account",
    "InvalidQOS": "there is no such quality of service",
    "AccountNotAllowed": "its account may not use this partition",
    "QOSNotAllowed": "its quality of service may not be used here",
    "AssocMaxNodePerJobLimit": "it asks for more nodes than its account may use in one job",
    "AssocMaxWallDurationPerJobLimit": "its time limit is longer than its account allows",
    "QOSMaxNodePerJobLimit": "it asks for more nodes than its quality of service allows",
    "QOSMaxWallDurationPerJobLimit": "its time limit is longer than its quality of service allows",
    "JobHeldAdmin": "an administrator holds it",
}
"""Reasons for which a pending job will never start."""


@dataclass(frozen=True, slots=True)
class JobState:
    """A job as its scheduler shows it, in the words of squeue and sacct."""

    job: str
    """SLURM's number, or the JobSet's name."""
    cluster: str
    """SLURM's cluster, or the namespace; empty for the usual one."""
    state: str = ""
    """Such as PENDING, RUNNING, COMPLETED; empty if the scheduler does not know the job (any more)."""
    reason: str = ""
    start: str = ""
    """When the job started, or is expected to start."""
    end: str = ""
    """The time at which its time limit ends the job, or at which the job ended."""
    nodes: str = ""

    @property
    def ended(self) -> bool:
        """Whether the job has ended for good."""
        return self.state in ENDED

    @property
    def ending(self) -> bool:
        """Whether the job's processes are being ended: then it accepts no signals."""
        return self.state == "COMPLETING"

    @property
    def never(self) -> str | None:
        """Why the job will never start; None if it may."""
        return NEVER.get(self.reason) if self.state == "PENDING" else None


def is_job(job: str) -> bool:
    """Whether a job is SLURM's, which has a number; a JobSet has a name."""
    return job[:1].isdigit()


def sbatch(script: Path) -> tuple[str, str]:
    """Submit a script; returns (job number, cluster or ""). Raises ConfigError (PP-E621) with SLURM's message."""
    done = _run("sbatch", "--parsable", str(script), cwd=script.parent)
    if done.returncode != 0:
        words = "; ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.splitlines() if line.strip())
        raise ConfigError(Problem("PP-E621", f"SLURM refused the job: {words}", "sinfo", "sbatch"))
    number, _, cluster = done.stdout.strip().splitlines()[-1].partition(";")
    return number, cluster


def state(job: str, cluster: str = "") -> JobState:
    """A job's state; empty if SLURM does not know it. Raises ConfigError (PP-E621) if SLURM does not answer."""
    done = _run("squeue", *_on(cluster), "-h", "-a", "-t", "all", "-j", job, "-o", "%T|%r|%S|%e|%N")
    if done.returncode == 0 and done.stdout.strip():
        fields = done.stdout.strip().splitlines()[-1].split("|")
        return JobState(job, cluster, *(field if field not in ("N/A", "None", "") else "" for field in fields[:5]))
    answered, words = done.returncode == 0 or "Invalid job id" in done.stderr, " ".join(done.stderr.split())
    done = _run("sacct", *_on(cluster), "-X", "-n", "-P", "-j", job, "-o", "State,Reason,Start,End,NodeList")
    if done.returncode == 0 and done.stdout.strip():
        word, *rest = done.stdout.strip().splitlines()[-1].split("|")
        return JobState(job, cluster, word.split()[0], *(field if field != "None" else "" for field in rest[:4]))
    if not answered:
        message = f"SLURM does not tell the state of job {job}: {words}"
        raise ConfigError(Problem("PP-E621", message, "squeue --me", "squeue"))
    return JobState(job, cluster)


def restart(job: str, cluster: str = "") -> None:
    """Have the job's ranks save; its script then requeues it. Raises ConfigError (PP-E621)."""
    _must("scancel", *_on(cluster), "--signal=USR1", job)


def requeue(job: str, without: str = "") -> None:
    """Requeue a job from one of its own nodes, as its script does: it starts again without the nodes `without` (commas
    between) and those that were left out before. Does nothing where bash or SLURM's commands are missing."""
    again = Path(__file__).with_name("requeue.sbatch").read_text(encoding="utf-8")
    _run("bash", "-c", f'{again}again "$@"', "requeue", job, without, timeout=10 * _TIMEOUT)  # it tries for a minute


def cancel(job: str, cluster: str = "") -> None:
    """End a job: its ranks get TERM, and KillWait seconds later KILL. Raises ConfigError (PP-E621)."""
    _must("scancel", *_on(cluster), job)


def _on(cluster: str) -> list[str]:
    return [f"--clusters={cluster}"] if cluster else []


def _must(*command: str) -> None:
    done = _run(*command)
    if done.returncode != 0:
        words = " ".join(done.stderr.split())
        raise ConfigError(Problem("PP-E621", f"SLURM refused: {words}", "squeue --me", command[0]))


def _run(*command: str, cwd: Path | None = None, timeout: float = _TIMEOUT) -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's commands; a missing command or no answer counts as failure."""
    try:
        return subprocess.run(
            command, cwd=cwd, env=_environment(), capture_output=True, text=True, timeout=timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _environment() -> dict[str, str]:
    """The environment without the variables of a job around this process: sbatch would apply them to the new job."""
    if "SLURM_JOB_ID" not in os.environ:
        return dict(os.environ)
    return {name: v for name, v in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
