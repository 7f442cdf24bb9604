"""The error of an action that failed, with its place in the rank's row of the schedule."""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.errors import PpctlError, Problem, TrainingError
from ppctl.schedule.action import Action

_SHOWN_BEFORE = 4
_SHOWN_AFTER = 2


class EngineError(TrainingError):
    """An action failed. `action`, `index` (in the rank's list) and `pp_rank` say which; `__cause__` says why."""

    def __init__(self, pp_rank: int, actions: Sequence[Action], index: int, cause: Exception) -> None:
        self.pp_rank = pp_rank
        self.index = index
        self.action = actions[index]
        other = Problem("PP-E710", f"{type(cause).__name__}: {cause}")
        why = cause.problems[0] if isinstance(cause, PpctlError) else other
        message = f"pp_rank {pp_rank} (stage {self.action.stage}) failed in {self.action}: {why.message}"
        super().__init__(Problem(why.code, message, why.remedy, _row(pp_rank, actions, index)))


def _row(pp_rank: int, actions: Sequence[Action], index: int) -> str:
    first, last = max(0, index - _SHOWN_BEFORE), min(len(actions), index + 1 + _SHOWN_AFTER)
    lines = [f"pp_rank {pp_rank}, action {index + 1} of {len(actions)}:"]
    lines += ["  ..."] * (first > 0)
    lines += [f"  {actions[i]}" + ("  <-- here" if i == index else "") for i in range(first, last)]
    return "\n".join(lines + ["  ..."] * (last < len(actions)))
