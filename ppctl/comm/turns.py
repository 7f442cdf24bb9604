"""Two pieces of work on one rank that take turns: while one piece waits for an exchange, the other piece computes.

A piece runs until it calls `hand_over`, between the start of an exchange and the wait for it; then the other piece
runs, until it hands over in turn or ends. One of the two runs at any moment, and nothing else decides where they
change: ranks that run the same pair start their exchanges in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class _Abandoned(BaseException):
    """Ends a piece, at the place where it waits for its turn, if the other piece has failed."""


class Turns:
    """Runs pairs of pieces, one pair at a time: the first in the caller's thread, the second in a separate thread.

    `initialize` is called once in that thread. `keep` saves global state that belongs to one piece, and returns a
    function that restores it: each piece starts with the state at the call of `run`, finds its state again at each
    turn, and leaves none behind. Not for use by two threads at once.
    """

    current: Turns | None = None
    """The Turns that runs a pair in this process now."""

    def __init__(
        self,
        initialize: Callable[[], None] = lambda: None,
        keep: Callable[[], Callable[[], None]] = lambda: lambda: None,
    ) -> None:
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, "pair", initialize)
        self._changed = threading.Condition()
        self._running = 0
        self._ended = [False, False]
        self._failed = False

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both pieces to their ends; `first` starts. Raises what a piece raises; the other piece then stops."""
        self._running, self._ended, self._failed = 0, [False, False], False
        restore = self._keep()
        Turns.current = self
        try:
            other = self._thread.submit(self._second, second, restore)
            try:
                self._piece(0, first)
            finally:
                other.exception()  # waits until the piece ends
            other.result()
        finally:
            Turns.current = None
            restore()

    def hand_over(self) -> None:
        """Let the other piece run; returns when the other has handed back, or immediately if it has ended.

        Only the running piece calls this, from any thread that does its work.
        """
        with self._changed:
            piece = self._running
            if self._ended[1 - piece]:
                return
            restore = self._keep()
            self._give(1 - piece)
            self._wait_for(piece)
            restore()

    def _second(self, piece: Callable[[], None], restore: Callable[[], None]) -> None:
        """The second thread's work: wait for the first turn, then run `piece`. Raises its errors; returns if the first
        piece failed."""
        with self._changed:
            try:
                self._wait_for(1)
            except _Abandoned:
                return
        restore()
        self._piece(1, piece)

    def _piece(self, number: int, piece: Callable[[], None]) -> None:
        """Run one piece in its thread; however it ends, the other piece gets the turn."""
        try:
            piece()
        except _Abandoned:
            pass
        except BaseException:
            self._failed = True
            raise
        finally:
            with self._changed:
                self._ended[number] = True
                self._give(1 - number)

    def _give(self, piece: int) -> None:
        self._running = piece
        self._changed.notify_all()

    def _wait_for(self, piece: int) -> None:
        self._changed.wait_for(lambda: self._running == piece)
        if self._failed:
            raise _Abandoned


def hand_over() -> None:
    """In a pair: let the other piece compute while this one's exchange is under way. Elsewhere nothing happens."""
    if Turns.current is not None:
        Turns.current.hand_over()
