"""One call of a forward-backward function: its arguments in one form, and how it runs through the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ppctl.comm.buffers import Message
from ppctl.engine.interpreter import run_schedule
from ppctl.engine.stage import StageProgram
from ppctl.errors import ConfigError
from ppctl.megatron.message_shapes import Edges
from ppctl.megatron.models import misuse, per_chunk, timed
from ppctl.megatron.p2p_communication import P2PCommunicator
from ppctl.megatron.steps import ForwardStep, check_attached, check_first_val_step, forward_step
from ppctl.megatron.wgrad import Deferral, main_gradients, split_products, split_sequence
from ppctl.schedule.action import Action, Op, Schedule
from ppctl.schedule.sync_events import Sync, SyncKind, SyncPlan
from ppctl.weight_gradients.functions import tell_what_stays


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
            kind = type(self.forward_step_func).__name__
            message = f"forward_step_func is a {kind}, but is called as forward_step_func(data_iterator, model)"
            raise misuse(message, "forward_step_func=...")


class CallOnRank:
    """Runs one call on one rank, through the engine.

    `flags` says for each forward whether all its layers are recomputed, `edges(stage)` which messages the stage
    receives and sends. An object serves one `run`, and collects the last stage's stored data and the number of tokens
    that count.
    """

    def __init__(
        self,
        call: Call,
        schedule: Schedule,
        pp_rank: int,
        sync: SyncPlan,
        flags: Mapping[Action, bool],
        edges: Callable[[int], Edges],
    ) -> None:
        self._call, self._schedule, self._flags, self._edges = call, schedule, flags, edges
        self._stages = schedule.placement.stages_of(pp_rank)
        self._last = schedule.placement.num_stages - 1
        cp_group = getattr(call.groups, "cp", None)
        self._cp = getattr(call.config, "context_parallel_size", 1) if cp_group is None else int(cp_group.size())
        self._plan = sync
        self._store: list[Any] = []
        self._tokens: Tensor | None = None

    def run(self, communicator: P2PCommunicator | None) -> list[Any]:
        """Run the call. Returns the data that the last stage stored; an empty list on ranks without it. Raises
        EngineError naming the action if an action fails."""
        call, config = self._call, self._call.config
        with timed(config, "forward-backward", 1, barrier=getattr(config, "barrier_with_L1_time", True)):
            self._sync = Synchroniser(config, call.chunks, self._stages)
            self._deferral = self._make_deferral()
            with ExitStack() as contexts:
                self._enter(contexts)
                self._sync.run(self._plan.start)
                run_schedule(
                    self._schedule,
                    [self._program(chunk) for chunk in range(len(call.chunks))],
                    communicator,
                    deallocate_pipeline_outputs=bool(getattr(config, "deallocate_pipeline_outputs", False)),
                    variable_shapes=bool(getattr(config, "variable_seq_lengths", False)),
                    timed=None if getattr(config, "timers", None) is None else partial(timed, config),
                )
                if self._deferral is not None:
                    self._deferral.finish(getattr(call.groups, "tp", None))
                self._sync.run(self._plan.end)
        self._finalize()
        return self._store

    def _make_deferral(self) -> Deferral | None:
        """The deferral of `defer_embedding_wgrad_compute`, if it is on and the output layer is here.

        Raises ConfigError on all ranks if nothing makes main_grad, or if the sequence is divided.
        """
        call = self._call
        if call.forward_only or not getattr(call.config, "defer_embedding_wgrad_compute", False):
            return None
        if not getattr(call.config, "gradient_accumulation_fusion", False):
            message = "defer_embedding_wgrad_compute adds to main_grad, which only gradient_accumulation_fusion makes"
            raise misuse(message, "gradient_accumulation_fusion=True")
        if problem := split_sequence(call.config, getattr(call.groups, "tp", None)):
            raise ConfigError(problem)
        return Deferral(call.config, list(call.chunks), call.num_microbatches) if self._last in self._stages else None

    def _enter(self, contexts: ExitStack) -> None:
        contexts.enter_context(self._sync)
        if not self._call.forward_only and getattr(self._call.config, "gradient_accumulation_fusion", False):
            contexts.enter_context(main_gradients(self._call.chunks))
        if self._deferral is not None:
            contexts.enter_context(self._deferral.applied())
        if self._schedule.split:
            split_products(self._call.chunks)

    def _program(self, chunk: int) -> StageProgram:
        stage = self._stages[chunk]
        edges = self._edges(stage)

        def forward(mb: int, inputs: Message) -> Message:
            action = Action(Op.F, stage, mb)
            self._sync.run(self._plan.before.get(action, ()))
            outputs = self._forward(chunk, mb, list(inputs) or [None] * max(len(edges.receives), 1))
            self._sync.run(self._plan.after.get(action, ()))
            return outputs

        halved: set[int] = set()

        def around_backward(mb: int, run: Callable[[], None]) -> None:
            splits = (stage, mb) in self._schedule.split
            backward = Action((Op.W if mb in halved else Op.I) if splits else Op.B, stage, mb)
            halved.add(mb)
            self._sync.run(self._plan.before.get(backward, ()))
            with timed(self._call.config, "backward-compute"):
                run()
            self._sync.run(self._plan.after.get(backward, ()))

        tell = partial(tell_what_stays, stage, self._call.chunks[chunk])
        return StageProgram(stage, forward, edges.receives, edges.sends, around_backward, on_deferred=tell)

    def _forward(self, chunk: int, mb: int, inputs: list[Tensor | None]) -> Message:
        """Run the forward of one microbatch in one chunk; returns the message to send, or the scaled loss. Tells the
        deferral the microbatch, and counts the step's tokens."""
        call, stage = self._call, self._stages[chunk]
        if self._deferral is not None:
            self._deferral.microbatch = mb
        outputs, num_tokens = forward_step(
            call.forward_step_func,
            call.iterators[chunk],
            call.chunks[chunk],
            call.num_microbatches,
            inputs,
            self._store,
            call.config,
            self._cp,
            call.collect_non_loss_data,
            self._flags.get(Action(Op.F, stage, mb)),
            check_first_val_step(call.first_val_step, call.forward_only, mb == 0),
            mb,
            chunk if call.interleaved else None,
            stage == self._last,
        )
        if stage == 0 < self._last and not call.forward_only:
            # A first stage gets no input whose missing gradient would show that the output is detached.
            check_attached(call.chunks[chunk], outputs)
        self._tokens = num_tokens if self._tokens is None else self._tokens + num_tokens
        scale = getattr(call.config, "grad_scale_func", None)
        if stage == self._last and scale is not None and not call.forward_only:
            outputs = [scale(outputs[0]), *outputs[1:]]
        return tuple(outputs)

    def _finalize(self) -> None:
        """Call `finalize_model_grads_func(chunks, tokens, pg_collection=...)`; tokens are None unless losses are per
        token."""
        call = self._call
        finalize = getattr(call.config, "finalize_model_grads_func", None)
        if finalize is None or call.forward_only:
            return
        tokens = self._tokens if getattr(call.config, "calculate_per_token_loss", False) else None
        more = {} if call.force_all_reduce is None else {"force_all_reduce": call.force_all_reduce}
        finalize(list(call.chunks), tokens, pg_collection=call.groups, **more)


class Synchroniser(ExitStack):
    """Runs events of a plan; a context that leaves `no_sync` on every path, exceptions included.

    `no_sync_func` makes a context; a list makes one context per function, entered together. `grad_sync_func` and
    `param_sync_func` take an iterable of parameters; a list has one function per chunk. The config is only read.
    """

    def __init__(self, config: Any, chunks: Sequence[nn.Module], stages: Sequence[int]) -> None:
        super().__init__()
        no_sync = getattr(config, "no_sync_func", None)
        self._holds = no_sync if isinstance(no_sync, list | tuple) else [no_sync] if no_sync is not None else []
        self._calls: dict[SyncKind, Mapping[int, Callable[[], object]]] = {
            kind: _calls(getattr(config, name, None), name, chunks, stages)
            for kind, name in ((SyncKind.REDUCE, "grad_sync_func"), (SyncKind.GATHER, "param_sync_func"))
        }

    def run(self, events: Iterable[Sync]) -> None:
        """Run these events of the plan."""
        for kind, stage in events:
            if kind is SyncKind.HOLD:
                for hold in self._holds:
                    self.enter_context(hold())
            elif kind is SyncKind.RELEASE:
                self.close()
            else:
                self._calls[kind][stage]()


def _calls(
    functions: Any, name: str, chunks: Sequence[nn.Module], stages: Sequence[int]
) -> dict[int, Callable[[], object]]:
    """Stage -> the call of its function on its parameters."""
    if functions is None:
        return {}

    def call(function: Callable[..., object], chunk: nn.Module) -> Callable[[], object]:
        return lambda: function(chunk.parameters())

    listed = per_chunk(functions, chunks, name)
    return {stage: call(f, chunk) for stage, f, chunk in zip(stages, listed, chunks, strict=True)}
