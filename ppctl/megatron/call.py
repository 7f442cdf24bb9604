"""One call of a forward-backward function: its arguments in one shape, and how it runs through the engine.

Knows stages' programs, sync and the config's hooks. Must not know which schedule it runs: it is handed one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ppctl.comm.buffers import Message
from ppctl.engine.interpreter import run_schedule
from ppctl.engine.stage import StageProgram
from ppctl.megatron.message_shapes import Edges, group_size
from ppctl.megatron.microbatches import check_first_val_step
from ppctl.megatron.models import misuse, setting
from ppctl.megatron.p2p_communication import P2PCommunicator
from ppctl.megatron.steps import ForwardStep, check_attached, forward_step, timed
from ppctl.megatron.sync_functions import Synchroniser
from ppctl.megatron.wgrad import Deferral, main_gradients
from ppctl.schedule.action import Action, Op, Schedule, weight_gradient_of
from ppctl.schedule.sync import SyncPlan


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of a forward-backward function, chunks and iterators as lists."""

    forward_step_func: ForwardStep
    iterators: Sequence[Any]
    chunks: Sequence[nn.Module]
    config: Any
    num_microbatches: int
    sizes: tuple[int, int, int | None]
    """seq_length, micro_batch_size, decoder_seq_length."""
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    groups: Any
    force_all_reduce: bool | None
    interleaved: bool = False
    """Whether the schedule interleaves: then chunks have numbers (vp_stage)."""

    def __post_init__(self) -> None:
        if not callable(self.forward_step_func):
            found = type(self.forward_step_func).__name__
            message = f"forward_step_func is a {found}, and is called as forward_step_func(data_iterator, model)"
            raise misuse(message, "forward_step_func=...")


@dataclass(frozen=True, slots=True)
class Order:
    """What runs: the schedule, this rank's sync events and checkpoint flags, and its stages' edges."""

    schedule: Schedule
    pp_rank: int
    sync: SyncPlan
    flags: Mapping[Action, bool]
    edges: Callable[[int], Edges]


def execute(call: Call, order: Order, communicator: P2PCommunicator | None) -> list[Any]:
    """Run the call on this rank. Returns the forward data store: filled where the last stage is, else empty.

    Raises EngineError, which names the action, where an action fails.
    """
    config = call.config
    with timed(config, "forward-backward", 1, barrier=setting(config, "barrier_with_L1_time", True)):
        running = _Running(call, order)
        with ExitStack() as contexts:
            running.enter(contexts)
            running.sync.start()
            run_schedule(
                order.schedule,
                [running.program(chunk) for chunk in range(len(call.chunks))],
                communicator,
                deallocate_pipeline_outputs=bool(setting(config, "deallocate_pipeline_outputs", False)),
                variable_shapes=bool(setting(config, "variable_seq_lengths", False)),
                timed=None if setting(config, "timers") is None else partial(timed, config),
            )
            if running.deferral is not None:
                running.deferral.finish(getattr(call.groups, "tp", None))
            running.sync.end()
    running.finalize()
    return running.store


class _Running:
    """A call under way on one rank, and what it leaves behind."""

    def __init__(self, call: Call, order: Order) -> None:
        self._call, self._order = call, order
        self._stages = order.schedule.placement.stages_of(order.pp_rank)
        self._last = order.schedule.placement.num_stages - 1
        self._cp = group_size(call.groups, "cp", setting(call.config, "context_parallel_size", 1))
        self.sync = Synchroniser(order.sync, call.config, call.chunks, self._stages)
        self.deferral = self._deferral()
        self.store: list[Any] = []
        self._tokens: Tensor | None = None

    def _deferral(self) -> Deferral | None:
        call = self._call
        if call.forward_only or not setting(call.config, "defer_embedding_wgrad_compute", False):
            return None
        if not setting(call.config, "gradient_accumulation_fusion", False):
            message = "defer_embedding_wgrad_compute adds to main_grad, which gradient_accumulation_fusion makes"
            raise misuse(message, "gradient_accumulation_fusion=True")
        return Deferral(call.config, list(call.chunks), call.num_microbatches) if self._last in self._stages else None

    def enter(self, contexts: ExitStack) -> None:
        """Enter what holds for the whole call."""
        contexts.enter_context(self.sync)
        if not self._call.forward_only and setting(self._call.config, "gradient_accumulation_fusion", False):
            contexts.enter_context(main_gradients(self._call.chunks))
        if self.deferral is not None:
            contexts.enter_context(self.deferral.applied())

    def program(self, chunk: int) -> StageProgram:
        """What the engine runs for a chunk."""
        stage = self._stages[chunk]
        edges = self._order.edges(stage)

        def forward(mb: int, inputs: Message) -> Message:
            self.sync.before(Action(Op.F, stage, mb))
            outputs = self._forward(chunk, mb, list(inputs) or [None] * max(len(edges.receives), 1))
            self.sync.after(Action(Op.F, stage, mb))
            return outputs

        def around_backward(mb: int, run: Callable[[], None]) -> None:
            backward = weight_gradient_of(stage, mb, self._order.schedule)
            self.sync.before(backward)
            with timed(self._call.config, "backward-compute"):
                run()
            self.sync.after(backward)

        return StageProgram(stage, forward, edges.receives, edges.sends, around_backward)

    def _forward(self, chunk: int, mb: int, inputs: list[Tensor | None]) -> Message:
        call, stage = self._call, self._stages[chunk]
        if self.deferral is not None:
            self.deferral.microbatch = mb
        outputs, num_tokens = forward_step(
            call.forward_step_func,
            call.iterators[chunk],
            call.chunks[chunk],
            call.num_microbatches,
            inputs,
            self.store,
            call.config,
            self._cp,
            call.collect_non_loss_data,
            self._order.flags.get(Action(Op.F, stage, mb)),
            check_first_val_step(call.first_val_step, call.forward_only, mb == 0),
            mb,
            chunk if call.interleaved else None,
            stage == self._last,
        )
        if stage == 0 < self._last and not call.forward_only:
            check_attached(call.chunks[chunk], outputs)
        self._tokens = num_tokens if self._tokens is None else self._tokens + num_tokens
        scale = setting(call.config, "grad_scale_func")
        if stage == self._last and scale is not None and not call.forward_only:
            outputs = [scale(outputs[0]), *outputs[1:]]
        return tuple(outputs)

    def finalize(self) -> None:
        """Call `finalize_model_grads_func(chunks, tokens, pg_collection=...)`: the tokens only for losses per token."""
        call = self._call
        finalize = setting(call.config, "finalize_model_grads_func")
        if finalize is None or call.forward_only:
            return
        tokens = self._tokens if setting(call.config, "calculate_per_token_loss", False) else None
        more = {} if call.force_all_reduce is None else {"force_all_reduce": call.force_all_reduce}
        finalize(list(call.chunks), tokens, pg_collection=call.groups, **more)
