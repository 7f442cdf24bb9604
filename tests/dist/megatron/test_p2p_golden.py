"""Megatron's recorded P2P calls, replayed through the public methods between real processes."""

import pytest
from p2p_replay import CHANGED, METHODS, RECORDS, replay, single_shape, steps
from ranks import run_ranks

SIZES = sorted({record["args"]["pp_size"] for record in METHODS.values()})


@pytest.mark.parametrize("size", SIZES)
def test_every_recorded_call_does_the_same(size):
    indices = [i for i, record in METHODS.items() if record["args"]["pp_size"] == size]
    by_rank = run_ranks(replay, size, indices)
    for index in indices:
        record = METHODS[index]
        caller = record["args"]["pp_rank"]
        outcome = by_rank[caller][index]
        expected = CHANGED.get(index, record["result"] if record["ok"] else record["error"]["type"])
        if isinstance(expected, str):
            kinds, message = outcome
            assert expected in kinds, (index, kinds)
            assert message, index
        else:
            form, values_came_through = outcome
            assert form == expected, index
            assert values_came_through, index
        moved = [shape for moves in steps(index, record) for move, shape in moves.items() if move.startswith("send")]
        received = [shape for rank in range(size) if rank != caller for shape in by_rank[rank][index]]
        assert size == 1 or sorted(received) == sorted(moved), index


STEPS = {
    "get_tensor_shapes",
    "get_forward_backward_func",
    "check_first_val_step",
    "deallocate_output_tensor",
    "custom_backward",
    "backward_step",
}
"""What torch/test_schedule_steps.py replays."""


def test_every_record_is_replayed_and_so_is_every_call_that_moves_something():
    others = {record["fn"] for i, record in RECORDS.items() if i not in METHODS}
    assert others <= STEPS | {"is_single_shape"}
    assert sum(bool(steps(i, record)) for i, record in METHODS.items()) > len(METHODS) / 2


@pytest.mark.parametrize("index", [i for i, record in RECORDS.items() if record["fn"] == "is_single_shape"])
def test_is_single_shape(index):
    assert single_shape(RECORDS[index]["args"]["x"]) is RECORDS[index]["result"]
