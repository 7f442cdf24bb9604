"""The run directory before its ranks start: made new, or set to go on; and env.json, which records the machine."""

from __future__ import annotations

import os
import platform
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import ppctl
from ppctl.config.schema import RunConfig
from ppctl.errors import pasted
from ppctl.host.files import write_atomically
from ppctl.host.processes import identity
from ppctl.launch.environment import Started
from ppctl.launch.machine import count_gpus
from ppctl.plan import Plan
from ppctl.runs.checkpoint_folder import AUTO
from ppctl.runs.finding import list_runs
from ppctl.runs.heartbeat import host_name
from ppctl.runs.run_starts import set_aside, write_secret
from ppctl.runs.rundir import RunDir, unwritable

_ID, _JOB = "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"
_RECORDED = re.compile(r"(TORCH_)?NCCL_.*|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|SLURM_JOB_ID|" + _ID)
_PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "safetensors")


@dataclass(frozen=True, slots=True)
class Launch:
    """The run to start. `config.launch.device` is `cuda` or `cpu`."""

    config: RunConfig
    plan: Plan
    command: str
    """The command line, ready to paste."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Description of the data: `{description, digest, samples, held_out}`."""
    compose_s: float = 0.0
    """Seconds that composing, checking and planning took."""


def with_value(config: RunConfig, section: str, **values: Any) -> RunConfig:
    """A copy of `config` with other values in one section."""
    return replace(config, **{section: replace(getattr(config, section), **values)})


def new_run(launch: Launch, started: Started) -> RunDir:
    """Make the run directory. Raises as `RunDir.create`."""
    log = launch.config.log
    return RunDir.create(Path(log.dir), log.name, lambda draft: _fill(draft, launch), started.run_id)


def interrupted(launch: Launch, started: Started) -> RunDir | None:
    """The run that these ranks had before their starter restarted them; None if they begin one.

    Under torchrun it is the last run that the same agent started; an id alone does not tell, since it may have been
    used before. After a requeue by SLURM, or where torchrun has moved the ranks, rank 0 has another agent: then it is
    the last started run with their id. (torchrun's agents count only failures of their own ranks, so no count says
    whether it restarted.)
    """
    if started.by not in ("torchrun", "slurm"):
        return None
    home = Path(launch.config.log.dir).absolute() / launch.config.log.name
    name = ".*" if started.run_id is None else rf"{re.escape(started.run_id)}(-[0-9]+)?"
    here = (run for run in list_runs(home.parent) if run.path.parent == home and re.fullmatch(name, run.id))
    runs = [run for run in here if run.path.lstat().st_uid == os.geteuid()]  # anybody may have made the others
    agent = identity(os.getppid())
    own = (run for run in runs if started.by == "torchrun" and run.environment().get("agent") == agent)
    if (found := next(own, None)) is not None or started.run_id is None or not started.restarts:
        return found
    # What looks like `ID-2` may be another id, and another job may have the same id.
    job = os.environ.get(_JOB)
    used = ((run, run.environment().get("variables", {})) for run in runs)
    mine = (run for run, each in used if each.get(_ID, started.run_id) == started.run_id and each.get(_JOB, job) == job)
    return next(mine, None)


def go_on(run: RunDir, launch: Launch, checkpoint: Path | None) -> RunDir:
    """Set `run` to go on from `checkpoint` with the config of `launch`; earlier files are kept under numbered names.
    Raises ConfigError (PP-E610) if the directory cannot be written, PP-E559 if what stands in it is no file."""
    resume = launch.config.checkpoint.resume
    if checkpoint is not None and resume != AUTO:
        resume = str(checkpoint)
    run.check_files()
    try:
        # The launcher's ranks do not look, but an agent of an earlier start does.
        write_atomically(run.path / "life", f"launcher-{secrets.token_hex(4)}")
        set_aside(run)
        run.forget_heartbeats()
        _fill(run, replace(launch, config=with_value(launch.config, "checkpoint", resume=resume)))
    except OSError as error:
        copy = f'to="$(mktemp -d)" && cp -r --no-preserve=mode {pasted(run.path)} "$to"'
        overrides = launch.command.partition(f" resume {pasted(run.path)}")[2]
        remedy = f'{copy} && ppctl resume "$to"/{pasted(run.id)}{overrides}'
        raise unwritable(error, run.path, remedy, str(run.path)) from error
    return run


def _fill(run: RunDir, launch: Launch) -> None:
    environment = environment_record(launch.config.launch.device, launch.config.launch.env)
    environment["agent"] = identity(os.getppid())  # rank 0's agent, if torchrun has started it
    run.write_environment(environment | {"data": dict(launch.data), "compose_s": round(launch.compose_s, 3)})
    run.write_plan(launch.plan)
    run.add_command(launch.command)
    write_secret(run)
    run.write_status("starting")
    run.write_config(launch.config)


def environment_record(device: str, launch_env: Mapping[str, str]) -> dict[str, Any]:
    """env.json: where and with what a run was started. `launch_env` counts like the environment. Only the listed
    variables are recorded: environments hold secrets."""
    variables = os.environ | dict(launch_env)
    return {
        "time": time.time(),
        "host": host_name(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "ppctl": ppctl.__version__,
        "commit": _commit(),
        "packages": dict(_versions()),
        "device": device,
        "gpus": count_gpus(os.environ) if device == "cuda" else 0,
        "cpus": os.cpu_count(),
        "variables": {name: value for name, value in sorted(variables.items()) if _RECORDED.fullmatch(name)},
    }


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield package, metadata.version(package)


def _commit() -> str | None:
    """The commit of ppctl's own source, with `+` after it if files differ; None outside a checkout."""
    source = Path(ppctl.__file__).resolve().parent.parent
    if not (source / ".git").exists():
        return None
    try:
        head = _git(source, "rev-parse", "HEAD")
        return head + ("+" if _git(source, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(source: Path, *arguments: str) -> str:
    # Without the option `status` locks the index to refresh it, and a process that is killed then leaves the lock.
    command = ["git", "--no-optional-locks", "-C", str(source), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
    return done.stdout.strip()
