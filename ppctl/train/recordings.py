"""Recordings of chosen steps: every rank's stamps, its gradients, and torch's profile.

Knows the keys `log.trace`, `log.gradients` and `log.torch_profile`, and when a step's values are whole. Must not know
what they are compared with, nor where a run keeps its files. Steps that no key names pay nothing for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from ppctl.schedule.measured_step import MeasuredStep, RankStamps
from ppctl.topology import RankGrid
from ppctl.train.callback import Callback, StepResult, TrainingRun
from ppctl.train.replica_check import HALF, PIECE, bit_sum
from ppctl.train.session import Session
from ppctl.train.snapshot import gradient_shards

TRACES, SNAPSHOTS = "profile_traces", "memory_snapshot"
"""torchtitan's directories: TRACES/iteration_N/rankM_trace.json, SNAPSHOTS/iteration_N/rankM_memory_snapshot.pickle,
which https://docs.pytorch.org/memory_viz shows."""
_MOST_EVENTS = 100_000
"""Entries of a memory history: torchtitan's number."""
_PHASES = 4
_WIDTH = 3
"""Numbers of a fingerprint in a gathered row: the squares, and the two halves of the bits."""


def _steps(asked: str | None) -> range:
    """The steps that a key names."""
    return range(0) if asked is None else steps_of(asked)


class StepTraces(Callback):
    """Gathers the stamps of the steps of `log.trace`, one collective of the world in each; `keep` takes them on rank 0.

    Rank 0 alone keeps them: with thousands of ranks these are millions of numbers.
    """

    def __init__(self, session: Session, keep: Callable[[MeasuredStep], None]) -> None:
        self.session, self.keep = session, keep
        self.steps = _steps(session.config.log.trace)
        self._width = session.plan.longest_row

    def post_update(self, result: StepResult) -> None:
        """Gather and save the step's stamps, if the step is traced."""
        if result.step not in self.steps:
            return
        s, recorder = self.session, self.session.pipeline.recorder
        row = [time + recorder.clock_offset for time in result.phases]
        for index, start, end in recorder.stamps_now():
            row += [float(index), start, end]
        row += [-1.0] * (_PHASES + 3 * self._width - len(row))
        rows = gather_rows(row, s.own.rank, s.groups.world)
        if s.own.rank == 0:
            self.keep(MeasuredStep(result.step, tuple(_unpack_stamps(row) for row in rows.tolist())))


def _unpack_stamps(row: list[float]) -> RankStamps:
    begin, pipeline_end, agreed, end = row[:_PHASES]
    indices, starts, ends = (row[_PHASES + place :: 3] for place in range(3))
    stamped = bisect_left(indices, True, key=lambda index: index < 0)  # shorter rows end in -1
    return RankStamps(begin, pipeline_end, agreed, end, [*zip(map(int, indices[:stamped]), starts, ends, strict=False)])


class KeptGradients(Callback):
    """Writes every rank's gradients of the steps of `log.gradients` below `directory`, and fingerprints of messages.

    `checkpoint/step_parity.py` has the form of the files.
    """

    def __init__(self, session: Session, directory: Path) -> None:
        self.session, self.directory = session, directory
        self.steps = _steps(session.config.log.gradients)
        self._on = False
        self._seen: dict[tuple[bool, int, int], tuple[Tensor, Tensor]] = {}
        """(forward, stage, microbatch of this rank) -> squares and bits, on the device until the step is over."""

    def pre_train(self, run: TrainingRun) -> None:
        """Remember how to say that files are written."""
        self._enter = run.enter

    def stage_program(self, program: StageProgram, first: int) -> StageProgram:
        """The program with an eye on what it hands on; itself if no step is kept."""
        frozen = program.stage < self.session.plan.schedule.frozen_stages  # it trains without a graph

        def forward(mb: int, inputs: Message) -> Message:
            if not self._on or not (frozen or torch.is_grad_enabled()):
                return program.forward(mb, inputs)
            for tensor in inputs:
                if tensor.requires_grad:  # else nothing before this stage is trained
                    tensor.register_hook(partial(self._note, (False, program.stage, first + mb)))
            outputs = program.forward(mb, inputs)
            for tensor in outputs:
                self._note((True, program.stage, first + mb), tensor)
            return outputs

        return replace(program, forward=forward) if self.steps else program

    def pre_step(self, step: int) -> None:
        """Forget the step before; on rank 0 also what an earlier start, perhaps on more ranks, has kept of this one."""
        self._on = step in self.steps
        self._seen.clear()
        if self._on and self.session.own.rank == 0:
            forget_step(self.directory, step)

    def pre_update(self, step: int) -> None:
        """Write the gradients, summed over all ranks and before they are clipped. A collective of the world."""
        if not self._on:
            return
        self._on = False
        s, path = self.session, step_directory(self.directory, step)
        self._enter("recording", step - 1)  # takes as long as the disk does
        gather_rows([], s.own.rank, s.groups.world)  # after it rank 0 has forgotten what an earlier start has kept
        path.mkdir(parents=True, exist_ok=True)
        shards = gradient_shards(s)
        file = path / disk.file_name(s.own.rank)
        disk.write_file(file, [shard.part for shard in shards], (values_of(shard.tensor) for shard in shards))
        rows = gather_rows(self._row(), s.own.rank, s.groups.world)  # after it all files are written
        if s.own.rank == 0:
            write_messages(path, [each for rank, row in enumerate(rows.tolist()) for each in self._unpack(rank, row)])
        self._enter("updating", step - 1)

    def _note(self, key: tuple[bool, int, int], tensor: Tensor) -> None:
        """Add a tensor of a message to its fingerprint; no wait for the device."""
        squares, bits = fingerprint(tensor)
        if key in self._seen:
            squares, bits = squares + self._seen[key][0], bits + self._seen[key][1]
        self._seen[key] = squares, bits

    def _places(self, stages: Sequence[int]) -> list[tuple[bool, int, int]]:
        """The keys of all that a rank with these stages may hand on in a step, in the order of its row."""
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
                row[_WIDTH * at : _WIDTH * (at + 1)] = square, *map(float, divmod(bit, HALF))
        return row

    def _unpack(self, rank: int, row: Sequence[float]) -> Iterator[Handed]:
        plan = self.session.plan
        dp_rank = RankGrid(plan.sizes).coordinates(rank)["dp"]
        stages = [spec.stage for spec in plan.for_rank(rank).stages]
        for at, (forward, stage, mb) in enumerate(self._places(stages)):
            squares, high, low = row[_WIDTH * at : _WIDTH * (at + 1)]
            if squares >= 0:
                number = mb * plan.sizes.dp + dp_rank  # how the global batch is dealt: `data/sampler.py`
                yield Handed(rank, forward, stage, number, (int(high), int(low)), squares)


@torch.no_grad()
def fingerprint(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of a tensor's squares in float64, and the sum of its bits: two scalars on its device.

    In pieces, which take 32 MiB beside the tensor at most: plans know nothing of what a step of `log.gradients` needs.
    """
    values = tensor.detach().contiguous()
    pieces = values.view(-1).split(PIECE)
    squares = [piece.to(torch.float64, copy=True).square_().sum() for piece in pieces]
    return torch.stack(squares).sum(), bit_sum(values)


class TorchProfile(Callback):
    """Runs torch's profiler in the steps of `log.torch_profile`; on a GPU with the history of its memory.

    `directory` is the run's directory. Without the key nothing is imported.
    """

    def __init__(self, session: Session, directory: Path, say: Callable[[str], None] = print) -> None:
        self.rank, self.device, self.directory = session.own.rank, session.device, directory
        self.steps = _steps(session.config.log.torch_profile)
        self._profiled = ExitStack()
        if self.steps and self.rank == 0 and self.device.type != "cuda":
            say("note: log.torch_profile: memory snapshots are of GPUs; on the CPU there are traces alone")

    def pre_train(self, run: TrainingRun) -> None:
        """Remember how to say that files are written."""
        self._enter = run.enter

    def pre_step(self, step: int) -> None:
        """Begin to record, if the step is profiled."""
        if step in self.steps:
            self._profiled.enter_context(self._recorded(step))

    def post_update(self, result: StepResult) -> None:
        """Write what was recorded."""
        self._profiled.close()

    def close(self, error: BaseException | None) -> None:
        """Stop recording a step that has failed."""
        if error is not None:
            self._profiled.__exit__(type(error), error, error.__traceback__)

    @contextmanager
    def _recorded(self, step: int) -> Iterator[None]:
        """Record a step; the files are written after it, when the device is through, and under another limit."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        if on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
        try:
            with profile(activities=activities, record_shapes=True, profile_memory=True) as recorded:
                yield
                if on_gpu:
                    torch.cuda.synchronize(self.device)
                self._enter("recording", step - 1)  # what the profiler has gathered is put in order when it ends
            file = self.directory / TRACES / f"iteration_{step}" / f"rank{self.rank}_trace.json"
            _write(file, recorded.export_chrome_trace)
            if on_gpu:
                file = self.directory / SNAPSHOTS / f"iteration_{step}" / f"rank{self.rank}_memory_snapshot.pickle"
                _write(file, torch.cuda.memory._dump_snapshot)
        finally:
            if on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)


def _write(file: Path, write: Callable[[str], object]) -> None:
    """Write a file under its own name when it is whole: half a trace looks like one until a viewer reads it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.tmp")
    write(str(draft))
    draft.replace(file)
