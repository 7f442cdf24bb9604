"""The schedules with split backwards against torch's own: the same lists, and sound with messages."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _Action

from ppctl.errors import ScheduleError
from ppctl.schedule.action import Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import to_slots
from ppctl.schedule.verify import verify

NAMES = {
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv_zero_bubble": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
SIZES = [(pp, m) for pp in (2, 3, 4, 5, 8) for m in (1, pp, 2 * pp, 2 * pp + 1, 4 * pp)]


def torchs(name: str, pp: int, m: int, vpp: int) -> str:
    """torch's rows as CSV with its idle slots, without gradient sync. Raises ValueError where torch refuses."""
    rows = get_schedule_ops(NAMES[name], pp, m, num_stages_per_rank=vpp)
    cells = [["" if a is None or "REDUCE" in str(a) else str(a) for a in row] for row in rows]
    return "".join(",".join(row) + "\n" for row in cells)


@pytest.mark.parametrize(("name", "vpp"), [*((name, 2) for name in NAMES), ("interleaved_zero_bubble", 3)])
@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_every_rank_runs_torchs_list(name: str, vpp: int, pp: int, m: int) -> None:
    try:
        theirs = torchs(name, pp, m, vpp)
    except ValueError:
        if name == "dualpipev":
            with pytest.raises(ScheduleError, match="or more microbatches"):
                make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m)
        return
    group = m // max(1, m // pp)
    made = make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m, microbatch_group_size=group)
    read = Schedule.from_csv(theirs)
    assert (made.actions, made.pairs) == (read.actions, read.pairs)
    assert bool(made.pairs) == (name == "dualpipev")
    assert verify(made) == [] == verify(lower(made))


def test_torch_reads_the_pairs_that_are_written() -> None:
    schedule = make_schedule("dualpipev", pp=4, vpp=2, num_microbatches=9)
    for text in (schedule.to_csv(), to_slots(schedule)):
        cells = [[_Action.from_str(cell) for cell in line.split(",")] for line in text.splitlines()]
        pairs = {str(action) for row in cells for action in row if action and action.sub_actions}
        assert pairs == set(map(str, schedule.pairs))
        assert Schedule.from_csv(text, name="dualpipev") == schedule


@pytest.mark.parametrize("name", ["zbv_zero_bubble", "dualpipev"])
def test_a_v_has_two_chunks_per_rank(name: str) -> None:
    with pytest.raises(ScheduleError, match="two chunks"):
        make_schedule(name, pp=4, vpp=1, num_microbatches=8)
