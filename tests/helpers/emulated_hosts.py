"""Threads of which one at a time runs, when it is chosen, and which wait for something to become true.

Knows whose turn it is, and what a process has once that every rank has of its own. Must not know devices: who is
chosen, and when nothing can move any more, a `World` decides.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ppctl.comm import turns
from ppctl.weight_gradients.put_off import keep_collecting


class Ended(BaseException):
    """Raised in a thread that still waits when its world has ended. No `except Exception` may hold it up."""


class Actor:
    """A thread that runs only when it has the turn."""

    def __init__(self, turns: Turns, rank: int, name: str, body: Callable[[], object]) -> None:
        self.turns, self.rank, self.name, self.body = turns, rank, name, body
        self.ready: Callable[[], bool] = _always
        self.why = "to begin"
        self.is_over = False
        self.pair: HostPair | None = None
        self.result: object = None
        self.failure: BaseException | None = None
        self.turn = threading.Semaphore(0)
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def wait(self, ready: Callable[[], bool], why: str) -> None:
        """Give the turn away until `ready`."""
        self.ready, self.why = ready, why
        restore = keep_collecting()
        self.turns.returned.release()
        self.turn.acquire()
        restore()
        if self.turns.are_over:
            raise Ended(why)

    def adopt(self) -> None:
        """The calling thread computes for this actor, while the actor's own one waits for it."""
        _own.actor = self

    def _run(self) -> None:
        self.turn.acquire()
        self.adopt()
        try:
            if not self.turns.are_over:
                self.result = self.body()
        except BaseException as error:
            self.failure = error
        self.is_over = True
        self.turns.returned.release()


class Turns:
    """All actors of a world. The thread that calls `give` has the turn whenever no actor has it."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.returned = threading.Semaphore(0)
        self.are_over = False

    def spawn(self, rank: int, name: str, body: Callable[[], object]) -> Actor:
        """A new actor on behalf of `rank`."""
        actor = Actor(self, rank, name, body)
        self.actors.append(actor)
        return actor

    @property
    def movable(self) -> list[Actor]:
        """The actors that can go on."""
        return [actor for actor in self.actors if not actor.is_over and actor.ready()]

    def give(self, actor: Actor) -> None:
        """Let an actor run until it gives the turn back."""
        restore = keep_collecting()
        actor.turn.release()
        self.returned.acquire()
        restore()

    def end(self) -> None:
        """End all threads that still wait."""
        self.are_over = True
        for actor in self.actors:
            if not actor.is_over:
                self.give(actor)


_own = threading.local()


def _always() -> bool:
    return True


def _nothing() -> None:
    """What the thread of a pair's second half does before it begins."""


def current_actor() -> Actor:
    """The actor whose thread calls this."""
    actor: Actor = _own.actor
    return actor


def take_turns() -> None:
    """Let others run, and go on when chosen again."""
    current_actor().wait(_always, "for its next turn")


class HostPair(turns.Turns):
    """`ppctl.comm.turns.Turns`: both halves of a pair are the actor that runs it, with `enter()` in the second's
    thread."""

    enter: Callable[[], object] = staticmethod(_nothing)

    def __init__(self, initialize: Callable[[], None], keep: Callable[[], Callable[[], None]]) -> None:
        actor = current_actor()

        def begin() -> None:
            actor.adopt()
            self.enter()
            initialize()

        super().__init__(begin, keep)

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        actor = current_actor()
        actor.pair = self
        try:
            super().run(first, second)
        finally:
            actor.pair = None


def hand_over() -> None:
    """`ppctl.comm.turns.hand_over`, of the caller's rank."""
    pair = current_actor().pair
    if pair is not None:
        pair.hand_over()


@dataclass(eq=False)
class HostSemaphore:
    """`threading.Semaphore`."""

    value: int

    def acquire(self) -> None:
        current_actor().wait(lambda: self.value > 0, "for a semaphore")
        self.value -= 1

    def release(self) -> None:
        self.value += 1


class HostQueue:
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self.items: deque[object] = deque()

    def put(self, item: object) -> None:
        self.items.append(item)

    def get(self) -> object:
        current_actor().wait(lambda: bool(self.items), "for a queue's item")
        return self.items.popleft()

    def empty(self) -> bool:
        return not self.items


class HostThread:
    """`threading.Thread`: an actor beside the one that starts it."""

    def __init__(self, *, target: Callable[[], object], name: str, daemon: bool) -> None:
        self.target, self.name = target, name

    def start(self) -> None:
        starter = current_actor()
        self.actor = starter.turns.spawn(starter.rank, f"{self.name} of {starter.name}", self.target)

    def join(self) -> None:
        current_actor().wait(lambda: self.actor.is_over, f"for {self.name} to end")
