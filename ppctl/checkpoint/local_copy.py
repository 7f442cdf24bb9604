"""A rank's copy in its host's memory that outlives the process: which step it is, and whether it is whole.

There is one, in place: its record goes before its values change, and comes back when they are whole and have digests. A
crash in between leaves no local copy, and the checkpoints on the disk. Must not know tensors, or other ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ppctl.checkpoint.manifest import digests_of
from ppctl.checkpoint.shard_file import Part

_OWN = re.compile(r"rank-\d+\.(values|json|tmp)")


@dataclass(frozen=True, slots=True)
class LocalRecord:
    """What lies in the memory. Of use where every rank has one of the same step, start and world, of its parts."""

    step: int
    world: int
    start: str
    """Of the run, in which it was made: copies that two starts made of one step may differ."""
    parts: str
    """A digest of the parts' names, boxes and dtypes."""
    state: str
    """The content of `state.json`."""
    digests: list[str]
    """Of the memory in chunks."""


class LocalCopy:
    """The files of a rank in `directory`, which is in memory."""

    def __init__(self, directory: Path, rank: int, world: int) -> None:
        self.directory, self.world = directory, world
        self.start = ""
        """Names this start of the run, the same on all ranks."""
        self.values = directory / f"rank-{rank:05}.values"
        self._record = directory / f"rank-{rank:05}.json"

    def find(self, parts: Sequence[Part]) -> LocalRecord | None:
        """The record of a whole copy of these parts in a job of as many ranks; its values are not looked at."""
        try:
            record = LocalRecord(**json.loads(self._record.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        return record if (record.world, record.parts) == (self.world, _digest(parts)) else None

    def forget(self) -> None:
        """From now on there is none: its values change."""
        self._record.unlink(missing_ok=True)

    def keep(self, step: int, parts: Sequence[Part], state: bytes, memory: memoryview) -> None:
        """The values of `step` are whole. Raises OSError."""
        record = LocalRecord(step, self.world, self.start, _digest(parts), state.decode(), list(digests_of(memory)))
        draft = self._record.with_suffix(".tmp")
        draft.write_text(json.dumps(asdict(record)))
        draft.replace(self._record)

    def remove(self) -> None:
        """Delete the run's copies on this host, also those of ranks that an earlier start had in another cut, and
        nothing else: the directory with them only where it is empty then."""
        with suppress(OSError):
            for path in self.directory.iterdir():
                if _OWN.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            self.directory.rmdir()


def directory_of(local: Path, run: Path) -> Path:
    """Where the copies of the run in a directory lie, in `checkpoint.local`.

    An id alone is not one run's: torchrun's users choose it, and runs of several names and log.dirs may have the same.
    """
    return local / f"{run.name}-{hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:8]}"


def sweep(directory: Path, here: range) -> None:
    """Delete what ranks other than those `here` have left on this host: nobody looks for it here any more.

    Before room for new copies is made: after a host was lost, ranks begin on other hosts than before.
    """
    for path in directory.glob("rank-*.*"):
        number = path.name.removeprefix("rank-").split(".")[0]
        if number.isdecimal() and int(number) not in here:
            path.unlink(missing_ok=True)


def intact(record: LocalRecord, memory: memoryview) -> bool:
    """Whether the values are those that were copied; reads all of them."""
    return record.digests == list(digests_of(memory))


def _digest(parts: Sequence[Part]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
