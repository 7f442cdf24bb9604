"""The drawing of a trace in a terminal."""

from __future__ import annotations

import pytest
from schedule_sizes import made, v_shaped

from ppctl.schedule.passes import lower
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.text_timeline import timeline_text
from ppctl.schedule.trace import Trace


def test_1f1b_is_drawn_as_on_paper() -> None:
    trace = simulate(made(("1f1b", 2, 1, 3, 2)), Costs.uniform(2, 1.0, 2.0))
    assert timeline_text(trace, 42) == (
        "last digit of the microbatch: 0-9 forward, a-j backward (a is 0); dots are idle\n"
        "rank 0  stage 0 |0011....aaaa22bbbb..cccc|\n"
        "rank 1  stage 1 |..00aaaa11bbbb22cccc....|\n"
        "                 12 s (0.5 s a column), bubble 25.0%\n"
    )


def test_chunks_have_a_line_each_and_idle_time_is_on_all_of_a_ranks_lines() -> None:
    trace = simulate(made(("interleaved_1f1b", 2, 2, 2, 2)), Costs.uniform(4, 1.0, 2.0))
    assert timeline_text(trace, 48).splitlines()[1:5] == [
        "rank 0  stage 0 |0011    ....    ..    aaaabbbb|",
        "        stage 2 |    0011....aaaa..bbbb        |",
        "rank 1  stage 1 |..0011            aaaabbbb....|",
        "        stage 3 |..    00aaaa11bbbb        ....|",
    ]


@pytest.mark.parametrize("width", [40, 79, 100, 200])
@pytest.mark.parametrize("sizes", [("1f1b", 4, 1, 12, 4), ("interleaved_1f1b", 8, 2, 32, 8), ("gpipe", 1, 3, 2, 1)])
def test_the_drawing_fits_the_width(sizes: tuple[str, int, int, int, int], width: int) -> None:
    schedule = lower(made(sizes))
    rows = timeline_text(simulate(schedule, Costs.uniform(schedule.placement.num_stages)), width).splitlines()[1:-1]
    assert len(rows) == schedule.placement.num_stages
    assert {len(row) for row in rows} == {width}


def test_every_action_shows_where_columns_suffice() -> None:
    schedule = made(("1f1b", 3, 1, 7, 3))
    rows = timeline_text(simulate(schedule, Costs.uniform(3)), 150).splitlines()[1:-1]
    assert all(set("0123456abcdefg") <= set(row) for row in rows)


def test_split_backwards_have_two_kinds_of_letters() -> None:
    text = timeline_text(simulate(v_shaped(), Costs.uniform(4)), 100)
    assert "A-J weight gradient" in text
    assert any("A" in line.partition("|")[2] for line in text.splitlines())


def test_an_empty_trace_is_drawn_too() -> None:
    assert "0 s" in timeline_text(Trace(2, ()), 80)
