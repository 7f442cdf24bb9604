"""The rehearsal of one rank: `python -m ppctl.rehearsal.rank DIRECTORY RANK`, started by `ppctl rehearse`.

DIRECTORY holds the run's config and plan as a run directory does. Prints one JSON object, a `Rehearsed`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ppctl.config.schema import RunConfig
from ppctl.engine.recorder import Recorder
from ppctl.errors import ConfigError, Problem
from ppctl.geometry.layers import kind_name, layer_kinds
from ppctl.model.grouped_fp8 import all_copies
from ppctl.plan import Plan
from ppctl.plan.memory import message_bytes
from ppctl.plan.rehearsal import UPDATE
from ppctl.records.rehearsal_record import BACKWARD, FORWARD, STEP, Moment, Rehearsed, StageMemory
from ppctl.rehearsal.ledger import BLOCK, DeviceLedger
from ppctl.rehearsal.stand_ins import FusedKernels, Samples, rehearsal_parts
from ppctl.runs.rundir import RunDir
from ppctl.schedule.action import BACKWARDS, Action, Op
from ppctl.train.session import Session, build_session, reads_data
from ppctl.train.step import Trainer
from ppctl.train.trained_weights import ShardedWeights

_DURING = {Op.F: FORWARD, **dict.fromkeys(BACKWARDS, BACKWARD)}


class MemoryRecorder(Recorder):
    """Records memory where a run's recorder records times."""

    def __init__(self, ledger: DeviceLedger, pp_rank: int, actions: Sequence[Action], **more: Any) -> None:
        super().__init__(pp_rank, actions, **more)
        self.ledger = ledger
        self.before: dict[int, int] = {}
        """Index of an action -> bytes at its begin."""
        self.moments: list[Moment] = []
        self.state: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Reads the bytes of weights and of gradients."""
        self.most_state = (0, 0)

    def begin(self, index: int) -> None:
        """Record the memory at the action's begin."""
        self._note(index)
        if self.actions[index].op is Op.REDUCE_GRAD:  # all gradients of the stage exist, and nothing is freed yet
            self.most_state = tuple(map(max, self.most_state, self.state()))  # type: ignore[assignment]  # of two
        self.before[index] = self.ledger.live
        self.ledger.during = _DURING.get(self.actions[index].op, STEP)
        super().begin(index)

    def end(self, index: int) -> None:
        """Record the memory at the action's end, and its peak."""
        super().end(index)
        self._note(index)
        self.ledger.during = STEP

    def _note(self, index: int) -> None:
        self.moments.append(Moment(index, self.ledger.live, self.ledger.restart_peak()))


def rehearse(config: RunConfig, plan: Plan, rank: int) -> Rehearsed:
    """Rehearse one step of a rank, in a process without a default process group. Raises ConfigError (PP-E128)."""
    # Messages need their device's backend of a group; torch has no fake one for meta tensors.
    dist.init_process_group("cpu:fake,cuda:fake,meta:fake", rank=rank, world_size=plan.sizes.world, store=FakeStore())
    try:
        return _rehearse(config, plan, rank)
    finally:
        dist.destroy_process_group()


def _rehearse(config: RunConfig, plan: Plan, rank: int) -> Rehearsed:
    """Build one rank's session on meta tensors and count one step of it."""
    if config.model.kernels:
        message = f"kernels from outside are not made for tensors without values: model.kernels={config.model.kernels}"
        raise ConfigError(Problem("PP-E128", message, "model.kernels=null"))
    ledger = DeviceLedger()
    recorders: list[MemoryRecorder] = []

    def make_recorder(pp_rank: int, actions: Sequence[Action], device: torch.device, **more: Any) -> Recorder:
        recorders.append(MemoryRecorder(ledger, pp_rank, actions, **more))
        return recorders[-1]

    with FusedKernels(), ledger:
        parts = rehearsal_parts(ledger, make_recorder)
        session = build_session(config, plan, rank, torch.device("meta"), parts=parts)
        _refuse_experts_one_by_one(session)
        ledger.watch_layers(_layers(session))
        ledger.axes |= {group.group_name: axis for axis, group in session.groups.items()}
        reads = any(reads_data(spec, config.data) for spec in session.own.stages)
        trainer = Trainer(session, Samples(config, plan) if reads else None)  # type: ignore[arg-type]  # no Batches
        recorders[0].state = lambda: _state(session)
        ledger.begin_step()
        started = time.perf_counter()
        trainer.step(0)
        seconds = time.perf_counter() - started
        in_update = ledger.restart_peak()
    (recorder,) = recorders
    return _figures(session, ledger, recorder, in_update, seconds)


def _layers(session: Session) -> Iterator[tuple[nn.Module, str]]:
    for stage in session.model.stages.values():
        layers = stage.decoder_layers()
        for module, kind in zip(layers.values(), layer_kinds(session.config.model, layers), strict=True):
            yield module, kind_name(kind)


def _refuse_experts_one_by_one(session: Session) -> None:
    """Raise ConfigError if the host would need each expert's number of rows, which is a value."""
    model = session.config.model
    if model.num_moe_experts is not None and not session.model.kernels.groups_experts:
        message = "experts that do not run as one grouped product have sizes that a rehearsal does not know"
        raise ConfigError(Problem("PP-E128", message, "parallel.bf16=true, and widths that are multiples of 8"))


def _figures(
    session: Session, ledger: DeviceLedger, recorder: MemoryRecorder, in_update: int, seconds: float
) -> Rehearsed:
    """The counted step as a record; `in_update` is the most bytes after the schedule."""
    weights, state = session.replica.weights, session.replica.optimizer.state
    moments = [tensor for entry in state.values() for tensor in entry.values() if tensor.is_meta]
    own = {id(parameter) for parameter in weights.model.values()}
    masters = [master for master in weights.master.values() if id(master) not in own]
    top = max(recorder.moments, key=lambda moment: moment.most)
    late = in_update > top.most
    return Rehearsed(
        rank=session.own.rank,
        weight_bytes=recorder.most_state[0],
        gradient_bytes=recorder.most_state[1],
        optimizer_bytes=_bytes([*masters, *moments]),
        peak_bytes=max(top.most, in_update),
        peak_action=UPDATE if late else str(recorder.actions[top.index]),
        stages=tuple(_stage_memory(session, recorder)),
        moments=tuple(recorder.moments),
        in_update=in_update,
        host_waits=ledger.host_waits,
        operations=ledger.operations,
        layers=ledger.layers,
        traffic=ledger.traffic,
        seconds=seconds,
    )


def _state(session: Session) -> tuple[int, int]:
    """(bytes of weights, with experts' copies in 8 bits, bytes of gradients) that exist now."""
    weights = session.replica.weights
    parameters = (*weights.model.values(), *weights.master.values())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sums = weights.sums.values() if isinstance(weights, ShardedWeights) else ()
    buffers = [tensor for stage in session.model.stages.values() for tensor in stage.canonical_buffers().values()]
    return _bytes([*weights.model.values(), *buffers, *all_copies()]), _bytes([*gradients, *sums])


def _stage_memory(session: Session, recorder: MemoryRecorder) -> Iterable[StageMemory]:
    """The memory of each stage from its last microbatches: the first also make gradients and tables. The two actions of
    a pair run together, and share one measurement."""
    ends = {moment.index: moment for moment in recorder.moments}  # an action has two moments; the later is its end
    paired = {action for pair in session.plan.schedule.pairs for action in pair}
    for spec in session.own.stages:
        kept = in_forward = in_backward = received = 0
        for index, action in enumerate(recorder.actions):
            if action.stage != spec.stage or index not in recorder.before or action in paired:
                continue
            more = ends[index].most - recorder.before[index]
            if action.op is Op.F:
                sent, received = (_rounded(edge) for edge in (spec.sends, spec.receives))
                kept, in_forward = ends[index].bytes - recorder.before[index] - sent + received, more
            elif action.op in BACKWARDS:
                in_backward = more
        yield StageMemory(spec.stage, kept, in_forward, in_backward, received)


def _rounded(edge: Sequence[Any]) -> int:
    return -(-message_bytes(edge) // BLOCK) * BLOCK


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def main() -> int:
    """Rehearse the rank that the arguments name, and print the measurements, or problems, as JSON."""
    directory, rank = RunDir(Path(sys.argv[1])), int(sys.argv[2])
    try:
        measured = rehearse(directory.read_config(), directory.read_plan(), rank)
    except ConfigError as error:
        print(json.dumps({"problems": [problem.to_json() for problem in error.problems]}))
        return 1
    print(json.dumps(asdict(measured)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
