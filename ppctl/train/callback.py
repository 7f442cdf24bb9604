"""Follows a run while it trains: metrics, recordings, checkpoints and a rank's live state are all callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ppctl.config.batch_sizes import Spans
from ppctl.data.sampler import SAMPLE_ORDER

if TYPE_CHECKING:
    from ppctl.engine.stage import StageProgram
    from ppctl.train.session import Session

TIME_IS_OVER, SAVE_FAILED, ASKED = -1, -2, -3
"""Reasons to stop beside signals: the run's time is nearly over, a checkpoint could not be written, or a callback of
`train.callbacks` asked for it."""


class Start(NamedTuple):
    """Where a run begins: completed steps, position in the data, the checkpoint that was loaded, spans of samples to
    skip, and the saved states of `train.callbacks`, as JSON by their names."""

    step: int = 0
    consumed_samples: int = 0
    sample_order: int = SAMPLE_ORDER
    checkpoint: Path | None = None
    passed: Spans = ()
    callbacks: Mapping[str, str] = {}


class TrainingRun(NamedTuple):
    """The run that a callback follows."""

    session: Session
    start: Start
    enter: Callable[[str, int], None]
    """`enter(state, steps)` tells all callbacks that the rank turns to a state after so many completed steps."""


@dataclass(slots=True)
class StepResult:
    """The results of one step, equal on every rank except `phases`."""

    step: int
    """The step's number, from 1."""
    record: dict[str, Any]
    """The figures of the step; callbacks may add some."""
    stop: str | None
    """Why the run has to stop, if a rank was asked to."""
    last: bool
    """Whether the step is the last of `train.steps`."""
    phases: tuple[float, float, float, float]
    """When the step began, the pipeline ended, the ranks agreed, and the step ended, on this rank's clock. On a GPU the
    update may be enqueued by the second time, and be under way at the last."""
    goes_back: bool = False
    """Whether the step was bad and the run goes back: then it is not the last step, and there is no stop."""
    start: Start | None = None
    """Where the run goes on after going back, from `post_update` on."""


@dataclass(slots=True)
class TrainingEnd:
    """How training ended, equal on every rank."""

    step: int
    """Completed optimizer steps."""
    loss: float | None = None
    """Loss of the last step that this process ran; None if no step was left."""
    eval_loss: float | None = None
    """Loss of the last evaluation, if there was one."""
    checkpoint: Path | None = None
    why: str | None = None
    """Why training stopped before the last step; None if it did not."""

    @property
    def stopped(self) -> bool:
        """Whether a request ended training before the last step."""
        return self.why is not None


class Callback:
    """Follows a run: subclasses override methods, which all do nothing here.

    Each method is called on every rank at the same place of the run, so that it may use collectives. Several callbacks
    are called in the order of their list. Steps count from 1. The order of the calls:

        load_state_dict     if the checkpoint has a state of the callback
        pre_train
        for each step:  enter("training"), pre_step, enter("updating"), stop_requested, pre_update, post_update,
                        log_metrics (at log.interval), post_step, state_dict (if a checkpoint is due)
                        (on a GPU enter("updating") follows pre_update: the GPU may be in the pipeline until then)
        post_train
        close           always after any of these, also after an error
    """

    def pre_train(self, run: TrainingRun) -> None:
        """Training begins: the session is built, and a checkpoint is loaded if there is one."""

    def enter(self, state: str, step: int) -> None:
        """The rank turns to a state (`ppctl.records.rank_records.STATES`) after `step` completed steps."""

    def stage_program(self, program: StageProgram, first: int) -> StageProgram:
        """The program that the engine calls for a stage in place of `program`, for example to watch it.

        `first` is the step's microbatch that is number 0 of the schedule call. Asked before the first step, and again
        if the batch grows or the run goes back.
        """
        return program

    def pre_step(self, step: int) -> None:
        """A step begins."""

    def stop_requested(self) -> int:
        """Why this rank would stop: the number of a signal, TIME_IS_OVER, SAVE_FAILED or ASKED; 0 to go on. Any true
        value of a callback of `train.callbacks` means ASKED."""
        return 0

    def pre_update(self, step: int) -> None:
        """Gradients are complete: summed over all ranks, not clipped yet. On a GPU the sums are enqueued."""

    def post_update(self, result: StepResult) -> None:
        """The weights are updated."""

    def log_metrics(self, record: dict[str, Any]) -> None:
        """The figures of a step of `log.interval`, with its evaluation's, are complete; callbacks may add some."""

    def post_step(self, result: StepResult) -> None:
        """A step is over, with its evaluation and its line of metrics."""

    def post_train(self, end: TrainingEnd) -> None:
        """The last step is over."""

    def close(self, error: BaseException | None) -> None:
        """The last call. `error` is the exception that ended training, if any."""

    def state_dict(self) -> dict[str, Any]:
        """Return a callback's (`train.callbacks`) state for checkpoints; rank 0's is written, unless it is empty."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take rank 0's state at the checkpoint from which training goes on, in any cut."""


class Callbacks(Callback):
    """Several callbacks as one. The first one's `post_step` comes last, since it saves the others' states."""

    def __init__(self, *each: Callback) -> None:
        self.each = each
        for name in WITHOUT_RESULT:
            order = (*each[1:], *each[:1]) if name == "post_step" else each
            setattr(self, name, partial(_call_all, [getattr(one, name) for one in order]))

    def stage_program(self, program: StageProgram, first: int) -> StageProgram:
        """Pass the program through all callbacks in order: each gets the previous one's result."""
        for one in self.each:
            program = one.stage_program(program, first)
        return program

    def stop_requested(self) -> int:
        """The first callback's reason that is not 0, after all were asked."""
        return next(filter(None, [one.stop_requested() for one in self.each]), 0)

    def close(self, error: BaseException | None) -> None:
        """Call `close` of all callbacks, the last one first, even if one raises."""
        with ExitStack() as closing:
            for one in reversed(self.each):
                closing.callback(one.close, error)


WITHOUT_RESULT = (
    *("pre_train", "enter", "pre_step", "pre_update", "post_update", "log_metrics", "post_step"),
    "post_train",
)
"""The methods that return nothing, except `close`."""


def _call_all(methods: Sequence[Callable[..., None]], *arguments: object) -> None:
    for method in methods:
        method(*arguments)
