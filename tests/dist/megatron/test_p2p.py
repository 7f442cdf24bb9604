"""P2PCommunicator: Megatron's methods in every message mode, between real processes."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pipeline import P2P_MODES
from ranks import RanksFailed, run_ranks

from ppctl.comm.channels import MessageError
from ppctl.comm.connections import loop_channels
from ppctl.comm.groups import make_group
from ppctl.comm.modes import Modes, pipeline_backend
from ppctl.errors import ConfigError
from ppctl.megatron.message_shapes import message_dtype
from ppctl.megatron.p2p_communication import P2PCommunicator, is_single_shape
from ppctl.schedule.action import Channel

SHAPE = (2, 3)
FUSED = "batched, fused"
"""Batches as NCCL's ranks start them, here on gloo."""
in_every_mode = pytest.mark.parametrize("mode", [*P2P_MODES, FUSED])


def communicator(mode="channels", group=None, **fields):
    config = dict(pipeline_dtype=torch.float32, virtual_pipeline_model_parallel_size=2)
    modes = P2P_MODES["batched" if mode == FUSED else mode]
    made = P2PCommunicator(group or dist.group.WORLD, SimpleNamespace(**config | modes | fields))
    made._exchange.fused = mode == FUSED
    return made


def filled(value, shape=SHAPE):
    return torch.full(shape, float(value))


def values(*received):
    """What each received tensor is filled with."""
    for tensor in received:
        assert tensor.requires_grad and tensor.is_leaf and len(tensor.unique()) == 1
    return [tensor.unique().item() for tensor in received]


def in_a_line(mode):
    """Forward down the ranks and gradients back, as a first, a middle and a last stage call it."""
    comm = communicator(mode)
    first, last, rank = comm.is_pp_first_stage, comm.is_pp_last_stage, comm.current_stage
    got = comm.recv_forward(SHAPE, first)
    comm.send_forward(filled(rank), last)
    gradient = comm.recv_backward(torch.Size(SHAPE), last)
    comm.send_backward(filled(100 + rank), first)
    pair = comm.recv_forward([SHAPE, [4]], first)
    comm.send_forward([filled(rank), filled(-rank, (4,))], last)
    assert (got is None) == first and (gradient is None) == last
    assert pair == [None, None] if first else [tuple(t.shape) for t in pair] == [SHAPE, (4,)]
    return [] if first else values(got, *pair), [] if last else values(gradient)


@pytest.mark.shows("parallel.batch_p2p_sync")
@in_every_mode
def test_activations_go_down_and_gradients_come_back(mode):
    assert run_ranks(in_a_line, 3, mode) == [
        ([], [101.0]),
        ([0.0, 0.0, -0.0], [102.0]),
        ([1.0, 1.0, -1.0], []),
    ]


def combined(mode):
    """1F1B's two combined calls between neighbours: a list gives a list, a flat list is one shape."""
    comm = communicator(mode)
    if comm.is_pp_first_stage:
        gradient = comm.send_forward_recv_backward(filled(1), list(SHAPE), False)
        (listed,) = comm.send_forward_recv_backward([filled(2)], [SHAPE], False)
        assert comm.send_backward_recv_forward(filled(9), SHAPE, True) is None
        assert comm.send_backward_recv_forward([filled(9)], [SHAPE], True) == [None]
        return values(gradient, listed)
    activation = comm.send_backward_recv_forward(filled(3), SHAPE, False)
    (listed,) = comm.send_backward_recv_forward([filled(4)], [SHAPE], False)
    assert comm.send_forward_recv_backward(filled(9), SHAPE, True) is None
    return values(activation, listed)


@in_every_mode
@pytest.mark.parametrize("size", [1, 2, 4])
def test_nothing_is_mixed_up_round_the_ring_even_where_both_neighbours_are_one_rank(size, mode):
    for rank, (got, neighbours, _) in enumerate(run_ranks(round_the_ring, size, mode)):
        before, after = (rank - 1) % size, (rank + 1) % size
        assert got == [before, 100 + after, before, 100 + after, before]
        assert neighbours == (before, after)


def round_the_ring(mode):
    """Everything at once, wrapping round: each tensor must come from where it should."""
    comm = communicator(mode)
    rank = comm.current_stage
    both = comm.send_forward_backward_recv_forward_backward(filled(rank), filled(100 + rank), True, True, SHAPE)
    forward = comm.send_forward_recv_forward(filled(rank), True, list(SHAPE))
    backward = comm.send_backward_recv_backward(filled(100 + rank), True, SHAPE)
    if comm.batched:
        return [*values(*both, forward, backward), (rank - 1) % comm.total_stages], (comm.prev_rank, comm.next_rank), 0
    tensor, handles = comm.send_forward_recv_forward(filled(rank), True, SHAPE, overlap_p2p_comm=True)
    assert sorted(handles) == ["recv_prev", "send_next"]
    for handle in handles.values():
        handle.wait()
    return values(*both, forward, backward, tensor), (comm.prev_rank, comm.next_rank), comm.total_stages


@in_every_mode
def test_the_combined_calls_of_1f1b(mode):
    assert run_ranks(combined, 2, mode) == [[3.0, 4.0], [1.0, 2.0]]


def strided():
    """A transposed tensor arrives as what it shows, not as how it is stored."""
    comm = communicator()
    if comm.is_pp_first_stage:
        comm.send_forward(torch.arange(6.0).view(3, 2).mT, False)
        return None
    return comm.recv_forward(SHAPE, False).tolist()


def test_a_tensor_that_is_not_contiguous_arrives_whole():
    assert run_ranks(strided, 2)[1] == torch.arange(6.0).view(3, 2).mT.tolist()


def two_pipelines():
    """Two pipelines in one world, in an unusual order: pp rank is the position in the tuple."""
    group = make_group([(2, 0), (1, 3)])
    comm = communicator(group=group)
    comm.send_forward(filled(dist.get_rank()), comm.is_pp_last_stage)
    got = comm.recv_forward(SHAPE, comm.is_pp_first_stage)
    return comm.current_stage, comm.next_rank, None if got is None else values(got)


def test_groups_keep_their_order_and_their_messages_apart():
    assert run_ranks(two_pipelines, 4) == [(1, 2, [2.0]), (0, 3, None), (0, 0, None), (1, 1, [1.0])]


def outside():
    make_group([(0,)])


def test_a_rank_outside_every_group_is_told():
    with pytest.raises(RanksFailed, match="rank 1 is in 0 of the groups"):
        run_ranks(outside, 2)


def refusals():
    comm = communicator()
    no_dtype = communicator(pipeline_dtype=None)
    x, y = filled(1), filled(1, (4,))
    calls = {
        "none": lambda: comm.send_forward(None, False),
        "none alone in a list": lambda: comm.send_backward([None], False),
        "none in a combined call": lambda: comm.send_backward_recv_forward(None, SHAPE, False),
        "dtype": lambda: comm.send_forward(x.double(), False),
        "surplus tensor": lambda: comm.send_forward_recv_backward([x, y], [SHAPE], False),
        "surplus shape": lambda: comm.send_backward_recv_forward(x, [SHAPE, (4,)], False),
        "no dtype": lambda: no_dtype.recv_forward(SHAPE, False),
        "no shape": lambda: comm.recv_backward([None], False),
        "no shape of two": lambda: comm.send_forward_recv_backward([x, y], [SHAPE, None], False),
    }
    caught = {}
    for name, call in calls.items():
        try:
            call()
        except (MessageError, ConfigError) as error:
            caught[name] = str(error)
    return caught


REFUSALS = {
    "none": "PP-E716: pp_rank 0 was given None as an activation to send: the other rank would wait for it for ever",
    "none alone in a list": "PP-E716: pp_rank 0 was given None as a gradient to send",
    "none in a combined call": "PP-E716: pp_rank 0 was given None as a gradient to send",
    "dtype": "PP-E716: send_next is a tensor of torch.float64, but the other rank expects pipeline_dtype torch.float32",
    "surplus tensor": "PP-E716: 2 tensors are sent, but 1 shapes are received",
    "surplus shape": "PP-E716: 1 tensors are sent, but 2 shapes are received",
    "no dtype": "PP-E716: recv_prev needs to know what dtype it receives",
    "no shape": "PP-E716: recv_next needs the shape of what it receives",
    "no shape of two": "PP-E716: recv_next needs the shape of what it receives",
}


def test_what_would_leave_the_other_rank_waiting_is_refused_before_anything_is_sent():
    caught = run_ranks(refusals, 2)[0]
    assert caught.keys() == REFUSALS.keys()
    for name, text in REFUSALS.items():
        assert caught[name].startswith(text), name


def lists_with_none(mode):
    """A ported loop with nothing in its first slot: the other rank receives the second alone."""
    comm = communicator(mode)
    if comm.is_pp_first_stage:
        comm.send_forward([None, filled(5)], False)
        return values(*comm.send_forward_recv_backward([None, filled(6)], [SHAPE, SHAPE], False))
    got = comm.recv_forward(SHAPE, False), comm.send_backward([filled(7), None], False)
    return values(got[0], comm.send_backward_recv_forward(filled(8), SHAPE, False))


@in_every_mode
def test_a_none_beside_tensors_is_not_sent_as_in_megatron(mode):
    assert run_ranks(lists_with_none, 2, mode) == [[7, 8], [5, 6]]


def lengths_that_differ(mode):
    """Tensors of any number of dims, in shapes that the receiver does not know; also in lists and all at once."""
    comm = communicator(mode)
    shapes = [(3,), (), (2, 0, 4), (1, 2, 3, 4, 1, 2), (5, 2), (5, 3)]
    if comm.is_pp_first_stage:
        for number, shape in enumerate(shapes):
            comm.send_forward(filled(number, shape), False)
        comm.send_forward([filled(1, (2,)), filled(2, (3, 3))], False)
        both = comm.send_forward_backward_recv_forward_backward(filled(1, (6,)), filled(2, (1, 7)), True, True, ())
        return [tuple(t.shape) for t in both]
    got = [comm.recv_forward([()], False)[0] for _ in shapes]
    pair = comm.recv_forward([(), ()], False)
    both = comm.send_forward_backward_recv_forward_backward(filled(3, (8, 1)), filled(4, ()), True, True, ())
    assert [tuple(t.shape) for t in got] == shapes
    assert [float(t.sum()) / max(t.numel(), 1) for t in got] == [0, 1, 0, 3, 4, 5]
    assert values(*pair) == [1, 2]
    assert values(*both) == [1, 2]
    return [tuple(t.shape) for t in both]


@pytest.mark.parametrize("mode", ["channels, variable", "batched, variable"])
def test_shapes_that_only_the_sender_knows_travel_ahead(mode):
    assert run_ranks(lengths_that_differ, 2, mode) == [[(8, 1), ()], [(6,), (1, 7)]]


def too_many_dims():
    communicator("channels, variable").send_forward(filled(1, (1,) * 9), False)


def test_a_shape_that_no_header_holds_is_refused():
    with pytest.raises(RanksFailed, match=r"PP-E715: a tensor of shape .* has more than 8 dims"):
        run_ranks(too_many_dims, 2)


def alone():
    """A pipeline of one rank receives what it has sent, in order, and nothing else."""
    comm = communicator()
    comm.send_forward(filled(1), False)
    comm.send_forward(filled(2), False)
    comm.send_backward(filled(3), False)
    got = values(comm.recv_forward(SHAPE, False), comm.recv_forward(SHAPE, False), comm.recv_backward(SHAPE, False))
    errors = []
    comm.send_backward(filled(4), False)
    for call in (lambda: comm.recv_forward(SHAPE, False), lambda: comm.recv_backward((7,), False)):
        with pytest.raises(MessageError) as caught:
            call()
        errors.append(str(caught.value))
    return got, errors


def test_a_pipeline_of_one_rank_is_its_own_neighbour():
    got, (nothing, other) = run_ranks(alone, 1)[0]
    assert got == [1, 2, 3]
    assert "has sent nothing" in nothing and "[2, 3] was sent, but [7] is received" in other


def overlap_in_batches():
    communicator("batched").send_forward_recv_forward(filled(1), True, SHAPE, overlap_p2p_comm=True)


def test_messages_that_nobody_waits_for_do_not_go_with_batches():
    with pytest.raises(RanksFailed, match=r"OverlapError: PP-E117: overlap_p2p_comm asks for"):
        run_ranks(overlap_in_batches, 2)


class Timers:
    """Megatron's timers, as far as the methods use them."""

    def __init__(self):
        self.calls = []

    def __call__(self, name, log_level):
        self.calls.append((name, log_level))
        return self

    def start(self):
        self.calls.append("start")

    def stop(self):
        self.calls.append("stop")


def timed():
    timers = Timers()
    comm = communicator(timers=timers)
    first, last = comm.is_pp_first_stage, comm.is_pp_last_stage
    comm.send_forward(filled(1), last)
    comm.recv_forward(SHAPE, first)
    comm.send_forward_recv_forward(filled(1), True, SHAPE)
    return [call for call in timers.calls if call not in ("start", "stop")], timers.calls[1::3], timers.calls[3::2]


def test_the_configs_timers_run_around_every_exchange():
    (sender, started, _), (receiver, _, _) = run_ranks(timed, 2)
    assert sender == [(name, 2) for name in ("forward-send",) * 2 + ("forward-send-forward-recv",) * 2]
    assert receiver == [(name, 2) for name in ("forward-recv",) * 2 + ("forward-send-forward-recv",) * 2]
    assert started[0] == "start"


def left_alone(mode):
    comm = communicator(mode)
    if comm.is_pp_last_stage:
        raise SystemExit("gone")
    comm.recv_backward(SHAPE, False)


@pytest.mark.parametrize("mode", ["channels", "batched"])
def test_a_rank_that_is_gone_is_named_by_the_channel(mode):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(left_alone, 2, mode)
    assert any("PP-E711" in failure.message and "1->0 B" in failure.message for failure in caught.value.failures)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (dict(use_ring_exchange_p2p=True), "PP-E111: parallel.use_ring_exchange_p2p=True needs ring_exchange"),
        (dict(overlap_p2p_comm=True, batch_p2p_comm=True), "PP-E117: overlap_p2p_comm and batch_p2p_comm exclude"),
        (dict(pipeline_model_parallel_comm_backend="mpi"), "PP-E103: .* must be one of nccl, gloo, ucc, not 'mpi'"),
        (dict(pipeline_dtype="float13"), "PP-E103: parallel.pipeline_dtype must be a floating point dtype"),
    ],
)
def test_modes_that_cannot_be_had_are_refused_before_any_group_is_used(fields, text):
    with pytest.raises(ConfigError, match=text):
        P2PCommunicator(None, SimpleNamespace(**fields))


def test_what_is_wrong_is_said_all_at_once():
    with pytest.raises(ConfigError) as caught:
        Modes.of(
            SimpleNamespace(
                use_ring_exchange_p2p=True,
                pipeline_model_parallel_comm_backend="x",
                overlap_p2p_comm=True,
                batch_p2p_comm=True,
            )
        )
    assert [problem.code for problem in caught.value.problems] == ["PP-E103", "PP-E111", "PP-E117"]


@pytest.mark.parametrize("name", ["torch.bfloat16", "bf16", torch.bfloat16, "BFloat16"])
def test_pipeline_dtype_may_be_a_name(name):
    config = SimpleNamespace(pipeline_dtype=name)
    assert Modes.of(config).dtype is message_dtype(config) is torch.bfloat16


@pytest.mark.parametrize(
    ("name", "device", "code"),
    [
        (None, "cpu", None),
        ("gloo", "cpu", None),
        ("gloo", "cuda", None),
        ("nccl", "cpu", "PP-E111"),
        ("x", "cpu", "PP-E103"),
    ],
)
def test_the_pipelines_backend(name, device, code):
    if code is None:
        assert pipeline_backend(name, torch.device(device)) == name
        return
    with pytest.raises(ConfigError, match=code):
        pipeline_backend(name, torch.device(device))


@pytest.mark.skipif(torch.distributed.is_ucc_available(), reason="this build of torch has ucc")
def test_a_backend_that_torch_was_built_without_is_named():
    with pytest.raises(ConfigError, match=r"PP-E111.*needs a build of torch with ucc"):
        pipeline_backend("ucc", torch.device("cpu"))


@pytest.mark.parametrize(
    ("x", "single"),
    [
        ((4, 2), True),
        ([4, 2, 8], True),
        (torch.Size([]), True),
        (torch.Size([1]), True),
        ([], False),
        ((), False),
        ([(4, 2)], False),
        (4, False),
        ((4, None), False),
        (None, False),
    ],
)
def test_is_single_shape(x, single):
    assert is_single_shape(x) is single


def test_a_loop_has_four_lanes_per_rank_also_between_two():
    assert loop_channels(1) == ()
    assert set(loop_channels(2)) == {Channel(a, b, d) for a, b in ((0, 1), (1, 0)) for d in "FB"}
    assert all(sum(rank in channel[:2] for channel in loop_channels(4)) == 4 for rank in range(4))
