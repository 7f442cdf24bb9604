"""What `pipeline.pp_schedule` may say: the policies by their own names and by those of other systems, in any case.

Knows spellings. Must not know how a policy orders work, nor which names there are (`ppctl.schedule.policies`).
"""

from __future__ import annotations

from ppctl.schedule.policies import POLICIES

SCHEDULES = {
    spelling.lower(): policy.name
    for policy in POLICIES.values()
    if policy.trains
    for spelling in (policy.name, *policy.other_names)
}
"""In lower case, without torch's `Schedule` prefix -> the policy's name."""

PLANNED_SCHEDULES = frozenset(policy.name for policy in POLICIES.values() if policy.splits)
"""The policies that can be planned and drawn, but not trained with yet."""

ABSTRACT_SCHEDULES = frozenset({"pipelineschedulesingle", "pipelineschedulemulti"})
"""torch's names of kinds of schedules, which name no schedule."""


def schedule_policy(name: str | None) -> str | None:
    """The policy that `pipeline.pp_schedule` names (`1F1B`, `ScheduleInterleaved1F1B`, ...), or None."""
    return SCHEDULES.get((name or "").lower().removeprefix("schedule"))
