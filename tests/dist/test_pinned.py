"""The path of a GPU's tensors over host memory, without a GPU: what it copies and when it waits are real.

Only the two calls that need a device are stood in for: pinning memory, and waiting for the current stream.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from pipeline import join, make_communicator, plain_loop, run_case
from ranks import run_ranks

from ppctl.comm import pinned
from ppctl.comm.channels import PinnedEnd
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule


def through_the_host(name, vpp, m):
    """A step whose messages go through copies; (outcome, copies made, waits for the device)."""
    counts = SimpleNamespace(copies=0, waits=0)

    def copy_of(tensor):
        counts.copies += 1
        return torch.empty_like(tensor)

    def synchronize():
        counts.waits += 1

    pinned._pinned = copy_of
    torch.cuda.current_stream = lambda: SimpleNamespace(synchronize=synchronize)
    pp = torch.distributed.get_world_size()
    schedule = lower(make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m))
    communicator = make_communicator(schedule)
    communicator._ends = {channel: PinnedEnd(channel, *end.backend) for channel, end in communicator._ends.items()}
    return run_case(schedule, communicator), counts.copies, counts.waits


@pytest.mark.parametrize(("name", "pp", "vpp", "m"), [("1f1b", 2, 1, 4), ("interleaved_1f1b", 3, 2, 6)])
def test_messages_through_the_host_change_no_bit_and_a_send_alone_waits_for_the_device(name, pp, vpp, m):
    ranks = run_ranks(through_the_host, pp, name, vpp, m)
    (reference,) = run_ranks(plain_loop, 1, pp * vpp, m)
    assert join(outcome for outcome, _, _ in ranks).equals(reference)
    messages = 2 * m * (pp * vpp - 1)
    assert sum(waits for _, _, waits in ranks) == messages, "one wait for each message sent"
    assert sum(copies for _, copies, _ in ranks) >= 2 * messages, "a copy at either end"
