"""Which microbatches keep their activations although layers are recomputed: a function of a rank's list of actions.

The rule is Megatron's `num_microbatches_with_partial_activation_checkpoints`. Must not know what recomputing is.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.schedule.action import BACKWARDS, Action, F


def checkpoint_flags(row: Sequence[Action], partial: int | None, window: int) -> dict[Action, bool]:
    """For every forward of a rank's list whether all its layers are recomputed; empty where `partial` is None.

    Of every `window` forwards, which is how many are in flight at most, the first `partial` keep more activations.
    """
    if partial is None:
        return {}
    forwards = [action for action in row if action.op is F]
    return {action: index % window >= partial for index, action in enumerate(forwards)}


def forwards_in_flight(row: Sequence[Action]) -> int:
    """How many forwards stand before a rank's first backward; without a backward, one more than there are forwards."""
    forwards = 0
    for action in row:
        if action.op in BACKWARDS:
            return forwards
        forwards += action.op is F
    return forwards + 1
