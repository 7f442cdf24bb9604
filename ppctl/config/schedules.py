"""What `pipeline.pp_schedule` may say: the policies by their own names and by those of other systems.

Knows spellings, and which policies a run cannot use yet. Must not know how a policy orders work.
"""

from __future__ import annotations

from ppctl.schedule.policies import POLICIES
from ppctl.schedule.zero_bubble import SPLIT_POLICIES

SCHEDULES = {
    **{name: name for name in POLICIES if name != "forward_only"},
    "interleaved1f1b": "interleaved_1f1b",
    "dfs": "interleaved_1f1b",
    "loopedbfs": "gpipe",
    "looped_bfs": "gpipe",
    "interleavedzerobubble": "interleaved_zero_bubble",
    "zero_bubble": "interleaved_zero_bubble",
    "zbh1": "zb_h1",
    "zbvzerobubble": "zbv_zero_bubble",
    "v_schedule": "zbv_zero_bubble",
}
"""In lower case, without torch's `Schedule` prefix -> the policy's name: ppctl's names, torch's, and those of NeMo
Automodel's documentation. Breadth-first (looped) is gpipe with several chunks per rank."""

PLANNED_SCHEDULES = frozenset(SPLIT_POLICIES)
"""The policies that can be planned and drawn, but not trained with yet."""

ABSTRACT_SCHEDULES = frozenset({"pipelineschedulesingle", "pipelineschedulemulti"})
"""torch's names of kinds of schedules, which name no schedule."""


def schedule_policy(name: str | None) -> str | None:
    """The policy that `pipeline.pp_schedule` names (`1F1B`, `ScheduleInterleaved1F1B`, ...), or None."""
    return SCHEDULES.get((name or "").lower().removeprefix("schedule"))
