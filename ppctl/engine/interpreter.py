"""The engine: every rank executes its own list of actions, one handler per operation.

The steady state builds no strings and no dictionaries; all look-ups are made at construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from ppctl.comm.buffers import Message, Shelf
from ppctl.comm.channels import Arrival, DirectEnd
from ppctl.comm.communicator import Communicator, MessageBatch
from ppctl.engine.engine_error import EngineError
from ppctl.engine.pace import DevicePace, Heartbeat, HostPace, make_pace
from ppctl.engine.pair_runner import PairRunner, pairs_of
from ppctl.engine.recorder import Recorder
from ppctl.engine.stage import Stage, StageProgram
from ppctl.errors import Problem, ScheduleError
from ppctl.schedule.action import BACKWARDS, INPUT_GRADIENTS, MESSAGES, SENDS, Action, Op, Schedule

Timed = Callable[[str], AbstractContextManager[object]]

_TIMERS = {Op.SEND_F: "forward-send", Op.SEND_B: "backward-send", Op.RECV_F: "forward-recv", Op.RECV_B: "backward-recv"}
_ALL_COMBINED = "forward-backward-send-forward-backward-recv"
"""Megatron's timer names for single messages, and for exchanges of several; a send and a receive join their names."""


class Engine:
    """One rank's interpreter of a lowered schedule; `run_schedule` describes the arguments.

    Construction is cheap: channels and buffers belong to the communicator and outlive the engine. Two engines of one
    communicator must not run at the same time. Raises ScheduleError if the schedule, the communicator and the programs
    do not fit together, or the schedule cannot be executed.
    """

    def __init__(
        self,
        schedule: Schedule,
        programs: Sequence[StageProgram],
        communicator: Communicator | None = None,
        *,
        deallocate_pipeline_outputs: bool = True,
        variable_shapes: bool = False,
        reduce_grad: Callable[[int], None] | None = None,
        recorder: Recorder | None = None,
        heartbeat: Heartbeat | None = None,
        timed: Timed | None = None,
        pace: HostPace | DevicePace | None = None,
    ) -> None:
        """`pace`: the pace of the engine that ran the previous list, if the device has not been waited for since."""
        self.pp_rank = 0 if communicator is None else communicator.pp_rank
        _check(schedule, programs, communicator)
        self.actions = schedule.actions[self.pp_rank]
        variable = variable_shapes or (communicator is not None and communicator.modes.variable)
        self._stages = _make_stages(schedule, programs, deallocates=deallocate_pipeline_outputs, variable=variable)
        self._outgoing: dict[tuple[Op, int], tuple[DirectEnd, dict[int, Message]]] = {}
        self._incoming: dict[tuple[Op, int], tuple[DirectEnd, Shelf, dict[int, Arrival]]] = {}
        self._batch: MessageBatch | None = None
        self._batch_ends: frozenset[int] = frozenset()
        if communicator is not None:
            self._connect(schedule, communicator)
        self._reduce = reduce_grad
        self.recorder = Recorder(self.pp_rank, self.actions) if recorder is None else recorder
        # Without messages the pace follows the device of the recorder: no rank waits for another.
        device = self.recorder.device if communicator is None else communicator.device
        self.pace = make_pace(device, len(self.actions), heartbeat) if pace is None else pace
        self._enter, self._sent = self.pace.enter, self.pace.sent
        self._begin, self._end = self.pace.begin, self.pace.end
        self._handlers = _HANDLERS
        self._behind = pairs_of(schedule, self.actions)
        if self._behind:
            self._beside = frozenset(self._behind.values())
            self._pairs = PairRunner(self.recorder, device)
            self._handlers = {**self._handlers, **_IN_PAIRS}
        if timed is not None:
            self._handlers = {op: _timing(op, handler, timed) for op, handler in self._handlers.items()}
        self._index = 0

    def run(self) -> None:
        """Execute the list once, and wait for the device.

        Raises EngineError, which names the action, with the original error as its cause.
        """
        self.start()
        self.leave()
        self.settle()

    def start(self) -> None:
        """Execute the list once, and return when the host is through it. Raises EngineError."""
        handlers, enter = self._handlers, self._enter
        self.recorder.begin_step()
        with self._naming():
            for index, action in enumerate(self.actions):
                self._index = index
                enter(index)
                handlers[action.op](self, action)
            self.pace.finish(self._flush)
        self.recorder.end_step()

    def leave(self) -> None:
        """Call it when the last list was started: on a device, what the caller enqueues next comes behind the list's
        messages. Raises EngineError."""
        with self._naming():
            self.pace.leave(self._flush)

    def settle(self) -> None:
        """Return when the device has finished every list up to `leave`, and their messages are delivered.

        Raises EngineError if the device has failed, or the connection of a message was ended.
        """
        with self._naming():
            self.pace.settle()
            self._check()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Turn an exception into an EngineError that names the action of the list, and abandon the pace."""
        try:
            yield
        except Exception as error:
            self.pace.abandon()
            raise EngineError(self.pp_rank, self.actions, self.pace.at, error) from error

    def _flush(self) -> None:
        for end, _ in self._outgoing.values():
            end.flush()

    def _check(self) -> None:
        """Raise PeerLost if a connection was ended: the device, which is through its list, lacks messages."""
        for end, _ in self._outgoing.values():
            end.check()
        for end, *_ in self._incoming.values():
            end.check()

    def _forward(self, action: Action) -> None:
        stage = self._stages[action.stage]
        stage.wait_for_input(action.mb)
        self._compute(stage.forward, action.mb)

    def _backward(self, action: Action) -> None:
        stage = self._stages[action.stage]
        stage.wait_for_gradient(action.mb)
        self._compute(stage.backward, action.mb)

    def _forward_in_pair(self, action: Action) -> None:
        """Run a forward, and beside it the next backward in the list if the two are a pair."""
        other = self._behind.get(action)
        if other is None:
            self._forward(action)
            return
        ahead, behind = self._stages[action.stage], self._stages[other.stage]
        ahead.wait_for_input(action.mb)
        self._enter(self._index + 1)  # else a rank that lacks its gradient would seem to wait for the forward's input
        behind.wait_for_gradient(other.mb)
        self._enter(self._index)
        self._begin(self._index)
        try:
            self._pairs.run(self._index, partial(ahead.forward, action.mb), partial(behind.backward, other.mb))
        except Exception:
            self.pace.at = self._pairs.failed
            raise
        self._end(self._index + 1)

    def _backward_in_pair(self, action: Action) -> None:
        """Run a backward unless it has run beside a forward."""
        if action not in self._beside:
            self._backward(action)

    def _weight_gradients(self, action: Action) -> None:
        self._compute(self._stages[action.stage].weight_gradients, action.mb)

    def _compute(self, work: Callable[[int], None], mb: int) -> None:
        self._begin(self._index)
        self.recorder.begin(self._index)
        work(mb)
        self.recorder.end(self._index)
        self._end(self._index)

    def _send(self, action: Action) -> None:
        end, outbox = self._outgoing[action.op, action.stage]
        message = outbox.pop(action.mb)
        if self._batch is None:
            end.send(message)
        else:
            self._batch.send(end, message)
        self._sent(self._index)
        self._settle_batch()

    def _receive(self, action: Action) -> None:
        end, shelf, inbox = self._incoming[action.op, action.stage]
        inbox[action.mb] = end.post(shelf) if self._batch is None else self._batch.post(end, shelf)
        self._settle_batch()

    def _settle_batch(self) -> None:
        """At the end of a batch of messages, wait for it."""
        if self._batch is not None and self._index in self._batch_ends:
            self._batch.settle()

    def _reduce_gradients(self, action: Action) -> None:
        self.recorder.begin(self._index)
        if self._reduce is not None:
            self._reduce(action.stage)
        self.recorder.end(self._index)

    def _connect(self, schedule: Schedule, communicator: Communicator) -> None:
        """Look up, once per kind of message, its end and the shelf of its buffers."""
        if schedule.batched:
            self._batch, self._batch_ends = communicator.batch(), schedule.batch_ends(self.pp_rank)
        for op, number in {(a.op, a.stage) for a in self.actions if a.op in MESSAGES}:
            channel = schedule.placement.channel(Action(op, number, 0))
            end, stage = communicator.end_in(channel), self._stages[number]
            if op in SENDS:
                if self._batch is None:
                    end.reserve(schedule.capacities[channel])
                self._outgoing[op, number] = end, stage.outbox if op is Op.SEND_F else stage.gradient_outbox
            else:
                forward = op is Op.RECV_F
                shelf = communicator.pool.shelf(stage.receives if forward else stage.sends)
                self._incoming[op, number] = end, shelf, stage.inbox if forward else stage.gradient_inbox

    def _batch_timer(self) -> str:
        """The timer's name for the batch that ends with the current action: Megatron's name for all its messages."""
        first = self._index
        while first and self.actions[first - 1].op in MESSAGES:
            first -= 1
        ops = {action.op for action in self.actions[first : self._index + 1]}
        if len(ops & SENDS) > 1 or len(ops - SENDS) > 1:
            return _ALL_COMBINED
        return "-".join(name for op, name in _TIMERS.items() if op in ops)


def _make_stages(
    schedule: Schedule, programs: Sequence[StageProgram], *, deallocates: bool, variable: bool
) -> dict[int, Stage]:
    """This rank's stages by number; neighbouring stages pass tensors without a message."""
    training = any(action.op in BACKWARDS for row in schedule.actions for action in row)
    split: dict[int, set[int]] = {}
    for number, mb in schedule.split:
        split.setdefault(number, set()).add(mb)
    stages = {
        p.stage: Stage(
            p,
            is_last=p.stage == schedule.placement.num_stages - 1,
            training=training and p.stage >= schedule.frozen_stages,
            hands_back=schedule.gradient_leaves(p.stage),
            deallocate_outputs=deallocates,
            variable_shapes=variable,
            split=split.get(p.stage, ()),
        )
        for p in programs
    }
    for number, stage in stages.items():
        following = stages.get(number + 1)
        if following is not None:
            stage.inbox_of_next, following.gradient_inbox_of_previous = following.inbox, stage.gradient_inbox
    return stages


_Handler = Callable[[Engine, Action], None]

# Unbound, so that an engine, which lives for one step, is not a cycle that waits for the garbage collector.
_HANDLERS: Mapping[Op, _Handler] = {
    Op.F: Engine._forward,
    Op.B: Engine._backward,
    Op.I: Engine._backward,
    Op.W: Engine._weight_gradients,
    **dict.fromkeys((Op.SEND_F, Op.SEND_B), Engine._send),
    **dict.fromkeys((Op.RECV_F, Op.RECV_B), Engine._receive),
    Op.REDUCE_GRAD: Engine._reduce_gradients,
}


_IN_PAIRS: Mapping[Op, _Handler] = {
    Op.F: Engine._forward_in_pair,
    **dict.fromkeys(INPUT_GRADIENTS, Engine._backward_in_pair),
}


_WAITS = {
    Op.F: (Op.RECV_F, Stage.wait_for_input),
    **dict.fromkeys(INPUT_GRADIENTS, (Op.RECV_B, Stage.wait_for_gradient)),
}
"""Operation -> the message before it, and the stage's method that waits for that message."""


def _timing(op: Op, handler: _Handler, timed: Timed) -> _Handler:
    """The handler, with a timer around its send, or around its wait for a message. In a batch the last message waits
    for all messages, and is timed under the batch's name.
    """

    def around(engine: Engine, action: Action) -> None:
        if engine._batch is not None and engine._index not in engine._batch_ends:
            handler(engine, action)
            return
        with timed(_TIMERS[op] if engine._batch is None else engine._batch_timer()):
            handler(engine, action)

    if op in MESSAGES:
        return around
    if op not in _WAITS:
        return handler
    received, wait = _WAITS[op]

    def wait_first(engine: Engine, action: Action) -> None:
        if engine._batch is None and (received, action.stage) in engine._incoming:
            with timed(_TIMERS[received]):
                wait(engine._stages[action.stage], action.mb)
        handler(engine, action)

    return wait_first


def _check(schedule: Schedule, programs: Sequence[StageProgram], communicator: Communicator | None) -> None:
    """Raise ScheduleError with everything that keeps this rank from executing the schedule."""
    pp_rank, size = (0, 1) if communicator is None else (communicator.pp_rank, communicator.pp)
    place = schedule.placement
    if place.pp != size:
        message = f"the schedule is for {place.pp} pipeline ranks, but the communicator has {size}"
        raise ScheduleError(Problem("PP-E390", message))
    problems = []
    expected, given = list(place.stages_of(pp_rank)), sorted(program.stage for program in programs)
    if expected != given:
        message = f"pp_rank {pp_rank} owns the stages {expected}, but the programs are for {given}"
        problems.append(Problem("PP-E390", message))
    channels = {place.channel(action) for action in schedule.actions[pp_rank] if action.op in MESSAGES}
    if not schedule.lowered or channels - schedule.capacities.keys():
        message = f"schedule {schedule.name} has no messages, or no capacities for them"
        problems.append(Problem("PP-E391", message, "ppctl.schedule.passes.lower(schedule)"))
    if channels and communicator is not None and communicator.batched and not schedule.batched:
        message = f"schedule {schedule.name} receives ahead of need, but the communicator sends in batches"
        problems.append(Problem("PP-E393", message, "ppctl.schedule.passes.lower(schedule, batched=True)"))
    if problems:
        raise ScheduleError(problems)


def run_schedule(
    schedule: Schedule,
    programs: Sequence[StageProgram],
    communicator: Communicator | None = None,
    *,
    deallocate_pipeline_outputs: bool = True,
    variable_shapes: bool = False,
    reduce_grad: Callable[[int], None] | None = None,
    recorder: Recorder | None = None,
    heartbeat: Heartbeat | None = None,
    timed: Timed | None = None,
) -> None:
    """Execute this rank's part of one step: all microbatches through this rank's stages.

    `schedule` is lowered (`ppctl.schedule.passes.lower`) and equal on every rank; a schedule without backwards runs
    under no_grad. `programs` are this rank's stages. The last stage's program returns the loss, already scaled; the
    engine never modifies it. Gradients accumulate into `.grad` in the order of the backwards in the list. If a backward
    is split, I accumulates all gradients except those of products with a weight, which wait for W
    (`StageProgram.whole` and `intercept`; `WeightGradStore` for autograd functions). The two actions of a pair run
    alternately; they switch where their stages call `ppctl.comm.turns.hand_over`.

    `communicator` is the pipeline's (None for a single rank); it keeps channels and buffers between calls.
    `deallocate_pipeline_outputs` frees an output once it is delivered; otherwise outputs live until their backward.
    With `variable_shapes`, or a communicator with variable_seq_lengths, a program's specs give only the number and
    dtypes of a message's tensors; shapes may differ between microbatches. `reduce_grad(stage)` is called when a
    stage's gradients are complete. `recorder` stamps the actions, and must have been made for this rank's list;
    `heartbeat` gets each action's index; `timed(name)` returns a context for each wait for a message: forward-recv,
    forward-send, backward-recv or backward-send, Megatron's names.

    Raises ScheduleError if the arguments do not fit together, and EngineError, naming the action, if an action fails.
    After an EngineError the communicator must not be used again: peers may be in the middle of a message.
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
