"""What people read when a layout is wrong: whole messages, carets included, in tests/golden/layout_messages.txt.

Each case is a line `== {"layout": ..., "pp": ...}` followed by the message. `python tests/unit/test_layout_messages.py`
writes the messages anew for the cases in the file; read the difference before committing it.
"""

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ppctl.errors import LayoutError
from ppctl.layout import PipelineParallelLayerLayout
from ppctl.layout.letters import MAX_ITEMS

FILE = Path(__file__).parents[1] / "golden" / "layout_messages.txt"


def read():
    for block in FILE.read_text(encoding="utf-8").removeprefix("== ").split("\n== "):
        head, _, message = block.partition("\n")
        yield pytest.param(json.loads(head), message.rstrip("\n"), id=head[11:50])


CASES = list(read())
ABOUT_TEXT = [each for each in CASES if each.values[0]["pp"] > 0]


def complaint(case):
    """The LayoutError of one case; None if ppctl accepts it."""
    try:
        layout = PipelineParallelLayerLayout(
            case["layout"], case["pp"], **{k: v for k, v in case.items() if k not in ("layout", "pp")}
        )
        kinds = [layer.value for layer in layout.flatten_layout]
        layout.validate_layer_layout(
            case.get("num_layers", kinds.count("decoder")), case.get("mtp_num_layers", kinds.count("mtp"))
        )
    except LayoutError as error:
        return error
    return None


def suggested(problem):
    """The layout that a remedy's first line proposes, taken out of it as a shell would."""
    *_, word = shlex.split(problem.remedy.splitlines()[0])
    return word.partition("=")[2] if "=" in word else word


@pytest.mark.parametrize(("case", "message"), CASES)
def test_a_bad_layout_is_told_exactly_so(case, message):
    assert str(complaint(case)) == message


@pytest.mark.parametrize(("case", "message"), ABOUT_TEXT)
def test_the_message_names_the_key_and_its_caret_stands_under_the_text(case, message):
    for problem in complaint(case).problems:
        assert problem.place.startswith(case.get("key", "layout"))
        if isinstance(case["layout"], str):
            shown, caret = problem.place.split("\n")
            assert caret.strip() == "^" and len(caret) <= len(shown) + 1 + 4  # four wide characters at most


@pytest.mark.parametrize(("case", "message"), ABOUT_TEXT)
def test_every_suggestion_is_a_layout_that_validates(case, message):
    for problem in complaint(case).problems:
        assert complaint({**case, "layout": suggested(problem)}) is None


def test_the_other_remedies_validate_too():
    with pytest.raises(LayoutError) as caught:
        PipelineParallelLayerLayout("Et|t|tL", 2)
    assert caught.value.problems[0].remedy.splitlines()[1] == "pp=3"
    assert complaint({"layout": "Et|t|tL", "pp": 3}) is None
    problem = PipelineParallelLayerLayout("Et|tL", 2).problems(61, 0)[0]
    assert problem.remedy.splitlines()[1] == "model.num_layers=2"


def test_there_are_enough_cases():
    assert len(CASES) >= 40


@given(st.text(alphabet="EtmL|()*,0123 9eTx?×;٣", max_size=24), st.integers(1, 5))
@example("(" * 60 + "t" + ")*2" * 60, 1)
@example("Et*" + "9" * 5000 + "|L", 2)
@example("?t" * 500, 3)
@example("E" + "(t|)*99999" * 3 + "L", 4)
def test_whatever_is_typed_is_accepted_or_answered_with_a_valid_layout(text, pp):
    error = complaint({"layout": text, "pp": pp})
    for problem in error.problems if error else ():
        assert complaint({"layout": suggested(problem), "pp": pp}) is None


def test_a_text_that_is_no_layout_is_not_answered_with_a_thousand_problems():
    assert len(complaint({"layout": "?t" * 1000, "pp": 1}).problems) == 21


@pytest.mark.parametrize("text", [f"Et*{MAX_ITEMS}L", "E((t)*1000)*1000L", "t" * (MAX_ITEMS + 1), "(t*99999|)*99999"])
def test_a_layout_beyond_the_cap_is_refused_with_the_numbers(text):
    error = complaint({"layout": text, "pp": 1})
    assert error.problems[0].code == "PP-E008" and f"{MAX_ITEMS:,}" in error.problems[0].message


@pytest.mark.parametrize(("layout", "pp", "num_layers"), [("Et|tL", 10**12, 2), ("Et|tL", 2, 10**12)])
def test_absurd_sizes_cost_no_memory(layout, pp, num_layers):
    assert complaint({"layout": layout, "pp": pp, "num_layers": num_layers}).problems[0].remedy


if __name__ == "__main__":
    heads = [case.values[0] for case in CASES]
    FILE.write_text("".join(f"== {json.dumps(case)}\n{complaint(case)}\n" for case in heads), encoding="utf-8")
