"""The copies in host memory of all ranks' shards: a start finds them and sends them to the ranks that need them, over
the process group that saves beside training use.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ppctl.checkpoint import local_copy
from ppctl.checkpoint.local_copy import Chosen, LocalCopy, LocalRecord, Seen
from ppctl.checkpoint.rank_agreement import AgreeingRanks
from ppctl.checkpoint.shards import HostMemory, shared_file
from ppctl.checkpoint.tensor_parts import TensorPart, size_of
from ppctl.errors import CheckpointError, Problem

_PIECE = 2**28
"""Bytes of a message."""


class CopiesAtStart(NamedTuple):
    """All ranks' copies, as every rank knows them after the ranks have exchanged what they found."""

    start: str
    """A random text that names this start."""
    hosts: list[list[int]]
    keepers: list[int]
    """For each rank, the rank that keeps its copy on a neighbouring host; empty if `replicas` is 0."""
    sizes: list[int]
    """Bytes of each rank's copy."""
    chosen: Chosen | None
    note: str
    """Why no copies are chosen although there are some; else empty."""
    other: int
    """The latest step of the copies if all are of another cut or optimizer; else 0."""


class LocalCopies:
    """This rank's copies. Each host has its ranks' copies in `directory`. All ranks create this object together.

    With `replicas` of 1 each copy goes to a neighbouring host as well. Creating the object deletes nothing: a start
    that is refused leaves the copies to the next start. Raises CheckpointError on all ranks (PP-E544, PP-E505,
    PP-E650).
    """

    def __init__(
        self, directory: Path, parts: Sequence[TensorPart], ranks: AgreeingRanks, *, replicas: int = 0
    ) -> None:
        self.directory, self.ranks, self.replicas = directory, ranks, replicas
        self.own = LocalCopy(directory, ranks.rank)
        self._kept_of: int | None = None
        self._room: Tensor | None = None

        def look() -> Seen:
            return local_copy.see(directory, ranks.rank, ranks.size, parts, size_of(parts))

        self.survey = ranks.agree("look for copies in memory", look, self._survey, each=Seen, result=CopiesAtStart)
        if replicas:
            self._kept_of = self.survey.keepers.index(ranks.rank)
            self._kept = LocalCopy(directory, self._kept_of, kept=True)
        (self._here,) = (here for here in self.survey.hosts if ranks.rank in here)

    def _survey(self, seen: list[Seen]) -> CopiesAtStart:
        hosts, chosen = local_copy.hosts_of([each.place for each in seen]), local_copy.choose(seen)
        return CopiesAtStart(
            secrets.token_hex(8),
            hosts,
            local_copy.keepers(hosts) if self.replicas else [],
            [each.bytes for each in seen] if self.replicas else [],
            chosen,
            "" if chosen is not None else local_copy.why_none(seen),
            0 if chosen is not None else local_copy.latest_of_others(seen),
        )

    def clear(self, *, but_chosen: bool) -> None:
        """Delete copies on this host to free their memory: all copies, or with `but_chosen` all that are not chosen.
        Files into which this host's ranks write values stay. Raises OSError if the directory cannot be read."""
        chosen, kept = self.survey.chosen, set[str]()
        if but_chosen and chosen is not None:
            kept = local_copy.files_of(self.directory, chosen.step, chosen.start)
        self._sweep(kept)

    def _sweep(self, names: set[str]) -> None:
        """Delete all copies on this host except the files `names` and the value files into which its ranks write."""
        with suppress(OSError):
            local_copy.sweep(self.directory, names | {copy.values.name for copy in self._rooms()})

    def _rooms(self) -> list[LocalCopy]:
        kept = [rank for rank, keeper in enumerate(self.survey.keepers) if keeper in self._here]
        return [LocalCopy(self.directory, rank, kept=False) for rank in self._here] + [
            LocalCopy(self.directory, rank, kept=True) for rank in kept
        ]

    def load(self, memory: HostMemory) -> LocalRecord | None:
        """Bring the chosen copies into the memory of their ranks; called by all ranks together. Returns this rank's
        record, or None on all ranks if the values of any copy do not fit its record. Raises CheckpointError."""
        chosen, me = self.survey.chosen, self.ranks.rank
        assert chosen is not None
        source, kept = chosen.sources[me]
        what, values = "read copies in memory", _tensor(memory.bytes)
        asked: dict[int, tuple[bytes, Tensor]] = {}

        def read() -> None:
            for to in (to for to, (source_rank, _) in enumerate(chosen.sources) if source_rank == me):
                copy = LocalCopy(self.directory, to, kept=chosen.sources[to][1])
                there = to == me and not kept
                asked[to] = copy.text(), values if there else _tensor(memoryview(copy.mapped()))

        # All ranks have what they send before the first message: none waits for a rank that has failed.
        self.ranks.agree(what, read, lambda _: None)
        sent = [each for to, (text, data) in asked.items() if to != me for each in _send(to, text, data, self.ranks)]
        if source != me:
            text = _receive(source, values, self.ranks)
        else:
            text, data = asked[me]
            if kept:
                values.copy_(data)
        for work, _ in sent:
            work.wait()

        def take() -> bool:
            if source == me and not kept:
                return True
            if not local_copy.is_of(LocalRecord.of(text), memory.bytes):
                return False
            self.own.keep(text)
            return True

        return LocalRecord.of(text) if self.ranks.agree(what, take, all, each=bool, result=bool) else None

    def settle(self, used: HostMemory | None) -> None:
        """Prepare for training, which begins from the values in `used`, or from the disk if that is None; called by all
        ranks together. Deletes copies that are not needed; with `replicas`, makes room for a neighbour's copy and
        exchanges the copies that are used, unless all are there. Raises CheckpointError (PP-E511) without room."""
        records = {copy.record.name for copy in self._rooms()} if used is not None else set()
        self.ranks.agree("delete copies in memory", lambda: self._sweep(records), lambda _: None)
        if not self.replicas:
            return
        whole = self.ranks.agree("make room for a neighbour's copy", self._make_room, all, each=bool, result=bool)
        if used is not None and not whole:  # a host may be lost before the next save
            self._exchange(self.own.text(), used.bytes)

    def _make_room(self) -> bool:
        """Map memory for a neighbour's copy; returns whether the copy is there. Raises CheckpointError (PP-E511)."""
        assert self._kept_of is not None
        size = self.survey.sizes[self._kept_of]
        try:
            descriptor, mapped = shared_file(size, self._kept.values)
        except OSError as error:
            message = f"no host memory for a neighbour's copy, {size / 2**30:.2f} GiB: {error.strerror}"
            raise CheckpointError(Problem("PP-E511", message, "checkpoint.local_replicas=0")) from error
        os.close(descriptor)
        self._room = _tensor(memoryview(mapped))
        return self._kept.record.exists()

    def copy(self, step: int, parts: Sequence[TensorPart], state: bytes, memory: memoryview) -> None:
        """Record that this rank's copy is whole and of `step`; with `replicas`, exchange it with neighbours (then all
        ranks call this together). Without room for its record a copy does not count: the next start finds none."""
        text = b""
        with suppress(OSError):
            text = local_copy.record_text(step, self.ranks.size, self.survey.start, parts, state, memory)
            self.own.keep(text)
        if not self.replicas:
            return
        # Until all ranks have recorded their copy, neighbours keep the previous one: a whole set exists at any moment.
        if not self.ranks.agree("copy to a neighbour's host", lambda: bool(text), all, each=bool, result=bool):
            return
        self._exchange(text, memory)

    def forget(self) -> None:
        """Delete the copies that this rank keeps, its own and a neighbour's, because the run gives up their state."""
        self.own.forget()
        if self.replicas:
            self._kept.forget()

    def _exchange(self, text: bytes, memory: memoryview) -> None:
        assert self._kept_of is not None and self._room is not None
        self._kept.forget()
        sent = _send(self.survey.keepers[self.ranks.rank], text, _tensor(memory), self.ranks)
        theirs = _receive(self._kept_of, self._room, self.ranks)
        for work, _ in sent:
            work.wait()
        with suppress(OSError):
            self._kept.keep(theirs)


def _tensor(memory: memoryview) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _send(to: int, text: bytes, values: Tensor, ranks: AgreeingRanks) -> list[tuple[dist.Work, Tensor]]:
    """Start to send a copy. Returns each message with its tensor, which must live until the message was waited for."""
    messages = [
        torch.tensor([len(text)], device="cpu"),
        torch.frombuffer(bytearray(text), dtype=torch.uint8),
        *values.split(_PIECE),
    ]
    works = [dist.isend(message, to, group=ranks.group, tag=tag) for tag, message in enumerate(messages)]
    return [(work, message) for work, message in zip(works, messages, strict=True) if work is not None]


def _receive(sender: int, values: Tensor, ranks: AgreeingRanks) -> bytes:
    """Receive a copy's values into `values`, and wait for them; returns the bytes of its record. Raises ValueError if
    the record has an impossible size."""
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    dist.recv(size, sender, group=ranks.group, tag=0)
    if not 0 < int(size) <= _PIECE:
        raise ValueError(f"rank {sender} announces a record of {int(size)} bytes")
    text = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    messages = [text, *values.split(_PIECE)]
    works = [dist.irecv(message, sender, group=ranks.group, tag=tag) for tag, message in enumerate(messages, 1)]
    for work in works:
        if work is not None:
            work.wait()
    return text.numpy().tobytes()
