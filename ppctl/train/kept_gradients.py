"""Keeps every rank's gradients of a step, and fingerprints of what its stages hand on (`log.gradients`).

Knows a session, and when a step's gradients are whole. Must not know what they are compared with, nor how the files
look (`checkpoint/step_parity.py`). Where no step asks for it, programs are what they were and nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ppctl.checkpoint import disk
from ppctl.checkpoint.shards import values_of
from ppctl.checkpoint.step_parity import Handed, forget_step, step_directory, write_messages
from ppctl.comm.buffers import Message
from ppctl.comm.groups import gather_rows
from ppctl.config.quantities import steps_of
from ppctl.engine.stage import StageProgram
from ppctl.topology import RankGrid
from ppctl.train.replica_check import PIECE, bit_sum
from ppctl.train.session import Session
from ppctl.train.snapshot import gradient_shards

_HALF = 2**32
_WIDTH = 3
"""Numbers of a fingerprint in a gathered row: the squares, and the two halves of the bits."""


class KeptGradients:
    """Watches the programs of a rank's stages, and writes what was seen."""

    def __init__(
        self, session: Session, directory: Path | None, first: Callable[[], int], writes: Callable[[int], None]
    ) -> None:
        """`first()` is the step's microbatch that is number 0 of the schedule call; `writes` is called with the step
        before its files are written, which take as long as the disk does."""
        asked = session.config.log.gradients
        self.session, self.directory, self.first, self.writes = session, directory, first, writes
        self.steps = range(0) if asked is None or directory is None else steps_of(asked)
        self._on = False
        self._seen: dict[tuple[bool, int, int], tuple[Tensor, Tensor]] = {}
        """(forward, stage, microbatch of this rank) -> squares and bits, on the device until the step is over."""

    def watched(self, programs: Sequence[StageProgram]) -> list[StageProgram]:
        """The programs, each with an eye on what it hands on."""
        return [self._watched(program) for program in programs] if self.steps else list(programs)

    def begin(self, step: int) -> None:
        """Step `step` (from 1) begins."""
        self._on = step in self.steps
        self._seen.clear()
        if self._on and self.session.own.rank == 0 and self.directory is not None:
            # Of an earlier start that did this step, perhaps on more ranks. Before the ranks' reports are gathered:
            # none writes yet, and one that dies now leaves a step that is not whole.
            forget_step(self.directory, step)

    def keep(self, step: int) -> None:
        """Write the gradients, summed over all ranks and before they are clipped. A collective of the world."""
        if not self._on:
            return
        self._on = False
        s = self.session
        assert self.directory is not None
        path = step_directory(self.directory, step)
        path.mkdir(parents=True, exist_ok=True)
        self.writes(step)
        file = path / disk.file_name(s.own.rank)
        shards = gradient_shards(s)
        disk.write_file(file, [shard.part for shard in shards], (values_of(shard.tensor) for shard in shards))
        rows = gather_rows(self._row(), s.own.rank, s.world_groups)  # behind it all files are written
        if s.own.rank == 0:
            write_messages(
                path, [handed for rank, row in enumerate(rows.tolist()) for handed in self._unpack(rank, row)]
            )
        if s.heartbeat is not None:
            s.heartbeat.set_state("updating")

    def _watched(self, program: StageProgram) -> StageProgram:
        frozen = program.stage < self.session.plan.schedule.frozen_stages  # it trains without a graph

        def forward(mb: int, inputs: Message) -> Message:
            if not self._on or not (frozen or torch.is_grad_enabled()):
                return program.forward(mb, inputs)
            number = self.first() + mb
            for tensor in inputs:
                if not tensor.requires_grad:  # nothing before this stage is trained
                    continue
                tensor.register_hook(partial(self._note, (False, program.stage, number)))
            outputs = program.forward(mb, inputs)
            for tensor in outputs:
                self._note((True, program.stage, number), tensor)
            return outputs

        return replace(program, forward=forward)

    def _note(self, key: tuple[bool, int, int], tensor: Tensor) -> None:
        """Add a tensor of a message to its fingerprint; no wait for the device."""
        squares, bits = fingerprint(tensor)
        if key in self._seen:
            squares, bits = squares + self._seen[key][0], bits + self._seen[key][1]
        self._seen[key] = squares, bits

    def _places(self, stages: Sequence[int]) -> list[tuple[bool, int, int]]:
        """What a rank with these stages may hand on in a step, in the order of its row."""
        count = self.session.plan.gradient_accumulation_steps * self.session.plan.num_microbatches
        return [(forward, stage, mb) for stage in stages for mb in range(count) for forward in (True, False)]

    def _row(self) -> list[float]:
        places = self._places([spec.stage for spec in self.session.own.stages])
        row = [-1.0] * _WIDTH * len(places)
        noted = [at for at, place in enumerate(places) if place in self._seen]
        if noted:
            squares = torch.stack([self._seen[places[at]][0] for at in noted]).tolist()
            bits = torch.stack([self._seen[places[at]][1] for at in noted]).tolist()
            for at, square, bit in zip(noted, squares, bits, strict=True):
                row[_WIDTH * at : _WIDTH * (at + 1)] = square, *map(float, divmod(bit, _HALF))
        return row

    def _unpack(self, rank: int, row: Sequence[float]) -> list[Handed]:
        plan = self.session.plan
        place = RankGrid(plan.sizes).coordinates(rank)
        stages = [spec.stage for spec in plan.for_rank(rank).stages]
        found = []
        for at, (forward, stage, mb) in enumerate(self._places(stages)):
            squares, high, low = row[_WIDTH * at : _WIDTH * (at + 1)]
            if squares < 0:
                continue
            number = mb * plan.sizes.dp + place["dp"]  # how the global batch is dealt: `data/sampler.py`
            found.append(Handed(rank, forward, stage, number, (int(high), int(low)), squares))
        return found


@torch.no_grad()
def fingerprint(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of a tensor's squares in float64, and that of its bits: two scalars on its device.

    In pieces, which take 32 MiB beside the tensor at most: plans know nothing of what a step of `log.gradients` needs.
    """
    values = tensor.detach().contiguous()
    pieces = values.view(-1).split(PIECE)
    squares = [piece.to(torch.float64, copy=True).square_().sum() for piece in pieces]
    return torch.stack(squares).sum(), bit_sum(values)
