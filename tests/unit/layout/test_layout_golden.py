"""Layouts as the originals read them: every recorded vector holds, but for the differences named in the tables."""

import json
from pathlib import Path

import pytest

from ppctl.errors import LayoutError
from ppctl.layout import LayerType, PipelineParallelLayerLayout, even_layout

GOLDEN = Path(__file__).parents[2] / "golden"


def records(name):
    data = json.loads((GOLDEN / f"{name}.json").read_text())
    return data["records"] if isinstance(data, dict) else data


def restored(value):
    """Tuples and bytes are marked in the JSON."""
    if isinstance(value, dict) and "__tuple__" in value:
        return tuple(restored(item) for item in value["__tuple__"])
    if isinstance(value, dict) and "__bytes__" in value:
        return value["__bytes__"].encode()
    return [restored(item) for item in value] if isinstance(value, list) else value


# The deliberate differences, by (layout, pp), each with its reason. DESIGN 3.1 is the parser, 3.2 the validation.
UNREADABLE = {("Et*٣|L", 2): "3.1: only ASCII digits are digits"}
UNMADE = {
    ("[]", 1): "3.2: a layout without stages would lose every layer; the original makes an object of 0 chunks",
    ("[]", 2): "3.2: the same on two ranks",
    ("Et|tL", -2): "3.2: there is no negative number of ranks; the original makes an object of -1 chunks",
}
READABLE = {
    ("E t|tL", 2): "3.1: blanks are allowed",
    ("Et |tL", 2): "3.1: blanks are allowed",
    ("[['E', 't'], ['t', 'L']]", 2): "3.1: lists take the letters",
}
OTHER_STAGES = {("E(t)*2*2|tL", 2): ("Etttt|tL", "3.1: (t)*2*2 is 4 layers; the original reads 3")}
NOT_VALID = {("Et|tL|", 3): "3.2: the loss must be in the last stage, which the trailing bar leaves empty"}
EVEN_BY_CHUNK = {
    (12, 1, 3): "3.2: at pp=1 the original builds all layers in every chunk",
    (24, 1, 3): "3.2: at pp=1 the original builds all layers in every chunk",
}


def key(record):
    layout = restored(record["args"]["layout"])
    return layout if isinstance(layout, str) else repr(layout), record["args"]["pipeline_model_parallel_size"]


LAYOUTS = [pytest.param(record, id=f"{i}-{key(record)[0][:40]}") for i, record in enumerate(records("layout"))]


def names(rows):
    return [[layer.value for layer in row] for row in rows]


STRINGS = [each for each in LAYOUTS if "parse_str_to_list" in each.values[0]]


@pytest.mark.parametrize("record", STRINGS)
def test_a_layout_string_parses_to_the_recorded_stages(record):
    text, recorded = record["args"]["layout"], record["parse_str_to_list"]
    if key(record) in UNREADABLE or not (recorded["ok"] or key(record) in READABLE):
        with pytest.raises(LayoutError):
            PipelineParallelLayerLayout.parse_str_to_list(text)
        return
    expected = recorded["result"] if recorded["ok"] else [["embedding", "decoder"], ["decoder", "loss"]]
    if key(record) in OTHER_STAGES:
        plain = OTHER_STAGES[key(record)][0]
        expected = names(PipelineParallelLayerLayout.parse_str_to_list(plain))
    assert names(PipelineParallelLayerLayout.parse_str_to_list(text)) == expected
    assert PipelineParallelLayerLayout.get_num_stages_from_str(text) == len(expected)
    assert key(record) in {**READABLE, **OTHER_STAGES} or record["get_num_stages_from_str"]["result"] == len(expected)


MADE = [each for each in LAYOUTS if each.values[0]["ok"] and key(each.values[0]) not in {**UNREADABLE, **UNMADE}]
SAME = [each for each in MADE if key(each.values[0]) not in OTHER_STAGES]


@pytest.mark.parametrize("record", [each for each in LAYOUTS if each not in MADE])
def test_what_the_original_refuses_is_refused_but_for_the_named_differences(record):
    layout, pp = restored(record["args"]["layout"]), record["args"]["pipeline_model_parallel_size"]
    if key(record) in READABLE:
        assert PipelineParallelLayerLayout(layout, pp).canonical() == "Et|tL"
        return
    with pytest.raises(LayoutError):
        PipelineParallelLayerLayout(layout, pp)


@pytest.mark.parametrize("record", SAME)
def test_a_layout_object_answers_as_recorded(record):
    made = PipelineParallelLayerLayout(
        restored(record["args"]["layout"]), record["args"]["pipeline_model_parallel_size"]
    )
    assert made.virtual_pipeline_model_parallel_size == record["virtual_pipeline_model_parallel_size"]
    assert [names(rank) for rank in made.layout] == record["layout_2d_pp_vpp"]
    assert [layer.value for layer in made.flatten_layout] == record["flatten_layout"]
    assert repr(made) == record["repr"]
    assert made.pretty_repr() == record["pretty_repr"]
    for place in record["stages_in_vpp_major_order"]:
        where = {"vp_stage": place["vp_stage"], "pp_rank": place["pp_rank"]}
        for kind in ("decoder", "mtp", "embedding", "loss"):
            assert made.get_num_layers_to_build(LayerType[kind], **where) == place[kind]["num"]
            assert made.get_layer_offset(LayerType[kind], **where) == place[kind]["offset"]
            assert made.get_layer_id_list(LayerType[kind], **where) == place[kind]["ids"]


@pytest.mark.parametrize("record", SAME)
def test_validation_agrees_with_the_record(record):
    made = PipelineParallelLayerLayout(
        restored(record["args"]["layout"]), record["args"]["pipeline_model_parallel_size"]
    )
    validation = record["validate_layer_layout"]
    if validation["ok"] and key(record) not in NOT_VALID:
        assert made.validate_layer_layout(**validation["args"]) is validation["result"]
        return
    with pytest.raises(LayoutError):
        made.validate_layer_layout(**validation["args"])


@pytest.mark.parametrize(
    "record", records("layouts_in_the_wild"), ids=lambda record: f"{record['layout']}-pp{record['pp']}"
)
def test_a_layout_in_the_wild_is_judged_as_recorded(record):
    recorded = record["checked"]
    assert PipelineParallelLayerLayout.get_num_stages_from_str(record["layout"]) == recorded["stages"]
    if not recorded["valid_mcore"]:
        with pytest.raises(LayoutError):
            PipelineParallelLayerLayout(record["layout"], record["pp"]).validate_layer_layout(
                record["num_layers"], record["mtp"]
            )
        return
    layout = PipelineParallelLayerLayout(record["layout"], record["pp"])
    assert layout.virtual_pipeline_model_parallel_size == recorded["implied_vpp"] == record["vpp"]
    assert layout.validate_layer_layout(record["num_layers"], record["mtp"]) is recorded["mtp_standalone"]
    assert sum(not stage for stage in layout.stages) == recorded["empty_stages"]


# The original's even split refuses what does not divide; ppctl gives the first stages one layer more.
EVEN_ARGS = {"num_layers", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"}
EVEN = [record for record in records("split") if set(record["args"]) == EVEN_ARGS]
BY_LAYOUT = [
    record
    for record in records("split")
    if set(record["args"]) == EVEN_ARGS | {"mtp_num_layers", "pipeline_model_parallel_layout"}
]
"""The other records are the options of test_plan_split.py."""


def rows(layout):
    pp, vpp = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    places = [{"pp_rank": rank, "vp_stage": chunk} for chunk in range(vpp) for rank in range(pp)]
    return [
        {**at, "num_layers": layout.get_num_layers_to_build(**at), "offset": layout.get_layer_offset(**at)}
        for at in places
    ]


@pytest.mark.parametrize("record", EVEN, ids=lambda record: "-".join(str(v) for v in record["args"].values()))
def test_the_even_split_has_the_recorded_rows(record):
    args = record["args"]
    pp, vpp = args["pipeline_model_parallel_size"], args["virtual_pipeline_model_parallel_size"] or 1
    layout = PipelineParallelLayerLayout(even_layout(args["num_layers"], pp * vpp), pp)
    layout.validate_layer_layout(args["num_layers"], None)
    if not record["ok"]:
        assert args["num_layers"] % (pp * vpp)
        return
    recorded = sorted(record["rows"], key=lambda row: (row["vp_stage"] or 0, row["pp_rank"]))
    if tuple(args.values()) in EVEN_BY_CHUNK:
        assert [row["num_layers"] for row in recorded] == [args["num_layers"]] * vpp
        assert [mine["offset"] for mine in rows(layout)] == [chunk * args["num_layers"] // vpp for chunk in range(vpp)]
        return
    for mine, row in zip(rows(layout), recorded, strict=True):
        assert (mine["num_layers"], mine["offset"]) == (row["num_layers"], row["offset"])


@pytest.mark.parametrize("record", BY_LAYOUT, ids=lambda record: str(record["args"]["pipeline_model_parallel_layout"]))
def test_a_split_by_layout_has_the_recorded_rows(record):
    layout = PipelineParallelLayerLayout(
        record["args"]["pipeline_model_parallel_layout"], record["args"]["pipeline_model_parallel_size"]
    )
    if not record["ok"]:
        with pytest.raises(LayoutError):
            layout.validate_layer_layout(record["args"]["num_layers"], record["args"]["mtp_num_layers"])
        return
    standalone = layout.validate_layer_layout(record["args"]["num_layers"], record["args"]["mtp_num_layers"])
    assert standalone is record["mtp_standalone"]
    recorded = sorted(record["rows"], key=lambda row: (row["vp_stage"] or 0, row["pp_rank"]))
    for mine, row in zip(rows(layout), recorded, strict=True):
        assert (mine["num_layers"], mine["offset"]) == (row["num_layers"], row["offset"])
