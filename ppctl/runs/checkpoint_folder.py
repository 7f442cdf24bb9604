"""A directory of checkpoints: names, order of writes, remains of a crash, and which checkpoint a start reads.

Free of torch: launcher and ranks use it. No other module knows these names (decision 23).

    step-20/        a checkpoint: complete, because it got this name by one rename, after its manifest was written
    latest          text: the name of the checkpoint to continue from; replaced by rename
    step-30.tmp/    being written or being deleted, or left half-done by a crash: never read
    step-20.old/    moved aside while a new step-20 takes its place; read only if a crash left no step-20
    passed.json     the run's steps back: discarded states, and skipped samples (decision 99)
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.errors import CheckpointError, Problem, pasted
from ppctl.host.files import open_regular, read_json, read_whole, write_atomically
from ppctl.records.json_reader import Count
from ppctl.runs import fence

LATEST = "latest"
MANIFEST = "manifest.json"
"""The file of a checkpoint that is written last and deleted first: without it, the checkpoint is not complete."""
STATE = "state.json"
PASSED = "passed.json"

AUTO = "auto"
"""The value of `checkpoint.resume` with which a start goes on from the newest checkpoint that is not damaged."""

_OLD, _TEMPORARY = ".old", ".tmp"
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_KEPT = re.compile(rf"{_STEP.pattern}(?:\{_OLD})?")
_REMAINS = re.compile(r"(step-[0-9]+|latest)\.tmp")
_LONGEST_NAME = 255


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """The checkpoint that a start continues from."""

    path: Path
    warning: str = ""
    """The fault of `latest`, and which checkpoint is used instead; empty if `latest` names this checkpoint."""


class StepBack(NamedTuple):
    """The run went from the bad step `bad` back to the state after `step`, and skips the samples at positions `first`
    to `end - 1` of its data from now on."""

    bad: Count
    step: Count
    first: Count
    end: Count


# Names


def step_path(directory: Path, step: int) -> Path:
    """The directory of the checkpoint of `step` completed steps."""
    return directory / f"step-{step}"


def temporary_path(directory: Path, step: int) -> Path:
    """The directory in which a checkpoint is written, with a name that is never read."""
    return directory / f"step-{step}{_TEMPORARY}"


def step_of(checkpoint: Path | str | None) -> int:
    """The number of completed steps in a checkpoint's name (`step-6` and `step-6.old`: 6); 0 for any other name."""
    match = _KEPT.fullmatch(Path(checkpoint or "").name)
    return int(match[1]) if match else 0


def is_step(checkpoint: Path) -> bool:
    """Whether the path has a name that `step_of` knows."""
    return _KEPT.fullmatch(checkpoint.name) is not None


# Reading


def find(directory: Path) -> FoundCheckpoint | None:
    """The checkpoint that every start of a run continues from; None only if there is no checkpoint of any kind.

    It is the one that the `latest` file names (or its `.old`, see `at`), else the newest complete one, with a warning.
    A checkpoint that the run has discarded (`steps_back`) is chosen only if there is no other. If none is complete, it
    is the newest incomplete one: loading that fails, so that no run starts again at step 0 beside its checkpoints.
    Raises CheckpointError (PP-E505) if the directory cannot be read.
    """
    with _os_errors_as_problems(directory):
        named, fault = _named_by_latest(directory)
        # Twice: a run that saves at this moment may be between two renames.
        path, back = None if named is None else _at(named) or _at(named), steps_back(directory)
        if path is not None and not _given_up(path, back):
            return FoundCheckpoint(path)
        if path is not None:
            fault = f"the run has gone back to step {back[-1].step} and given up {path.name}"
        existing = [each for each in kept(directory) if not _given_up(each, back)] or kept(directory)
        if not existing:
            return None
        newest = max(existing, key=lambda path: (is_complete(path), step_of(path), path.suffix != _OLD))
        which = "newest complete checkpoint" if is_complete(newest) else "newest (none is complete)"
    return FoundCheckpoint(newest, f"{fault}; using {newest.name}, the {which} there")


def candidates(resume: str | None, directory: Path) -> list[FoundCheckpoint]:
    """The checkpoints that a start with `checkpoint.resume=resume` tries in order: the result of `find`; for AUTO then
    all earlier usable ones, newest first; none for a new run. Raises CheckpointError (PP-E505) as `find`."""
    if resume is None:
        return []
    if resume != AUTO:  # a `step-N.old` in the config may be called step-N again
        return [FoundCheckpoint(at(Path(resume)) or Path(resume))]
    first = find(directory)
    if first is None:
        return []
    with _os_errors_as_problems(directory):
        earlier = [path for path in usable(directory) if step_of(path) < step_of(first.path)]
    return [first, *map(FoundCheckpoint, reversed(earlier))]


def at(path: Path) -> Path | None:
    """The checkpoint that a path names, or None.

    After a crash while a new step-N replaced an old one, this is `step-N.old`, also for the path `step-N`; once the
    next save has renamed it back, it is `step-N`, also for the path `step-N.old`. Any other directory with a manifest
    is a checkpoint, too (a copy with another name), but never a `.tmp`. Raises CheckpointError (PP-E505) if the file
    system does not answer.
    """
    with _os_errors_as_problems(path):
        return _at(path)


def complete(directory: Path) -> list[Path]:
    """All complete checkpoints, by step; `step-N.old` only if there is no complete step-N. Raises OSError as `kept`."""
    by_step = {step_of(path): path for path in sorted(kept(directory), reverse=True) if is_complete(path)}
    return [by_step[step] for step in sorted(by_step)]


def usable(directory: Path) -> list[Path]:
    """The complete checkpoints, by step, without those that the run has given up. Raises as `kept` and `steps_back`."""
    found = complete(directory)
    back = steps_back(directory) if found else []
    return [path for path in found if not _given_up(path, back)]


def kept(directory: Path) -> list[Path]:
    """Every step-N and step-N.old, complete or not; none without the directory. Raises OSError if it cannot be read."""
    try:
        entries = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        if os.path.lexists(directory):  # a file, or a link into a file system that is not mounted
            raise
        return []
    return [path for path in entries if _KEPT.fullmatch(path.name) and path.is_dir()]


def is_complete(path: Path) -> bool:
    """Whether the checkpoint at `path` has been written completely, and its deletion has not begun. Raises OSError if
    the file system fails: then the checkpoint may be there."""
    try:
        return stat.S_ISREG((path / MANIFEST).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a name that no file can have
        return False


def steps_back(directory: Path) -> list[StepBack]:
    """The rollbacks recorded in `directory`, in order; none without the file. Raises CheckpointError (PP-E505) if it
    is unreadable."""
    path = directory / PASSED
    with _os_errors_as_problems(path):
        try:
            back = read_json(path, list[StepBack])
            if wrong := [each for each in back if each.step >= each.bad or each.first >= each.end]:
                raise ValueError(f"{wrong[0]} goes forward")
            return back
        except (FileNotFoundError, NotADirectoryError):
            return []
        except ValueError as error:
            raise OSError(0, f"it is damaged: {error}", str(path)) from None


def _given_up(checkpoint: Path, back: Iterable[StepBack]) -> bool:
    """Whether the checkpoint is discarded: before it was saved, the run had trained on samples that it now skips."""
    position = _entry(checkpoint, "consumed_samples") if back else None
    return isinstance(position, int) and any(each.first < position < each.end for each in back)


def _at(path: Path) -> Path | None:
    places = [path]
    if _KEPT.fullmatch(path.name):
        places.append(path.with_suffix("" if path.suffix == _OLD else _OLD))
    for place in places:
        if is_complete(place) and place.suffix != _TEMPORARY:
            return place
    # Without a manifest the checkpoint is damaged; loading reports this, and no other checkpoint replaces it here.
    return next((place for place in places if _KEPT.fullmatch(place.name) and place.is_dir()), None)


def _named_by_latest(directory: Path) -> tuple[Path | None, str]:
    """(the path that `latest` names, the fault of `latest` if nothing is there)."""
    pointer = directory / LATEST
    try:
        with open_regular(pointer, follow=False) as file:
            text = file.read(_LONGEST_NAME).decode(errors="replace").strip()
    except FileNotFoundError:
        return None, f"{pointer} is missing"
    except OSError as error:
        return None, f"{pointer} cannot be read ({error.strerror})"
    if not text:
        return None, f"{pointer} is empty"
    if not _STEP.fullmatch(text):
        return None, f"{pointer} holds {text!r}, which is not the name of a checkpoint"
    return directory / text, f"{pointer} names {text}, which is not there"


@contextmanager
def _os_errors_as_problems(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error of a checkpoint, or a directory of checkpoints, that the file system does not let us read."""
    message = f"{path} cannot be read: {error.strerror}"
    return CheckpointError(Problem("PP-E505", message, f"ls -ld {pasted(path)}", str(error.filename or path)))


# Writing. The machine may stop between any two lines: `find` must understand every state in between.


def prepare(directory: Path, step: int) -> Path:
    """Make the empty directory into which `step` is written, after removing the remains of crashed saves. A directory
    in the place of the file `latest` is renamed to latest.old, or to latest.old-2 and so on if that exists."""
    directory.mkdir(parents=True, exist_ok=True)
    sweep(directory)
    pointer = directory / LATEST
    if pointer.is_dir() and not pointer.is_symlink():
        # Not a checkpoint, and in the way. Its owner may need it: it is moved, not deleted.
        aside = (pointer.with_suffix(_OLD + (f"-{number}" if number > 1 else "")) for number in count(1))
        pointer.rename(next(path for path in aside if not os.path.lexists(path)))
    path = temporary_path(directory, step)
    path.mkdir()
    return path


def sweep(directory: Path) -> None:
    """Remove the remains of crashed saves, and finish or undo replacements. Only while no other process saves here."""
    for path in sorted(directory.iterdir()):
        if path.suffix == _OLD and _KEPT.fullmatch(path.name):
            _settle(path)
        elif _REMAINS.fullmatch(path.name):
            discard(path)


def _settle(moved: Path) -> None:
    """Finish or undo the replacement of a checkpoint that a crash interrupted."""
    path = moved.with_suffix("")
    if is_complete(moved) and not is_complete(path):
        discard(path)
        moved.rename(path)
    elif os.path.lexists(path):
        discard(moved)
    # Damaged, but kept as a sign that there was a checkpoint: without it a start would begin at step 0.


def publish(directory: Path, step: int) -> Path:
    """Give the written checkpoint its name, unless an interrupted call has, then point `latest` at it; returns its
    path. Both are synced. Everything that needs disk space happens before the first rename."""
    path, temporary, pointer = step_path(directory, step), temporary_path(directory, step), directory / LATEST
    draft = pointer.with_suffix(_TEMPORARY)
    draft.write_text(f"{path.name}\n")
    sync(draft)
    moved = path.with_suffix(_OLD)
    if temporary.is_dir():
        if os.path.lexists(path):
            path.rename(moved)
        temporary.rename(path)
        sync(directory)
    draft.replace(pointer)
    sync(directory)
    discard(moved)
    return path


def add_step_back(directory: Path, back: StepBack) -> None:
    """Record a step back for later starts, in one rename. Raises TrainingError (PP-E779) in an older start."""
    fence.check(at_once=True)  # an older start must not discard checkpoints of the newer
    write_atomically(directory / PASSED, json.dumps([*steps_back(directory), back]) + "\n")
    sync(directory)


def retain(directory: Path, step: int, keep: int, keep_every: int = 0, keep_best: int = 0) -> None:
    """Delete the `expired` checkpoints; if one cannot be deleted, the next save tries again."""
    for path in expired(directory, step, keep, keep_every, keep_best):
        remove(path)


def expired(directory: Path, step: int, keep: int, keep_every: int = 0, keep_best: int = 0) -> list[Path]:
    """The complete checkpoints up to `step`, except, of the `usable` ones, the last `keep` (0 keeps all), those of
    every `keep_every`-th step and the `keep_best` best. Later ones, of a run resumed from an earlier step, stay until
    it reaches them."""
    past, good = ([path for path in each(directory) if step_of(path) <= step] for each in (complete, usable))
    held = good[-keep:] + [path for path in good if keep_every and step_of(path) % keep_every == 0]
    held += best(good)[:keep_best] if keep_best else []
    return [path for path in past if path not in held] if keep else []


def best(checkpoints: Iterable[Path]) -> list[Path]:
    """The checkpoints that were evaluated when saved, by loss, the lowest first; of equal losses the earlier first."""
    found = [(loss, step_of(path), path) for path in checkpoints if (loss := eval_loss(path)) is not None]
    return [path for _, _, path in sorted(found)]


def eval_loss(checkpoint: Path) -> float | None:
    """The loss of the evaluation before a checkpoint was saved; None if there was none, or it cannot be read."""
    loss = _entry(checkpoint, "eval_loss")
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def _entry(checkpoint: Path, name: str) -> Any:
    """An entry of state.json; None without one, or if it cannot be read."""
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        return json.loads(read_whole(checkpoint / STATE, follow=False)).get(name)
    return None


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, renamed first, so that a half-deleted one is never read."""
    discard(checkpoint.rename(temporary_path(checkpoint.parent, step_of(checkpoint))))


def discard(path: Path) -> None:
    """Delete a file or a directory that is not read any more, as far as the file system allows. A checkpoint's manifest
    is deleted first: after a crash the remains count as incomplete under any name."""
    if path.is_dir() and not path.is_symlink():
        try:
            (path / MANIFEST).unlink(missing_ok=True)
            sync(path)
        except OSError:
            return
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
