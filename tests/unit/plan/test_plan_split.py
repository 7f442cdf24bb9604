"""Megatron's and NeMo's ways of dividing layers, compiled to layouts: their records, and what is refused."""

import json
from pathlib import Path

import pytest
from unit_plan import equation, plan, refusal

from ppctl.config.compose import compose
from ppctl.config.pipeline_config import StageCountError, calculate_virtual_stages
from ppctl.errors import ConfigError
from ppctl.geometry.layers import count_of
from ppctl.layout import PipelineParallelLayerLayout
from ppctl.plan import build_plan
from ppctl.plan.split_options import EMBEDDING, FIRST, LAST, LOSS
from ppctl.schedule.policies import POLICIES

GOLDEN = Path(__file__).parents[2] / "golden"
SPLITS = [
    record
    for record in json.loads((GOLDEN / "split.json").read_text())["records"]
    if {"num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"} & set(record["args"])
    or "account_for_loss_in_pipeline_split" in record["args"]
]
SHORT = {"num_layers": "model.num_layers", "pipeline_model_parallel_size": "pp"}
SHORT |= {"virtual_pipeline_model_parallel_size": "vpp", "pipeline_model_parallel_layout": "layout"}


def typed(args: dict) -> dict[str, object]:
    """A record's arguments as overrides; what is none is not typed."""
    given = {
        SHORT.get(key, f"parallel.{key}"): value
        for key, value in args.items()
        if value is not None and value is not False
    }
    return {key.replace(".", "__"): value for key, value in given.items()}


def named(args: dict) -> str:
    return "-".join(str(value) for value in args.values())


def stricter(record: dict) -> str:
    """Why ppctl decides otherwise than the original; nothing where it does not."""
    if (record.get("error") or {}).get("type") == "ZeroDivisionError":
        return "no middle ranks and no middle layers is a cut like any other"
    if record["ok"] and any(row["num_layers"] < 0 for row in record["rows"]):
        return "a stage of less than no layers is refused"
    return ""


@pytest.mark.shows(
    "parallel.num_layers_in_first_pipeline_stage",
    "parallel.num_layers_in_last_pipeline_stage",
    "parallel.account_for_embedding_in_pipeline_split",
    "parallel.account_for_loss_in_pipeline_split",
)
@pytest.mark.parametrize("record", [r for r in SPLITS if r["ok"]], ids=lambda r: named(r["args"]))
def test_megatrons_splits_have_the_recorded_rows(record: dict) -> None:
    if stricter(record):
        assert refusal(**typed(record["args"])) == ["PP-E222"]
        return
    made = plan(**typed(record["args"]))
    rows = [
        (stage.pp_rank, count_of("decoder", stage.layers), [str(n) for n in stage.layers if n.kind == "decoder"])
        for stage in made.stages
    ]
    assert [(rank, count) for rank, count, _ in rows] == [(r["pp_rank"], r["num_layers"]) for r in record["rows"]]
    for (_, count, names), expected in zip(rows, record["rows"], strict=True):
        assert not count or names[0] == f"decoder.{expected['offset']}"
    assert equation(made, "layout").startswith(f"layout {made.layout}: ")


def test_megatrons_impossible_splits_are_refused() -> None:
    refused = [record for record in SPLITS if not record["ok"]]
    assert refused
    for record in refused:
        values = typed(record["args"])
        if stricter(record):
            assert plan(**values).problems == ()
        elif not any(key.startswith("parallel__") for key in values):
            assert plan(**values).problems == (), "an even split need not divide: the first stages hold one more"
        else:
            beyond = any(value == 0 for value in values.values())
            assert refusal(**values) == ["PP-E103" if beyond else "PP-E222"], record["args"]


@pytest.mark.shows("parallel.num_layers_per_virtual_pipeline_stage")
@pytest.mark.parametrize(
    ("values", "layout"),
    [
        (dict(pp=2, parallel__num_layers_per_virtual_pipeline_stage=2), "Ett|tt|tt|ttL"),
        (dict(pp=2, parallel__num_layers_per_virtual_pipeline_stage=4), "Et*4|t*4L"),
        (dict(pp=4, parallel__num_layers_per_virtual_pipeline_stage=1, vpp=2), "Et|(t|)*6tL"),
    ],
)
def test_layers_per_chunk_give_the_chunks(values: dict[str, object], layout: str) -> None:
    made = plan(**values)
    assert (made.layout, made.sizes.vpp) == (layout, len(made.stages) // values["pp"])


RECORDED = json.loads((GOLDEN / "nemo.json").read_text())
NEMO = [
    record
    for record in RECORDED["records"]
    if record["fn"] == "calculate_virtual_stages" and record["args"]["layers_per_stage"]
]


@pytest.mark.shows("pipeline.layers_per_stage", "pipeline.round_virtual_stages_to_pp_multiple")
def test_layers_per_stage_are_nemos() -> None:
    looked_at = 0
    for record in NEMO:
        args = record["args"]
        single = args["is_single_stage_schedule"]
        values = dict(
            pp=args["pp_size"],
            gbs=args["pp_size"],
            model__num_layers=args["num_layers"],
            pipeline__layers_per_stage=args["layers_per_stage"],
            pipeline__round_virtual_stages_to_pp_multiple=args["round_to_pp_multiple"],
            pipeline__pp_schedule="1f1b" if single else "interleaved1f1b",
        )
        try:
            stages, vpp = calculate_virtual_stages(**args)
        except StageCountError:
            assert not record["ok"]
            assert refusal(**values) == ["PP-E222"], args
            continue
        assert record["result"] == [stages, vpp]
        if stages > args["num_layers"]:
            assert refusal(**values) == ["PP-E222"], args
            continue
        made = plan(**values)
        counts = [count_of("decoder", stage.layers) for stage in made.stages]
        assert (len(counts), made.sizes.vpp) == (stages, vpp)
        assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1
        looked_at += 1
    assert looked_at > len(NEMO) / 10


def test_without_a_schedule_the_layers_per_stage_choose_it() -> None:
    assert plan(pp=2, pipeline__layers_per_stage=4).schedule.name == "1f1b"
    assert plan(pp=2, pipeline__layers_per_stage=2).schedule.name == "interleaved_1f1b"


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.trains])
def test_layers_per_stage_make_as_many_chunks_as_the_schedule_is_made_for(name: str) -> None:
    chunks = POLICIES[name].chunks
    made = plan(pp=2, gbs=8, pipeline__layers_per_stage=4 // chunks, pipeline__pp_schedule=name)
    assert (made.schedule.name, made.sizes.vpp) == (name, chunks)


PARTS = [
    ["model.embed_tokens", *(f"model.layers.{n}" for n in range(5)), "model.rotary_emb"],
    [*(f"layers.{n}" for n in range(5, 8)), "norm", "lm_head"],
]


@pytest.mark.shows("pipeline.module_fqns_per_model_part")
def test_modules_by_name_are_a_layout() -> None:
    made = plan(pp=2, pipeline__module_fqns_per_model_part=PARTS)
    assert made.layout == "Et*5|t*3L"
    assert "module_fqns_per_model_part" in equation(made, "layout")
    four = [["tok_embeddings"], *([f"layers.{n}", f"layers.{n + 1}"] for n in (0, 2, 4, 6)), ["norm", "output"]]
    assert plan(pp=2, pipeline__module_fqns_per_model_part=four).layout == "E|(tt|)*4L"


GENERATED = [r for r in RECORDED["records"] if r["fn"] == "generate_hf_model_fqn_per_model_part"]


@pytest.mark.parametrize("record", GENERATED, ids=lambda record: named(record["args"]))
def test_the_names_that_nemo_generates_are_a_layout_but_for_those_that_no_decoder_has(record: dict) -> None:
    values = dict(pp=record["args"]["num_stages"], model__num_layers=record["args"]["num_layers"])
    with pytest.raises(ConfigError, match=r"model\.vision_tower"):
        plan(**values, pipeline__module_fqns_per_model_part=record["result"])
    others = {f"model.{suffix}" for suffix in RECORDED["meta"]["MULTIMODAL_SUFFIXES"]}
    parts = [[name for name in part if name not in others] for part in record["result"]]
    letters = ["E" * ("model.embed_tokens" in part) + "t" * str(part).count(".layers.") for part in parts]
    layout = PipelineParallelLayerLayout("|".join(letters) + "L", len(parts)).canonical()
    assert plan(**values, pipeline__module_fqns_per_model_part=parts).layout == layout


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([PARTS[0], ["layers.5", "layers.6", "layers.7", "norm"]], "norm alone"),
        ([PARTS[0], [*PARTS[1], "vision_tower"]], "vision_tower"),
        ([PARTS[1], PARTS[0]], "in order"),
        ([PARTS[0], ["layers.6", "layers.7", "norm", "lm_head"]], "in order"),
        ([*PARTS, []], "3 parts"),
    ],
)
def test_modules_that_are_no_cut_of_this_model_are_named(parts: list[list[str]], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(pp=2, pipeline__module_fqns_per_model_part=parts)
    assert any(named in problem.message for problem in error.value.problems)


@pytest.mark.parametrize(
    "values",
    [
        {"layout": "Et*4|t*4L", FIRST: 4},
        {FIRST: 4, LOSS: True},
        {EMBEDDING: True, "pipeline.layers_per_stage": 2},
        {LAST: 4, "pipeline.module_fqns_per_model_part": PARTS},
        {"pipeline.round_virtual_stages_to_pp_multiple": "up"},
        {"parallel.num_layers_per_virtual_pipeline_stage": 2, "vpp": 1},
        {"pipeline.layers_per_stage": 2, "vpp": 1},
    ],
)
def test_two_ways_to_cut_are_not_mixed(values: dict[str, object]) -> None:
    assert refusal(pp=2, **{key.replace(".", "__"): value for key, value in values.items()}) == ["PP-E222"]


@pytest.mark.parametrize(
    "words",
    [
        ["--decoder-first-pipeline-num-layers", "3", "--decoder-last-pipeline-num-layers=5"],
        ["parallel.num_layers_in_first_pipeline_stage=3"],
        ["model.num_layers_in_first_pipeline_stage=3", "model.num_layers_in_last_pipeline_stage=5"],
    ],
)
def test_megatrons_flags_and_names_are_understood_and_set_a_recipes_layout_aside(words: list[str]) -> None:
    composed = compose(["recipe=quickstart", "pp=2", "vpp=1", *words])
    assert build_plan(composed.config, composed.provenance).layout == "Et*3|t*5L"


def test_a_switch_takes_no_value() -> None:
    words = ["pp=2", "model.num_layers=7", "--account-for-loss-in-pipeline-split"]
    composed = compose([*words, "--num-virtual-stages-per-pipeline-rank", "2"])
    assert build_plan(composed.config, composed.provenance).layout == "Ett|tt|tt|tL"
