"""States of a directory of checkpoints: what a kill leaves at every line of a save, and what only a hand or disk does.

Torch-free. A checkpoint is three small files here, which all hold its mark: which save wrote it.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from ppctl.runs import checkpoint_folder
from ppctl.runs.checkpoint_folder import LATEST, MANIFEST, STATE, prepare, publish, retain, step_path

DATA = "rank-00000.safetensors"


def write(path: Path, mark: str) -> Path:
    """Fill a new directory as a save does: the manifest last."""
    path.mkdir(exist_ok=True)
    for name in (DATA, STATE, MANIFEST):
        (path / name).write_text(mark)
    return path


def save(directory: Path, step: int, mark: str, keep: int = 0) -> None:
    """A whole save, in the order of `checkpoint/saver.py`."""
    write(prepare(directory, step), mark)
    publish(directory, step)
    retain(directory, step, keep)


def mark_of(path: Path | None) -> str | None:
    """Which save wrote the checkpoint; it is whole, and of that save alone."""
    if path is None:
        return None
    (mark,) = {(path / name).read_text() for name in (DATA, STATE, MANIFEST)}
    return mark


# What a kill leaves


@dataclass(frozen=True)
class Save:
    """A save that is killed: what there is before, and which checkpoint a start then reads (by its mark)."""

    begin: Callable[[Path], None]
    step: int
    keep: int
    before: str | None


def _three(directory: Path) -> None:
    for step in (2, 4, 6):
        save(directory, step, f"first {step}")


def _set_back(directory: Path) -> None:
    _three(directory)
    save(directory, 8, "first 8")
    save(directory, 4, "second 4")


def _after_a_crash(directory: Path) -> None:
    """Killed while step-6 was replaced, with half of a step-8 and a draft of `latest`."""
    _three(directory)
    step_path(directory, 6).rename(directory / "step-6.old")
    write(directory / "step-6.tmp", "never")
    (directory / "step-8.tmp").mkdir()
    (directory / "step-8.tmp" / DATA).write_text("never")
    (directory / "latest.tmp").write_text("")


def _without_latest(directory: Path) -> None:
    _three(directory)
    (directory / LATEST).write_text("")


def _latest_is_a_directory(directory: Path) -> None:
    _three(directory)
    (directory / LATEST).unlink()
    write(directory / LATEST, "someone's own")


SAVES = {
    "the first": Save(lambda directory: None, 2, 0, None),
    "the next": Save(_three, 8, 0, "first 6"),
    "the next, which deletes two": Save(_three, 8, 2, "first 6"),
    "one in place of the last": Save(_three, 6, 0, "first 6"),
    "one in place of the last, which deletes two": Save(_three, 6, 1, "first 6"),
    "one in place of an earlier one": Save(_set_back, 6, 1, "second 4"),
    "the next after a crash": Save(_after_a_crash, 8, 2, "first 6"),
    "in place of the last after a crash": Save(_after_a_crash, 6, 2, "first 6"),
    "after `latest` was lost": Save(_without_latest, 8, 2, "first 6"),
    "after `latest` became a directory": Save(_latest_is_a_directory, 8, 2, "first 6"),
}
MARK = "new"


def killed_states(name: str, root: Path) -> list[Path]:
    """The directories that the save `name` leaves when it is killed, in the order of the lines; the last is finished.

    The process dies (no handler runs) before a line of `runs/checkpoint_folder.py` or of `save` here, or before a
    change to the directory inside the standard library: at each of those before which the directory has changed.
    """
    one, home = SAVES[name], root / name.replace(" ", "-")
    states = [home / "before"]
    states[0].mkdir(parents=True)
    one.begin(states[0])

    def in_copy(called: str, at_line: Callable[[int, Path], None]) -> Path:
        copy = shutil.copytree(states[0], home / called)
        _in_child(lambda: save(copy, one.step, MARK, one.keep), lambda number: at_line(number, copy))
        return copy

    seen, moments = content(states[0]), home / "moments"

    def note_change(number: int, copy: Path) -> None:
        nonlocal seen
        if (now := content(copy)) != seen:
            seen = now
            with open(moments, "a") as file:
                file.write(f"{number}\n")

    finished = in_copy("finished", note_change)
    for moment in map(int, moments.read_text().split()):

        def die(number: int, _: Path, moment: int = moment) -> None:
            if number == moment:
                os._exit(0)

        states.append(in_copy(f"killed-{moment}", die))
    assert all(content(one) != content(other) for one, other in pairwise(states))
    return states if content(states[-1]) == content(finished) else [*states, finished]


def content(directory: Path) -> dict[str, str]:
    """Every file's text, every directory."""
    files = sorted(directory.rglob("*"))
    return {str(path.relative_to(directory)): path.read_text() if path.is_file() else "" for path in files}


def _in_child(action: Callable[[], None], at_line: Callable[[int], None]) -> None:
    """Do `action` in a process of its own, which calls `at_line` with 1, 2, 3 and so on before its lines."""
    child = os.fork()
    if child == 0:
        try:
            _call_at_lines(at_line)
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the save failed"


_TRACED = {checkpoint_folder.__file__, __file__}
_CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def _call_at_lines(at_line: Callable[[int], None]) -> None:
    count, busy = 0, False

    def step() -> None:
        nonlocal count, busy
        if not busy:
            busy, count = True, count + 1
            at_line(count)
            busy = False

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if busy or frame.f_code.co_filename not in _TRACED:
            return None
        if event == "line":
            step()
        return trace

    sys.addaudithook(lambda event, _: step() if event in _CHANGES else None)
    sys.settrace(trace)


# What a save never leaves, but a disk, a copy or a hand may


@dataclass(frozen=True)
class Strange:
    """A directory, the checkpoint that a start goes on from, and what the warning says."""

    make: Callable[[Path], object]
    name: str | None
    warning: str = ""


def _pointing(text: str | bytes, *names: str) -> Callable[[Path], object]:
    """Complete checkpoints (and, with `!` behind the name, some without a manifest) and the `latest` file."""

    def make(directory: Path) -> None:
        _lost(*names)(directory)
        (directory / LATEST).write_bytes(text if isinstance(text, bytes) else text.encode())

    return make


def _lost(*names: str) -> Callable[[Path], object]:
    """As `_pointing`, without a `latest` file."""

    def make(directory: Path) -> None:
        for name in names:
            path = write(directory / name.rstrip("!"), name)
            if name.endswith("!"):
                (path / MANIFEST).unlink()

    return make


def _file_in_place_of_step_6(directory: Path) -> None:
    _pointing("step-6\n", "step-4")(directory)
    (directory / "step-6").write_text("a file")


def _link(directory: Path) -> None:
    _lost("step-4", "step-6")(directory)
    (directory / LATEST).symlink_to("nowhere")


def _directory(directory: Path) -> None:
    _lost("step-4", "step-6")(directory)
    (directory / LATEST).mkdir()


STRANGE = {
    "no directory": Strange(shutil.rmtree, None),
    "an empty directory": Strange(_lost(), None),
    "only a save that did not finish": Strange(_lost("step-6.tmp", "latest.tmp"), None),
    "`latest` alone": Strange(_pointing("step-6\n"), None),
    "`latest` names the earlier one": Strange(_pointing("step-4\n", "step-4", "step-6"), "step-4"),
    "`latest` is empty": Strange(_pointing("", "step-4", "step-6"), "step-6", "latest is empty; using step-6"),
    "`latest` is blank": Strange(_pointing("\n", "step-4", "step-6"), "step-6", "latest is empty; using step-6"),
    "`latest` is missing": Strange(_lost("step-4", "step-6"), "step-6", "latest is missing; using step-6"),
    "`latest` links to nothing": Strange(
        _link, "step-6", "latest cannot be read (it is a link, not a file); using step-6"
    ),
    "`latest` is a directory": Strange(_directory, "step-6", "latest cannot be read (Is a directory); using step-6"),
    "`latest` names one that is not there": Strange(
        _pointing("step-8\n", "step-4", "step-6"), "step-6", "latest names step-8, which is not there; using step-6"
    ),
    "`latest` names one before the newest": Strange(
        _pointing("step-8\n", "step-9", "step-10"), "step-10", "names step-8, which is not there; using step-10"
    ),
    "`latest` names a file": Strange(_file_in_place_of_step_6, "step-4", "names step-6, which is not there"),
    "`latest` holds bytes": Strange(_pointing(b"\xff\0{", "step-4", "step-6"), "step-6", "not the name of a"),
    "`latest` holds zeros": Strange(_pointing(b"\0" * 4096, "step-6"), "step-6", "not the name of a checkpoint"),
    "`latest` holds a path": Strange(_pointing("../../..", "step-4", "step-6"), "step-6", "holds '../../..', which"),
    "`latest` names a draft": Strange(_pointing("step-8.tmp", "step-6", "step-8.tmp"), "step-6", "'step-8.tmp', which"),
    "`latest` names what is moved aside": Strange(_pointing("step-6.old", "step-6"), "step-6", "'step-6.old', which"),
    "only one that is moved aside": Strange(_pointing("step-6\n", "step-6.old"), "step-6.old"),
    "the newest is moved aside": Strange(_pointing("step-6\n", "step-4", "step-6.old"), "step-6.old"),
    "moved aside, `latest` is empty": Strange(_pointing("", "step-4", "step-6.old"), "step-6.old", "is empty; using"),
    "moved aside, `latest` is missing": Strange(_lost("step-6.old"), "step-6.old", "latest is missing; using"),
    "replaced, the old one is half deleted": Strange(_pointing("step-6\n", "step-6", "step-6.old!"), "step-6"),
    "replaced, the old one is there": Strange(_pointing("", "step-6", "step-6.old"), "step-6", "latest is empty"),
    "an old one that is half deleted": Strange(_lost("step-4", "step-6.old!"), "step-4", "latest is missing"),
    "the newest has no manifest": Strange(_pointing("", "step-4", "step-6!"), "step-4", "the newest complete"),
    "damaged, and the old one is there": Strange(_pointing("step-6\n", "step-6!", "step-6.old"), "step-6.old"),
    # Whoever loads these says that they are damaged (exit code 3): no start takes them for a run without checkpoints.
    "the one that `latest` names has no manifest": Strange(_pointing("step-6\n", "step-4", "step-6!"), "step-6"),
    "none has a manifest": Strange(_pointing("", "step-4!", "step-6!"), "step-6", "the newest (none is complete)"),
    "only an old one, half deleted": Strange(_lost("step-6.old!"), "step-6.old", "the newest (none is complete)"),
}
