"""A start from copies in memory: whether they are whole and newer than the disk's, and who is told.

Must not know where copies lie, nor how they travel (`ppctl.checkpoint.local_copies`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ppctl.checkpoint.local_copies import LocalCopies
from ppctl.checkpoint.local_copy import CHANGED
from ppctl.checkpoint.rank_agreement import AgreeingRanks
from ppctl.checkpoint.shards import HostMemory
from ppctl.checkpoint_folder import FoundCheckpoint, find, step_of
from ppctl.errors import CheckpointError, Problem
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
    local: LocalCopies,
    directory: Path,
    candidates: Callable[[], list[FoundCheckpoint]],
    *,
    from_disk: Callable[[], Loaded | None],
    make_room: Callable[[], HostMemory],
    say: Callable[[str], None] = print,
) -> Loaded | None:
    """Take the copies that an earlier start of this run has left in memory, where all ranks have those of one step and
    start, later than that of the checkpoint that the run would go on from; else what `from_disk` loads.

    A collective over the world. `say` takes, on rank 0, what was chosen, and why. A start from an earlier checkpoint
    than the newest of `directory` means that one. What is of no use is deleted, and room made, when the start is sure
    to go on: a checkpoint that does not fit, another optimizer or other data raise before that.
    """
    ranks = AgreeingRanks(None)
    choice = ranks.agree(
        "choose between memory and disk", lambda: None, lambda _: _choose(local, directory, candidates), result=_Choice
    )
    said = say if ranks.rank == 0 else lambda line: None
    loaded, memory = None, None
    if choice.takes:
        local.clear(but_chosen=True)
        memory = make_room()
        record = local.load(memory)
        if record is None:
            choice = _Choice(line=CHANGED)
        else:
            state = json.loads(record.state)
            check_optimizer(state, session, local.directory)
            memory.fill(session_shards(session))
            loaded = Loaded(choice.newest, continued(session, state, local.directory))
    if choice.line:
        said(choice.line)
    used = loaded is not None
    if not used:
        loaded = from_disk()
    if memory is None:
        local.clear(but_chosen=False)
        memory = make_room()
    local.settle(memory if used else None)
    return loaded


def _choose(local: LocalCopies, directory: Path, candidates: Callable[[], list[FoundCheckpoint]]) -> _Choice:
    """On rank 0. Raises CheckpointError (PP-E775) where all that the run has done is in copies of no use to it."""
    chosen, note = local.survey.chosen, local.survey.note
    if chosen is None and not note:
        return _Choice()
    found = candidates()
    newest, path = find(directory), found[0].path if found else None
    if path is not None and (newest is None or path != newest.path):
        return _Choice()  # the start means that one
    if path is None and local.survey.other:
        raise CheckpointError(_only_others(local))
    on_disk = f"{path.name} on the disk" if path is not None else "no checkpoint on the disk"
    if chosen is None:
        return _Choice(line=note if note.startswith("warning") else f"{note}: going on from {on_disk}")
    if chosen.step <= step_of(path):
        return _Choice()
    where = f"the copies of step {chosen.step} in memory{local.sources_text()}"
    return _Choice(True, path, f"going on from {where}; there is {on_disk}")


def _only_others(local: LocalCopies) -> Problem:
    message = (
        f"there is no checkpoint on the disk, and the copies of step {local.survey.other} in memory are of another cut "
        "or optimizer: a start from step 0 would delete them"
    )
    remedy = "start the run once more as it was, which goes on from them\ncheckpoint.local=null"
    return Problem("PP-E775", message, remedy, place=str(local.directory))
