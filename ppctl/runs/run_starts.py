"""The starts of one run: at most one process holds the run at a time, and later starts keep earlier starts' files."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ppctl.errors import ConfigError, Problem, pasted
from ppctl.host.files import TAKEN, lock, open_regular, release, write_atomically
from ppctl.host.processes import identity
from ppctl.records.run_records import Holder
from ppctl.runs import checkpoint_folder
from ppctl.runs.rundir import RunDir

_KEPT = re.compile(r"(?:errors|plan)-([0-9]+)(?:\.json)?")
SECRET = "PPCTL_SECRET"
"""The variable with the secret, for ranks that do not share a disk."""
QUIET = 60.0
"""A run without a visible holder counts as over this many seconds after its last write: heartbeats come every ten."""


@contextmanager
def hold(run: RunDir, *, strictly: bool = False) -> Iterator[None]:
    """Hold the run for this process, so that no second launcher continues it.

    The run stays held after an exec, at most as long as the process exists. Raises ConfigError (PP-E613) if another
    process holds it; `strictly`, also if processes on another host have written within `QUIET` seconds, since NFS does
    not share locks of directories. A caller that knows the earlier ranks to be gone is not strict (after restarts by
    torchrun or SLURM). On a file system without locks nothing is held.
    """
    descriptor = _taken(run, strictly=strictly)
    if descriptor is not None:
        os.set_inheritable(descriptor, True)
    try:
        with suppress(OSError):  # lets others know immediately when this process is lost
            write_atomically(run.path / "holder.json", json.dumps(identity()) + "\n", durable=False)
        yield
    finally:
        release(descriptor)


@contextmanager
def at_rest(run: RunDir) -> Iterator[None]:
    """Hold a run that no process continues, to change its files. Raises as `hold` does."""
    descriptor = _taken(run, strictly=True)
    try:
        yield
    finally:
        release(descriptor)


def _taken(run: RunDir, *, strictly: bool) -> int | None:
    """A descriptor that holds the run; None without locks. Raises ConfigError (PP-E613)."""
    descriptor = lock(run.path, patience=0.2)
    elsewhere = _going_on_elsewhere(run) if strictly and descriptor != TAKEN else ""
    if descriptor == TAKEN or elsewhere:
        release(descriptor)
        message = f"run {run.id} is still going on{elsewhere}"
        raise ConfigError(Problem("PP-E613", message, f"ppctl runs show {pasted(run.path)}", str(run.path)))
    return descriptor


def _going_on_elsewhere(run: RunDir) -> str:
    """The other host and the time since its last write, if the run began there and is not quiet yet; else empty."""
    # A directory without a status has only checkpoints, or a run that has not started.
    machine, status = holder(run).get("machine", "another host"), run.status()
    if machine == identity()["machine"] or "time" not in status or status["state"] not in ("starting", "running"):
        return ""
    silent = quiet_for(run)
    return "" if silent > QUIET else f", on {machine}: it wrote {silent:.0f} s ago; after {QUIET:.0f} s it is over"


def quiet_for(run: RunDir) -> float:
    """Seconds since a process of the run has written one of its files."""
    files = [run.path, *run.path.glob("*.json*"), *(run.path / "heartbeats").glob("*.json")]
    return time.time() - max(file.lstat().st_mtime for file in files)


def holder(run: RunDir) -> dict[str, Any]:
    """The `processes.identity` of the process that held the run last; empty if none has held it."""
    return run.read_object("holder.json", Holder)


def is_held(run: RunDir) -> bool:
    """Whether a launcher on a machine that shares this file system's locks is running the run now."""
    descriptor = lock(run.path)
    release(descriptor)
    return descriptor == TAKEN


def slurm_job(environ: Mapping[str, str] = os.environ) -> str | None:
    """What SLURM's commands call this process's job; None outside a job. One task of an array has the array's number as
    SLURM_JOB_ID, which commands take for all its tasks."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array else environ.get("SLURM_JOB_ID")


def slurm_start() -> str | None:
    """The name of this process's start of a submitted run, `<job>.<restarts>`; None outside a job of SLURM's."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"{job}.{os.environ.get('SLURM_RESTART_COUNT') or 0}" if job else None


def write_secret(run: RunDir) -> None:
    """Draw the secret of the next start, by which its ranks know each other (`reach.store`)."""
    write_atomically(run.path / "secret", secrets.token_hex(32), private=True)


def secret_of(run: RunDir, *, reported: bool = False) -> bytes | None:
    """The secret of the newest start; None with PPCTL_SECRET=none. Raises ConfigError (PP-E777) if it is missing, or if
    the run was `reported`, perhaps by a stranger, and another user can read the secret's file."""
    text, place = os.environ.get(SECRET), "environment"
    if text == "none":
        return None
    if text is None:
        text, place = _text(run.path / "secret", reported=reported), str(run.path / "secret")
    if re.fullmatch("[0-9a-f]{64}", text) is None:
        message = "the ranks of this start have no secret in common, of 64 hexadecimal digits that only this user reads"
        raise ConfigError(Problem("PP-E777", message, f"export {SECRET}=$(openssl rand -hex 32)", place))
    return bytes.fromhex(text)


def _text(path: Path, *, reported: bool) -> str:
    with suppress(OSError), open_regular(path, follow=False) as file:
        status = os.fstat(file.fileno())
        private = status.st_uid == os.geteuid() and not status.st_mode & 0o077 and status.st_nlink == 1
        if private or not reported:  # on file systems without modes no file is private
            return file.read(65).decode("latin-1")
    return ""


def begin_start(run: RunDir, name: str) -> None:
    """Prepare the start `name` of a submitted run: delete the last result and heartbeats, keep failures as errors-N.
    Raises OSError; ConfigError (PP-E559) if one of its files is no file."""
    run.check_files()
    write_atomically(run.path / "life", name)
    (run.path / "result.json").unlink(missing_ok=True)
    if run.errors():
        _keep_errors(run, _free_number(run))
    run.forget_heartbeats()


def set_aside(run: RunDir) -> None:
    """Keep the last start's files as plan-1.json and so on. Raises OSError; ConfigError (PP-E559) if one is no file."""
    run.check_files()
    number = _free_number(run)
    for name in ("plan.json", "config.yaml", "env.json", "result.json"):
        old = run.path / name
        if old.exists():
            # A copy, not a move: the file stays readable until its successor replaces it.
            shutil.copy2(old, old.with_name(f"{old.stem}-{number}{old.suffix}"))
    (run.path / "result.json").unlink(missing_ok=True)
    _keep_errors(run, number)


def sweep(run: RunDir) -> None:
    """Delete half-written files of killed processes. Only while no process of the run exists."""
    with suppress(OSError):
        for place in (run.path, run.path / "errors", run.path / "heartbeats"):
            for draft in place.glob("*.tmp"):
                if not draft.is_dir():
                    draft.unlink(missing_ok=True)
    with suppress(OSError):
        checkpoint_folder.sweep(run.checkpoints)


def _free_number(run: RunDir) -> int:
    """The first number without kept files of an earlier start; a requeued run keeps only errors."""
    kept = (_KEPT.fullmatch(path.name) for path in run.path.iterdir())
    return 1 + max((int(match[1]) for match in kept if match), default=0)


def _keep_errors(run: RunDir, number: int) -> None:
    errors = run.path / "errors"
    if errors.exists():
        errors.rename(run.path / f"errors-{number}")
    errors.mkdir()
