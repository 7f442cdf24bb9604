"""The policies and the lowering against torch.distributed.pipelining's own schedules.

Compared are the lists that torch makes for GPipe, for its multi-stage schedules, and for 1F1B on all ranks but the
last: there its list, which is never executed, is wrong (it starts at microbatch 1), and the rule of the loop that is
executed stands in: one forward and one backward in turn.
"""

from __future__ import annotations

import csv

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from ppctl.schedule.action import Action, Op, Schedule
from ppctl.schedule.passes import lower, place_gradient_sync
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.schedule_request import schedule_in
from ppctl.schedule.simulate import to_slots
from ppctl.schedule.verify import verify

GRID = [(pp, m) for pp in (2, 3, 4, 8) for m in (1, pp, pp + 1, 2 * pp, 4 * pp)]


def torch_rows(name: str, pp: int, m: int, vpp: int = 1) -> list[str]:
    rows = get_schedule_ops(name, pp, m, num_stages_per_rank=vpp)
    return [",".join(str(action) for action in row if action is not None) for row in rows]


@pytest.mark.parametrize(("pp", "m"), GRID)
def test_gpipe(pp: int, m: int) -> None:
    schedule = place_gradient_sync(make_schedule("gpipe", pp=pp, num_microbatches=m))
    assert schedule.to_csv().splitlines() == torch_rows("GPipe", pp, m)


@pytest.mark.parametrize(("pp", "m"), [(pp, m) for pp, m in GRID if m >= pp])
def test_1f1b(pp: int, m: int) -> None:
    rows = place_gradient_sync(make_schedule("1f1b", pp=pp, num_microbatches=m)).to_csv().splitlines()
    assert rows[:-1] == torch_rows("1F1B", pp, m)[:-1]
    assert rows[-1] == ",".join(f"{pp - 1}F{mb},{pp - 1}B{mb}" for mb in range(m)) + f",{pp - 1}REDUCE_GRAD"


@pytest.mark.parametrize("vpp", [2, 3, 4])
@pytest.mark.parametrize(("pp", "m"), GRID)
def test_interleaved_1f1b_on_all_ranks(pp: int, m: int, vpp: int) -> None:
    rounds = max(1, m // pp)
    if m % rounds:
        with pytest.raises(ValueError, match="multiple"):
            torch_rows("Interleaved1F1B", pp, m, vpp)
        return
    schedule = make_schedule("interleaved_1f1b", pp=pp, vpp=vpp, num_microbatches=m, microbatch_group_size=m // rounds)
    assert schedule.to_csv().splitlines() == torch_rows("Interleaved1F1B", pp, m, vpp)


def test_a_file_of_torch_with_fsdps_actions_is_read_without_them(tmp_path) -> None:
    """Written as torch writes a schedule: rows of the csv module, with what its own pass puts in for FSDP."""
    schedule = make_schedule("interleaved_1f1b", pp=2, vpp=2, num_microbatches=4)
    with open(tmp_path / "torch.csv", "w", newline="") as file:
        for row in schedule.actions:
            actions = [torch_schedules._Action.from_str(str(action)) for action in row]
            csv.writer(file).writerow(torch_schedules._add_unshard_reshard(actions))
    text = (tmp_path / "torch.csv").read_text()
    assert "0UNSHARD" in text and "3RESHARD" in text
    assert Schedule.from_csv(text).actions == schedule_in(str(tmp_path / "torch.csv")).actions == schedule.actions


@pytest.mark.parametrize(
    "cell",
    ["0F0", " 0F0", "0F0\t", "0F", "3I", "1SEND_B12", "1RECV_F", "2REDUCE_GRAD", "2REDUCE_GRAD0", "1RESHARD",
     "1UNSHARD ", "", "  ", "(0F1;0B0)OVERLAP_F_B", " ( 0F1 ; 0B0 )OVERLAP_F_B "],
)  # fmt: skip
def test_a_cell_that_torch_reads_is_read_as_the_same_action(cell: str) -> None:
    theirs = torch_schedules._Action.from_str(cell)
    several = [] if theirs is None else theirs.sub_actions or [theirs]
    expected = [
        Action(Op(name), each.stage_index, -1 if name == "REDUCE_GRAD" else each.microbatch_index or 0)
        for each in several
        if (name := each.computation_type.value) not in ("UNSHARD", "RESHARD")
    ]
    assert Schedule.from_csv(f"0F0,{cell}").actions[0][1:] == tuple(expected)


@pytest.mark.parametrize("vpp", [2, 3])
@pytest.mark.parametrize(("pp", "m"), GRID)
def test_breadth_first_forwards_are_gpipe_with_chunks(pp: int, m: int, vpp: int) -> None:
    """torch runs the backwards of a chunk from the last microbatch to the first; here gradients add up in order."""
    schedule = make_schedule("gpipe", pp=pp, vpp=vpp, num_microbatches=m)
    forwards = [",".join(str(action) for action in row if action.op is Op.F) for row in schedule.actions]
    breadth_first = torch_rows("LoopedBFS", pp, m, vpp)
    assert forwards == [",".join(cell for cell in row.split(",") if "F" in cell) for row in breadth_first]


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "Interleaved1F1B", "LoopedBFS"])
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8)])
def test_torchs_other_schedules_can_be_read_lowered_and_proved(name: str, pp: int, m: int) -> None:
    schedule = Schedule.from_csv("\n".join(torch_rows(name, pp, m, 2)) + "\n", name=name)
    assert schedule.placement.kind == ("v" if name == "ZBVZeroBubble" else "loop")
    assert verify(schedule) == []
    assert verify(lower(schedule)) == []


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 2, 4), (3, 2, 6), (4, 3, 8)])
def test_torch_and_we_place_the_same_messages(pp: int, vpp: int, m: int) -> None:
    """Not at the same places (torch posts a receive where its send stands), but the same ones on every rank."""
    schedule = lower(make_schedule("interleaved_1f1b", pp=pp, vpp=vpp, num_microbatches=m))
    theirs = get_schedule_ops("Interleaved1F1B", pp, m, num_stages_per_rank=vpp, with_comms=True)
    for ours, torchs in zip(schedule.actions, theirs, strict=True):
        messages = {str(action) for action in ours if action.op not in (Op.F, Op.B, Op.REDUCE_GRAD)}
        assert messages == {str(action) for action in torchs if "SEND" in str(action) or "RECV" in str(action)}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_torch_reads_our_text_and_finds_it_valid(name: str) -> None:
    vpp = 2 if name == "interleaved_1f1b" else 1
    schedule = make_schedule(name, pp=4, vpp=vpp, num_microbatches=9)
    rows = {rank: [torch_schedules._Action.from_str(str(a)) for a in row] for rank, row in enumerate(schedule.actions)}
    torch_schedules._validate_schedule(rows, 4, 4 * vpp, 9)


@pytest.mark.parametrize(
    ("name", "vpp"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zbv_zero_bubble", 2), ("dualpipev", 2)]
)
def test_torch_reads_the_dumped_csv_and_finds_it_valid(name: str, vpp: int) -> None:
    text = to_slots(make_schedule(name, pp=4, vpp=vpp, num_microbatches=9))
    cells = [[torch_schedules._Action.from_str(cell) for cell in row.split(",")] for row in text.splitlines()]
    torch_schedules._validate_schedule(dict(enumerate(cells)), 4, 4 * vpp, 9)
