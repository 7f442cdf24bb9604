"""Computes one microbatch of a stage twice in every `train.replay`-th step, and compares the results bit for bit.

The microbatch is that of the stage's first backward in the step: then the sums have no other gradients. A rank's stages
take turns, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ppctl.checkpoint.rank_agreement import AgreeingRanks
from ppctl.comm.buffers import Message
from ppctl.engine.stage import StageProgram, run_backward
from ppctl.errors import Problem, TrainingError
from ppctl.model.router import RouterLedger
from ppctl.schedule.action import INPUT_GRADIENTS
from ppctl.train.callback import Callback
from ppctl.train.replica_check import pieces_of_bits
from ppctl.train.session import Session
from ppctl.weight_gradients.deferred import collecting
from ppctl.weight_gradients.wide_sums import WideSum


class ReplayCheck(Callback):
    """Replays one of its stages on each rank; raises TrainingError (PP-E737) on all ranks before the update."""

    def __init__(self, session: Session) -> None:
        self.session, self.every = session, session.config.train.replay
        row = session.plan.schedule.actions[session.own.pp_rank]
        self.chosen = {stage: mb for op, stage, mb in reversed(row) if op in INPUT_GRADIENTS}
        """Stage of this rank -> the microbatch of its first backward."""
        self._due: tuple[int, int] | None = None
        """The stage and microbatch that the step computes twice, until it has."""
        self._inputs: Message = ()
        self._outputs: Message = ()
        self._seeds: dict[int, Tensor] = {}
        """Gradients of the outputs, by place."""
        self.unequal: list[tuple[str, Tensor]] = []
        """For each result of the step: its name, and whether it differs (on the device)."""

    def coverage(self) -> str:
        """Words for how much of the run's work on this rank is compared; empty if none is."""
        units = self.session.plan.gradient_accumulation_steps * self.session.plan.num_microbatches * len(self.chosen)
        if not units * self.every:
            return ""
        share = f"{100 / (units * self.every):.3g} % of its forwards and backwards, no optimizer, no sum over ranks"
        return f"1 of {units:,} microbatches of a rank's stages twice, every {self.every:,} steps: {share}"

    def pre_step(self, step: int) -> None:
        """Choose what is computed twice in this step, if anything is."""
        self.unequal.clear()
        if self.every and step % self.every == 0 and self.chosen:
            stage = sorted(self.chosen)[step // self.every % len(self.chosen)]
            self._due = self._place = stage, self.chosen[stage]

    def stage_program(self, program: StageProgram, first: int) -> StageProgram:
        """A program that computes the chosen microbatch twice when its turn comes; `program` if nothing is replayed."""
        if not self.every or first or program.stage not in self.chosen:
            return program
        whole, plainly = list(program.whole), program.around_backward or (lambda mb, run: run())
        parameters = list(self.session.model.stages[program.stage].canonical_parameters().values())

        def prepare(mb: int) -> None:
            # Then a backward in halves leaves nothing to its W, which would meet sums of other microbatches' gradients.
            whole[:] = parameters if self._due == (program.stage, mb) else program.whole
            if program.prepare is not None:
                program.prepare(mb)

        def forward(mb: int, inputs: Message) -> Message:
            outputs = program.forward(mb, inputs)
            if self._due == (program.stage, mb) and torch.is_grad_enabled():
                self._inputs, self._outputs = inputs, tuple(tensor.detach() for tensor in outputs)
                for place, tensor in enumerate(outputs):
                    if tensor.requires_grad:
                        tensor.register_hook(partial(self._seeds.__setitem__, place))
            return outputs

        def around_backward(mb: int, run: Callable[[], None]) -> None:
            plainly(mb, run)
            if self._due == (program.stage, mb):
                self._due = None
                self._again(program, mb)

        return replace(program, prepare=prepare, forward=forward, around_backward=around_backward, whole=whole)

    def _again(self, program: StageProgram, mb: int) -> None:
        """Compute the microbatch a second time after its backward, and compare the results. The second gradients go to
        separate sums, and what routers record of the second time is discarded."""
        stage, weights = self.session.model.stages[program.stage], self.session.replica.weights
        sums = {name: weights.sum_of(name) for name in weights.narrow() if name in stage.canonical_parameters()}
        for name, p in stage.canonical_parameters().items():
            sums.setdefault(name, WideSum(partial(getattr, p, "grad"), partial(setattr, p, "grad")))
        first, ledgers = {name: each.total() for name, each in sums.items()}, [(r, r.ledger) for r in stage.routers()]
        for each in sums.values():
            each.begin(None)
        for router, ledger in ledgers:
            router.ledger = RouterLedger(ledger.scale)
        inputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._inputs)
        # Backwards in halves watch what torch calls.
        with (
            collecting(None),
            torch._C.DisableTorchFunction() if torch._C._len_torch_function_stack() else nullcontext(),
        ):
            outputs = program.forward(mb, inputs)
            edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in outputs]
            run_backward(edges, [self._seeds.get(place, tensor) for place, tensor in enumerate(outputs)])
        self._compare("its output", self._outputs, outputs)
        self._compare("the gradient of its input", [t.grad for t in self._inputs], [t.grad for t in inputs])
        for name, each in sums.items():
            self._compare(f"the gradient of {name}", [first[name]], [each.total()])
            each.begin(first[name])
        for router, ledger in ledgers:
            router.ledger = ledger
        self._inputs, self._outputs, self._seeds = (), (), {}

    def _compare(self, what: str, first: Sequence[Tensor | None], again: Sequence[Tensor | None]) -> None:
        for one, other in zip(first, again, strict=True):
            if one is not None and other is not None:
                pieces = zip(pieces_of_bits(one), pieces_of_bits(other), strict=True)
                self.unequal.append((what, torch.stack([(a != b).any() for a, b in pieces]).any()))

    def pre_update(self, step: int) -> None:
        """Wait for the comparisons of the step, if any. A collective over the world; raises TrainingError (PP-E737)."""
        if not self.every or step % self.every:
            return
        flags = torch.stack([flag for _, flag in self.unequal]).tolist() if self.unequal else []
        found = [what for (what, _), unequal in zip(self.unequal, flags, strict=True) if unequal]
        own = (*self._place, found) if found else None
        problem = AgreeingRanks(None).agree(
            "compare what was computed twice",
            lambda: own,
            partial(_problem, step),
            each=tuple[int, int, list[str]] | None,
            result=Problem | None,
        )
        if problem is not None:
            raise TrainingError(problem)


def _problem(step: int, of_ranks: Sequence[tuple[int, int, list[str]] | None]) -> Problem | None:
    wrong = [(rank, *found) for rank, found in enumerate(of_ranks) if found is not None]
    if not wrong:
        return None
    (rank, stage, mb, found), *others = wrong
    so_did = f"; so did ranks {', '.join(str(each[0]) for each in others[:8])}" if others else ""
    message = (
        f"step {step}: rank {rank} computed microbatch {mb} of stage {stage} twice from the same numbers and got other "
        f"bits in {', '.join(found[:3])} ({len(found)} results){so_did}; no weight was changed"
    )
    return Problem("PP-E737", message, "`ppctl resume` goes on from the last checkpoint, best without the rank's host")
