"""The first contact of ranks before they train: every edge and every group once, timed, each with its own limit.

Knows the rendezvous store, through which ranks still talk when a connection between them is dead. Must not know what a
contact does, plans, runs or configs.

Every rank goes through its contacts in one order that all share, so that nobody waits in a circle. When one takes too
long, many ranks may stand still, and only some of them in front of what is dead: each writes into the store where it
stands, and all follow these words to the same end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from ppctl.errors import Problem, TrainingError
from ppctl.reach.gloo_failures import in_words

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ROUNDS = 3
"""Messages of one contact: the first makes the connection, the best of them tells how fast it is."""
_KEY = "ppctl/contact"
_SETTLE = 1.0
"""Seconds after a limit for all that stand still to have said where."""


class Contact(NamedTuple):
    """Something that several ranks do together."""

    name: str
    """As a person reads it: `channel 0->1 F`, `group dp`."""
    ranks: tuple[int, ...]
    """Global ranks; of an edge the sender first."""
    run: Callable[[], None]
    """One message, or one collective."""


@dataclass(frozen=True, slots=True)
class Made:
    """A contact that came about."""

    name: str
    ranks: tuple[int, ...]
    first_s: float
    """Seconds of the first message, waiting for the other ranks included."""
    best_s: float
    """Seconds of the fastest."""


class DeadEdge(TrainingError):
    """Two ranks do not reach each other, or one answers nobody."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where one rank meets the others. `host` is its own."""

    store: Store
    rank: int
    world: int
    host: str
    patience: float
    """Seconds to wait for all ranks to arrive: they build their stages at different speeds."""
    words: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def make_contact(self, contacts: Sequence[Contact], limit: float, enter: Callable[[], None]) -> list[Made]:
        """Make `contacts`, each within `limit` seconds from when this rank turns to it; in a thread, after `enter()`.

        Raises DeadEdge (PP-E707), which names ranks and hosts, alike on every rank that had to wait.
        """
        self._say(at=None)
        self._arrive()
        results: SimpleQueue[list[float] | Exception] = SimpleQueue()
        Thread(target=_make_all, args=(contacts, results, enter), name="contacts", daemon=True).start()
        made = []
        for contact in contacts:
            try:
                found = results.get(timeout=limit)
            except Empty:
                self._complain(contact, f"took longer than {limit:g} s")
            else:
                if isinstance(found, Exception):
                    self._complain(contact, f"broke: {in_words(found)}")
                else:
                    made.append(Made(contact.name, contact.ranks, found[0], min(found)))
        self._say(at=None, over=True)
        return made

    def _say(self, **word: Any) -> None:
        self.store.set(f"{_KEY}/{self.rank}", json.dumps({"host": self.host, "over": False, **word}))

    def _arrive(self) -> None:
        """The clocks of all ranks start together."""
        if self.store.add(f"{_KEY}/arrived", 1) == self.world:
            self.store.set(f"{_KEY}/all", "1")
        self.store.wait([f"{_KEY}/all"], timedelta(seconds=self.patience))

    def _complain(self, contact: Contact, what: str) -> None:
        self._say(at=[contact.name, list(contact.ranks)], what=what)
        time.sleep(_SETTLE)
        ranks, message = self._verdict([contact.name, list(contact.ranks)])
        if self.rank not in ranks:
            time.sleep(_SETTLE)  # those whom it concerns speak first
        raise DeadEdge(Problem("PP-E707", message, _REMEDY))

    def _heard(self, rank: int) -> Mapping[str, Any]:
        if rank not in self.words:
            self.words[rank] = json.loads(self.store.get(f"{_KEY}/{rank}"))
        return self.words[rank]

    def _verdict(self, at: list[Any]) -> tuple[list[int], str]:
        """Follow from contact to contact until one in which all stand still, or with a rank that says nothing.

        Returns its ranks and what to tell.
        """
        seen: list[list[Any]] = []
        while at not in seen:
            seen.append(at)
            words = {rank: self._heard(rank) for rank in at[1]}
            elsewhere = [word["at"] for word in words.values() if word["at"] not in (None, at)]
            if not elsewhere:
                break
            at = elsewhere[0]
        words = {rank: self._heard(rank) for rank in at[1]}
        silent = [rank for rank, word in words.items() if word["at"] is None and not word["over"]]
        what = next((word["what"] for word in words.values() if word["at"] == at), "took too long")
        named = [f"rank {rank} on {word['host']}" for rank, word in words.items()]
        if silent:
            return at[1], f"rank {silent[0]} on {words[silent[0]]['host']} does not answer: {at[0]} {what}"
        if len(named) == 2:
            return at[1], f"{named[0]} does not reach {named[1]}: {at[0]} {what}, and both are alive"
        return at[1], f"{', '.join(named)} do not reach each other: {at[0]} {what}, and all are alive"


_REMEDY = "ppctl doctor, started on these hosts as the run was, times their edges; launch.edge_limit=5m waits longer"


def _make_all(
    contacts: Sequence[Contact], results: SimpleQueue[list[float] | Exception], enter: Callable[[], None]
) -> None:
    enter()
    for contact in contacts:
        times = []
        try:
            for _ in range(ROUNDS):
                began = time.perf_counter()
                contact.run()
                times.append(time.perf_counter() - began)
        except Exception as error:
            results.put(error)
            return
        results.put(times)
