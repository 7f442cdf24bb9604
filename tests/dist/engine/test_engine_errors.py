"""What goes wrong is named with its action, and no peer hangs."""

import pipeline
import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, run_ranks

from ppctl.engine.interpreter import Engine
from ppctl.engine.stage import StageProgram
from ppctl.errors import ScheduleError
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule


def wrong_shape(mb, inputs, outputs):
    return (outputs[0][:-1], *outputs[1:])


def wrong_dtype(mb, inputs, outputs):
    return (outputs[0].double(), *outputs[1:])


def one_tensor_too_many(mb, inputs, outputs):
    return (*outputs, outputs[0])


def no_tuple(mb, inputs, outputs):
    return outputs[0]


def unused_input(mb, inputs, outputs):
    return tuple(output.detach().requires_grad_() for output in outputs)


def exception(mb, inputs, outputs):
    raise ValueError(f"no flour for microbatch {mb}")


class FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("the well is dry")


def exception_in_backward(mb, inputs, outputs):
    return (FailInBackward.apply(outputs[0]), *outputs[1:])


def vector_loss(mb, inputs, outputs):
    return (outputs[0].expand(2),)


def constant_loss(mb, inputs, outputs):
    return (outputs[0].detach(),)


def run_with_fault(fault, stage, mb):
    """Three stages on three ranks; one stage goes wrong in one microbatch."""
    schedule = lower(make_schedule("1f1b", pp=3, num_microbatches=4))
    rank = dist.get_rank()
    (healthy,) = pipeline.programs_of(schedule, rank, {rank: pipeline.build(rank)}, {})

    def forward(m, inputs):
        outputs = healthy.forward(m, inputs)
        return globals()[fault](m, inputs, outputs) if m == mb else outputs

    program = StageProgram(rank, forward, healthy.receives, healthy.sends) if rank == stage else healthy
    pipeline.run_schedule(schedule, [program], pipeline.make_communicator())


FAULTS = [
    # fault, stage, action that fails, code, what the message says
    (
        "wrong_shape",
        0,
        "0F2",
        "PP-E712",
        r"stage 0 put float32\[2, 6\] on its edge to stage 1.*says float32\[3, 6\]",
    ),
    ("wrong_dtype", 1, "1F2", "PP-E712", r"stage 1 put float64\[3, 7\], float32\[3\] on its edge to stage 2"),
    ("one_tensor_too_many", 1, "1F2", "PP-E712", r"float32\[3, 7\], float32\[3\], float32\[3, 7\]"),
    ("no_tuple", 0, "0F2", "PP-E712", "a Tensor instead of a tuple of tensors"),
    ("unused_input", 1, "1B2", "PP-E713", "stage 1 has no gradient for its input in microbatch 2"),
    ("exception", 1, "1F2", "PP-E710", "ValueError: no flour for microbatch 2"),
    ("exception_in_backward", 1, "1B2", "PP-E710", "ArithmeticError: the well is dry"),
    ("vector_loss", 2, "2F2", "PP-E714", r"must return one scalar loss .* it returned float32\[2\]"),
    ("constant_loss", 2, "2F2", "PP-E714", r"it returned float32\[\] without a gradient"),
]


@pytest.mark.parametrize(("fault", "stage", "action", "code", "message"), FAULTS, ids=[f[0] for f in FAULTS])
def test_a_fault_is_named_with_its_action_and_the_peers_end(fault, stage, action, code, message):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(run_with_fault, 3, fault, stage, 2)
    first, *others = caught.value.failures
    assert (first.rank, first.kind) == (stage, "EngineError")
    assert first.message.startswith(f"{code}: pp_rank {stage} (stage {stage}) failed in {action}: ")
    assert caught.match(message)
    assert f"\n    {action}  <-- here\n" in first.message
    assert sorted(f.rank for f in others) == [rank for rank in range(3) if rank != stage]
    for echo in others:
        assert echo.message.startswith(f"PP-E711: pp_rank {echo.rank} (stage {echo.rank}) failed in "), echo


def placeholder(stage):
    return StageProgram(stage, lambda mb, inputs: inputs)


def test_foreign_stages_are_refused():
    schedule = make_schedule("gpipe", pp=1, vpp=2, num_microbatches=1)
    with pytest.raises(ScheduleError, match=r"PP-E390.*owns the stages \[0, 1\], but the programs are for \[0\]"):
        Engine(schedule, [placeholder(0)])


def test_a_schedule_for_more_ranks_is_refused():
    schedule = lower(make_schedule("1f1b", pp=2, num_microbatches=1))
    with pytest.raises(ScheduleError, match=r"PP-E390.*for 2 pipeline ranks, but the communicator has 1"):
        Engine(schedule, [placeholder(0)])


def test_messages_of_integers_are_refused():
    with pytest.raises(ValueError, match="'int64' is not such a dtype"):
        Engine(
            make_schedule("gpipe", pp=1, vpp=2, num_microbatches=1),
            [StageProgram(0, placeholder(0).forward, sends=(pipeline.TensorSpec((1,), "int64"),)), placeholder(1)],
        )
