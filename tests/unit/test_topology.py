"""Ranks stand on one grid with two views; groups cut it without gaps or overlaps."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppctl.errors import ConfigError
from ppctl.topology import ORDER, RINGS, ParallelSizes, RankGrid, axes_with_groups, levels, pairs_with_messages, views

ORDERS = ["-".join(axes) for axes in permutations(ORDER.split("-"))]
AXES = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")


@st.composite
def sizes(draw: st.DrawFn) -> ParallelSizes:
    small = st.integers(1, 4)
    tp, cp, dp, pp = (draw(small) for _ in range(4))
    dense = tp * cp * dp
    etp = draw(st.sampled_from([n for n in range(1, dense + 1) if dense % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, dense // etp + 1) if dense // etp % n == 0]))
    order = draw(st.sampled_from(ORDERS))
    return ParallelSizes(dense * pp, pp, draw(small), tp, cp, dp, ep, etp, dense // etp // ep, order)


@given(sizes())
def test_every_rank_is_in_exactly_one_group_of_every_axis(sizes: ParallelSizes) -> None:
    grid = RankGrid(sizes)
    for axis in AXES:
        groups = grid.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(sizes.world))
        assert {len(group) for group in groups} == {getattr(sizes, axis)}
        for group in groups:
            assert all(grid.group_of(axis, rank) == group for rank in group)


@given(sizes())
def test_every_position_of_a_view_has_one_rank(sizes: ParallelSizes) -> None:
    grid = RankGrid(sizes)
    for view, axes in views(sizes.order).items():
        seen = [grid.coordinates(rank, view) for rank in range(sizes.world)]
        assert len({tuple(position.values()) for position in seen}) == sizes.world
        assert all(tuple(position) == axes for position in seen)


@given(sizes())
def test_the_ranks_of_a_group_differ_on_its_axis_alone(sizes: ParallelSizes) -> None:
    grid = RankGrid(sizes)
    for view, axes in views(sizes.order).items():
        for axis in set(axes) - ({"pp"} if view == "expert" else set()):
            for group in grid.groups(axis):
                positions = [grid.coordinates(rank, view) for rank in group]
                assert [position.pop(axis) for position in positions] == list(range(len(group)))
                assert all(position == positions[0] for position in positions)


@given(sizes())
def test_both_views_agree_on_pp_where_their_strides_do(sizes: ParallelSizes) -> None:
    grid, ranks = RankGrid(sizes), range(sizes.world)
    same = all(grid.coordinates(rank)["pp"] == grid.coordinates(rank, "expert")["pp"] for rank in ranks)
    assert same == (sizes.pp == 1 or len({*sizes.pipeline_strides}) == 1)
    assert same or not sizes.order.endswith("pp")


@given(sizes(), st.integers(1, 12))
def test_an_axis_crosses_nodes_where_a_group_has_ranks_on_several(sizes: ParallelSizes, per_node: int) -> None:
    for axis in AXES:
        groups = RankGrid(sizes).groups(axis)
        assert sizes.crosses(axis, per_node) == any(len({rank // per_node for rank in group}) > 1 for group in groups)


@given(sizes())
def test_groups_along_two_axes_are_in_rank_order(sizes: ParallelSizes) -> None:
    grid = RankGrid(sizes)
    groups = grid.groups("cp", "dp")
    assert sorted(rank for group in groups for rank in group) == list(range(sizes.world))
    for group in groups:
        assert list(group) == sorted(group)
        assert len({tuple(grid.coordinates(rank)[axis] for axis in ("tp", "pp")) for rank in group}) == 1


@pytest.mark.parametrize(
    ("order", "dense", "expert"),
    [
        ("tp-cp-ep-dp-pp", ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")),
        ("tp-cp-ep-pp-dp", ("tp", "cp", "pp", "dp"), ("etp", "ep", "pp", "edp")),
        ("ep-dp-cp-tp-pp", ("dp", "cp", "tp", "pp"), ("ep", "edp", "etp", "pp")),
    ],
)
def test_one_order_makes_both_views(order, dense, expert) -> None:
    """As Megatron's RankGenerator is called: cp 1 for experts, ep 1 for the rest, etp and edp for tp and dp."""
    assert views(order) == {"dense": dense, "expert": expert}


def test_pipelines_before_replicas_count_as_with_megatrons_flag() -> None:
    """--use-tp-pp-dp-mapping: tp 2, pp 2, dp 2."""
    grid = RankGrid(ParallelSizes(8, pp=2, tp=2, dp=2, etp=2, edp=2, order="tp-cp-ep-pp-dp"))
    assert grid.groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.groups("dp") == grid.groups("edp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize("order", ["", "tp-cp-ep-dp", "tp-cp-ep-dp-pp-pp", "tp-cp-ep-dp-xp", "TP-CP-EP-DP-PP"])
def test_what_is_no_order_is_an_error(order) -> None:
    with pytest.raises(ValueError, match="no order of the axes"):
        ParallelSizes(1, order=order)


def test_ranks_count_in_megatrons_order() -> None:
    """tp 2, cp 1, dp 2, pp 2: neighbours in tp are next to each other, pp peers are half a world apart."""
    grid = RankGrid(ParallelSizes(8, pp=2, tp=2, dp=2, ep=2, edp=2))
    assert grid.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert grid.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert grid.groups("ep") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert grid.groups("edp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.coordinates(6) == {"tp": 0, "cp": 0, "dp": 1, "pp": 1}


@pytest.mark.parametrize(
    ("sizes", "code"),
    [
        (dict(world=4, pp=3), "PP-E202"),
        (dict(world=4, dp=4, ep=3), "PP-E202"),
        (dict(world=0, pp=0), "PP-E201"),
        (dict(world=4, dp=4, edp=4, vpp=0), "PP-E201"),
    ],
)
def test_sizes_that_do_not_make_up_the_world_are_refused(sizes: dict[str, int], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelSizes(**sizes)
    assert code in {problem.code for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda grid: grid.coordinates(4), IndexError),
        (lambda grid: grid.groups("xp"), KeyError),
    ],
)
def test_positions_outside_the_grid_are_errors(call, error) -> None:
    with pytest.raises(error):
        call(RankGrid(ParallelSizes(4, pp=4)))


def test_levels_of_a_group_are_neighbours_and_what_lies_across_them() -> None:
    inner, outer = levels((0, 2, 4, 6, 8, 10, 12, 14), 2)
    assert inner == [(0, 2), (4, 6), (8, 10), (12, 14)]
    assert outer == [(0, 4, 8, 12), (2, 6, 10, 14)]


@settings(max_examples=20)
@given(sizes())
def test_ranks_exchange_messages_with_all_of_a_group_and_with_neighbours_in_one_that_grows(
    sizes: ParallelSizes,
) -> None:
    pairs = {frozenset(pair) for pair in pairs_with_messages(sizes)}
    for axes in axes_with_groups(sizes, experts=True):
        for group in RankGrid(sizes).groups(*axes.split("-")):
            expected = zip(group, group[1:] + group[:1], strict=True) if axes in RINGS else permutations(group, 2)
            assert all(frozenset(pair) in pairs for pair in expected)
    few = sizes.pp + sizes.tp + sizes.cp + sizes.ep + sizes.etp + 2 * len(RINGS)
    assert all(sum(rank in pair for pair in pairs) <= few for rank in range(sizes.world))


def test_replicas_of_one_pipeline_are_a_ring() -> None:
    sizes = ParallelSizes(8, dp=8, edp=8)
    assert {*pairs_with_messages(sizes)} == {(rank, (rank + 1) % 8) for rank in range(8)}
