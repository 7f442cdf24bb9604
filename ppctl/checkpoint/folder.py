"""The directory that holds a run's checkpoints: names, order of writes, what a crash may leave behind.

Knows directories and the `latest` file. Must not know tensors, ranks or what is in a checkpoint. Standard library only.

    step-20/        a checkpoint: complete, because it got this name by one rename
    latest          text: the name of the checkpoint to resume from; replaced by rename
    step-30.tmp/    being written, or the leftover of a crashed save: never read
    step-20.old/    moved aside while a new step-20 takes its place; read only if a crash left no step-20
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ppctl.errors import CheckpointError, Problem

LATEST = "latest"
_STEP = re.compile(r"step-(\d+)")
_REMAINS = re.compile(r"(step-\d+|latest)\.tmp")


def step_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of `step` completed steps lives."""
    return directory / f"step-{step}"


def temporary_path(directory: Path, step: int) -> Path:
    """Where it is written before it has a name that is read."""
    return directory / f"step-{step}.tmp"


def steps(directory: Path) -> list[int]:
    """The steps of all complete checkpoints, in order."""
    if not directory.is_dir():
        return []
    matches = (_STEP.fullmatch(path.name) for path in directory.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def latest(directory: Path) -> Path | None:
    """The checkpoint to resume from, or None if there is none yet.

    The one that the `latest` file names; without that file (a crash before it was first written) the last step.
    Raises CheckpointError if the file names a checkpoint that is not there.
    """
    try:
        name = (directory / LATEST).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        found = steps(directory)
        return step_path(directory, found[-1]) if found else None
    if _STEP.fullmatch(name):
        for path in (directory / name, directory / f"{name}.old"):
            if path.is_dir():
                return path
    others = ", ".join(f"step-{step}" for step in steps(directory)) or "none"
    raise CheckpointError(
        Problem(
            "PP-E501",
            f"{directory / LATEST} names {name!r}, which is not there; complete checkpoints: {others}",
            remedy=f"echo step-{steps(directory)[-1]} > '{directory / LATEST}'" if steps(directory) else "",
        )
    )


def prepare(directory: Path, step: int) -> Path:
    """Make the empty directory that `step` is written into, after removing what a crashed save left."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(directory.iterdir()):
        if path.name.endswith(".old") and _STEP.fullmatch(path.stem):
            _settle(path)
        elif _REMAINS.fullmatch(path.name):
            discard(path)
    path = temporary_path(directory, step)
    path.mkdir()
    return path


def _settle(moved: Path) -> None:
    """Finish or undo the replacement of a checkpoint that a crash interrupted."""
    if moved.with_suffix("").exists():
        discard(moved)
    else:
        moved.rename(moved.with_suffix(""))


def publish(directory: Path, step: int) -> Path:
    """Give the written checkpoint its name, then point `latest` at it; both outlast a power failure.

    Everything that needs space on the disk happens before the first rename.
    """
    path, pointer = step_path(directory, step), directory / f"{LATEST}.tmp"
    pointer.write_text(f"{path.name}\n")
    sync(pointer)
    moved = path.with_suffix(".old")
    if path.exists():
        path.rename(moved)
    temporary_path(directory, step).rename(path)
    sync(directory)
    pointer.replace(directory / LATEST)
    sync(directory)
    discard(moved)
    return path


def retain(directory: Path, step: int, keep: int) -> None:
    """Delete all but the last `keep` checkpoints up to `step` (0 keeps all).

    Later ones belong to a run that was set back; they stay until this run reaches them. Each loses its name first, so
    that a half-deleted checkpoint is never read. What cannot be deleted now is tried again at the next save.
    """
    past = [found for found in steps(directory) if found <= step]
    for old in past[:-keep] if keep else []:
        gone = temporary_path(directory, old)
        step_path(directory, old).rename(gone)
        discard(gone)


def discard(path: Path) -> None:
    """Delete a file or a directory that nobody reads, as far as the file system lets us."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's content or a directory's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
