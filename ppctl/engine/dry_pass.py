"""A stage's forward and backward on made-up inputs, without any message: before the first step on a GPU.

Knows stages. Must not know what they compute, nor what has to be restored afterwards (gradients, ledgers).

CUDA loads a kernel when it is first launched, and before that waits until the device is idle. A posted receive is a
kernel that runs until its message comes. So the first step, whose receives are posted ahead, must not be the first to
launch a kernel: two ranks would wait for each other for ever. The dry pass also compiles, tunes and makes workspaces
while no rank waits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch

from ppctl.comm.buffers import Message, MessageSpec, TensorLike
from ppctl.comm.channels import Arrival
from ppctl.engine.interpreter import EngineError
from ppctl.engine.stage import Stage, StageProgram
from ppctl.schedule.action import Action, B, F, I, W


def dry_pass(
    program: StageProgram,
    pp_rank: int,
    mb: int,
    device: torch.device,
    *,
    is_last: bool,
    training: bool = True,
    split: bool = False,
    hands_back: bool = True,
) -> int:
    """Run one stage's forward of microbatch `mb`, and with `training` its backward, on values that mean nothing.

    Returns the bytes of a GPU that a microbatch keeps from its forward to its backward.

    A `split` backward is run in its two halves. Without `hands_back` it makes no gradient of the stage's input.

    Inputs have the shapes that the program's specs declare; where `run_schedule` lets them vary, declare usual ones.
    Parameters receive gradients. Raises EngineError, naming the stage's forward, with what failed as its cause.
    """
    halves = (mb,) * split
    stage = Stage(
        program, is_last=is_last, training=training, deallocate_outputs=True, split=halves, hands_back=hands_back
    )
    actions = [Action(op, program.stage, mb) for op in ((F, I, W) if split else (F, B))]
    at, held = 0, _held(device)
    try:
        if program.stage > 0:
            stage.inbox[mb] = Arrival(_made_up(program.receives, program.stage, device))
        stage.wait_for_input(mb)
        stage.forward(mb)
        held = _held(device) - held
        if not training:
            return held
        at = 1
        if not is_last:
            stage.gradient_inbox[mb] = Arrival(_made_up(program.sends, program.stage, device))
        stage.wait_for_gradient(mb)
        stage.backward(mb)
        if split:
            at = 2
            stage.weight_gradients(mb)
    except Exception as error:
        raise EngineError(pp_rank, actions, at, error) from error
    return held


def _held(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def representatives(kinds: Iterable[Hashable]) -> list[int]:
    """Microbatches of a stage that together run all of its kernels; `kinds` are those of its microbatches, in order.

    One of each kind, twice: the second time its gradients are added to those of the first.
    """
    found = {kind: mb for mb, kind in enumerate(kinds)}
    return [*found.values(), *found.values()]


def _made_up(specs: Sequence[TensorLike], seed: int, device: torch.device) -> Message:
    """Values of unit variance, so that routers choose different experts. No generator of the run is touched."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(shape or (), generator=generator).to(device, dtype) for shape, dtype in MessageSpec.of(specs)
    )
