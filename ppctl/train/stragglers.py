"""Finds ranks that compute slower than others with the same stages, by the seconds that every step reports.

Ranks that wait for each other inside a forward (tensor parallelism, exchanges of experts' rows) are slow together: the
warning names only the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ppctl.errors import Problem
from ppctl.plan import Plan
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.trace import step_time

WINDOW = 20
"""Steps over which a rank is compared."""
SLOWER = 1.07
"""A rank is slow if its median time is above this many times its peers'. Ten per cent are found despite noise of a few
per cent, since the noise's median over the window is smaller."""


class Stragglers:
    """Compares ranks' seconds in the last steps with their peers'. `stages` [ranks, chunks] are the ranks' stages."""

    def __init__(self, plan: Plan, stages: npt.NDArray[np.int64]) -> None:
        self.plan, self.stages = plan, stages
        self.peers = np.lexsort(stages.T[::-1]).reshape(plan.sizes.pp, -1)
        """[pp, peers]: the ranks that have the same stages."""
        self.ratios = np.ones((WINDOW, *self.peers.shape))
        """The seconds of each rank, divided by its peers' usual seconds, in the last steps."""
        self.steps, self.named = 0, frozenset[int]()

    def note(self, step: int, seconds: npt.NDArray[np.float64]) -> Problem | None:
        """Take a step's busy seconds of stages [ranks, chunks]; one with a rank of 0 seconds is ignored. Returns a
        warning if ranks have become slow, else None."""
        busy = seconds.sum(1)[self.peers]
        if self.peers.shape[1] < 2 or not busy.all():
            return None
        # The lower median: of two ranks the faster is usual.
        usual = np.sort(busy, axis=1)[:, (busy.shape[1] - 1) // 2]
        self.ratios[self.steps % WINDOW] = busy / usual[:, None]
        self.steps += 1
        if self.steps < WINDOW:
            return None
        medians = np.median(self.ratios, axis=0)
        slow = frozenset(self.peers[medians > SLOWER].tolist())
        before, self.named = self.named, slow
        if not slow - before:
            return None
        place = np.unravel_index(int(medians.argmax()), medians.shape)
        return self._warning(step, int(self.peers[place]), float(medians[place]), len(slow), seconds)

    def _warning(self, step: int, rank: int, ratio: float, number: int, seconds: npt.NDArray[np.float64]) -> Problem:
        own = self.stages[rank].tolist()
        usual = [float(np.median(seconds[self.stages == stage])) for stage in range(self.stages.max() + 1)]
        now, without = (self._simulated(usual, own, factor) for factor in (ratio, 1.0))
        named = f"stage {own[0]}" if len(own) == 1 else f"stages {', '.join(map(str, own))}"
        others = f" (and {number - 1} more ranks are slow)" if number > 1 else ""
        message = (
            f"step {step}: rank {rank} ({named}) computed {ratio - 1:.0%} slower than usual with its stages in "
            f"the last {WINDOW} steps{others}; this makes a schedule call {now / without - 1:.1%} longer"
        )
        return Problem("PP-E825", message, "nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE   # on its host")

    def _simulated(self, seconds: Sequence[float], slow: Sequence[int], factor: float) -> float:
        """The seconds of a schedule call if stages take `seconds`, and the slow ones `factor` times as long. A third of
        a stage's seconds are its forwards."""
        by_stage = [each * (factor if stage in slow else 1.0) / 3 for stage, each in enumerate(seconds)]
        per_call = max(1, self.plan.num_microbatches)
        costs = Costs([each / per_call for each in by_stage], [2 * each / per_call for each in by_stage])
        return step_time(simulate(self.plan.schedule, costs))
