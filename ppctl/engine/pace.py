"""How far a rank's host may run ahead of its device, and where the rank is said to be.

Knows a heartbeat, and on a GPU two events for each action under way. Must not know what actions do.

On a CPU the host computes: it is where it says. On a GPU it only enqueues, and without a bound it would be through with
its list while the device is in the first action. Then every rank's record says the same when one device hangs, every
message of the step stays allocated until the host looks at its event, and an error of the device is told in a later
action. So before a forward or backward is enqueued, the one `AHEAD` before it has ended on the device; and what the
record says is where the device is.

No deadlock comes of it: a host that waits for an action of its own list has enqueued all before that action, which is
all that a rank in `verify`'s rule of execution has done when it waits there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

AHEAD = 4
"""Forwards and backwards that a GPU has in its queue at most: enough to never run dry."""


class Heartbeat(Protocol):
    """Where the engine says what it is about to do."""

    def enter(self, index: int) -> None:
        """The action with this index in the rank's list begins."""

    def work(self, index: int) -> None:
        """The action has the message that it waited for, and computes."""


class Event(Protocol):
    """A mark on a device's queue."""

    def record(self) -> None:
        """Set the mark behind what is enqueued now."""

    def synchronize(self) -> None:
        """Return when the device has passed it."""


class HostPace:
    """The host computes: actions are where it is."""

    __slots__ = ("at", "begin", "heartbeat", "length")

    def __init__(self, length: int, heartbeat: Heartbeat) -> None:
        self.length = length
        self.heartbeat = heartbeat
        self.at = 0
        """The action that fails, if something does."""
        self.begin = heartbeat.work

    def enter(self, index: int) -> None:
        """The host turns to an action."""
        self.at = index
        self.heartbeat.enter(index)

    def end(self, index: int) -> None:
        """The forward or backward is over."""

    def finish(self, flush: Callable[[], None]) -> None:
        """The list is over but for what `flush` waits for."""
        self.heartbeat.enter(self.length)
        flush()


class DevicePace:
    """A device computes what the host enqueues, at most `ahead` forwards and backwards later."""

    __slots__ = ("_ahead", "_free", "_under_way", "at", "heartbeat", "length", "make_event")

    def __init__(self, length: int, heartbeat: Heartbeat, make_event: Callable[[], Event], ahead: int = AHEAD) -> None:
        self.length = length
        self.heartbeat = heartbeat
        self.make_event = make_event
        self.at = 0
        self._ahead = ahead
        self._free: list[tuple[Event, Event]] = []
        self._under_way: deque[tuple[int, tuple[Event, Event]]] = deque()
        heartbeat.enter(0)

    def enter(self, index: int) -> None:
        """The host turns to an action: nobody has to know."""
        self.at = index

    def begin(self, index: int) -> None:
        """The host is about to enqueue a forward or backward, behind the wait for its message."""
        while len(self._under_way) >= self._ahead:
            self._wait_for_oldest()
        self.at = index
        marks = self._free.pop() if self._free else (self.make_event(), self.make_event())
        marks[0].record()
        self._under_way.append((index, marks))

    def end(self, index: int) -> None:
        """It is enqueued."""
        self._under_way[-1][1][1].record()

    def finish(self, flush: Callable[[], None]) -> None:
        """Return when the device is through with the list, and what `flush` waits for is over."""
        while self._under_way:
            self._wait_for_oldest()
        self.at = self.length - 1
        self.heartbeat.enter(self.length)
        flush()
        over = self.make_event()
        over.record()
        over.synchronize()

    def _wait_for_oldest(self) -> None:
        index, marks = self._under_way[0]
        self.at = index
        self.heartbeat.enter(index)
        marks[0].synchronize()
        self.heartbeat.work(index)
        marks[1].synchronize()
        self._under_way.popleft()
        self._free.append(marks)


def make_pace(device: torch.device, length: int, heartbeat: Heartbeat | None) -> HostPace | DevicePace:
    """The pace on a device, for a list of `length` actions."""
    heartbeat = _Silence() if heartbeat is None else heartbeat
    if device.type != "cuda":
        return HostPace(length, heartbeat)
    # Waiting gives the core away: several ranks' hosts, and autograd's threads, share few of them.
    return DevicePace(length, heartbeat, lambda: torch.cuda.Event(blocking=True))


class _Silence:
    """The heartbeat of an engine that has none."""

    def enter(self, index: int) -> None:
        """Nobody listens."""

    def work(self, index: int) -> None:
        """Nobody listens."""
