"""A run of a session in a rank, with a callback that notes what it says, enters and logs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppctl.runs.checkpoint_folder import FoundCheckpoint
from ppctl.train.callback import Callback, Callbacks, TrainingEnd
from ppctl.train.loop import train
from ppctl.train.saving import Saves
from ppctl.train.session import Session


class Notes(Callback):
    """What a run does: its records and states."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.states: list[str] = []

    def enter(self, state: str, step: int) -> None:
        self.states.append(state)

    def log_metrics(self, record: dict[str, Any]) -> None:
        self.records.append(dict(record))


def train_noted(
    session: Session,
    directory: Path,
    *callbacks: Callback,
    candidates: Callable[[], list[FoundCheckpoint]] = list,
    say: Callable[[str], None] = print,
) -> tuple[TrainingEnd, Notes]:
    """Train from the first of the candidates, saving below `directory`."""
    saves, notes = Saves(session, directory, say=say), Notes()
    end = train(session, saves.start(candidates), Callbacks(saves, notes, *callbacks))
    return end, notes
