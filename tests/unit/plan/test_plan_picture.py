"""The picture of a plan holds as much as the plan says: what is used for a moment inside a pass counts."""

from __future__ import annotations

import pytest

from ppctl.config.resources import recipes
from ppctl.launch.planning import planned
from ppctl.plan.plan_picture import picture
from ppctl.schedule.picture import memory_over_time


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_pictures_peaks_are_the_plans(name: str) -> None:
    composed, plan, _ = planned([f"+recipe={name}"])
    assert composed is not None
    assert plan is not None
    drawn = picture(plan, composed.config)
    peaks = [max(held for _, held in levels) for levels in memory_over_time(drawn.trace, drawn.memory)]
    assert peaks == [cost.peak_bytes for cost in plan.pp_ranks]
