"""The execution of one stage: forward and backward of its microbatches, and what is kept between forward and backward.

From the F of a microbatch to the end of its B exactly its input is kept, and what autograd saved. Of an output only the
gradient edge in the graph is kept; the tensor is free as soon as its message is delivered. If the backward is split,
all this is kept to the end of the I, and the operands of weight gradients from there to the W.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeGuard

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from ppctl.comm.buffers import Message, MessageSpec, TensorLike
from ppctl.comm.channels import Arrival
from ppctl.errors import Problem, TrainingError
from ppctl.weight_gradients.deferred import DeferredGradients, collecting
from ppctl.weight_gradients.intercept import intercepting

AroundBackward = Callable[[int, Callable[[], None]], None]
"""A function that is called with a microbatch's number and a function that runs its backward."""


@dataclass(frozen=True, slots=True)
class StageProgram:
    """The functions that the engine calls for a stage, and the form of its messages.

    `forward(mb, inputs)` gets the tensors of `receives` (none on the first stage) and returns a tuple of the tensors of
    `sends`, or on the last stage a tuple of one scalar, the loss. It must return new tensors: an input or a view of it
    would keep message buffers from being reused. `receives` and `sends` describe this stage's edges (anything with
    `shape` and `dtype`, such as a plan's TensorSpec); both ends of an edge must agree.
    """

    stage: int
    forward: Callable[[int, Message], Message]
    receives: Sequence[TensorLike] = ()
    sends: Sequence[TensorLike] = ()
    around_backward: AroundBackward | None = None
    """Called as `around_backward(mb, run)` in place of a backward, or of each half of a split one; it must call
    `run()`, which runs that backward or half, once. Forwards need no such hook: `forward` itself can do this."""
    prepare: Callable[[int], None] | None = None
    """Called as `prepare(mb)` before the wait for a forward's input: its time does not count as the stage's."""
    whole: Sequence[torch.Tensor] = ()
    """Weights whose gradients a split backward does not defer, but computes in I."""
    intercept: bool = True
    """Whether split backwards find products with weights by watching torch's functions. Not needed if each product asks
    by itself (`weight_gradients.deferred.deferring`), as in ppctl's own models."""
    on_deferred: Callable[[Sequence[torch.nn.Parameter]], None] | None = None
    """Called before each W with the parameters whose gradients it computes."""


class Live(NamedTuple):
    """The state of a microbatch between its forward and its backward."""

    arrival: Arrival | None
    leaves: Message
    edges: tuple[GradientEdge | None, ...]
    outputs: Message
    """The outputs on the last stage (a scalar), or if outputs are not deallocated; otherwise empty."""
    deferred: DeferredGradients | None
    """Collects weight gradients for the W, if the backward is split."""


class Stage:
    """A stage's microbatches in flight, and the hand-over to its neighbours.

    By microbatch: `inbox` and `gradient_inbox` hold messages that have arrived or are on their way, `outbox` and
    `gradient_outbox` those that wait for their send. Messages to a neighbour on the same rank go straight into its
    inbox.
    """

    def __init__(
        self,
        program: StageProgram,
        *,
        is_last: bool,
        training: bool,
        deallocate_outputs: bool,
        variable_shapes: bool = False,
        split: Collection[int] = (),
        hands_back: bool = True,
    ) -> None:
        self.program = program
        self.split = split
        """The microbatches whose backward is split into I and W."""
        self.receives = MessageSpec.of(program.receives, variable=variable_shapes)
        self.sends = MessageSpec.of(program.sends, variable=variable_shapes)
        self.is_first = program.stage == 0
        self.is_last = is_last
        self.training = training
        self.hands_back = hands_back
        """Whether the gradient of the stage's input is needed: otherwise autograd makes none."""
        self._keep_outputs = is_last or not deallocate_outputs
        self.inbox: dict[int, Arrival] = {}
        self.gradient_inbox: dict[int, Arrival] = {}
        self.outbox: dict[int, Message] = {}
        self.gradient_outbox: dict[int, Message] = {}
        self.inbox_of_next: dict[int, Arrival] | None = None
        self.gradient_inbox_of_previous: dict[int, Arrival] | None = None
        self._live: dict[int, Live] = {}
        self._due: dict[int, tuple[DeferredGradients, tuple[Arrival, ...]]] = {}
        """Kept from I to W, with messages whose memory deferred operands lie in: released with the W."""

    def wait_for_input(self, mb: int) -> None:
        """Wait until the input of a microbatch's forward is there."""
        if self.program.prepare is not None:
            self.program.prepare(mb)
        if not self.is_first:
            self.inbox[mb].wait()

    def wait_for_gradient(self, mb: int) -> None:
        """Wait until the gradient of a microbatch's output is there."""
        if not self.is_last:
            self.gradient_inbox[mb].wait()

    def forward(self, mb: int) -> None:
        """Run the program on a microbatch and hand on its output. Raises TrainingError (PP-E712, PP-E714) if wrong."""
        arrival = None if self.is_first else self.inbox.pop(mb)
        if not self.training:
            self._forward_only(mb, arrival)
            return
        leaves = () if arrival is None else tuple(t.detach() for t in arrival.message)
        if self.hands_back:
            for leaf in leaves:
                leaf.requires_grad_()
        deferred = DeferredGradients(self.program.whole) if mb in self.split else None
        with self._collecting(deferred):
            outputs = self.program.forward(mb, leaves)
        self._check_outputs(mb, outputs)
        edges = tuple(get_gradient_edge(t) if t.requires_grad else None for t in outputs)
        self._live[mb] = Live(arrival, leaves, edges, outputs if self._keep_outputs else (), deferred)
        self._hand_on(mb, outputs)

    def _forward_only(self, mb: int, arrival: Arrival | None) -> None:
        with torch.no_grad():
            outputs = self.program.forward(mb, () if arrival is None else arrival.message)
        if not self.is_last:
            self._check_outputs(mb, outputs)
            self._hand_on(mb, outputs)
        del outputs
        if arrival is not None:
            arrival.release()

    def _hand_on(self, mb: int, outputs: Message) -> None:
        if self.inbox_of_next is not None:
            self.inbox_of_next[mb] = Arrival(tuple(t.detach() for t in outputs))
        elif not self.is_last:
            # Detached: a send that is still under way must not hold the graph.
            self.outbox[mb] = tuple(t.detach().contiguous() for t in outputs)

    def backward(self, mb: int) -> None:
        """Run a microbatch's backward: hand back its input's gradient, accumulate weight gradients, and free its state.

        If the backward is split this is the I: deferred weight gradients are left to `weight_gradients`. Raises
        TrainingError (PP-E713) if the input gets no gradient."""
        arrival, leaves, edges, outputs, deferred = self._live.pop(mb)
        gradient = None if self.is_last else self.gradient_inbox.pop(mb)
        seeds = (torch.ones_like(outputs[0]),) if gradient is None else gradient.message
        with self._collecting(deferred, backward=True):
            self._around(mb, partial(run_backward, edges, seeds))
        del edges, outputs, seeds
        gradients = tuple(leaf.grad for leaf in leaves)
        del leaves
        if arrival is not None and self.hands_back:
            self._hand_back(mb, gradients)
        del gradients
        arrivals = tuple(each for each in (arrival, gradient) if each is not None)
        if deferred is not None:
            kept = tuple(each for each in arrivals if deferred.keeps(each.message))
            self._due[mb], arrivals = (deferred, kept), tuple(each for each in arrivals if each not in kept)
        for each in arrivals:
            each.release()

    def weight_gradients(self, mb: int) -> None:
        """Accumulate the weight gradients that the I of a microbatch deferred, and free its state."""
        deferred, arrivals = self._due.pop(mb)
        if self.program.on_deferred is not None:
            self.program.on_deferred(deferred.parameters)
        self._around(mb, deferred.deliver)
        del deferred
        for each in arrivals:
            each.release()

    def _around(self, mb: int, run: Callable[[], None]) -> None:
        around = self.program.around_backward
        if around is None:
            run()
        else:
            around(mb, run)

    def _collecting(
        self, deferred: DeferredGradients | None, *, backward: bool = False
    ) -> AbstractContextManager[object]:
        if deferred is None:
            return nullcontext()
        collect = intercepting if self.program.intercept else collecting
        return collect(deferred, backward=backward)

    def _hand_back(self, mb: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Give the inputs' gradients to the previous stage here, or to the outbox. Raises PP-E713 if one is missing."""
        message = tuple(g.contiguous() for g in gradients if g is not None)
        if len(message) < len(gradients):
            raise no_gradient(self.program.stage, mb)
        if self.gradient_inbox_of_previous is not None:
            self.gradient_inbox_of_previous[mb] = Arrival(message)
        else:
            self.gradient_outbox[mb] = message

    def _check_outputs(self, mb: int, outputs: Message) -> None:
        if self.is_last:
            refuse_other_loss(self.program.stage, mb, outputs)
        else:
            refuse_other_outputs(self.program.stage, mb, outputs, self.sends)


def refuse_other_outputs(stage: int, mb: int, outputs: object, sends: MessageSpec) -> None:
    """Raise TrainingError (PP-E712) for outputs whose number, shapes or dtypes are not those of `sends`."""
    if _is_message(outputs) and sends.fits(outputs):
        return
    message = f"stage {stage} put {_describe(outputs)} on its edge to stage {stage + 1}, in microbatch {mb}, "
    message += f"but the plan says {sends}"
    raise TrainingError(Problem("PP-E712", message, "return what the edge's spec says, or correct the spec"))


def refuse_other_loss(stage: int, mb: int, outputs: object) -> None:
    """Raise TrainingError (PP-E714) if the output is no loss whose backward can run."""
    if _is_message(outputs) and len(outputs) == 1 and outputs[0].numel() == 1 and outputs[0].requires_grad:
        return
    message = f"the last stage (stage {stage}) must return one scalar loss that needs a gradient; "
    message += f"in microbatch {mb} it returned {_describe(outputs)}"
    raise TrainingError(Problem("PP-E714", message, "return (loss,), reduced to one number, computed outside no_grad"))


def no_gradient(stage: int, mb: int) -> TrainingError:
    """The error (PP-E713) of a stage that has made no gradient of its input."""
    message = f"stage {stage} has no gradient for its input in microbatch {mb}: "
    message += "its output does not depend on all that it received"
    remedy = "let the stage's output depend on its input (a detach or a no_grad inside is the usual cause)"
    return TrainingError(Problem("PP-E713", message, remedy))


def run_backward(edges: Sequence[GradientEdge | None], seeds: Sequence[torch.Tensor]) -> None:
    """Backward from the outputs that have a graph; a stage without any (all frozen) has nothing to do."""
    pairs = [(edge, seed) for edge, seed in zip(edges, seeds, strict=True) if edge is not None]
    if pairs:
        # The core of torch.autograd.backward, which itself imports sympy to check shapes that the plan knows.
        roots, gradients = zip(*pairs, strict=True)
        _engine_run_backward(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _is_message(outputs: object) -> TypeGuard[Message]:
    return isinstance(outputs, tuple) and all(isinstance(t, torch.Tensor) for t in outputs)


def _describe(outputs: object) -> str:
    if not _is_message(outputs):
        one = outputs[0] if isinstance(outputs, tuple) and len(outputs) == 1 else outputs
        return f"a {type(one).__name__} instead of a tuple of tensors"
    texts = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in outputs)
    frozen = bool(outputs) and not any(t.requires_grad for t in outputs)
    return (", ".join(texts) or "nothing") + (" without a gradient" if frozen else "")
