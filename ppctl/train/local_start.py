"""A start from copies in memory: whether they are whole and newer than the disk's, and who is told.

Must not know where copies lie, nor how they travel (`ppctl.checkpoint.local_copies`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ppctl.checkpoint.agreement import AgreeingRanks
from ppctl.checkpoint.background import BackgroundSaver
from ppctl.checkpoint.local_copy import CHANGED
from ppctl.checkpoint_folder import Found, find, step_of
from ppctl.train.session import Session
from ppctl.train.snapshot import Loaded, check_optimizer, continued, session_shards


class _Choice(NamedTuple):
    """What rank 0 decides."""

    takes: bool = False
    newest: Path | None = None
    """The newest checkpoint on the disk."""
    line: str = ""
    """For the user."""


def load_local(
    session: Session,
    saver: BackgroundSaver,
    directory: Path,
    candidates: Callable[[], list[Found]],
    say: Callable[[str], None] = print,
) -> Loaded | None:
    """Take the copies that an earlier start of this run has left in memory, where all ranks have those of one step and
    start, later than that of the checkpoint that the run would go on from; else None, and what is there is deleted.

    A collective over the world. `say` takes, on rank 0, what was chosen, and why. A start from an earlier checkpoint
    than the newest of `directory` means that one.
    """
    local, ranks = saver.local, AgreeingRanks(None)
    assert local is not None
    chosen, note = local.survey.chosen, local.survey.note

    def choose(_: list[None]) -> _Choice:
        if chosen is None and not note:
            return _Choice()
        found = candidates()
        newest, path = find(directory), found[0].path if found else None
        if path is not None and (newest is None or path != newest.path):
            return _Choice()  # the start means that one
        on_disk = f"{path.name} on the disk" if path is not None else "no checkpoint on the disk"
        if chosen is None:
            return _Choice(line=note if note.startswith("warning") else f"{note}: going on from {on_disk}")
        if chosen.step <= step_of(path):
            return _Choice()
        where = f"the copies of step {chosen.step} in memory{local.told()}"
        return _Choice(True, path, f"going on from {where}; there is {on_disk}")

    choice, loaded = ranks.agree("choose between memory and disk", lambda: None, choose), None
    said = say if ranks.rank == 0 else _nothing
    if choice.takes:
        record = local.load(saver.memory)
        if record is None:
            choice = _Choice(line=CHANGED)
        else:
            state = json.loads(record.state)
            check_optimizer(state, session, local.directory)
            saver.memory.fill(session_shards(session))
            loaded = Loaded(choice.newest, continued(session, state, local.directory))
    if choice.line:
        said(choice.line)
    local.settle(None if loaded is None else saver.memory)
    return loaded


def _nothing(line: str) -> None:
    pass
