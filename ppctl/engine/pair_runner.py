"""A forward and a backward of one rank, a pair of its schedule, that advance in turns (`comm/turns.py`).

While the exchange of one half is under way, the other half computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.variable import Variable
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from ppctl.comm.turns import Turns
from ppctl.engine.recorder import Recorder
from ppctl.errors import Problem, TrainingError
from ppctl.schedule.action import Action, Pair, Schedule
from ppctl.weight_gradients.deferred import keep_collecting


def pairs_of(schedule: Schedule, actions: Sequence[Action]) -> dict[Action, Action]:
    """Forward -> backward of the pairs in a rank's list whose backward follows directly."""
    return dict(pair for pair in pairwise(actions) if Pair(*pair) in schedule.pairs) if schedule.pairs else {}


class PairRunner:
    """Runs the halves of a pair, and stamps them: the half that ends first gets the time up to its end, the other half
    gets the rest. Both times add up to the pair's time."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self.recorder = recorder
        self._turns = Turns(_same_state(device), keep_collecting)
        self.failed = 0
        """The index of the half that failed, after `run` has raised."""

    def run(self, first: int, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run a forward, at `first` in the list, and the backward after it as a pair. Raises what a half raises."""
        running = [first, first + 1]
        for index in reversed(running):  # the forward last, which is first to run
            self.recorder.begin(index)

        def half(index: int, work: Callable[[], None]) -> Callable[[], None]:
            """`work` as one of the two halves; its end is recorded, and the time of the other half begins there."""

            def run() -> None:
                try:
                    work()
                except Exception:
                    self.failed = index
                    raise
                self.recorder.end(index)
                running.remove(index)
                for other in running:
                    self.recorder.begin(other)

            return run

        with _refusing_autograd():
            self._turns.run(half(first, forward), half(first + 1, backward))


@contextmanager
def _refusing_autograd() -> Iterator[None]:
    """Refuse backwards from the caller's thread, in which a pair's forward runs (PP-E784).

    On CUDA a device's backwards run one after the other in one thread of autograd's, and there the pair's own backward
    waits for its turn: the forward would wait for that backward, and never hand over.
    """
    variable: Any = Variable
    if not isinstance(variable._execution_engine, _Refusing):
        variable._execution_engine = _Refusing(variable._execution_engine)
    refusing, thread = variable._execution_engine, threading.get_ident()
    refusing.threads.add(thread)
    try:
        yield
    finally:
        refusing.threads.remove(thread)
        if not refusing.threads:
            variable._execution_engine = refusing.engine


class _Refusing:
    """A stand-in for autograd's engine, through which all backwards go, that refuses those of `threads`."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.threads: set[int] = set()

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """autograd's `run_backward`; raises TrainingError in a refused thread."""
        if threading.get_ident() in self.threads:
            message = "this forward calls autograd (backward or grad) itself, but it runs beside a backward"
            remedy = "pipeline.pp_schedule=interleaved_1f1b parallel.overlap_moe_expert_parallel_comm=false"
            raise TrainingError(Problem("PP-E784", message, remedy))
        return self.engine.run_backward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def leave_blas_handle(device: torch.device) -> None:
    """Make the cuBLAS handle of a pair's thread, in which a replay multiplies, while no message is under way: making
    it waits for an idle device. Torch gives a new thread the handles of an ended thread, such as the one made here."""
    initialize = _same_state(device)

    def take() -> None:
        initialize()
        torch.cuda.current_blas_handle()

    thread = threading.Thread(target=take, name="pair")
    thread.start()
    thread.join()


def _same_state(device: torch.device) -> Callable[[], None]:
    """A function that gives the thread that calls it this thread's state in torch: device, stream, autocast, modes. So
    kernels of both halves go into one queue, and modes that watch or cast this thread's operations see both halves.
    """
    kind = device.type
    stream = torch.cuda.current_stream(device) if kind == "cuda" else None
    cast = torch.amp.is_autocast_available(kind)
    autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) if cast else None
    function_modes, dispatch_modes = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()

    def initialize() -> None:
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)
        if autocast is not None:
            torch.set_autocast_enabled(kind, autocast[0])
            torch.set_autocast_dtype(kind, autocast[1])
        for mode in function_modes:  # pushed, not entered: the thread never leaves them
            _push_function_mode(mode)
        for mode in dispatch_modes:
            _push_dispatch_mode(mode)

    return initialize
