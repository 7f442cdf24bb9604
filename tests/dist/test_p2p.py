"""P2PCommunicator: Megatron's methods over channels, between real processes."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, run_ranks

from ppctl.comm.groups import make_group
from ppctl.comm.p2p_communication import P2PCommunicator, is_single_shape
from ppctl.comm.wiring import loop_channels
from ppctl.errors import ConfigError
from ppctl.schedule.action import Channel

SHAPE = (2, 3)
CONFIG = SimpleNamespace(batch_p2p_comm=False, pipeline_dtype=torch.float32, virtual_pipeline_model_parallel_size=2)


def filled(value, shape=SHAPE):
    return torch.full(shape, float(value))


def values(*received):
    """What each received tensor is filled with."""
    for tensor in received:
        assert tensor.requires_grad and tensor.is_leaf and len(tensor.unique()) == 1
    return [tensor.unique().item() for tensor in received]


def in_a_line():
    """Forward down the ranks and gradients back, as a first, a middle and a last stage call it."""
    comm = P2PCommunicator(dist.group.WORLD, CONFIG)
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


def test_activations_go_down_and_gradients_come_back():
    assert run_ranks(in_a_line, 3) == [
        ([], [101.0]),
        ([0.0, 0.0, -0.0], [102.0]),
        ([1.0, 1.0, -1.0], []),
    ]


def combined():
    """1F1B's two combined calls between neighbours: a list gives a list, a flat list is one shape."""
    comm = P2PCommunicator(dist.group.WORLD, CONFIG)
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


@pytest.mark.parametrize("size", [2, 4])
def test_nothing_is_mixed_up_round_the_ring_even_where_both_neighbours_are_one_rank(size):
    for rank, (got, neighbours, _) in enumerate(run_ranks(round_the_ring, size)):
        before, after = (rank - 1) % size, (rank + 1) % size
        assert got == [before, 100 + after, before, 100 + after, before]
        assert neighbours == (before, after)


def round_the_ring():
    """Everything at once, wrapping round: each tensor must come from where it should."""
    comm = P2PCommunicator(dist.group.WORLD, CONFIG)
    rank = comm.current_stage
    both = comm.send_forward_backward_recv_forward_backward(filled(rank), filled(100 + rank), True, True, SHAPE)
    forward = comm.send_forward_recv_forward(filled(rank), True, list(SHAPE))
    backward = comm.send_backward_recv_backward(filled(100 + rank), True, SHAPE)
    tensor, handles = comm.send_forward_recv_forward(filled(rank), True, SHAPE, overlap_p2p_comm=True)
    assert sorted(handles) == ["recv_prev", "send_next"]
    for handle in handles.values():
        handle.wait()
    return values(*both, forward, backward, tensor), (comm.prev_rank, comm.next_rank), comm.total_stages


def test_the_combined_calls_of_1f1b():
    assert run_ranks(combined, 2) == [[3.0, 4.0], [1.0, 2.0]]


def strided():
    """A transposed tensor arrives as what it shows, not as how it is stored."""
    comm = P2PCommunicator(dist.group.WORLD, CONFIG)
    if comm.is_pp_first_stage:
        comm.send_forward(torch.arange(6.0).view(3, 2).mT, False)
        return None
    return comm.recv_forward(SHAPE, False).tolist()


def test_a_tensor_that_is_not_contiguous_arrives_whole():
    assert run_ranks(strided, 2)[1] == torch.arange(6.0).view(3, 2).mT.tolist()


def two_pipelines():
    """Two pipelines in one world, in an unusual order: pp rank is the position in the tuple."""
    group = make_group([(2, 0), (1, 3)])
    comm = P2PCommunicator(group, CONFIG)
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
    comm = P2PCommunicator(dist.group.WORLD, SimpleNamespace(pipeline_dtype=None))
    caught = {}
    for name, call in {
        "none": lambda: comm.send_forward(None, False),
        "none in list": lambda: comm.send_backward([None], False),
        "dtype": lambda: comm.recv_forward(SHAPE, False),
    }.items():
        try:
            call()
        except (ValueError, RuntimeError) as error:
            caught[name] = f"{type(error).__name__}: {error}"
    comm.config.pipeline_dtype = torch.float32
    try:
        comm.recv_forward([None], False)
    except RuntimeError as error:
        caught["shape"] = str(error)
    return caught


def test_what_would_hang_the_peer_is_refused_before_anything_is_sent():
    caught = run_ranks(refusals, 2)[0]
    assert caught["none"] == caught["none in list"]
    assert caught["none"].startswith("ValueError: None cannot be sent")
    assert caught["dtype"].startswith("RuntimeError: recv_prev needs pipeline_dtype")
    assert caught["shape"].startswith("recv_prev needs the shape")


@pytest.mark.parametrize("name", ["batch_p2p_comm", "use_ring_exchange_p2p", "variable_seq_lengths"])
def test_modes_that_are_not_built_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"PP-E110.*parallel\.{name}=True is not built yet"):
        P2PCommunicator(None, SimpleNamespace(**{name: True}))


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
