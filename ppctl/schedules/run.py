"""The door to the engine: a schedule, the stages' programs and a communicator go in, one step is run.

Knows the engine. Must not know policies, configs, models or data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ppctl.comm.p2p_communication import P2PCommunicator
from ppctl.engine.interpreter import Engine, Timed
from ppctl.engine.pace import Heartbeat
from ppctl.engine.recorder import Recorder
from ppctl.engine.stage import StageProgram
from ppctl.schedule.action import Schedule


def run_schedule(
    schedule: Schedule,
    programs: Sequence[StageProgram],
    communicator: P2PCommunicator | None = None,
    *,
    deallocate_pipeline_outputs: bool = True,
    variable_shapes: bool = False,
    reduce_grad: Callable[[int], None] | None = None,
    recorder: Recorder | None = None,
    heartbeat: Heartbeat | None = None,
    timed: Timed | None = None,
) -> None:
    """Execute this rank's part of one step: all microbatches through this rank's stages.

    `schedule` is lowered (`ppctl.schedule.passes.lower`), the same value on every rank; without backwards in it, it
    runs under no_grad. `programs` are this rank's stages. The loss is what the last stage's program returns, already
    scaled; the engine never modifies it. Gradients accumulate into `.grad` in the order of the backwards in the list.
    `communicator` is the pipeline's, and may be missing where it has one rank; it keeps channels and buffers from call
    to call. `deallocate_pipeline_outputs` frees an output once it is delivered, else it lives until its backward.
    `variable_shapes` lets the shapes of messages differ between microbatches (a communicator with variable_seq_lengths
    does as well). `reduce_grad(stage)` is called when a stage's gradients are complete. `recorder` stamps the actions,
    and must have been made for this rank's list; `heartbeat` is told each action's index, and `timed(name)`
    makes a context around what waits for messages.

    Raises ScheduleError where the arguments do not belong together, and EngineError, naming the action, where an action
    fails. After an EngineError the communicator must not be used again: peers may be in the middle of a message.
    """
    Engine(
        schedule,
        programs,
        communicator,
        deallocate_pipeline_outputs=deallocate_pipeline_outputs,
        variable_shapes=variable_shapes,
        reduce_grad=reduce_grad,
        recorder=recorder,
        heartbeat=heartbeat,
        timed=timed,
    ).run()
