"""PipelineParallelLayerLayout: what the grammar means, which rank holds which layer, and what never gets lost."""

import copy
import re
import subprocess
import sys
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppctl.errors import ConfigError, LayoutError
from ppctl.layout import LayerType, PipelineParallelLayerLayout, even_layout

E, T, M, L = LayerType.embedding, LayerType.decoder, LayerType.mtp, LayerType.loss
LETTER = {E: "E", T: "t", M: "m", L: "L"}
DEEPSEEK = "Et*3|(tt|)*29,m|L"


def plain(text):
    """The stages of a layout, written out in letters."""
    rows = PipelineParallelLayerLayout.parse_str_to_list(text)
    return "|".join("".join(LETTER[layer] for layer in row) for row in rows)


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|L", "Ettt|L"),
        ("Et*003|L", "Ettt|L"),
        ("E(t|)*2tL", "Et|t|tL"),
        ("E((t|)*2t|)*2L", "Et|t|t|t|t|t|L"),
        ("E(t)*2*2|L", "Etttt|L"),
        ("E(t|)*2*3L", "Et|t|t|t|t|t|L"),
        ("E(t*2|)*2L", "Ett|tt|L"),
        ("E|*3tL", "E|||tL"),
        ("E||t|L", "E||t|L"),
        ("Et*0t|tL", "Et|tL"),
        ("E(t|)*0t|tL", "Et|tL"),
        ("E((t|)*2)*0L", "EL"),
        (" E t , t\t| t\n* 2 L ", "Ett|ttL"),
        ("E,t,*2|t*,2L", "Ett|ttL"),
        (",,E,,t,|,t,,L,,", "Et|tL"),
        ("E( t , | ) * 2 L", "Et|t|L"),
        ("", ""),
        ("|", "|"),
    ],
)
def test_a_layout_string_means(text, stages):
    assert plain(text) == stages


items = st.recursive(
    st.tuples(st.sampled_from("EtmL|"), st.one_of(st.none(), st.integers(0, 4))),
    lambda inner: st.tuples(
        st.lists(inner, min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=2)
    ),
    max_leaves=12,
)
noise = st.sampled_from(["", " ", ",", ", ", "\t"])


def written(item, draw):
    """An item as text, with separators wherever they may stand, and what it expands to."""
    body, counts = item
    if isinstance(body, str):
        if counts is None:
            return body + draw(noise), body
        return f"{body}{draw(noise)}*{draw(noise)}{counts}{draw(noise)}", body * counts
    texts, meanings = zip(*(written(each, draw) for each in body), strict=True)
    count = 1
    for factor in counts:
        count *= factor
    stars = "".join(f"{draw(noise)}*{factor}" for factor in counts)
    return f"({draw(noise)}{''.join(texts)}){stars}{draw(noise)}", "".join(meanings) * count


@given(st.data(), st.lists(items, max_size=5))
def test_any_text_of_the_grammar_expands_as_its_tree_does(data, tree):
    parts = [written(item, data.draw) for item in tree]
    assert plain("".join(text for text, _ in parts)) == "".join(meaning for _, meaning in parts)


stage_lists = st.lists(st.text("tmEL", max_size=7), min_size=1, max_size=24) | st.lists(
    st.sampled_from(["", "t", "tt", "ttt"]), min_size=1, max_size=60
)


def as_megatron_reads(text):
    """The original's reading, in three lines: groups, then single characters, each in one pass."""
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda match: match[1] * int(match[2]), text.replace(",", ""))
    return re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), text)


@given(stage_lists)
def test_the_canonical_string_parses_back_to_the_same_stages_in_megatron_too(stages):
    text = "|".join(stages)
    canonical = PipelineParallelLayerLayout(text, 1).canonical()
    assert plain(canonical) == text == as_megatron_reads(canonical)
    assert len(canonical) <= len(text)
    assert PipelineParallelLayerLayout(canonical, len(stages)).canonical() == canonical


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (DEEPSEEK, "Et*3|(tt|)*29m|L"),
        ("E, t t | t t L", "Ett|ttL"),
        ("Et|t|t|t|tL", "Et|t|t|t|tL"),
        ("Et|t|t|t|t|tL", "Et|(t|)*4tL"),
        ("E||t|L", "E||t|L"),
        ("E" + "|" * 12 + "L", "E|(|)*11L"),
        ("Et|" + "tt|t|t|" * 5 + "tL", "Et|(tt|t|t|)*5tL"),
        ("E((t|)*2t*3|)*2L", "Et|t|t*3|t|t|t*3|L"),
    ],
)
def test_the_canonical_string_is_short_and_readable(text, canonical):
    assert PipelineParallelLayerLayout(text, 1).canonical() == canonical


@given(stage_lists, st.data())
def test_every_layer_lives_on_exactly_one_stage_of_one_rank(stages, data):
    sizes = [size for size in range(1, len(stages) + 1) if len(stages) % size == 0]
    layout = PipelineParallelLayerLayout("|".join(stages), data.draw(st.sampled_from(sizes)))
    pp, vpp = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    assert pp * vpp == len(stages)
    for kind in (E, T, M, L):
        ids = [
            layout.get_layer_id_list(kind, vp_stage=chunk, pp_rank=rank) for chunk in range(vpp) for rank in range(pp)
        ]
        assert [each for stage in ids for each in stage] == list(range("".join(stages).count(LETTER[kind])))
    names = [name for stage in range(len(stages)) for name in layout.layer_names(stage)]
    assert [name for name in names if "decoder" in name] == [f"decoder.{i}" for i in range("".join(stages).count("t"))]
    assert [len(layout.layer_names(stage)) for stage in range(len(stages))] == [len(stage) for stage in stages]
    assert [layer for stage in layout.stages for layer in stage] == layout.flatten_layout


def test_layers_have_global_names():
    layout = PipelineParallelLayerLayout("Ett||ttmmL", 3)
    assert layout.layer_names(0) == ("embedding", "decoder.0", "decoder.1")
    assert layout.layer_names(1) == ()
    assert layout.layer_names(2) == ("decoder.2", "decoder.3", "mtp.0", "mtp.1", "loss")


@given(st.integers(0, 200), st.integers(1, 40), st.integers(0, 3))
def test_an_even_layout_is_sound_and_even(num_layers, num_stages, mtp):
    text = even_layout(num_layers, num_stages, mtp)
    layout = PipelineParallelLayerLayout(text, num_stages)
    layout.validate_layer_layout(num_layers, mtp)
    counts = [stage.count(T) for stage in layout.stages]
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1
    assert text == layout.canonical() and layout.stages[-1].count(M) == mtp


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((8, 4), "Ett|tt|tt|ttL"),
        ((7, 4), "Ett|tt|tt|tL"),
        ((2, 4), "Et|t||L"),
        ((61, 1, 1), "Et*61mL"),
        ((0, 2), "E|L"),
    ],
)
def test_an_even_layout_reads(sizes, text):
    assert even_layout(*sizes) == text


@pytest.mark.parametrize("sizes", [(-1, 2), (4, 0), (4, 2, -1), (10**9, 2), (4, 10**9)])
def test_sizes_that_cannot_be_split_are_refused(sizes):
    with pytest.raises(LayoutError, match="PP-E021"):
        even_layout(*sizes)


# lists


@pytest.mark.parametrize(
    "rows",
    [
        [["embedding", "decoder"], [], ["decoder", "loss"]],
        [["E", "t"], [], ["t", "L"]],
        [[E, T], [], [T, L]],
        [[E, " Decoder "], [], ["t", "LOSS"]],
        ([E, T], [], [T, L]),
    ],
)
def test_lists_take_members_names_and_letters(rows):
    before = copy.deepcopy(rows)
    layout = PipelineParallelLayerLayout(rows, 3)
    assert layout.canonical() == "Et||tL"
    assert rows == before and repr(layout) == repr(before)


def test_neither_the_list_given_nor_the_lists_returned_are_shared():
    rows = [["E", "t"], ["t", "L"]]
    layout = PipelineParallelLayerLayout(rows, 2)
    rows[0].append("t")
    layout.layout[0][0].append(T)
    layout.flatten_layout.append(L)
    assert layout.canonical() == "Et|tL" and repr(layout) == "[['E', 't'], ['t', 'L']]"
    assert layout.layout == [[[E, T]], [[T, L]]]


@pytest.mark.parametrize(
    "rows",
    [
        None,
        7,
        {"a": 1},
        b"Et|tL",
        [],
        ["Et", "tL"],
        [("E",), ["L"]],
        [["E", "x"]],
        [["e"]],
        [["E", None]],
        [["E", ["t"]]],
    ],
)
def test_anything_else_is_refused(rows):
    with pytest.raises(LayoutError, match=r"PP-E010: .*\n  layout"):
        PipelineParallelLayerLayout(rows, 1)


def test_encoders_can_be_read_but_not_placed():
    layout = PipelineParallelLayerLayout([["embedding", "encoder"], ["loss"]], 2)
    assert layout.layer_names(0) == ("embedding", "encoder.0")
    assert layout.get_num_layers_to_build(LayerType.encoder, pp_rank=0) == 1
    with pytest.raises(LayoutError, match="PP-E019"):
        layout.validate_layer_layout(0, None)
    with pytest.raises(LayoutError, match="PP-E019"):
        layout.canonical()


# ranks and chunks


def test_the_default_rank_is_the_one_that_the_layout_was_bound_to():
    layout = PipelineParallelLayerLayout("Et|ttt|tL", 3, pp_rank=1)
    assert layout.get_num_layers_to_build() == 3
    assert layout.get_layer_offset() == 1
    assert layout.get_layer_id_list() == [1, 2, 3]
    assert layout.get_layer_id_list(pp_rank=2) == [4]


@pytest.mark.parametrize(
    ("pp", "arguments", "what"),
    [
        (3, {}, "pp_rank is not given"),
        (1, {"pp_rank": 0}, "vp_stage is not given, but every rank holds 3 chunks"),
        (3, {"pp_rank": 3}, "pp_rank=3 is outside of 0 to 2"),
        (3, {"pp_rank": -1}, "pp_rank=-1 is outside"),
        (3, {"pp_rank": 0, "vp_stage": 1}, "vp_stage=1 is outside of 0 to 0"),
        (1, {"pp_rank": 0, "vp_stage": -1}, "vp_stage=-1 is outside"),
    ],
)
@pytest.mark.parametrize("method", ["get_num_layers_to_build", "get_layer_offset", "get_layer_id_list"])
def test_a_stage_that_is_not_named_or_does_not_exist_is_a_clear_error(method, pp, arguments, what):
    layout = PipelineParallelLayerLayout("Et|ttt|tL", pp)
    with pytest.raises(LayoutError, match=f"PP-E020: {what}"):
        getattr(layout, method)(**arguments)


def test_a_layout_cannot_be_bound_to_a_rank_that_does_not_exist():
    with pytest.raises(LayoutError, match="PP-E020: pp_rank=2 is outside of 0 to 1"):
        PipelineParallelLayerLayout("Et|tL", 2, pp_rank=2)
    with pytest.raises(LayoutError, match="PP-E020: stage=2 is outside"):
        PipelineParallelLayerLayout("Et|tL", 2).layer_names(2)


def test_one_rank_with_several_chunks_builds_every_layer_once():
    layout = PipelineParallelLayerLayout("Et|tt|tL", 1)
    assert [layout.get_layer_id_list(vp_stage=chunk, pp_rank=0) for chunk in range(3)] == [[0], [1, 2], [3]]


# validation and the error type


def test_all_violations_are_reported_at_once():
    layout = PipelineParallelLayerLayout("|mt|E|LE|", 5)
    codes = [problem.code for problem in layout.problems(9, 3)]
    assert codes == ["PP-E013", "PP-E013", "PP-E014", "PP-E015", "PP-E016", "PP-E017"]
    with pytest.raises(LayoutError) as caught:
        layout.validate_layer_layout(9, 3)
    assert [problem.code for problem in caught.value.problems] == codes


def test_no_mtp_layers_may_be_said_as_none_or_zero():
    layout = PipelineParallelLayerLayout("Et|tL", 2)
    assert layout.validate_layer_layout(2, None) is layout.validate_layer_layout(2, 0) is False


def test_a_layout_error_is_a_config_error_and_a_value_error():
    with pytest.raises(LayoutError) as caught:
        PipelineParallelLayerLayout.from_str("x", 1)
    assert isinstance(caught.value, ConfigError) and isinstance(caught.value, ValueError)
    assert caught.value.exit_code == 2


def test_from_str_makes_a_layout_of_its_own_each_time():
    one, two = (PipelineParallelLayerLayout.from_str(DEEPSEEK, 16) for _ in range(2))
    assert one is not two and one.stages == two.stages


def test_validation_survives_python_without_asserts():
    code = "from ppctl.layout import *; PipelineParallelLayerLayout('t|t', 2).validate_layer_layout(2, 0)"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode and "PP-E013" in done.stderr


def test_layouts_need_the_standard_library_only():
    code = "import sys, ppctl.cli.layout; print([m for m in ('torch', 'hydra', 'rich', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_layout_code_has_a_page_and_every_page_a_code():
    source = "".join(path.read_text() for path in (files("ppctl") / "layout").iterdir() if path.name.endswith(".py"))
    page = (files("ppctl") / "pages" / "E0.md").read_text()
    assert sorted(set(re.findall(r"PP-E0\d\d", source))) == re.findall(r"^## (PP-E0\d\d) \S", page, re.MULTILINE)
