"""Copies of ranks' shards in hosts' memory that outlive the processes: their records, and the choice of those to use.

A rank has one copy on its own host, and perhaps another on a neighbouring host. A copy is overwritten in place: its
record is deleted before its values change, and written again when the values are whole and have digests.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

from ppctl.checkpoint.manifest import digests_of
from ppctl.checkpoint.tensor_parts import TensorPart
from ppctl.errors import CheckpointError, Problem, pasted
from ppctl.host import private_files
from ppctl.host.processes import boot
from ppctl.records.json_reader import parse, read

_OWN = re.compile(r"rank-([0-9]{5,})(\.kept)?\.(values|json|tmp)")
_MOST_OF_A_RECORD = 2**26
"""Bytes of a record: 36 for every 16 MiB of values, and state.json."""

CHANGED = "warning: copies in memory have changed since they were made; they are not used"


@dataclass(frozen=True, slots=True)
class LocalRecord:
    """The record of a copy. Copies can be loaded if every rank has one of the same step and start, with its parts."""

    step: int
    start: str
    """The start of the run that made the copy: copies that two starts made of one step may differ."""
    parts: str
    """A digest of the parts' names, boxes and dtypes, and of the number of ranks."""
    state: str
    """The content of `state.json`."""
    digests: list[str]
    """The digests of the copy's values, chunk by chunk."""

    @staticmethod
    def of(text: bytes) -> LocalRecord:
        """Read the bytes of a record. Raises ValueError if they are no record."""
        return read(LocalRecord, parse(text))


class LocalCopy:
    """The files of a rank's copy in `directory`, in memory of the rank's own host or (`kept`) of a neighbour's."""

    def __init__(self, directory: Path, rank: int, *, kept: bool = False) -> None:
        self.rank, self.kept = rank, kept
        self.values, self.record = (directory / f"rank-{rank:05}{'.kept' * kept}.{end}" for end in ("values", "json"))

    def forget(self) -> None:
        """Delete the record, and with it the copy: its values are about to change."""
        private_files.remove(self.record)

    def keep(self, text: bytes) -> None:
        """Write the record of values that are whole again. Raises OSError."""
        private_files.write(self.record, text)

    def text(self) -> bytes:
        """Return the record as bytes. Raises OSError."""
        return private_files.read(self.record, _MOST_OF_A_RECORD)

    def is_intact(self) -> bool:
        """Whether there is a record, and the values fit it; reads all values."""
        with suppress(OSError, ValueError):
            return is_of(LocalRecord.of(self.text()), memoryview(self.mapped()))
        return False

    def mapped(self) -> mmap:
        """Map the file with the copy's values. Raises OSError, and ValueError if it is empty."""
        with open(private_files.open_file(self.values, os.O_RDWR), "r+b") as file:
            return mmap(file.fileno(), 0)


def record_text(
    step: int, world: int, start: str, parts: Sequence[TensorPart], state: bytes, memory: memoryview
) -> bytes:
    """Return the bytes of the record of a copy whose values lie in `memory`."""
    record = LocalRecord(step, start, _digest(world, parts), state.decode(), list(digests_of(memory)))
    return json.dumps(asdict(record)).encode()


def is_of(record: LocalRecord, memory: memoryview) -> bool:
    """Whether the values in `memory` are those that the record was made of; reads all values."""
    return record.digests == list(digests_of(memory))


def directory_of(local: Path, run: Path) -> Path:
    """Return where the copies of the run in directory `run` lie, below `local`. The run's path names it, not its id:
    users of torchrun choose ids, and runs of other names or log.dirs may have the same."""
    return local / f"{run.name}-{hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:8]}"


def remove_all(directory: Path) -> None:
    """Delete the run's copies on this host, earlier starts' too, then the directory if empty. Ignores OSError."""
    with suppress(OSError):
        sweep(directory, ())
        directory.rmdir()


def sweep(directory: Path, names: Collection[str]) -> None:
    """Delete all files of copies on this host, values and records, except those called `names`. Raises OSError."""
    for name in private_files.names(directory):
        if _OWN.fullmatch(name) and name not in names:
            private_files.remove(directory / name)


def files_of(directory: Path, step: int, start: str) -> set[str]:
    """Return the file names of this host's copies of this step and start, and of their records. Raises OSError."""
    copies = [copy for copy, record in _records(directory) if (record.step, record.start) == (step, start)]
    return {path.name for copy in copies for path in (copy.record, copy.values)}


def _records(directory: Path) -> Iterator[tuple[LocalCopy, LocalRecord]]:
    """Yield the copies in the directory that have a record. Raises OSError."""
    for name in private_files.names(directory):
        match = _OWN.fullmatch(name)
        if match is not None and match[3] == "json":
            copy = LocalCopy(directory, int(match[1]), kept=bool(match[2]))
            with suppress(OSError, ValueError):
                yield copy, LocalRecord.of(copy.text())


# What a start finds, and which copies it uses


class HostCopy(NamedTuple):
    """What the record of a copy on a host says."""

    rank: int
    kept: bool
    step: int
    start: str
    parts: str


class Seen(NamedTuple):
    """The copies that a rank sees at a start. Bare values, because rank 0 reads all ranks' answers."""

    place: str
    """Equal for ranks that share the directory with the copies."""
    parts: str
    """A digest of what the rank holds now."""
    bytes: int
    """Bytes of the copy's values."""
    copies: list[HostCopy]
    """All copies at the place, of any rank."""
    changed: bool
    """Whether the values of the rank's own copy have changed since it was made; then it is not among `copies`."""


class Chosen(NamedTuple):
    """The copies that a start uses: one for every rank, all made at one step by one earlier start."""

    step: int
    start: str
    sources: list[tuple[int, bool]]
    """For each rank: the rank (itself or another host's) that has its copy, and whether it is a neighbour's."""


def see(directory: Path, rank: int, world: int, parts: Sequence[TensorPart], size: int) -> Seen:
    """Return the copies on this host, once the rank has checked the values of its own; makes the directory. Raises
    CheckpointError (PP-E650) if the directory, or `checkpoint.local` above it, is not this user's alone."""
    try:
        private_files.make_directory(directory)
    except OSError as error:
        message = f"copies in memory cannot be kept there: {error.strerror} ({error.filename})"
        remedy = pasted(f"checkpoint.local={private_files.shared_memory()}/ppctl-{directory.name[-8:]}")
        raise CheckpointError(Problem("PP-E650", message, remedy, "checkpoint.local")) from error
    status = directory.stat()
    place, own = f"{boot()} {status.st_dev} {status.st_ino}", _digest(world, parts)
    copies, changed = [], False
    for copy, record in _records(directory):
        if (copy.rank, copy.kept, record.parts) == (rank, False, own) and not copy.is_intact():
            changed = True
        else:
            copies.append(HostCopy(copy.rank, copy.kept, record.step, record.start, record.parts))
    return Seen(place, own, size, copies, changed)


def hosts_of(places: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host; hosts are in the order of their first ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place, []).append(rank)
    return list(hosts.values())


def keepers(hosts: Sequence[Sequence[int]]) -> list[int]:
    """Return, for every rank, the rank on the neighbouring host that keeps its copy.

    Hosts are paired in order; of an odd number, the last three form a ring. In pairs, fewer combinations of two lost
    hosts take both copies of a rank than in a ring of all hosts. Raises CheckpointError (PP-E544) unless there are two
    hosts or more, all with the same number of ranks.
    """
    count, sizes = len(hosts), sorted({len(ranks) for ranks in hosts})
    if count < 2 or len(sizes) > 1:
        each = f"{' or '.join(map(str, sizes))} rank{'s' * (sizes != [1])} each"
        place = f"{count} hosts with {each}" if count > 1 else "one host, or share one directory in memory"
        message = (
            f"copies on a neighbour's host need two hosts or more with equally many ranks; the ranks are on {place}"
        )
        raise CheckpointError(Problem("PP-E544", message, "checkpoint.local_replicas=0"))
    ring = count - 3 * (count % 2)
    keeper_of: dict[int, int] = {}
    for number, ranks in enumerate(hosts):
        beside = number ^ 1 if number < ring else ring + (number - ring + 1) % 3
        keeper_of |= dict(zip(ranks, hosts[beside], strict=True))
    return [keeper_of[rank] for rank in range(len(keeper_of))]


def refused_on_one_host(world: int) -> list[Problem]:
    """Return the problems that `keepers` raises for `world` ranks on one host; for launchers."""
    try:
        keepers([range(world)])
    except CheckpointError as error:
        return list(error.problems)
    return []


def choose(seen: Sequence[Seen]) -> Chosen | None:
    """Return the copies of the latest step that has one for every rank, if possible on the rank's own host; or None."""
    where: dict[tuple[int, str], dict[int, tuple[int, bool]]] = {}
    for ranks in hosts_of([each.place for each in seen]):
        for copy in {copy for rank in ranks for copy in seen[rank].copies}:
            if not _fits(copy, seen):
                continue
            if not copy.kept and copy.rank in ranks and copy not in seen[copy.rank].copies:
                continue  # its own rank has found its values changed
            sources = where.setdefault((copy.step, copy.start), {})
            source = copy.rank if copy.rank in ranks else ranks[copy.rank % len(ranks)], copy.kept
            best = sources.setdefault(copy.rank, source)
            sources[copy.rank] = min(best, source, key=lambda each: (each[0] != copy.rank, each[1], each[0]))
    whole = [key for key, sources in where.items() if len(sources) == len(seen)]
    if not whole:
        return None
    step, start = max(whole)
    return Chosen(step, start, [where[step, start][rank] for rank in range(len(seen))])


def why_none(seen: Sequence[Seen]) -> str:
    """Return why none of the copies is chosen; empty if there are no copies."""
    if any(each.changed for each in seen):
        return CHANGED
    steps = ", ".join(map(str, sorted({copy.step for each in seen for copy in each.copies})))
    return f"note: copies in memory (steps {steps}) are not whole for this cut" if steps else ""


def latest_of_others(seen: Sequence[Seen]) -> int:
    """Return the latest step of the copies if all are of other parts than the ranks hold now; else 0."""
    copies = [copy for each in seen for copy in each.copies]
    return 0 if any(_fits(copy, seen) for copy in copies) else max([copy.step for copy in copies], default=0)


def _fits(copy: HostCopy, seen: Sequence[Seen]) -> bool:
    return copy.rank < len(seen) and seen[copy.rank].parts == copy.parts


def _digest(world: int, parts: Sequence[TensorPart]) -> str:
    return hashlib.sha256(json.dumps([world, parts]).encode()).hexdigest()
