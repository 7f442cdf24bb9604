"""`ppctl.TorchSchedule`: a schedule with torch's interface for stages of torch.distributed.pipelining.

Only `ppctl/__init__.py` imports it: torch.distributed.pipelining takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from ppctl.checkpoint.rank_agreement import AgreeingRanks
from ppctl.comm.buffers import TensorLike
from ppctl.comm.communicator import Communicator, goes_by_group
from ppctl.engine.interpreter import run_schedule
from ppctl.engine.recorder import Recorder, make_recorder
from ppctl.engine.stage import AroundBackward, StageProgram
from ppctl.errors import ConfigError, Problem
from ppctl.modules.pipeline_agreement import CODE, agreed, misuse
from ppctl.schedule.action import BACKWARDS, Placement, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import AUTO, POLICIES, fitting_policy, forwards_alone
from ppctl.schedule.schedule_request import ScheduleRequest, requested
from ppctl.schedule.simulate import Costs
from ppctl.weight_gradients.functions import tell_what_stays

LOOPED_BFS = "loopedbfs"
"""Torch's `gpipe` with several chunks: backwards begin with the last microbatch, and sum gradients in that order."""


class Asked(NamedTuple):
    """A rank's arguments; the first three must be equal on all ranks."""

    schedule: str
    num_microbatches: int
    num_stages: int
    stages: list[int]
    replicated: bool
    """Whether one of the stages is wrapped in DistributedDataParallel."""


def schedule_of(request: ScheduleRequest, batched: bool, asked: list[Asked]) -> Schedule:
    """The schedule of a training step; for `auto`, the schedule under which stages are measured. Raises ScheduleError
    for a request that does not fit, ConfigError (PP-E130) if the ranks' arguments differ."""
    first, pp = asked[0], len(asked)
    for rank, other in enumerate(asked):
        if other[:3] != first[:3]:
            message = f"ranks ask for different schedules: rank 0 {first[:3]}, rank {rank} {other[:3]}"
            raise misuse(message, "the same schedule, memory, microbatches and number of stages on every rank")
    places = [Placement(kind, pp, first.num_stages) for kind in request.kinds]
    own = [sorted(each.stages) for each in asked]
    place = next((p for p in places if [list(p.stages_of(r)) for r in range(pp)] == own), None)
    if place is None:
        request.check(pp, first.num_stages // pp)
        stages = "; ".join(f"rank {rank} {each.stages}" for rank, each in enumerate(asked))
        wanted = "; ".join(f"rank {rank} {list(places[0].stages_of(rank))}" for rank in range(pp))
        raise misuse(f"the stages are {stages}, but {first.schedule} runs {wanted}", f"stages: {wanted}")
    runs = ScheduleRequest(_to_measure(place)) if request.policy == AUTO else request
    made = runs.made(place, first.num_microbatches)
    if first.schedule == LOOPED_BFS:
        made = _last_first(made)
    if made.split and any(each.replicated for each in asked):
        message = f"{first.schedule} splits backwards, but DistributedDataParallel needs its last backward whole"
        raise misuse(message, f"schedule={fitting_policy(len(first.stages))!r}, or fully_shard")
    return lower(made, batched=batched)


def _last_first(schedule: Schedule) -> Schedule:
    """The schedule with the microbatches of backwards in reverse order."""
    last = schedule.num_microbatches - 1
    turned = (tuple(a._replace(mb=last - a.mb) if a.op in BACKWARDS else a for a in row) for row in schedule.actions)
    return replace(schedule, actions=tuple(turned))


def _to_measure(place: Placement) -> str:
    """The policy with split backwards, on this placement, under which stages are measured."""
    vpp = place.num_stages // place.pp
    return next(p.name for p in POLICIES.values() if p.splits and p.placement == place.kind and p.runs(vpp))


def found_schedule(schedule: Schedule, memory: float, measured: Sequence[Sequence[tuple[str, int, float]]]) -> Schedule:
    """The schedule that a search finds for measured seconds; a microbatch's activations count equally on all stages."""
    place, times = schedule.placement, {(op, stage): each for rank in measured for op, stage, each in rank}
    forward, inputs, weights = ([times.get((op, s), 0.0) for s in range(place.num_stages)] for op in "FIW")
    costs = Costs(forward, [i + w for i, w in zip(inputs, weights, strict=True)], inputs, weights)
    found = ScheduleRequest(AUTO, memory=memory, costs=costs).made(place, schedule.num_microbatches)
    return lower(found, batched=schedule.batched)


class _Prepared(NamedTuple):
    """The schedule of a training step or of an evaluation, and by stage the received and sent tensors."""

    schedule: Schedule
    edges: dict[int, tuple[Sequence[TensorLike], Sequence[TensorLike]]]


class _Batch(NamedTuple):
    """The microbatches of one call, and what the last stage computes from them."""

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] | None
    loss_kwargs: dict[str, Any]
    outputs: dict[int, Any] | None
    """The last stage's outputs by microbatch; None if the caller does not want them."""
    losses: dict[int, Tensor]


class TorchSchedule(PipelineScheduleMulti):
    """A multi-stage schedule of torch.distributed.pipelining that ppctl's engine executes.

    `stages` is this rank's `PipelineStage`, or the list of them. `schedule` is a policy of ppctl, torch's name for one,
    the path of a CSV file of forwards and backwards, or `auto`: the first step then measures the stages, and the steps
    after it run the order that a search finds for these times. None means `1f1b`, or with several stages per rank
    `interleaved_1f1b`. `memory` bounds the search: the microbatches in flight, in multiples of those on 1F1B's first
    rank. All other arguments, `step` and `eval` are as in torch's classes, except that returned losses and outputs have
    no graph.

    Raises ConfigError: in the constructor for faults that this rank can see alone, in the first `step` or `eval` on all
    ranks. PP-E130 is for stages, PP-E304, PP-E305 and PP-E216 are for an unknown or unfit `schedule`.
    """

    def __init__(
        self,
        stages: Any,
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        schedule: str | PathLike[str] | None = None,
        memory: float = 1.0,
    ) -> None:
        stages = list(stages) if isinstance(stages, list | tuple) else [stages]
        if not stages or not all(hasattr(stage, "submod") and hasattr(stage, "stage_index") for stage in stages):
            message = "stages are this rank's stages of torch.distributed.pipelining, as a list"
            raise misuse(message, "ppctl.TorchSchedule([PipelineStage(module, index, num_stages, device)], ...)")
        _refuse_others(stages)
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads=scale_grads,
        )
        wanted = fitting_policy(len(stages)) if schedule is None else schedule
        self._request = requested(wanted, None if memory == 1.0 else memory, None)
        turned = str(schedule).lower().removeprefix("schedule") == LOOPED_BFS
        name = LOOPED_BFS if turned else str(self._request)
        replicated = any(isinstance(stage.submod, DistributedDataParallel) for stage in stages)
        group = stages[0].group or dist.group.WORLD
        assert group is not None  # torch's stages need one
        self._group, self._batched = group, goes_by_group(group)
        self._by_index = {stage.stage_index: stage for stage in stages}
        self._asked = Asked(name, n_microbatches, self._num_stages, list(self._by_index), replicated)
        self._ranks, self._device = AgreeingRanks(stages[0].group), torch.device(stages[0].device)
        self._schedule: Schedule | None = None
        self._prepared: dict[bool, _Prepared] = {}
        self._communicator: Communicator | None = None
        self._measures = self._request.policy == AUTO

    def close(self) -> None:
        """End the pipeline's connections. All ranks call it before they destroy the process group; NCCL needs it."""
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None
            self._prepared.clear()

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Run one step; in `eval`, or without a loss function, only forwards."""
        args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        trains = self._has_backward
        batch = _Batch(args, kwargs, target_mbs, loss_kwargs or {}, {} if return_outputs else None, {})
        if trains not in self._prepared:
            self._prepare(batch, trains)
        schedule = self._prepared[trains].schedule
        measures = trains and self._measures
        # Made only when needed: making a recorder for a GPU waits for the GPU.
        recorder = make_recorder(self.rank, schedule.actions[self.rank], self._device) if measures else None
        run_schedule(
            schedule,
            [self._program(stage, batch, trains) for stage in self._stages],
            self._communicator,
            reduce_grad=self._reduce,
            recorder=recorder,
        )
        if recorder is not None:
            self._search(recorder)
        if self._num_stages - 1 in self._by_index:
            if batch.outputs is not None:
                self._by_index[self._num_stages - 1].output_chunks[:] = [batch.outputs[mb] for mb in range(len(args))]
            self._internal_losses[:] = [loss for _, loss in sorted(batch.losses.items())]
        self._update_losses(self._stages, losses if batch.losses else None)  # type: ignore[no-untyped-call]  # torch's

    # --- how it runs -------------------------------------------------------------------------------------------------

    def _program(self, stage: Any, batch: _Batch, trains: bool) -> StageProgram:
        index, prepared = stage.stage_index, self._prepared[trains]

        def forward(mb: int, received: tuple[Tensor, ...]) -> tuple[Any, ...]:
            args = batch.args[mb] if stage.is_first else received
            output = stage.forward_maybe_with_nosync(*args, **batch.kwargs[mb])
            kept = tree_map_only(Tensor, partial(_own, received), output)
            if not stage.is_last:
                return tuple(kept) if isinstance(kept, list | tuple) else (kept,)
            if batch.outputs is not None:
                batch.outputs[mb] = tree_map_only(Tensor, Tensor.detach, kept)
            if self._loss_fn is None or batch.targets is None:
                return ()
            loss = self._compute_loss(output, batch.targets[mb], batch.loss_kwargs)  # type: ignore[no-untyped-call]  # torch's
            batch.losses[mb] = loss.detach()
            return (loss,)

        around = self._around_backward(stage, prepared.schedule) if trains else None
        tell = partial(tell_what_stays, index, stage.submod)
        return StageProgram(index, forward, *prepared.edges[index], around_backward=around, on_deferred=tell)

    def _around_backward(self, stage: Any, schedule: Schedule) -> AroundBackward | None:
        """Return the function around a stage's backwards that tells its wrapper (sharding or DDP) which is the last;
        None without a wrapper."""
        module = stage.submod
        if isinstance(module, FSDPModule):
            return partial(_without_sum, module)  # the sum follows in `_reduce`
        if isinstance(module, DistributedDataParallel):
            of_stage = [a.mb for a in schedule.actions[self.rank] if a.op in BACKWARDS and a.stage == stage.stage_index]
            return partial(_summing_after, module, of_stage[-1])
        return None

    def _reduce(self, index: int) -> None:
        self._by_index[index].perform_reduce_grad(self._n_microbatches if self.scale_grads else 1)

    # --- what is agreed on before the first step ---------------------------------------------------------------------

    def _prepare(self, batch: _Batch, trains: bool) -> None:
        """Agree on the schedule, let torch infer the stages' tensors, and check them. A collective."""
        if self._schedule is None:
            made = partial(schedule_of, self._request, self._batched)
            self._schedule = agreed(
                self._ranks, "make the schedule", lambda: self._asked, of=Asked, to=Schedule, joined=made
            )
        place = self._schedule.placement
        self.stage_index_to_group_rank = {number: place.rank_of(number) for number in range(place.num_stages)}
        for stage in self._stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        target = None if batch.targets is None else batch.targets[0]
        agreed(self._ranks, "look at the batch", partial(self._check_target, target), own=True)
        self._initialize_stages(batch.args[0], batch.kwargs[0], target, batch.loss_kwargs)
        agreed(self._ranks, "look at the stages", partial(self._check_stages, trains), own=True)
        forwards = lower(forwards_alone(place, self._n_microbatches), batched=self._batched)
        schedule = self._schedule if trains else forwards
        self._prepared[trains] = _Prepared(schedule, {i: _edges(stage) for i, stage in self._by_index.items()})
        for stage in self._stages:  # torch's buffers, one for every microbatch
            stage.args_recv_info.clear()
            stage.grad_recv_info.clear()
        if self._communicator is None and self._ranks.size > 1:
            self._communicator = Communicator(self._group, channels=self._schedule.capacities, device=self._device)

    def _check_target(self, target: Any) -> None:
        if target is None and self._has_backward and self._num_stages - 1 in self._by_index:
            raise misuse("the last stage computes a loss, but step() was given no target", "schedule.step(target=...)")

    def _check_stages(self, trains: bool) -> None:
        """Raise ConfigError (PP-E130) for tensors between stages that the engine's messages do not carry."""
        problems = []
        for index, stage in self._by_index.items():
            edges = zip(("receives", "sends"), _edges(stage), strict=True)
            for verb, number, each in [(verb, n, each) for verb, metas in edges for n, each in enumerate(metas)]:
                what = f"stage {index} {verb} tensor {number}, {each.dtype} {list(each.shape)},"
                if hasattr(each, "placements"):
                    message, remedy = f"{what} as a DTensor", "output.to_local() in the stage that sends it"
                    problems.append(Problem(CODE, message, remedy))
                elif trains and not each.requires_grad:
                    message = f"{what} requires no gradient, but every tensor between stages gets one back"
                    problems.append(Problem(CODE, message, "schedule.step(..., NAME=tensor) on every rank"))
        if problems:
            raise ConfigError(problems)

    def _search(self, recorder: Recorder) -> None:
        """Search with this step's times, and run the result from now on. A collective of the pipeline's ranks."""
        if recorder.device.type == "cuda":
            torch.cuda.synchronize(recorder.device)
        times: dict[tuple[str, int], list[float]] = {}
        for index, start, end in recorder.stamps_now():
            op, stage, _ = recorder.actions[index]
            times.setdefault((str(op), stage), []).append(end - start)
        measured = [(op, stage, median(each)) for (op, stage), each in times.items()]
        assert self._schedule is not None  # it has run
        found = partial(found_schedule, self._schedule, self._request.memory)
        kind = list[tuple[str, int, float]]
        self._schedule = agreed(
            self._ranks, "search for a schedule", lambda: measured, of=kind, to=Schedule, joined=found
        )
        self._prepared[True] = self._prepared[True]._replace(schedule=self._schedule)
        self._measures = False


def _refuse_others(stages: Sequence[Any]) -> None:
    """Raise ConfigError (PP-E130) for stages that only torch's runtime runs."""
    for stage in stages:
        if stage.dw_builder is not None:
            message = f"stage {stage.stage_index} has a dw_builder, but ppctl finds products with weights by itself"
            raise misuse(message, "PipelineStage(..., dw_builder=None)")
        if getattr(stage.submod, "find_unused_parameters", False):
            message = f"stage {stage.stage_index} looks for unused parameters from its outputs, which are not kept"
            raise misuse(message, "DistributedDataParallel(..., find_unused_parameters=False)")


def _edges(stage: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The tensors that a stage receives and sends, as torch has inferred them."""
    meta = stage._stage_meta
    return () if stage.is_first else meta.inputs, () if stage.is_last else meta.outputs


def _own(received: Sequence[Tensor], tensor: Tensor) -> Tensor:
    """A result, copied if it lies in the memory of a received tensor, which later messages overwrite."""
    memory = tensor.untyped_storage()._cdata
    return tensor.clone() if any(each.untyped_storage()._cdata == memory for each in received) else tensor


def _without_sum(module: Any, _: int, run: Callable[[], None]) -> None:
    module.set_is_last_backward(False)
    module.set_reshard_after_backward(False)
    module.set_requires_gradient_sync(False)
    run()


def _summing_after(module: Any, last: int, mb: int, run: Callable[[], None]) -> None:
    if mb == last:
        module.reducer.prepare_for_backward([])
        run()
        return
    with module.no_sync():
        run()
