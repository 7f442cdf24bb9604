"""An engine of threads and blocking queues that runs a lowered schedule: the judge of `verify`.

Written from the rules of a lowered list alone, and of nothing of ppctl but the schedule's fields. A rank is a thread. A
wire is a pair of queues, sends and posted receives; a message moves when both have one. Every payload is the history of
what it was computed from, so that a message taken for another is found where it is used. In a batched schedule the two
wires from one rank to another are the same queues, and a rank sleeps behind every run of messages until all are over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ppctl.schedule.action import Schedule


class Wrong(Exception):
    """The run went wrong: a deadlock, a payload that is not the wanted one, work that is missing or done twice."""


class Wire:
    def __init__(self, capacity: int) -> None:
        self.pool = (capacity + 1) // 2
        self.may_lag = capacity // 2
        self.sends: deque[list] = deque()
        self.receives: deque[dict] = deque()
        self.unused = 0

    def match(self) -> None:
        while self.sends and self.receives:
            self.receives.popleft()["payload"] = self.sends.popleft()[0]

    def share(self, other: Wire) -> None:
        self.sends, self.receives = other.sends, other.receives


class World:
    """All ranks, one lock, and the rule that nobody may sleep when everybody else does and nothing can change."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.place = schedule.placement
        self.last = self.place.num_stages - 1
        self.wires = {(c.source, c.target, c.direction): Wire(n) for c, n in schedule.capacities.items()}
        if schedule.batched:
            for (source, target, direction), wire in self.wires.items():
                if direction == "B" and (source, target, "F") in self.wires:
                    wire.share(self.wires[source, target, "F"])
        self.moved = threading.Condition()
        self.asleep: dict[int, Callable[[], bool]] = {}
        self.running = len(schedule.actions)
        self.wrong: str = ""

    def fail(self, why: str) -> None:
        self.wrong = self.wrong or why
        self.moved.notify_all()
        raise Wrong(why)

    def sleep_until(self, rank: int, ready: Callable[[], bool]) -> None:
        self.asleep[rank] = ready
        while not ready():
            if self.wrong:
                raise Wrong(self.wrong)
            if len(self.asleep) == self.running and not any(wakes() for wakes in self.asleep.values()):
                self.fail("deadlock")
            self.moved.wait()
        del self.asleep[rank]

    def run(self) -> str:
        threads = [threading.Thread(target=Rank(self, rank).main) for rank in range(self.running)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError("the threads hang without having noticed")
        return self.wrong


class Rank:
    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.made: dict[tuple[str, int, int], object] = {}
        self.inbox: dict[tuple[str, int, int], dict] = {}
        self.reduced: set[int] = set()
        self.batch: list[Callable[[], bool]] = []

    def main(self) -> None:
        world = self.world
        with world.moved:
            try:
                for op, stage, mb in world.schedule.actions[self.rank]:
                    if world.wrong:
                        return
                    if "_F" not in op and "_B" not in op:
                        self.end_batch()
                    getattr(self, str(op).lower())(stage, mb)
                self.end_batch()
                self.check_complete()
            except Wrong:
                pass
            finally:
                world.asleep.pop(self.rank, None)
                world.running -= 1
                world.moved.notify_all()

    def end_batch(self) -> None:
        for is_over in self.batch:
            self.world.sleep_until(self.rank, is_over)
        self.batch = []

    def wire(self, source_stage: int, target_stage: int, direction: str) -> Wire:
        for stage in (source_stage, target_stage):
            if not 0 <= stage <= self.world.last:
                self.world.fail("no such stage")
        source, target = self.world.place.rank_of(source_stage), self.world.place.rank_of(target_stage)
        wire = self.world.wires.get((source, target, direction))
        return wire if wire else self.world.fail("no such wire")

    def take(self, kind: str, stage: int, mb: int, wire: Wire) -> object:
        slot = self.inbox.get((kind, stage, mb))
        if slot is None:
            self.world.fail("its receive was never posted")
        self.world.sleep_until(self.rank, lambda: "payload" in slot)
        wire.unused -= 1
        return slot["payload"]

    def keep(self, kind: str, stage: int, mb: int, payload: object) -> None:
        if (kind, stage, mb) in self.made:
            self.world.fail("done twice")
        if self.world.place.rank_of(stage) != self.rank or not 0 <= mb < self.world.schedule.num_microbatches:
            self.world.fail("not this rank's")
        self.made[kind, stage, mb] = payload

    def f(self, stage: int, mb: int) -> None:
        if stage == 0:
            data: object = ("data", mb)
        elif self.world.place.rank_of(stage - 1) == self.rank:
            data = self.made.get(("F", stage - 1, mb))
        else:
            data = self.take("F", stage, mb, self.wire(stage - 1, stage, "F"))
        if data != ("data" if stage == 0 else f"output {stage - 1}", mb):
            self.world.fail("computed on the wrong input")
        self.keep("F", stage, mb, (f"output {stage}", mb))

    def backward(self, stage: int, mb: int) -> None:
        if ("F", stage, mb) not in self.made:
            self.world.fail("backward before forward")
        if stage == self.world.last:
            data: object = (f"gradient {stage + 1}", mb)
        elif self.world.place.rank_of(stage + 1) == self.rank:
            data = self.made.get(("B", stage + 1, mb))
        else:
            data = self.take("B", stage, mb, self.wire(stage + 1, stage, "B"))
        if data != (f"gradient {stage + 1}", mb):
            self.world.fail("computed on the wrong gradient")
        if stage in self.reduced:
            self.world.fail("a backward after the reduction")
        self.keep("B", stage, mb, (f"gradient {stage}", mb))

    def i(self, stage: int, mb: int) -> None:
        self.backward(stage, mb)
        self.keep("to do", stage, mb, None)

    def b(self, stage: int, mb: int) -> None:
        self.backward(stage, mb)
        self.keep("W", stage, mb, None)

    def w(self, stage: int, mb: int) -> None:
        if ("to do", stage, mb) not in self.made or stage in self.reduced:
            self.world.fail("a weight gradient without its input gradient, or too late")
        self.keep("W", stage, mb, None)

    def send(self, kind: str, stage: int, target: int, mb: int) -> None:
        if (kind, stage, mb) not in self.made:
            self.world.fail("nothing to send yet")
        self.keep(f"sent {kind}", stage, mb, None)
        wire = self.wire(stage, target, kind)
        message = [self.made[kind, stage, mb]]
        wire.sends.append(message)
        wire.match()
        self.world.moved.notify_all()
        if self.world.schedule.batched:
            self.batch.append(lambda: all(waiting is not message for waiting in wire.sends))
        else:
            self.world.sleep_until(self.rank, lambda: len(wire.sends) <= wire.may_lag)

    def receive(self, kind: str, stage: int, source: int, mb: int) -> None:
        wire = self.wire(source, stage, kind)
        if self.world.place.rank_of(stage) != self.rank:
            self.world.fail("not this rank's")
        if (kind, stage, mb) in self.inbox:
            self.world.fail("received twice")
        wire.unused += 1
        if wire.unused > wire.pool:
            self.world.fail("no buffer for this receive")
        self.inbox[kind, stage, mb] = slot = {}
        wire.receives.append(slot)
        wire.match()
        self.world.moved.notify_all()
        if self.world.schedule.batched:
            self.batch.append(lambda: "payload" in slot)

    def send_f(self, stage: int, mb: int) -> None:
        self.send("F", stage, stage + 1, mb)

    def send_b(self, stage: int, mb: int) -> None:
        self.send("B", stage, stage - 1, mb)

    def recv_f(self, stage: int, mb: int) -> None:
        self.receive("F", stage, stage - 1, mb)

    def recv_b(self, stage: int, mb: int) -> None:
        self.receive("B", stage, stage + 1, mb)

    def reduce_grad(self, stage: int, mb: int) -> None:
        for number in range(self.world.schedule.num_microbatches):
            if ("W", stage, number) not in self.made:
                self.world.fail("reduced too early")
        if stage in self.reduced:
            self.world.fail("reduced twice")
        self.reduced.add(stage)

    def check_complete(self) -> None:
        stages = [s for s in range(self.world.last + 1) if self.world.place.rank_of(s) == self.rank]
        count = self.world.schedule.num_microbatches
        if self.reduced != set(stages) or any(("W", s, mb) not in self.made for s in stages for mb in range(count)):
            self.world.fail("something was left out")


def goes_wrong(schedule: Schedule) -> str:
    """Why a lowered schedule with backwards does not run as it should; empty if it does."""
    return World(schedule).run()
