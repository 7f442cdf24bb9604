"""What is counted while a rank runs on tensors without values: operations, memory, waits of the host, collectives."""

import gc
import inspect
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ppctl.records.rehearsal_record import BACKWARD, FORWARD, MESSAGE, STEP, HostWait, MeasuredTraffic, Operations
from ppctl.rehearsal.ledger import BLOCK, DeviceLedger
from ppctl.tensors import row_copies


def on_device(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.fixture
def ledger():
    with DeviceLedger() as ledger:
        yield ledger


def test_views_and_memory_without_values_are_operations_and_no_launches(ledger):
    x = on_device(4, 4)
    x.view(16)
    x.t()
    torch.ops.aten._unsafe_view(x, [16])
    torch.empty_like(x)
    x + x
    x.add_(1)
    torch.zeros_like(x)
    assert ledger.operations == (Operations(STEP, 8, 3),)


def test_operations_are_counted_by_what_the_rank_does(ledger):
    x = on_device(4)
    for ledger.during in (FORWARD, FORWARD, BACKWARD):
        x + x
    assert ledger.operations == (Operations(BACKWARD, 1, 1), Operations(FORWARD, 2, 2), Operations(STEP, 1, 0))


@pytest.mark.parametrize(("dtype", "waits"), [(torch.float32, 3), (torch.bfloat16, 0)])
def test_a_grouped_product_in_float32_goes_group_by_group(ledger, dtype, waits):
    rows, weights = on_device(64, 16, dtype=dtype).requires_grad_(), on_device(4, 16, 32, dtype=dtype).requires_grad_()
    ends = on_device(4, dtype=torch.int32)
    out = torch._grouped_mm(rows, weights, ends)
    assert (out.shape, out.dtype) == ((64, 32), dtype)
    out.square().sum().backward()
    assert (rows.grad.shape, weights.grad.shape) == (rows.shape, weights.shape)
    assert sum(wait.count for wait in ledger.host_waits) == waits, "where each group ends is read, in each product"


def test_what_runs_on_the_host_starts_no_kernel(ledger):
    torch.zeros(4) + 1
    (operations,) = ledger.operations
    assert (operations.count, operations.launches, ledger.live) == (2, 0, 0)


def test_a_storage_lives_from_its_first_tensor_to_its_last_view(ledger):
    x = on_device(1024)
    view = x.view(32, 32)[3]
    assert ledger.live == 4096
    del x
    assert ledger.live == 4096
    del view
    assert ledger.live == 0


def test_every_storage_takes_whole_blocks(ledger):
    held = [on_device(1), on_device(BLOCK // 4), on_device(BLOCK // 4 + 1)]
    assert ledger.live == BLOCK + BLOCK + 2 * BLOCK
    held.append(on_device(0))
    assert ledger.live == 4 * BLOCK


def test_what_autograd_keeps_lives_until_the_backward(ledger):
    x = on_device(1024).requires_grad_()
    y = x.exp()
    loss = y.sum()
    saved = weakref.ref(y.untyped_storage())
    del y
    gc.collect()
    assert saved() is not None
    assert ledger.live == 2 * 4096 + BLOCK
    loss.backward()
    assert saved() is None
    assert ledger.live == 2 * 4096 + BLOCK  # the gradient has come for what was kept


def test_the_peak_is_the_most_since_it_was_last_read(ledger):
    x = on_device(1024)
    y = on_device(1024)
    del y
    assert (ledger.live, ledger.peak) == (4096, 8192)
    assert ledger.restart_peak() == 8192
    assert ledger.peak == 4096
    assert ledger.restart_peak() == 4096
    del x
    assert ledger.restart_peak() == 4096
    assert ledger.restart_peak() == 0


def test_a_step_begins_without_what_was_counted_before(ledger):
    x = on_device(1024)
    on_device(4096)
    x.sum().item()
    ledger.message("send", "pp", 8)
    ledger.begin_step()
    assert (ledger.operations, ledger.host_waits, ledger.traffic) == ((), (), ())
    assert ledger.peak == ledger.live == 4096


READS = {
    "item": (lambda x: x.sum().item(), 0.0),
    "float": (lambda x: float(x.sum()), 0.0),
    "int": (lambda x: int(x.long().sum()), 0),
    "bool": (lambda x: bool(x.sum()), False),
    "tolist": (lambda x: x.cpu().tolist(), [0.0, 0.0]),
    "to": (lambda x: x.to("cpu").tolist(), [0.0, 0.0]),
    "copy_": (lambda x: torch.ones(2).copy_(x).tolist(), [0.0, 0.0]),
    "equal": (lambda x: torch.equal(x, x), False),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_of_the_device_is_a_wait_and_answered_by_zeros(ledger, read):
    reads, answer = READS[read]
    found = reads(on_device(2))
    assert found == answer
    assert [wait.count for wait in ledger.host_waits] == [1]


def test_tolist_waits(ledger):
    assert on_device(2).tolist() == [0.0, 0.0]
    assert sum(wait.count for wait in ledger.host_waits) >= 1


UNSEEN = {
    "to the host, not blocking": lambda x: x.to("cpu", non_blocking=True),
    "copied to the host, not blocking": lambda x: torch.ones(2).copy_(x, non_blocking=True),
    "to the device, not blocking": lambda x: torch.ones(2).to("meta", non_blocking=True),
    "into the device, not blocking": lambda x: x.copy_(torch.ones(2), non_blocking=True),
    "on the device": lambda x: x.copy_(x + 1),
    "to another dtype": lambda x: x.to(torch.bfloat16),
    "on the host": lambda x: torch.ones(2).to(torch.bfloat16),
}


@pytest.mark.parametrize("copies", UNSEEN)
def test_the_host_does_not_wait_for_a_copy(ledger, copies):
    UNSEEN[copies](on_device(2))
    assert ledger.host_waits == ()


@pytest.mark.parametrize(
    "copies",
    [
        lambda x: torch.ones(2).to("meta"),
        lambda x: x.copy_(torch.ones(2)),
    ],
)
def test_the_host_waits_for_a_copy_out_of_its_pageable_memory(ledger, copies):
    copies(on_device(2))
    assert [wait.count for wait in ledger.host_waits] == [1]


def test_a_wait_is_named_by_the_line_of_ppctl_that_asked(ledger):
    class Asks(torch.Tensor):
        """Order of rows that is read when ppctl divides it."""

        def __floordiv__(self, other):
            return self.as_subclass(torch.Tensor).div(other).long().clamp(max=int(self.as_subclass(torch.Tensor)[0]))

    numbers = on_device(4, 2, dtype=torch.int64).as_subclass(Asks)
    ledger.during = FORWARD
    for _ in range(3):
        row_copies.RowCopies.of(numbers, 1, 1)
    lines, first = inspect.getsourcelines(row_copies.RowCopies.of)
    (place,) = [first + n for n, line in enumerate(lines) if "order // times" in line]
    assert ledger.host_waits == (HostWait("ppctl/tensors/row_copies.py", place, FORWARD, 3),)


SIZES = {
    "nonzero": lambda x: torch.nonzero(x),
    "bincount": lambda x: torch.bincount(x),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
    "_unique2": lambda x: torch.unique(x),
}


@pytest.mark.parametrize("operator", SIZES)
def test_sizes_that_depend_on_values_are_refused_by_name(ledger, operator):
    with pytest.raises(NotImplementedError, match=rf"aten\.{operator}"):
        SIZES[operator](on_device(4, dtype=torch.int64))
    assert [wait.count for wait in ledger.host_waits] == [1]


def test_a_repetition_of_known_size_waits_for_nobody(ledger):
    x = on_device(4, dtype=torch.int64)
    assert len(torch.repeat_interleave(x, x, output_size=9)) == 9
    assert ledger.host_waits == ()


def test_values_on_the_host_are_read_as_ever(ledger):
    x = torch.tensor([0, 3, 3])
    assert (x.sum().item(), torch.bincount(x).tolist(), torch.nonzero(x).shape) == (6, [1, 0, 0, 2], (2, 1))
    assert ledger.host_waits == ()


@pytest.fixture
def groups():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield dist.new_group([0, 1]), dist.new_group([0, 2])
    dist.destroy_process_group()


def test_collectives_by_kind_axis_and_bytes(groups, ledger):
    dp, ties = groups
    ledger.axes = {dp.group_name: "dp"}
    x, parts = on_device(8), on_device(4)
    dist.all_reduce(x, group=dp)
    ledger.during = BACKWARD
    for _ in range(2):
        dist.all_reduce(x, group=dp)
    dist.reduce_scatter_tensor(parts, x, group=dp)
    dist.all_gather_into_tensor(x, parts, group=dp)
    dist.all_reduce(on_device(2, dtype=torch.bfloat16), group=ties)
    assert {(row.group, row.during, row.count, row.bytes) for row in ledger.traffic if "reduce" in row.kind} == {
        ("dp", STEP, 1, 32),
        ("dp", BACKWARD, 2, 64),
        ("dp", BACKWARD, 1, 32),
        ("ties", BACKWARD, 1, 4),
    }
    kinds = {row.kind for row in ledger.traffic}
    assert kinds == {"allreduce", "reduce_scatter_base", "allgather_base"}


def test_an_exchange_counts_the_larger_of_what_goes_and_what_comes(groups, ledger):
    dp, _ = groups
    ledger.axes = {dp.group_name: "ep"}
    dist.all_to_all_single(on_device(6), on_device(4), [3, 3], [2, 2], group=dp)
    assert ledger.traffic == (MeasuredTraffic("alltoall_base", "ep", STEP, 1, 24),)


def test_messages(ledger):
    for size in (8, 16):
        ledger.message("send", "pp", size)
    ledger.message("receive", "pp", 4)
    assert ledger.traffic == (
        MeasuredTraffic("receive", "pp", MESSAGE, 1, 4),
        MeasuredTraffic("send", "pp", MESSAGE, 2, 24),
    )


def test_nothing_is_counted_once_it_is_left():
    with DeviceLedger() as ledger:
        pass
    x = on_device(1024)
    x + x
    assert (ledger.live, ledger.operations) == (0, ())
    with pytest.raises(RuntimeError, match="meta"):
        x.sum().item()
