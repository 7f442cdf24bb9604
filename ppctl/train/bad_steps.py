"""Bad steps: their gradient norm is not finite, or far above the usual. All ranks see one norm, and judge alike."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np
import torch

from ppctl.config.quantities import rollback_of
from ppctl.config.schema import TrainConfig
from ppctl.errors import Problem, TrainingError
from ppctl.train.grad_norm import GradNorm

REMEMBERED, NEEDED = 100, 20
"""(most, least) updates whose median norm decides what a spike is."""
MOST_IN_A_ROW = 10
"""The most bad steps in a row; the run stops at the next one."""


class NormLimit:
    """The largest norm of a good step, from the norms of the updates before it."""

    def __init__(self, train: TrainConfig) -> None:
        self.goes_on, self.factor = train.on_bad_step != "stop", train.spike_factor
        self.back = rollback_of(train.on_bad_step)
        """The least steps between a bad step and the checkpoint to go back to; 0 if the run does not go back."""
        self.goes_back = False
        """Whether the last step makes the run go back."""
        self.norms: deque[float] = deque(maxlen=REMEMBERED)
        self.in_a_row = 0
        """Bad steps since the last update."""

    def value(self, dtype: torch.dtype) -> float:
        """The next step's limit, finite and rounded to `dtype`, in which a device compares. Clears `goes_back`."""
        self.goes_back = False
        most = torch.finfo(dtype).max
        spike = self.factor * median(self.norms) if self.factor and len(self.norms) >= NEEDED else most
        return float(np.asarray(min(spike, most), dtype=str(dtype).removeprefix("torch.")))

    def take(self, norm: float) -> None:
        """Add the norm of an update."""
        self.in_a_row = 0
        if self.factor:
            self.norms.append(norm)

    def skip(self, step: int, norm: GradNorm, value: float, limit: float) -> Problem:
        """The warning about a bad step; may set `goes_back`. Raises TrainingError (PP-E733) if the run has to stop."""
        self.in_a_row += 1
        named = (
            f"step {step}: the gradient norm {value:.4g} is above {limit:.4g}, train.spike_factor times the usual one"
        )
        if not math.isfinite(value):
            culprits = norm.culprits()  # the host waits for these
            places = [f"of {each.name} (pp_rank {each.pp_rank}, stage {each.stage})" for each in culprits]
            named = f"step {step}: the gradient norm {[*places, 'of all parameters together'][0]} is not finite"
        if self.back:
            self.goes_back = True
            return Problem("PP-E826", f"{named}: the run goes back at least {self.back:,} steps and passes them by")
        if not self.goes_on or self.in_a_row > MOST_IN_A_ROW:
            after = f"; {MOST_IN_A_ROW} steps before it were left out" if self.goes_on else ""
            remedy = "lower optim.lr or raise optim.warmup_steps; `ppctl resume` goes on from the last checkpoint"
            raise TrainingError(Problem("PP-E733", f"{named}; no weight was changed{after}", remedy))
        return Problem("PP-E824", f"{named}: its update is left out, and its samples are not used again")

    def state(self) -> dict[str, Any]:
        """The entries that a checkpoint saves, for `restore`."""
        return {"usual": list(self.norms), "in_a_row": self.in_a_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the norms and the count from a checkpoint's `state`, which is empty in earlier versions."""
        self.norms.clear()
        self.norms.extend(state.get("usual", ()))
        self.in_a_row = state.get("in_a_row", 0)
