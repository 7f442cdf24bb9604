"""A debug switch: whether all copies of a parameter, on whatever ranks, still have the same bits.

Knows a session's parameters, which part of each this rank has, and the ranks' groups. Must not know how a step is
computed. A part that several ranks hold is the same on all of them by construction: along dp and cp, along tp and etp
if the table does not split the parameter, and in all uses of a tied one. If it is not, some sum is missing, or a
device computed wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppctl.comm.groups import gather_rows, gather_values
from ppctl.errors import Problem, TrainingError
from ppctl.geometry.rows import Parameter
from ppctl.topology import RankGrid
from ppctl.train.callback import Callback, StepResult
from ppctl.train.session import Session
from ppctl.train.trained_weights import GatheredWeights, ShardedWeights

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HALF = 2**32
"""A float64 holds half of a 64-bit sum."""
_SHOWN = 8
PIECE = 2**22
"""Elements of a tensor that are read at once: torch makes what it sums 8 bytes wide before."""


class HeldTensor(NamedTuple):
    """A tensor of this rank; other ranks have copies of it if they have one with the same name and part."""

    name: str
    stage: int
    part: int
    """Which part of the parameter it is, counted over the ranks that divide it."""
    tensor: Tensor


class ReplicaCheck(Callback):
    """Compares copies every `train.check_replicas` steps: a pass over the weights, and one gather of a few numbers."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.every = session.config.train.check_replicas
        self._names: list[list[tuple[int, str]]] = []
        """For each pp_rank the stage and name of its tensors; exchanged once."""

    def post_update(self, result: StepResult) -> None:
        """Compare copies, if the step is one to check, and add the number of copies to its figures."""
        if self.every > 0 and result.step % self.every == 0:
            result.record["replicas_compared"] = self.compare(result.step)

    def compare(self, step: int) -> int:
        """How many parts of parameters have copies. A collective over the world.

        Raises TrainingError (PP-E734), alike on all ranks, if copies differ: it names the first parameter in the
        model's order, and its ranks.
        """
        held = self._gather()
        different = {place: values for place, values in held.items() if len(values) > 1}
        if different:
            raise TrainingError(_problem(step, different))
        return sum(len(ranks) > 1 for values in held.values() for ranks in values.values())

    @torch.no_grad()
    def _gather(self) -> dict[tuple[str, int], dict[tuple[float, float], set[int]]]:
        """(name, part) -> the sum of its bits -> the ranks that have this sum; in the model's order."""
        s, weights = self.session, self.session.replica.weights
        if isinstance(weights, ShardedWeights) and not isinstance(weights, GatheredWeights):
            for stage in weights.stages:
                weights.hold(stage)  # what the update has published
        own = list(copies(s))
        if not self._names:
            names = [(copy.stage, copy.name) for copy in own]
            self._names = gather_values(list[tuple[int, str]], names, s.groups["pp"], everywhere=True)
        sums = torch.stack([bit_sum(copy.tensor) for copy in own]).tolist() if own else []  # waits for the device once
        row = [0.0] * 3 * max(map(len, self._names))
        for number, (copy, total) in enumerate(zip(own, sums, strict=True)):
            row[3 * number : 3 * number + 3] = copy.part, *divmod(total, HALF)
        table = gather_rows(row, s.own.rank, s.groups.world).tolist()
        holders_of: dict[tuple[str, int], dict[tuple[float, float], set[int]]] = {}
        places = [
            (stage, i, name, pp) for pp, listed in enumerate(self._names) for i, (stage, name) in enumerate(listed)
        ]
        holders = self._holders()
        for _, i, name, pp in sorted(places):
            for rank in holders[pp]:
                part, high, low = table[rank][3 * i : 3 * i + 3]
                holders_of.setdefault((name, int(part)), {}).setdefault((high, low), set()).add(rank)
        return holders_of

    def _holders(self) -> list[list[int]]:
        """The ranks at each pp_rank."""
        sizes = self.session.plan.sizes
        grid, holders = RankGrid(sizes), [list[int]() for _ in range(sizes.pp)]
        for rank in range(sizes.world):
            holders[grid.coordinates(rank)["pp"]].append(rank)
        return holders


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
            if apart and not isinstance(weights, GatheredWeights):  # else there is nothing of it between steps
                yield HeldTensor(shared, number, part, parameter)
        for name, buffer in stage.canonical_buffers().items():
            yield HeldTensor(name, number, 0, buffer)


def _part(session: Session, row: Parameter) -> int:
    """Which part of a parameter this rank's model has."""
    part, parts = 0, session.model.parts
    for axis in parts.splits(row):
        part = part * parts.on(axis).size + parts.on(axis).rank
    return part


def bit_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's numbers with their bits read as integers, modulo 2^64 (a scalar, int64, on its device).

    Any single other bit changes it; an exchange of two numbers does not.
    """
    flat = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    return torch.stack([piece.sum(dtype=torch.int64) for piece in flat.split(PIECE)]).sum()


def _problem(step: int, different: Mapping[tuple[str, int], Mapping[Any, set[int]]]) -> Problem:
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
