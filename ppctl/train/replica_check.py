"""Checks, for debugging, whether all copies of a parameter on all ranks still have the same bits.

A part that several ranks hold is equal on all of them by construction: along dp and cp, along tp and etp if the table
does not split the parameter, and in all uses of a tied one. If it is not, a sum is missing, or a device computed wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ppctl.checkpoint.rank_agreement import AgreeingRanks
from ppctl.errors import Problem, TrainingError
from ppctl.geometry.rows import Parameter
from ppctl.train.callback import Callback, StepResult
from ppctl.train.session import Session
from ppctl.train.trained_weights import GatheredWeights, ShardedWeights

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 8
PIECE = 2**22
"""Elements of a tensor that are read at a time: torch widens summands to 8 bytes."""


class HeldTensor(NamedTuple):
    """A tensor of this rank; ranks that have one with the same name and part have copies of it."""

    name: str
    stage: int
    part: int
    """The number of the part of the parameter, over the ranks that divide it."""
    tensor: Tensor


_Bits = tuple[int, str, int, int]
"""Stage, name and part of a tensor, and the sum of its bits."""


class ReplicaCheck(Callback):
    """Compares copies every `train.check_replicas` steps: reads the weights once, and gathers a few numbers once."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.every = session.config.train.check_replicas

    def post_update(self, result: StepResult) -> None:
        """Compare copies, if the step is one to check, and add the number of copies to its figures."""
        if self.every > 0 and result.step % self.every == 0:
            result.record["replicas_compared"] = self.compare(result.step)

    def compare(self, step: int) -> int:
        """Compare all copies; returns how many parts of parameters have copies. A collective over the world. Raises
        TrainingError (PP-E734) on all ranks if copies differ; it names the first such parameter, and its ranks."""
        bits = self._bits()  # before the exchange, so that a fault of this rank's device is its own
        compared, problem = AgreeingRanks(None).agree(
            "compare copies of parameters",
            lambda: bits,
            partial(_compared, step),
            each=list[_Bits],
            result=tuple[int, Problem | None],
        )
        if problem is not None:
            raise TrainingError(problem)
        return compared

    @torch.no_grad()
    def _bits(self) -> list[_Bits]:
        """The sums of the bits of all that this rank holds, in canonical order within a stage."""
        weights = self.session.replica.weights
        if isinstance(weights, ShardedWeights) and not isinstance(weights, GatheredWeights):
            for stage in weights.stages:
                weights.hold(stage)  # gather the weights that the update has published
        own = list(copies(self.session))
        sums = torch.stack([bit_sum(copy.tensor) for copy in own]).tolist() if own else []  # waits for the device once
        return [(copy.stage, copy.name, copy.part, total) for copy, total in zip(own, sums, strict=True)]


def _compared(step: int, of_ranks: list[list[_Bits]]) -> tuple[int, Problem | None]:
    """(how many parts have copies, the problem if some differ)."""
    in_order = sorted(
        (stage, place, name, part, bits, rank)
        for rank, held in enumerate(of_ranks)
        for place, (stage, name, part, bits) in enumerate(held)
    )
    holders: dict[tuple[str, int], dict[int, set[int]]] = {}
    for _, _, name, part, bits, rank in in_order:
        holders.setdefault((name, part), {}).setdefault(bits, set()).add(rank)
    different = {place: values for place, values in holders.items() if len(values) > 1}
    if different:
        return 0, _problem(step, different)
    return sum(len(ranks) > 1 for values in holders.values() for ranks in values.values()), None


def copies(session: Session) -> Iterator[HeldTensor]:
    """The masters, weights and biases that this rank keeps from step to step; in canonical order within a stage."""
    weights = session.replica.weights
    for number, stage in session.model.stages.items():
        for name, parameter in stage.canonical_parameters().items():
            row, master = session.model.rows[name], weights.master[name]
            shared, part = row.copy_of or name, _part(session, row)
            apart = master is not parameter
            group = weights.group_of(name) if isinstance(weights, ShardedWeights) else None
            of_master = part if group is None else part * group.size() + group.rank()
            yield HeldTensor(f"{shared} (master)" if apart else shared, number, of_master, master)
            if apart and not isinstance(weights, GatheredWeights):  # gathered weights do not exist between steps
                yield HeldTensor(shared, number, part, parameter)
        for name, buffer in stage.canonical_buffers().items():
            yield HeldTensor(name, number, 0, buffer)


def _part(session: Session, row: Parameter) -> int:
    part, parts = 0, session.model.parts
    for axis in parts.splits(row):
        part = part * parts.on(axis).size + parts.on(axis).rank
    return part


def bit_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's numbers with their bits read as integers, modulo 2^64 (a scalar, int64, on its device). Any
    single changed bit changes the sum; a swap of two numbers does not."""
    return torch.stack([piece.sum(dtype=torch.int64) for piece in pieces_of_bits(tensor)]).sum()


def pieces_of_bits(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor's numbers with their bits read as integers, in pieces [n]."""
    pieces: Sequence[Tensor] = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()]).split(PIECE)
    return pieces


def _problem(step: int, different: Mapping[tuple[str, int], Mapping[int, set[int]]]) -> Problem:
    names = list(dict.fromkeys(name for name, _ in different))
    values = next(iter(different.values()))
    groups = sorted(map(sorted, values.values()), key=lambda ranks: (-len(ranks), ranks))
    message = f"after step {step}, copies of {names[0]} that must have the same bits differ: those of "
    message += ", of ".join(map(_named, groups))
    more = f"\nand {len(names) - 1 - _SHOWN} more" if len(names) > 1 + _SHOWN else ""
    place = f"different as well: {', '.join(names[1 : 1 + _SHOWN])}{more}" if names[1:] else ""
    remedy = "`ppctl resume` goes on from the last checkpoint; with train.check_replicas=1 it finds the first such step"
    return Problem("PP-E734", message, remedy, place)


def _named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 5`."""
    shown = [str(rank) for rank in ranks[:_SHOWN]]
    if len(ranks) > _SHOWN:
        shown.append(f"{len(ranks) - _SHOWN} more")
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
