"""Measured costs in place of a preset's: one run's stages price every other cut; another model's are refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from unit_plan import config_values, equation, plan, refusal

from ppctl.config.schema import RunConfig
from ppctl.geometry.layers import Kind
from ppctl.plan.profile import LayerSeconds, fitted, subject

E, T, L = Kind("embedding", False), Kind("decoder", False), Kind("loss", False)
TRUE = {E: (0.01, 0.03), T: (0.1, 0.25), L: (0.4, 0.7)}
PRIOR = {E: LayerSeconds(0.1, 0.2), T: LayerSeconds(1.0, 2.0), L: LayerSeconds(1.0, 2.0)}


def seconds(counts: Counter[Kind]) -> LayerSeconds:
    return LayerSeconds(*(sum(n * TRUE[kind][i] for kind, n in counts.items()) for i in (0, 1)))


def test_the_stages_of_a_run_tell_what_its_layers_take() -> None:
    stages = [Counter({E: 1, T: 2}), Counter({T: 3}), Counter({T: 2, L: 1})]
    found = fitted([(counts, seconds(counts)) for counts in stages], PRIOR)
    for kind, expected in TRUE.items():
        assert found[kind] == pytest.approx(expected, rel=1e-3)


def written(path: Path, **changes: object) -> str:
    stages = [["embedding", *(f"decoder.{i}" for i in range(4))], [*(f"decoder.{i}" for i in range(4, 8)), "loss"]]
    rows = [{"stage": i, "layers": layers, "forward_s": 0.4, "backward_s": 0.8} for i, layers in enumerate(stages)]
    messages = [{"source": 0, "target": 1, "direction": "F", "seconds": 0.002}]
    data = {"subject": subject(RunConfig()) | changes, "stages": rows, "messages": messages}
    path.write_text(json.dumps(data))
    return f"@{path}"


def test_a_profile_prices_every_cut_and_the_plan_says_so(tmp_path: Path) -> None:
    profile = written(tmp_path / "profile.json")
    made = plan(pp=4, gbs=16, cost__profile=profile)
    assert made.time_calibrated
    assert made.timing.priced_by == profile.removeprefix("@")
    told = equation(made, "cost.profile")
    assert "of the layout Et*4|t*4L: what its layers took, put together anew" in told
    assert equation(plan(pp=2, gbs=16, cost__profile=profile), "cost.profile").endswith("of this layout")
    costs = made.timing.stages
    assert sum(cost.forward_s for cost in costs) == pytest.approx(0.8, rel=1e-3)
    assert sum(cost.backward_s for cost in costs) == pytest.approx(1.6, rel=1e-3)
    assert costs[0].message_s == 0.002
    assert made.digest == plan(pp=4, gbs=16).digest


def test_a_profile_of_another_model_is_refused_by_what_differs(tmp_path: Path) -> None:
    other = written(tmp_path / "other.json", **{"model.hidden_size": 64, "data.seq_length": 17})
    assert refusal(pp=2, cost__profile=other) == ["PP-E821"]


@pytest.mark.parametrize("key", ["train.recompute_modules", "train.recompute_stages", "parallel.sequence_parallel"])
def test_a_profile_of_another_way_to_run_the_layers_is_refused(tmp_path: Path, key: str) -> None:
    assert refusal(pp=2, cost__profile=written(tmp_path / "other.json", **{key: [1]})) == ["PP-E821"]


def test_a_key_that_a_profile_does_not_know_had_its_default_when_it_was_measured(tmp_path: Path) -> None:
    bare = tmp_path / "bare.json"
    rows = [{"layers": ["embedding", "loss"], "forward_s": 1, "backward_s": 2}]
    bare.write_text(json.dumps({"subject": {}, "stages": rows}))
    assert plan(cost__profile=f"@{bare}").time_calibrated
    assert refusal(mbs=2, gbs=16, cost__profile=f"@{bare}") == ["PP-E821"]


RECOMPUTED = {
    "every layer": dict(train__recompute_granularity="full"),
    "the first layer of a stage": dict(
        train__recompute_granularity="full", train__recompute_method="block", train__recompute_num_layers=1
    ),
    "the last stage": dict(train__recompute_granularity="full", train__recompute_stages=[3]),
    "modules of the last stage": dict(
        train__recompute_granularity="selective", train__recompute_modules=["mlp"], train__recompute_stages=[3]
    ),
}


@pytest.mark.parametrize("recomputed", RECOMPUTED.values(), ids=RECOMPUTED)
def test_a_profile_of_what_is_computed_again_gives_its_own_seconds(tmp_path: Path, recomputed: dict) -> None:
    sizes = dict(pp=4, gbs=16, seq=1024, model__vocab_size=6000, **recomputed)
    preset = plan(**sizes)
    rows = [
        {"layers": list(map(str, stage.layers)), "forward_s": cost.forward_s, "backward_s": cost.backward_s}
        for stage, cost in zip(preset.stages, preset.timing.stages, strict=True)
    ]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"subject": subject(config_values(**sizes).config), "stages": rows}))
    made = plan(cost__profile=f"@{path}", **sizes)
    for before, after in zip(preset.timing.stages, made.timing.stages, strict=True):
        assert (after.forward_s, after.backward_s) == pytest.approx((before.forward_s, before.backward_s), rel=1e-6)


ROW = {"layers": ["decoder.0"], "forward_s": 1.0, "backward_s": 2.0}


@pytest.mark.parametrize(
    "rows",
    [[]]
    + [
        [ROW | {key: value}]
        for key, value in [
            ("layers", ["decoder.99"]), ("layers", ["decoder.x"]), ("layers", ["foo"]), ("layers", "decoder"),
            ("layers", [["decoder.0"]]), ("forward_s", float("nan")), ("forward_s", -1), ("backward_s", True),
            ("backward_s", "2"), ("forward_s", None), ("backward_s", float("inf")),
        ]
    ],
)  # fmt: skip
def test_a_profile_whose_stages_make_no_sense_is_refused(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"subject": subject(RunConfig()), "stages": rows}))
    assert refusal(pp=2, cost__profile=f"@{path}") == ["PP-E820"]


@pytest.mark.parametrize("text", [None, "", "{}", "[1]", "[" * 100_000, '{"stages": [{"layers": 3}], "subject": {}}'])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    assert refusal(pp=2, cost__profile=f"@{path}") == ["PP-E820"]
