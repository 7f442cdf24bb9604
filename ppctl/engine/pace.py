"""How far a rank's host may run ahead of its device, and which action the heartbeat names.

On a CPU the host computes, and the heartbeat names the host's action. On a GPU the host only enqueues, and without a
bound it would reach the end of its list while the device is in the first action. Then the heartbeats of all ranks would
be the same when one device hangs, every message of the step would stay allocated until the host looks at its event, and
an error of the device would be raised in a later action. So at most `AHEAD` forwards and backwards are enqueued but not
finished, and the heartbeat names the device's action: a thread follows the device from event to event, also while the
host waits for the device inside a stage.

A pace may follow several lists, one after the other: between them the device is not waited for. `leave` ends the last
list; what the host enqueues from then on belongs to no list, and `settle` does not wait for it.

The bound causes no deadlock: a host that waits for an action of its own list has enqueued everything before that
action, which is all that a rank in `verify`'s rule of execution has done when it waits there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from threading import Semaphore, Thread
from time import perf_counter
from typing import Protocol

import torch

AHEAD = 4
"""The most forwards and backwards in a GPU's queue: enough that the device never waits for its host."""
HELD = 2 * AHEAD
"""Sent messages whose memory may not be free yet, beyond the channels' capacities."""


class Heartbeat(Protocol):
    """A listener that is called before and within each action."""

    def enter(self, index: int) -> None:
        """The action with this index in the rank's list begins."""

    def work(self, index: int) -> None:
        """The action has its message, and begins to compute."""


class HostPace:
    """The pace if the host computes: the current action is the one that the host is in."""

    __slots__ = ("at", "begin", "ended", "heartbeat", "length")

    def __init__(self, length: int, heartbeat: Heartbeat) -> None:
        self.length = length
        self.heartbeat = heartbeat
        self.at = 0
        """The index of the current action of the host or the device."""
        self.begin = heartbeat.work
        self.ended = 0.0
        """The time at which the last list ended, on the host's clock (`perf_counter`)."""

    def enter(self, index: int) -> None:
        """The host turns to an action."""
        self.at = index
        self.heartbeat.enter(index)

    def end(self, index: int) -> None:
        """The forward or backward is over."""

    def sent(self, index: int) -> None:
        """The send is started, and older ones were waited for if they had to be."""

    def finish(self, flush: Callable[[], None]) -> None:
        """The list is over, except for the messages that `flush` waits for."""
        self.heartbeat.enter(self.length)
        flush()
        self.ended = perf_counter()

    def leave(self, flush: Callable[[], None]) -> None:
        """Do nothing: every list is over."""

    def settle(self) -> None:
        """Do nothing: every list is over."""

    def abandon(self) -> None:
        """The list has failed."""


class DevicePace:
    """The pace if a device computes what the host enqueues, at most `ahead` forwards and backwards later.

    Every list ends in `finish`, and the last of several also in `leave` and `settle`; one that fails ends in `abandon`.
    """

    def __init__(
        self,
        length: int,
        heartbeat: Heartbeat,
        make_event: Callable[[], torch.cuda.Event],
        ahead: int = AHEAD,
        on_device: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.length = length
        self.heartbeat = heartbeat
        self.make_event = make_event
        self.at = 0
        self.ended = 0.0
        """The time at which the device passed the last mark so far."""
        self._list = 0
        """The number of the list that the host is in."""
        self._on_device = on_device
        self._free = Semaphore(ahead)
        self._events: list[torch.cuda.Event] = []
        self._marks: SimpleQueue[tuple[int, int, bool, torch.cuda.Event] | None] = SimpleQueue()
        """(list, action, whether it begins to compute here, mark), in the order of the device's queue; None ends it."""
        self._made = self._passed = 0
        self._failure: tuple[int, Exception] | None = None
        self._thread: Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether the device has finished everything enqueued: then the current action is the host's."""
        return self._passed == self._made

    def enter(self, index: int) -> None:
        """The host turns to an action, which the device may reach later; action 0 begins a list."""
        self._list += not index
        self.at = index
        if self.idle:
            self.heartbeat.enter(index)

    def begin(self, index: int) -> None:
        """Wait until the host may enqueue its next forward or backward. Raises the device's error if it has failed."""
        self._free.acquire()
        self._raise_failure()
        self._mark(index, begins=True)

    def end(self, index: int) -> None:
        """The forward or backward is enqueued."""
        self._mark(index, begins=False)

    def sent(self, index: int) -> None:
        """A send is enqueued, and the device waits for older ones if it has to."""
        self._mark(index, begins=False)

    def finish(self, flush: Callable[[], None]) -> None:
        """The host has reached the end of its list; the device is still followed, but not waited for."""
        self._mark(self.length, begins=False)

    def leave(self, flush: Callable[[], None]) -> None:
        """The host is through the last list, and goes on to other work when `flush` has returned."""
        flush()
        self._mark(self.length, begins=False)

    def settle(self) -> None:
        """Return when the device has finished every list, without what followed `leave`; or raise its error."""
        self._marks.put(None)
        assert self._thread is not None  # the thread follows the marks
        self._thread.join()
        self._thread = None
        self._raise_failure()

    def abandon(self) -> None:
        """The list has failed: the device, which may never reach the end of its queue, is not waited for."""
        self._marks.put(None)

    def _mark(self, index: int, *, begins: bool) -> None:
        event = self._events.pop() if self._events else self.make_event()
        event.record()
        self._made += 1
        self._marks.put((self._list, index, begins, event))
        if self._thread is None:
            self._thread = Thread(target=self._follow, name="pace", daemon=True)
            self._thread.start()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self.at, error = min(self._failure[0], self.length - 1), self._failure[1]
            raise error

    def _follow(self) -> None:
        """Follow the device through the list, from mark to mark."""
        computing = False
        with self._on_device():
            while (mark := self._marks.get()) is not None:
                number, index, begins, event = mark
                if self._failure is None:
                    self._pass(number, index, event, begins=begins, enters=not computing)
                if computing and not begins:
                    self._free.release()
                computing = begins
                self._events.append(event)
                self.ended = perf_counter()
                self._passed += 1

    def _pass(self, number: int, index: int, event: torch.cuda.Event, *, begins: bool, enters: bool) -> None:
        """Wait until the device has passed one mark, and move the heartbeat. Runs in the watching thread."""
        if enters:
            self.heartbeat.enter(index)
        try:
            event.synchronize()
        except Exception as error:  # the current action stays where the device failed
            self._failure = index, error
            return
        if begins:
            self.heartbeat.work(index)
        if self._marks.empty() and (self._list, self.at) > (number, index):  # the host itself waits for a message
            self.heartbeat.enter(self.at)


def make_pace(device: torch.device, length: int, heartbeat: Heartbeat | None) -> HostPace | DevicePace:
    """The pace on a device, for a list of `length` actions."""
    heartbeat = _Silence() if heartbeat is None else heartbeat
    if device.type != "cuda":
        return HostPace(length, heartbeat)
    # A blocking event frees the core while it waits: the hosts of several ranks, and autograd's threads, share few.
    return DevicePace(
        length, heartbeat, lambda: torch.cuda.Event(blocking=True), on_device=lambda: torch.cuda.device(device)
    )


class _Silence:
    """The heartbeat of an engine that has none."""

    def enter(self, index: int) -> None:
        """Do nothing."""

    def work(self, index: int) -> None:
        """Do nothing."""
