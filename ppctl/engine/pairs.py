"""A forward and a backward of one rank that advance in turns (`turns`), action by action of a schedule's pairs.

While the exchange of one is under way the other computes. Knows stamps and the order in which halves end. Must not know
stages' work or schedules' policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from ppctl.engine.recorder import Recorder
from ppctl.schedule.action import Action, Pair, Schedule
from ppctl.turns import Turns
from ppctl.weight_gradients.put_off import keep_collecting


def pairs_of(schedule: Schedule, actions: Sequence[Action]) -> dict[Action, Action]:
    """Forward -> backward of the pairs in a rank's list whose backward follows directly."""
    return dict(pair for pair in pairwise(actions) if Pair(*pair) in schedule.pairs) if schedule.pairs else {}


class Pairs:
    """Runs the halves of a pair, and stamps them: the one that ends first has the time up to its end, the other the
    rest. Their times add up to the pair's."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self.recorder = recorder
        # The device and its stream are a thread's own; kernels of both halves go into the queue of the engine's.
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def initialize() -> None:
            if stream is not None:
                torch.cuda.set_device(device)
                torch.cuda.set_stream(stream)

        self._turns = Turns(initialize, keep_collecting)
        self.failed = 0
        """The index of the half that failed, after `run` has raised."""

    def run(self, first: int, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run both; `first` is the forward's index in the list, the backward's is the next one."""
        running = [first, first + 1]
        for index in running:
            self.recorder.begin(index)

        def half(index: int, work: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                try:
                    work()
                except Exception:
                    self.failed = index
                    raise
                self.recorder.end(index)
                running.remove(index)
                for other in running:
                    self.recorder.begin(other)

            return run

        self._turns.run(half(first, forward), half(first + 1, backward))
