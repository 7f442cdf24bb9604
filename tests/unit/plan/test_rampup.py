"""A batch that grows in the plan: every size has a proved schedule, and one that does not fit is told."""

import json

import pytest

from ppctl.cli.plan_text import blocks
from ppctl.config.compose import compose
from ppctl.errors import ConfigError
from ppctl.plan import Plan, build_plan
from ppctl.schedule.verify import verify


def planned(*typed):
    found = compose(["+recipe=quickstart", *typed])
    return found.config, build_plan(found.config, found.provenance)


def test_every_size_on_the_way_has_a_schedule_of_its_own_that_was_proved():
    config, plan = planned("train.batch_rampup=[4,4,60]", "train.steps=30")
    assert [(each.size, each.step, each.sample, each.num_microbatches) for each in plan.smaller] == [
        (4, 0, 0, 2),
        (8, 5, 20, 4),
        (12, 8, 44, 6),
    ]
    for each in plan.smaller:
        assert each.schedule.num_microbatches == each.num_microbatches
        assert not verify(each.schedule)
        assert 0 < each.step_time_s < plan.step_time_s
    assert [plan.at_step(step).num_microbatches for step in (0, 4, 5, 7, 8, 9, 10, 99)] == [2, 2, 4, 4, 6, 6, 8, 8]
    assert [plan.of_batch(size).num_microbatches for size in (4, 8, 12, 16)] == [2, 4, 6, 8]
    text = "\n".join(blocks(plan, config, 120))
    assert "the batch grows from 4 by 4 to 16 samples while 60 are consumed: 3 sizes in 10 steps" in text
    assert "30 steps take 388 samples" in text
    assert "6 to 8" in text


def test_a_plan_with_sizes_comes_back_from_json_and_has_a_digest_of_its_own():
    _, plan = planned("train.batch_rampup=[4,4,60]")
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.digest == plan.digest != planned("train.batch_rampup=[8,4,60]")[1].digest != planned()[1].digest
    assert "smaller" not in planned()[1].to_json()


def test_calls_of_one_size_share_their_schedule():
    _, plan = planned("train.batch_rampup=[4,4,60]", "pipeline.pp_batch_size=4")
    assert [each.gradient_accumulation_steps for each in plan.smaller] == [1, 2, 3]
    assert all(each.schedule == plan.schedule for each in plan.smaller)


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        (["train.batch_rampup=[5,1,60]"], "PP-E138", "5 samples; 7 samples; 9 samples and 3 more"),
        (["train.batch_rampup=[2,2,60]", "pp=4", "vpp=2", "layout=null", "pipeline.pp_schedule=dualpipev"],
         "PP-E138", "at least 8 microbatches for dualpipev"),
        (["train.batch_rampup=[4,4,60]", "pipeline.pp_schedule=auto"], "PP-E139", "auto"),
    ],
)  # fmt: skip
def test_a_size_that_does_not_fit_is_told_with_what_fits(typed, code, said):
    with pytest.raises(ConfigError) as caught:
        planned(*typed)
    (problem,) = [problem for problem in caught.value.problems if problem.code == code]
    assert said in problem.message
    remedies = problem.remedy.splitlines()
    assert remedies
    for remedy in remedies:
        key = remedy.strip("'").partition("=")[0]
        kept = [word for word in typed if not word.startswith(key)]
        planned(*kept, remedy.strip("'"))
