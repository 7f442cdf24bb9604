"""The first contact of ranks before they train: every channel and every group once, timed, each with its own limit.

All ranks make their contacts in one common order, so that no ranks wait for each other in a circle. When one contact
takes too long, many ranks may wait, but only some for the dead connection: each writes the contact in which it waits
into the store, and all draw the same conclusion from these entries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ppctl.comm.channels import DirectEnd, Transport, VariableEnd
from ppctl.comm.connections import first_message, other_end
from ppctl.comm.groups import send_round
from ppctl.errors import Problem
from ppctl.reach.hosts import DeadEdge, reason_of
from ppctl.reach.store import SealedStore
from ppctl.schedule.action import Channel

_ROUNDS = 3
"""Messages per contact: the first makes the connection, the fastest shows its speed."""
_KEY = "ppctl/contact"
_SETTLE = 1.0
"""Seconds after a limit within which all waiting ranks write where they wait."""
_REMEDY = "ppctl doctor, started on these hosts as the run was, times their edges; launch.edge_limit=5m waits longer"
_TAG = 5
"""Tag of messages around a group; channels have 1 to 4."""
_CPU = torch.device("cpu")


class Contact(NamedTuple):
    """A message or a collective of several ranks."""

    name: str
    """The contact's name for a person: `channel 0->1 F`, `group dp`."""
    ranks: tuple[int, ...]
    """Global ranks; the sender of an edge comes first."""
    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class TimedContact:
    """A contact that succeeded."""

    name: str
    ranks: tuple[int, ...]
    first_s: float
    """Seconds of the first message, waiting for the other ranks included."""
    best_s: float
    """Seconds of the fastest message."""


def channel_contacts(ends: Sequence[DirectEnd], pp_group: ProcessGroup, device: torch.device) -> list[Contact]:
    """This rank's channels, in the order that all ranks of the pipeline follow."""
    rank, ranks = pp_group.rank(), dist.get_process_group_ranks(pp_group)
    contacts = []
    for end in sorted(ends, key=lambda end: (_turn(end.channel, len(ranks)), end.channel)):
        name, between = f"channel {end.channel}", (ranks[end.channel.source], ranks[end.channel.target])
        if isinstance(end, VariableEnd):
            contacts.append(Contact(name, between, partial(first_message, end.headers, rank, end.header_device)))
            contacts.append(Contact(name, between, partial(first_message, end.body, rank, device)))
        else:
            contacts.append(Contact(name, between, partial(first_message, end, rank, device)))
    return contacts


def group_contacts(
    name: str, group: ProcessGroup, device: torch.device, *, ring: bool = True, exchanges: Collection[str] = ()
) -> list[Contact]:
    """A rank's contacts in a group: on gloo messages over its edges of the ring, then a collective on each backend.

    `exchanges` are further kinds, for which ranks connect differently (NCCL at the first of each): messages `round` the
    group, from every rank to the next, or `all to all`.
    """
    size, rank, ranks = group.size(), group.rank(), tuple(dist.get_process_group_ranks(group))
    if size == 1:
        return []
    contacts = []
    gloo = _gloo(group)
    if ring and gloo is not None:
        edges = [Channel(source, (source + 1) % size, "F") for source in range(size)]
        for edge in sorted((edge for edge in edges if rank in edge[:2]), key=lambda edge: _turn(edge, size)):
            end = DirectEnd(edge, gloo, other_end(edge, rank), _TAG)
            between = (ranks[edge.source], ranks[edge.target])
            contacts.append(Contact(f"edge of group {name}", between, partial(first_message, end, rank, _CPU)))
    devices = [_CPU] * (gloo is not None) + [device] * (gloo is None or device != _CPU)
    contacts += [Contact(f"group {name} ({on.type})", ranks, partial(_all_reduce, group, on)) for on in devices]
    ways = {"round": _round, "all to all": _all_to_all}
    return contacts + [
        Contact(f"group {name} ({device.type}), {each}", ranks, partial(way, group, device))
        for each, way in ways.items()
        if each in exchanges
    ]


def _gloo(group: ProcessGroup) -> Transport | None:
    """The group's gloo backend; None if it has none for the CPU, or another one."""
    try:
        backend = group._get_backend(_CPU)
    except RuntimeError:
        return None
    return cast(Transport, backend) if backend.name() == "gloo" else None


def _turn(edge: Channel, size: int) -> tuple[int, int]:
    """The place of a ring's edge in the order: first every second edge, then the others, and the last edge of an odd
    ring alone. So no two edges of one rank have the same turn."""
    index = edge.source if edge.target == (edge.source + 1) % size else edge.target
    return (2 if size % 2 and index == size - 1 else index % 2), index


def _all_reduce(group: ProcessGroup, device: torch.device) -> None:
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    _synchronize(device)


def _round(group: ProcessGroup, device: torch.device) -> None:
    sent = torch.zeros(1, device=device)
    works, _ = send_round(sent, group)
    for work in works:
        work.wait()
    _synchronize(device)


def _all_to_all(group: ProcessGroup, device: torch.device) -> None:
    sent = torch.zeros(group.size(), device=device)
    dist.all_to_all_single(torch.empty_like(sent), sent, group=group)
    _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class FirstContact:
    """One rank's part in the first contact of all ranks."""

    store: SealedStore
    rank: int
    world: int
    host: str
    """The host of this rank."""
    patience: float
    """Seconds to wait for all ranks to arrive: they build their stages at different speeds."""
    _entries: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def make(self, contacts: Sequence[Contact], limit: float, enter: Callable[[], None]) -> list[TimedContact]:
        """Make `contacts` in a thread, which calls `enter()` first; each must end within `limit` seconds. All ranks
        call this together. Raises DeadEdge (PP-E707) naming ranks and hosts, with the same text on every rank that
        waited."""
        self._write(at=None)
        self._arrive()
        results: SimpleQueue[list[float] | Exception] = SimpleQueue()
        Thread(target=_make_all, args=(contacts, results, enter), name="contacts", daemon=True).start()
        made = []
        for contact in contacts:
            try:
                result = results.get(timeout=limit)
            except Empty:
                self._fail(contact, f"took longer than {limit:g} s")
            else:
                if isinstance(result, Exception):
                    self._fail(contact, f"broke: {reason_of(result)}")
                else:
                    made.append(TimedContact(contact.name, contact.ranks, result[0], min(result)))
        self._write(at=None, over=True)
        return made

    def _write(self, **entry: Any) -> None:
        self.store.set(f"{_KEY}/{self.rank}", {"host": self.host, "over": False, **entry})

    def _read(self, ranks: Sequence[int]) -> dict[int, Mapping[str, Any]]:
        """The entries of these ranks, each as first read."""
        for rank in ranks:
            if rank not in self._entries:
                self._entries[rank] = self.store.get(f"{_KEY}/{rank}")
        return {rank: self._entries[rank] for rank in ranks}

    def _arrive(self) -> None:
        """Wait until all ranks have arrived: their limits begin at the same time."""
        if self.store.plain.add(f"{_KEY}/arrived", 1) == self.world:
            self.store.set(f"{_KEY}/all", True)
        self.store.plain.wait([f"{_KEY}/all"], timedelta(seconds=self.patience))

    def _fail(self, contact: Contact, reason: str) -> None:
        """Report a dead contact, and raise DeadEdge (PP-E707); ranks outside the contact raise a moment later."""
        at = [contact.name, list(contact.ranks)]
        self._write(at=at, how=reason)
        time.sleep(_SETTLE)
        ranks, message = self._dead_contact(at)
        if self.rank not in ranks:
            time.sleep(_SETTLE)  # the ranks of the dead contact fail first
        raise DeadEdge(Problem("PP-E707", message, _REMEDY))

    def _dead_contact(self, at: list[Any]) -> tuple[list[int], str]:
        """(the ranks of the first contact in which all wait or one rank has written nothing, a message)."""
        seen: list[list[Any]] = []
        while at not in seen:
            seen.append(at)
            elsewhere = [entry["at"] for entry in self._read(at[1]).values() if entry["at"] not in (None, at)]
            if not elsewhere:
                break
            at = elsewhere[0]
        name, ranks = at
        entries = self._read(ranks)
        silent = [rank for rank, entry in entries.items() if entry["at"] is None and not entry["over"]]
        reason = next((entry["how"] for entry in entries.values() if entry["at"] == at), "took too long")
        named = [f"rank {rank} on {entry['host']}" for rank, entry in entries.items()]
        if silent:
            return ranks, f"rank {silent[0]} on {entries[silent[0]]['host']} does not answer: {name} {reason}"
        if len(named) == 2:
            return ranks, f"{named[0]} does not reach {named[1]}: {name} {reason}, and both are alive"
        return ranks, f"{', '.join(named)} do not reach each other: {name} {reason}, and all are alive"


def _make_all(
    contacts: Sequence[Contact], results: SimpleQueue[list[float] | Exception], enter: Callable[[], None]
) -> None:
    """Run each contact `_ROUNDS` times and put its seconds into `results`; put an exception and return. Runs in a
    thread."""
    enter()
    for contact in contacts:
        times = []
        try:
            for _ in range(_ROUNDS):
                began = time.perf_counter()
                contact.run()
                times.append(time.perf_counter() - began)
        except Exception as error:
            results.put(error)
            return
        results.put(times)
