"""Faults in published recipes that a check finds before a job is queued (facts/performance.md, section 2)."""

from __future__ import annotations

import pytest
from unit_plan import plan

from ppctl.errors import ConfigError
from ppctl.geometry.layers import count_of
from ppctl.plan.violations import parse_overrides

FAULTS = [
    pytest.param(
        dict(model__num_layers=27, pp=8, vpp=1, layout="Et*4|(t*4|)*6t*3L"),
        {"PP-E015": "the layout holds 31 decoder layers (t), the model has num_layers=27"},
        id="Moonlight 16B on pp 8, h100/moonlight_16b.py",
    ),
    pytest.param(
        dict(model__num_layers=27, pp=4, vpp=2, layout="Et*4|(t*4|)*6t*3L"),
        {"PP-E015": "the layout holds 31 decoder layers (t), the model has num_layers=27"},
        id="Moonlight 16B on pp 4, the same map",
    ),
    pytest.param(
        dict(model__num_layers=61, model__mtp_num_layers=1, pp=4, vpp=2, layout="Et*4|(t*4|)*14tmL"),
        {"PP-E220": "the layout has 16 stages, but pp 4 x vpp 2 = 8; 16 stages on pp 4 would be vpp=4"},
        id="DeepSeek-V3, gb200 and gb300/deepseek_v3.py",
    ),
    pytest.param(
        dict(model__num_layers=78, pp=8, layout="Et*10|(t*11|)*6t*9L"),
        {"PP-E015": "the layout holds 85 decoder layers (t), the model has num_layers=78"},
        id="GLM-5, run_glm5_pretrain_mi355x.sh",
    ),
    pytest.param(
        dict(model__num_layers=61, pp=16, parallel__num_layers_in_last_pipeline_stage=13),
        {"PP-E222": "leave 48 of 61 layers for the other 15 ranks"},
        id="13 layers on the last rank, read as extra ones",
    ),
    pytest.param(
        dict(model__num_layers=10, model__mtp_num_layers=3, pp=16, layout="E|(t|)*10m|m|m|LL|LL"),
        {"PP-E014": "exactly one loss", "PP-E018": "share one stage"},
        id="a fork's grammar: the loss in several stages",
    ),
]


@pytest.mark.parametrize(("setting", "faults"), FAULTS)
def test_a_published_fault_is_found_and_its_remedies_are_sound(setting: dict, faults: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        plan(**setting)
    problems = {problem.code: problem for problem in error.value.problems}
    assert problems.keys() == faults.keys()
    for code, text in faults.items():
        assert text in problems[code].message
        for line in problems[code].remedy.splitlines():
            mended = setting | {key.replace(".", "__"): value for key, value in parse_overrides(line).items()}
            assert not plan(**mended).problems, line


@pytest.mark.parametrize(("layers", "pp"), [(92, 8), (46, 4)])
def test_layers_that_no_ranks_share_evenly_are_shared_as_evenly_as_can_be(layers: int, pp: int) -> None:
    """GLM-4.5's 92 layers on pp 8 and Air's 46 on pp 4 aborted before a merged fix."""
    made = plan(model__num_layers=layers, pp=pp)
    counts = [count_of("decoder", stage.layers) for stage in made.stages]
    assert sum(counts) == layers
    assert max(counts) - min(counts) == 1
