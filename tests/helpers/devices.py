"""Ranks whose hosts only enqueue and whose devices compute in order: what DevicePace bounds, without a device.

Every host is a thread. A device passes marks and finishes computations as soon as what they depend on is finished on
whichever device; one computation may be stuck. That nothing moves any more is found by no progress being possible.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from ppctl.engine.pace import DevicePace
from ppctl.records.rank_records import RankState
from ppctl.schedule.action import COMPUTE, MESSAGES, SENDS, Action, Schedule, deps


class NothingMoves(Exception):
    """Every host that is not through waits for a device, and no device can go on."""


@dataclass
class Beat:
    """A heartbeat: the last place, whether the action has its message, and a clock that counts changes of all ranks."""

    clock: list[int]
    index: int = -1
    working: bool = False
    since: int = 0

    def enter(self, index: int) -> None:
        self._set(index, False)

    def work(self, index: int) -> None:
        self._set(index, True)

    def _set(self, index: int, working: bool) -> None:
        self.clock[0] += 1
        self.index, self.working, self.since = index, working, self.clock[0]


class Slots:
    """A semaphore of the pace's that says, at every moment, whether its host stands at it."""

    def __init__(self, ranks: Ranks, rank: int, free: int) -> None:
        self.ranks, self.rank, self.free = ranks, rank, free
        self.changed = threading.Condition()

    def acquire(self) -> None:
        with self.changed:
            if not self.free:
                self.ranks.hosts[self.rank] = "begins"
                self.changed.wait_for(lambda: self.free)
            self.free -= 1

    def release(self) -> None:
        with self.changed:
            self.free += 1
            if self.ranks.hosts[self.rank] == "begins":
                self.ranks.hosts[self.rank] = "runs"
            self.changed.notify_all()


@dataclass
class Ranks:
    """All ranks of one pipeline; `stuck` never ends."""

    schedule: Schedule
    ahead: int
    stuck: Action | None = None
    waits_inside: Action | None = None
    """An action whose stage waits for its own device."""
    finished: set[Action] = field(default_factory=set)
    most_ahead: int = 0
    """The most computations that were enqueued on one device and not finished."""

    def __post_init__(self) -> None:
        self.queues: list[deque] = [deque() for _ in self.schedule.actions]
        self.moved = threading.Condition()
        self.waited_for: list[Mark | None] = [None] * len(self.queues)
        self.hosts: list[str] = ["runs"] * len(self.queues)
        self.paces: list[DevicePace | None] = [None] * len(self.queues)
        self.over = False
        clock = [0]
        self.beats = [Beat(clock) for _ in self.schedule.actions]

    def run(self) -> None:
        """Run all hosts to their ends, or until nothing moves."""
        hosts = [threading.Thread(target=self._host, args=(r,)) for r in range(len(self.queues))]
        for host in hosts:
            host.start()
        for host in hosts:
            host.join()

    def states(self) -> list[RankState]:
        """As `status` would read them."""
        return [RankState(r, "training", 0, b.index, float(b.since), b.working) for r, b in enumerate(self.beats)]

    def _host(self, rank: int) -> None:
        row = self.schedule.actions[rank]
        pace = DevicePace(len(row), self.beats[rank], lambda: Mark(self, rank), self.ahead)
        pace._free = Slots(self, rank, self.ahead)
        self.paces[rank] = pace
        try:
            for index, action in enumerate(row):
                pace.enter(index)
                if action.op in COMPUTE:
                    # The wait for its message stands in the queue, in front of the mark of its begin.
                    self._enqueue(rank, ("needs", action))
                    pace.begin(index)
                    self._enqueue(rank, ("compute", action))
                    if action == self.waits_inside:
                        self._wait_inside(rank)
                    pace.end(index)
                elif action.op in SENDS:
                    pace.sent(index)
            self.hosts[rank] = "finishes"
            pace.finish(lambda: None)
            pace.leave(lambda: None)
            pace.settle()
        except NothingMoves:
            pace.abandon()
        self.hosts[rank] = "done"

    def _wait_inside(self, rank: int) -> None:
        """As a stage that reads a count off its device."""
        mark = Mark(self, rank)
        mark.record()
        self.hosts[rank] = "waits"
        self.wait_for(mark, host=True)
        self.hosts[rank] = "runs"

    def _quiet(self, rank: int) -> bool:
        """Whether neither the rank's host nor what follows its device can do anything."""
        pace, mark = self.paces[rank], self.waited_for[rank]
        if pace is None:
            return False
        host = self.hosts[rank]
        return host != "runs" and (
            host == "done" or (mark is not None and not mark.passed) or (host == "waits" and pace.idle)
        )

    def _enqueue(self, rank: int, entry: tuple) -> None:
        with self.moved:
            self.queues[rank].append(entry)
            ahead = sum(kind == "compute" for kind, _ in self.queues[rank])
            self.most_ahead = max(self.most_ahead, ahead)
            self._advance()

    def _ready(self, action: Action) -> bool:
        """Whether all that the action follows from is finished: messages arrive as soon as they are made."""
        needs = list(deps(action, self.schedule))
        while needs:
            need = needs.pop()
            if need.op in MESSAGES:
                needs += deps(need, self.schedule)
            elif need not in self.finished:
                return False
        return True

    def _advance(self) -> None:
        """Let every device go on as far as it can."""
        progress, again = False, True
        while again:
            again = False
            for queue in self.queues:
                while queue:
                    kind, what = queue[0]
                    if kind == "needs" and not self._ready(what):
                        break
                    if kind == "compute" and what == self.stuck:
                        break
                    if kind == "compute":
                        self.finished.add(what)
                    elif kind == "mark":
                        what.passed = True
                    queue.popleft()
                    progress = again = True
        if progress:
            self.moved.notify_all()

    def wait_for(self, mark: Mark, *, host: bool = False) -> None:
        with self.moved:
            self._advance()
            if not host:
                self.waited_for[mark.rank] = mark
            while not mark.passed and not self.over:
                self.over = all(map(self._quiet, range(len(self.queues))))
                # Hosts tell nobody that they have come to stand: one looks again.
                self.moved.wait(0.01)
            self.moved.notify_all()
            if not mark.passed:
                raise NothingMoves


@dataclass(eq=False)
class Mark:
    """An event of a device."""

    ranks: Ranks
    rank: int
    passed: bool = False

    def record(self) -> None:
        self.passed = False
        self.ranks._enqueue(self.rank, ("mark", self))

    def synchronize(self) -> None:
        self.ranks.wait_for(self)
