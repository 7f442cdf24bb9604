"""Which hosts a life has: torch's dynamic rendezvous over a TCPStore, whose state is unpickled only with a proof."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousInfo, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from ppctl.errors import ConfigError, Problem, TrainingError
from ppctl.reach.store import unproved

JOIN = timedelta(minutes=10)
"""How long agents wait for one that is missing."""
CAME, _LATE, _SINCE = "ppctl/came", "ppctl/late", time.monotonic()
"""Keys of the store: the count of agents that have reached it, whether `JOIN` is over. When this process began."""
LOST, _PROOF = 15, 32
"""Seconds without a sign of life (three are due in them) after which an agent counts as lost; bytes of a proof."""
_SLOW = 3.0
"""Seconds before each look of an agent without ranks: those with copies in their hosts' memory come first."""


class StandsStillError(RendezvousTimeoutError):
    """A `host` whose agent gives signs of life but does not go on: perhaps it waits for the file system."""

    def __init__(self, host: str, limit: float) -> None:
        super().__init__(f"the agent on {host} lives, but has not gone on for {limit:g} s or more (launch.start_limit)")
        self.host = host


class _SealedBackend(C10dRendezvousBackend):
    """c10d's backend. torch pickles the state, so it travels with an HMAC; one that does not fit raises TrainingError.
    A store that fails once is asked no more: an answer that comes late would be taken for the next one."""

    key, before_look, _lost = b"", staticmethod(lambda: None), False

    def _call_store(self, *operation: Any) -> Any:
        if self._lost:
            raise RendezvousConnectionError
        try:
            return super()._call_store(*operation)
        except RendezvousConnectionError:
            self._lost = True
            raise

    def get_state(self) -> Any:
        self.before_look()
        return self._opened(super().get_state())

    def set_state(self, state: bytes, token: Any = None) -> Any:
        return self._opened(super().set_state(self._proof(state) + state, token))

    def _opened(self, found: Any) -> Any:
        if found is not None and not hmac.compare_digest(found[0][:_PROOF], self._proof(found[0][_PROOF:])):
            raise TrainingError(unproved("torch.rendezvous"))
        return found and (found[0][_PROOF:], *found[1:])

    def _proof(self, state: bytes) -> bytes:
        return hmac.digest(self.key, state, "sha256")


class NodeRendezvous(DynamicRendezvousHandler):
    """torch's handler for as many agents as the run has nodes; `spares` more wait."""

    spares = 0
    shrink, patience = "wait", JOIN
    """`launch.shrink`; and how long the others wait for one in the place of a lost agent, unless it is `wait`."""
    _had_ranks = False
    nobody_comes = False
    """Whether no agent can come in the place of a lost one but spares that are there: then nobody waits for one."""
    all_come = False
    """Whether a cluster makes all agents, sooner or later: the first meeting has no limit."""
    stands_back = 0.0
    """Seconds for which this agent, if it is a spare's, lets the nodes' agents come first to the first meeting."""
    answer: ClassVar[Callable[[], None]] = staticmethod(lambda: None)
    """Called before each look: in the agent that has the store, answers hosts that join."""
    backend: _SealedBackend
    _surplus_since: float | None = None
    _short_since: float | None = None

    @classmethod
    def over(cls, store: Any, run_id: str, key: bytes, nodes: int, spares: int, name: str) -> NodeRendezvous:
        """The handler of the agent `name`. Names decide the order of nodes, and with it that of ranks."""
        # torch tells agents apart by name and process, and a lost pod's successor may have the same two.
        backend, unique = _SealedBackend(store, run_id), f"{name} {secrets.token_hex(4)}"
        handler = cls.from_backend(run_id, store, backend, nodes, nodes, unique, RendezvousTimeout(JOIN), LOST // 3, 3)
        assert isinstance(handler, NodeRendezvous)
        handler.spares, handler.backend, backend.key = spares, backend, key
        backend.before_look = handler._before_look
        return handler

    def _before_look(self) -> None:
        """Wait in an agent without ranks, so that others look first. Raises ConfigError (PP-E658) if it is surplus once
        all lost ones have been noticed, and RendezvousTimeoutError if there are too few agents and no other comes."""
        NodeRendezvous.answer()
        state, now = self._state_holder.state, time.monotonic()
        if self.nobody_comes and self.has_begun:
            # An agent that meets the others anew is not in the state for a moment, and a slow one may come back.
            short = len(state.last_heartbeats) < self.settings.max_nodes and not self._one_comes()
            self._short_since = self._short_since or now if short else None
            if short and now - (self._short_since or now) > LOST:
                raise RendezvousTimeoutError
        if self._had_ranks or not (self._is_complete or state.round):
            return
        waiting = sorted(state.redundancy_list | state.wait_list)
        surplus = self._is_complete and self._this_node in waiting[self.spares :]
        self._surplus_since = self._surplus_since or now if surplus else None
        if surplus and now - (self._surplus_since or now) > LOST:
            message = f"the run has all hosts that it needs: nodes {self.settings.max_nodes}, spares {self.spares}"
            raise ConfigError(Problem("PP-E658", message, f"launch.spares={self.spares + 1}", "launch.spares"))
        time.sleep(_SLOW)

    def _one_comes(self) -> bool:
        """Whether an agent may still come: one that has never come is not lost, but may import. The agent that waits
        longest tells all when that is over: by clocks of their own some would go on smaller while others wait."""
        late = self.backend._call_store("add", _LATE, int(time.monotonic() - _SINCE >= JOIN.total_seconds()))
        return not late and self.backend._call_store("add", CAME, 0) < self.settings.max_nodes + self.spares

    @property
    def _is_complete(self) -> bool:
        return len(self._state_holder.state.participants) == self.settings.max_nodes

    def here(self) -> list[str]:
        """The hosts of all agents that give signs of life."""
        return [node.addr.split(" ")[1] for node in self._state_holder.state.last_heartbeats]

    def host_of(self, group_rank: int) -> str:
        """The host of an agent that has ranks in the present life, by its place in the order of nodes."""
        places = self._state_holder.state.participants
        return next((node.addr.split(" ")[1] for node, place in places.items() if place == group_rank), "a host")

    def farewell(self) -> None:
        """Wait until all agents have seen that the rendezvous is closed: then its host may leave."""
        state = self._state_holder.state
        time.sleep(_SLOW + 2.0 if state.redundancy_list or state.wait_list else 1.5)

    def num_nodes_waiting(self) -> int:
        """1 if this agent has to meet the others anew, because one of this life has gone or the others took this one
        for lost; else 0. torch's own count is 0 without a spare, and counts a spare that came too late for ever."""
        super().num_nodes_waiting()
        return int(not self._is_complete or self._this_node not in self._state_holder.state.participants)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next life that this agent is needed for. Raises RendezvousTimeoutError if agents are missing."""
        until = time.monotonic() + self.stands_back
        while not (self._is_complete or self.has_begun) and time.monotonic() < until:
            super().num_nodes_waiting()  # looks
            time.sleep(1.0)
        while True:
            try:
                info = super().next_rendezvous()
            except RendezvousTimeoutError:
                waits = self.shrink == "wait" if self.has_begun else self.all_come
                if waits or self._is_complete:  # a spare has no limit either
                    continue
                raise
            self._begin()
            return info

    def follow(self) -> None:
        """In a pod, and with shrink=smaller, count this agent among those that had ranks: in the job before it had, or
        stood by. The others then wait for a missing agent as long as for one that is lost later."""
        if self.all_come or self.shrink == "smaller":
            self._begin()

    def _begin(self) -> None:
        self._had_ranks = True
        self.settings.timeout._set_timeouts(join=self.patience)

    @property
    def has_begun(self) -> bool:
        """Whether there was a life of this rendezvous."""
        return self._had_ranks or self._state_holder.state.round > 0
