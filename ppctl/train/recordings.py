"""Recordings of chosen steps: every rank's stamps, its gradients, and torch's profile. Other steps pay nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from ppctl.comm.groups import gather_values
from ppctl.config.quantities import steps_of
from ppctl.engine.stage import StageProgram
from ppctl.schedule.measured_step import MeasuredStep, RankStamps
from ppctl.train.callback import Callback, StepResult, TrainingRun
from ppctl.train.replica_check import PIECE, bit_sum
from ppctl.train.session import Session
from ppctl.train.snapshot import gradient_shards

TRACES, SNAPSHOTS = "profile_traces", "memory_snapshot"
"""torchtitan's directories: TRACES/iteration_N/rankM_trace.json, SNAPSHOTS/iteration_N/rankM_memory_snapshot.pickle,
which https://docs.pytorch.org/memory_viz shows."""
_MOST_EVENTS = 100_000
"""Entries of a memory history: torchtitan's number."""


def _steps(asked: str | None) -> range:
    return range(0) if asked is None else steps_of(asked)


class StepTraces(Callback):
    """Gathers the stamps of the steps of `log.trace`, by one collective of the world per step. `keep` gets them on rank
    0 only: with thousands of ranks they are millions of numbers."""

    def __init__(self, session: Session, keep: Callable[[MeasuredStep], None]) -> None:
        self.session, self.keep = session, keep
        self.steps = _steps(session.config.log.trace)

    def post_update(self, result: StepResult) -> None:
        """Gather and save the step's stamps, if the step is traced."""
        if result.step not in self.steps:
            return
        recorder = self.session.pipeline.recorder
        begin, pipeline_end, agreed, end = (time + recorder.clock_offset for time in result.phases)
        own = RankStamps(begin, pipeline_end, agreed, end, recorder.stamps_now())
        ranks = gather_values(RankStamps, own)
        if self.session.own.rank == 0:
            self.keep(MeasuredStep(result.step, tuple(ranks)))


class _WritesFiles(Callback):
    def pre_train(self, run: TrainingRun) -> None:
        """Keep `run.enter`, to report that files are written."""
        self._enter = run.enter


class KeptGradients(_WritesFiles):
    """Writes every rank's gradients in the steps of `log.gradients`, and fingerprints of these steps' messages, below
    `directory`, as files of `checkpoint/step_parity.py`."""

    def __init__(self, session: Session, directory: Path) -> None:
        self.session, self.directory = session, directory
        self.steps = _steps(session.config.log.gradients)
        self._on = False
        self._seen: dict[tuple[bool, int, int], tuple[Tensor, Tensor]] = {}
        """(forward, stage, microbatch of this rank) -> squares and bits, on the device until the step is over."""

    def stage_program(self, program: StageProgram, first: int) -> StageProgram:
        """The program, which takes a fingerprint of each message in the chosen steps; unchanged if none are chosen."""
        # a frozen stage's forwards run without autograd in training, too
        frozen = program.stage < self.session.plan.schedule.frozen_stages

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
        """Clear the previous step's fingerprints; on rank 0 also delete files of this step from an earlier start,
        perhaps with more ranks."""
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
        gather_values(None, None, everywhere=True)  # from here on rank 0 has deleted an earlier start's files
        path.mkdir(parents=True, exist_ok=True)
        shards = gradient_shards(s)
        file = path / disk.file_name(s.own.rank)
        disk.write_file(file, [shard.part for shard in shards], (values_of(shard.tensor) for shard in shards))
        ranks = gather_values(list[Handed], self._handed())  # after this all files are written
        if s.own.rank == 0:
            write_messages(path, [each for handed in ranks for each in handed])
        self._enter("updating", step - 1)

    def _note(self, key: tuple[bool, int, int], tensor: Tensor) -> None:
        """Add a tensor of a message to its fingerprint; no wait for the device."""
        squares, bits = fingerprint(tensor)
        if key in self._seen:
            squares, bits = squares + self._seen[key][0], bits + self._seen[key][1]
        self._seen[key] = squares, bits

    def _handed(self) -> list[Handed]:
        """The messages that this rank has sent in the step, in order."""
        if not self._seen:
            return []
        own, dp = self.session.own, self.session.plan.sizes.dp
        squares, bits = (torch.stack(each).tolist() for each in zip(*self._seen.values(), strict=True))
        return [
            # Microbatches are numbered as the global batch is dealt: `data/sampler.py`.
            Handed(own.rank, forward, stage, mb * dp + own.dp_rank, divmod(bit, 2**32), square)
            for (forward, stage, mb), square, bit in zip(self._seen, squares, bits, strict=True)
        ]


@torch.no_grad()
def fingerprint(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of a tensor's squares in float64, and the sum of its bits: two scalars on its device. In pieces of at
    most 32 MiB: plans do not count the memory that `log.gradients` needs."""
    values = tensor.detach().contiguous()
    pieces = values.view(-1).split(PIECE)
    squares = [piece.to(torch.float64, copy=True).square_().sum() for piece in pieces]
    return torch.stack(squares).sum(), bit_sum(values)


class TorchProfile(_WritesFiles):
    """Runs torch's profiler in the steps of `log.torch_profile`, into the run's `directory`; on a GPU with the history
    of its memory. Without the key nothing is imported."""

    def __init__(self, session: Session, directory: Path, say: Callable[[str], None] = print) -> None:
        self.rank, self.device, self.directory = session.own.rank, session.device, directory
        self.steps = _steps(session.config.log.torch_profile)
        self._profiled = ExitStack()
        if self.steps and self.rank == 0 and self.device.type != "cuda":
            say("note: log.torch_profile: memory snapshots are of GPUs; on the CPU there are only traces")

    def pre_step(self, step: int) -> None:
        """Begin to record, if the step is profiled."""
        if step in self.steps:
            self._profiled.enter_context(self._recorded(step))

    def post_update(self, result: StepResult) -> None:
        """Write the step's recording."""
        self._profiled.close()

    def close(self, error: BaseException | None) -> None:
        """Stop recording a step that has failed."""
        if error is not None:
            self._profiled.__exit__(type(error), error, error.__traceback__)

    @contextmanager
    def _recorded(self, step: int) -> Iterator[None]:
        """Record a step; the files are written after it, when the device is idle, under another time limit."""
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
                self._enter("recording", step - 1)  # the profiler processes its data when it ends
            file = self.directory / TRACES / f"iteration_{step}" / f"rank{self.rank}_trace.json"
            _write(file, recorded.export_chrome_trace)
            if on_gpu:
                file = self.directory / SNAPSHOTS / f"iteration_{step}" / f"rank{self.rank}_memory_snapshot.pickle"
                _write(file, torch.cuda.memory._dump_snapshot)
        finally:
            if on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)


def _write(file: Path, write: Callable[[str], object]) -> None:
    """Write a file, which gets its name only when it is whole: half a trace looks valid until a viewer reads it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.tmp")
    write(str(draft))
    draft.replace(file)
