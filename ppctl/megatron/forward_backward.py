"""Megatron's forward-backward functions: each names a policy and when gradients are synchronised.

All functions have the same arguments. `forward_step_func(data_iterator, model)` returns a stage's output and a loss
function (see `forward_step`). `data_iterator` and `model` are one, or a list of one, on a rank with one chunk, and
lists with one per chunk if the schedule interleaves. `num_microbatches` counts those of this call. `seq_length` (or
`decoder_seq_length`, unless None), `micro_batch_size` and the config's `hidden_size` are the shape of messages between
stages. `forward_only` runs no backward, under no_grad. `collect_non_loss_data` stores other results of the loss
function. `first_val_step` goes to models that treat the first microbatch differently. `p2p_communicator` is the
pipeline's, ours or Megatron's; without it `pg_collection.pp`, else the world, is the pipeline. `pg_collection` (`pp`,
`tp`, `cp`), by default the groups of Megatron's `parallel_state` if a program has made them, and `force_all_reduce`,
unless None, are passed to `finalize_model_grads_func`.

Schedules are Megatron's unless `ppctl.adopt` has named another one.

The scale of losses inside layers (expert load balancing, multi-token prediction) is set on Megatron's own autograd
functions if they are imported, and on modules with `set_moe_loss_scale(scale)` or `set_mtp_loss_scale(scale)`.

Everything else comes from `model.config`, which is only read. All return the list of the last stage's stored data, one
entry per microbatch in order; on ranks without the last stage it is empty.

Raises ConfigError (ScheduleError for sizes that no schedule fits) before anything runs, and EngineError, which names
rank, stage and action, for whatever fails within.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from torch import nn

from ppctl.megatron.call import Call, CallOnRank
from ppctl.megatron.message_shapes import AdjustShapes, Edges, edges_of, get_tensor_shapes
from ppctl.megatron.models import all_chunks, config_of, misuse, only_chunk, whole_number
from ppctl.megatron.p2p_communication import P2PCommunicator
from ppctl.megatron.pipelines import agree, groups_or_own, misplaced_on_v, pipeline_of, pipeline_sizes
from ppctl.megatron.steps import ForwardStep
from ppctl.schedule.action import Action, Placement, Schedule
from ppctl.schedule.passes import lower, split_before_late_weights
from ppctl.schedule.policies import forwards_alone
from ppctl.schedule.schedule_request import ScheduleRequest
from ppctl.schedule.sync_events import (
    checkpoint_flags,
    forwards_in_flight,
    sync_of_chunks,
    sync_of_one_chunk,
    sync_without_pipelining,
)

_requested = ScheduleRequest()
"""The schedule of every call: Megatron's own, unless a program has adopted another one."""


def use(request: ScheduleRequest) -> None:
    """Let all calls from now on run the requested schedule. Every rank must pass the same request."""
    global _requested
    _requested = request


def _function(
    run: Callable[[Call, P2PCommunicator | None, AdjustShapes | None], list[Any]], *, interleaved: bool = False
) -> Callable[..., list[Any]]:
    """A function with Megatron's arguments and the name of `run`, which it calls."""

    def forward_backward(
        *,
        forward_step_func: ForwardStep,
        data_iterator: Any,
        model: nn.Module | list[nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: AdjustShapes | None = None,
        p2p_communicator: P2PCommunicator | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = None,
    ) -> list[Any]:
        if interleaved:
            chunks, iterators = all_chunks(model, data_iterator)
        else:
            chunks, iterators = only_chunk(model, "model"), only_chunk(data_iterator, "data_iterator")
        sizes = (seq_length, micro_batch_size, decoder_seq_length)
        groups = groups_or_own(pg_collection, p2p_communicator)
        options = (sizes, forward_only, collect_non_loss_data, first_val_step, groups, force_all_reduce, interleaved)
        call = Call(forward_step_func, iterators, chunks, config_of(chunks[0]), num_microbatches, *options)
        return run(call, p2p_communicator, adjust_tensor_shapes_fn)

    for name in ("__name__", "__qualname__", "__doc__"):
        setattr(forward_backward, name, getattr(run, name))
    return forward_backward


@_function
def forward_backward_no_pipelining(
    call: Call, communicator: P2PCommunicator | None, adjust: AdjustShapes | None
) -> list[Any]:
    """Run all microbatches through a whole model, one after the other; gradients are synchronised in the last one.

    No message is sent, so sizes are not used. Raises ConfigError for a communicator of several ranks.
    """
    _refuse_adjusting(adjust)
    if communicator is not None and communicator.total_stages > 1:
        message = f"the communicator has {communicator.total_stages} ranks, but this function does not pipeline"
        raise misuse(message, "get_forward_backward_func()")
    schedule = _lowered(call, None, ScheduleRequest())
    sync = sync_without_pipelining(schedule.actions[0])
    return CallOnRank(call, schedule, 0, sync, {}, lambda stage: Edges((), ())).run(None)


@_function
def forward_backward_pipelining_without_interleaving(
    call: Call, communicator: P2PCommunicator | None, adjust: AdjustShapes | None
) -> list[Any]:
    """Run 1F1B with one chunk per rank, any number of microbatches.

    `adjust_tensor_shapes_fn(receive_shapes, send_shapes)` returns both lists as they are on this rank's edges, one
    shape per tensor; a stage then takes and returns lists of tensors. Both ends of an edge must agree.
    """
    return _run_pipeline(call, communicator, adjust)


@partial(_function, interleaved=True)
def forward_backward_pipelining_with_interleaving(
    call: Call, communicator: P2PCommunicator | None, adjust: AdjustShapes | None
) -> list[Any]:
    """Run interleaved 1F1B with one or more chunks per rank, in groups of `microbatch_group_size_per_vp_stage`.

    Groups must fill the pipeline, except the last; fewer microbatches than ranks work, too.
    """
    _refuse_adjusting(adjust)
    return _run_pipeline(call, communicator, None)


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> Callable[..., list[Any]]:
    """The function for these sizes: no pipelining for one rank, interleaving wherever `vp_size` is a number, even 1.

    If both sizes are None, they are taken from Megatron's `parallel_state`, provided that a program has made its
    groups. Without a `pp_size` the returned function chooses when it is called, by the size of the communicator or the
    world, and by the chunks. Raises ConfigError for a size below 1.
    """
    for name, size in (("pp_size", pp_size), ("vp_size", vp_size)):
        if size is not None and whole_number(size, name) < 1:
            raise misuse(f"{name} must be at least 1, not {size}", f"{name}=1")
    if pp_size is None and vp_size is None and (sizes := pipeline_sizes()) is not None:
        pp_size, vp_size = sizes
    if pp_size is None:
        return _choose_and_call
    if pp_size == 1:
        return forward_backward_no_pipelining
    if vp_size is None:
        return forward_backward_pipelining_without_interleaving
    return forward_backward_pipelining_with_interleaving


def _choose_and_call(**arguments: Any) -> list[Any]:
    """Call the function that fits the model and the pipeline of these arguments. A list of one model is one chunk."""
    model = arguments.get("model")
    chunks = model if isinstance(model, list) else [model]
    if not chunks or chunks[0] is None:
        raise misuse("there is no model", "model=...")
    communicator = arguments.get("p2p_communicator")
    groups = groups_or_own(arguments.get("pg_collection"), communicator)
    if len(chunks) > 1:
        return forward_backward_pipelining_with_interleaving(**arguments)
    if pipeline_of(chunks[0], communicator, groups, _requested.kinds[0]) is None:
        return forward_backward_no_pipelining(**arguments)
    return forward_backward_pipelining_without_interleaving(**arguments)


def _refuse_adjusting(adjust: AdjustShapes | None) -> None:
    if adjust is not None:
        message = "adjust_tensor_shapes_fn belongs to the schedule without interleaving"
        raise misuse(message, "forward_backward_pipelining_without_interleaving")


def _run_pipeline(call: Call, communicator: Any, adjust: AdjustShapes | None) -> list[Any]:
    """Run a call on its pipeline, once all ranks have agreed on the call's sizes."""
    request = _requested
    pipeline = pipeline_of(call.chunks[0], communicator, call.groups, request.kinds[0])
    pp, pp_rank = (1, 0) if pipeline is None else (pipeline.total_stages, pipeline.current_stage)
    schedule = _lowered(call, pipeline, request)
    row = schedule.actions[pp_rank]
    trains = not call.forward_only
    reduces = getattr(call.config, "grad_sync_func", None) is not None
    if call.interleaved:
        sync = sync_of_chunks(
            row,
            pp_rank,
            stages=schedule.placement.stages_of(pp_rank),
            reduces=trains and reduces,
            gathers=trains and getattr(call.config, "param_sync_func", None) is not None,
        )
    else:
        sync = sync_of_one_chunk(row, reduces=reduces)
    if call.interleaved or schedule.name not in ("1f1b", "forward_only"):
        window = forwards_in_flight(row)
    else:
        window = min(pp - pp_rank - 1, call.num_microbatches) + 1
    flags, edges = _checkpoint_flags(call.config, row, window), _edges(call, pp * len(call.chunks), adjust)
    misplaced = misplaced_on_v(call.chunks, schedule.placement, pp_rank)
    agree(pipeline, _must_agree(call, varying=adjust is not None), misplaced)
    return CallOnRank(call, schedule, pp_rank, sync, flags, edges).run(pipeline)


def _lowered(call: Call, pipeline: P2PCommunicator | None, request: ScheduleRequest) -> Schedule:
    """The call's schedule, lowered for the communicator."""
    pp = 1 if pipeline is None else pipeline.total_stages
    own = "forward_only" if call.forward_only else "interleaved_1f1b" if call.interleaved else "1f1b"
    batched = pipeline is not None and (pipeline.batched or _is_first_on_device(pipeline, f"{request}, {own}"))
    group = getattr(call.config, "microbatch_group_size_per_vp_stage", None) if call.interleaved else None
    microbatches = whole_number(call.num_microbatches, "num_microbatches")
    return lowered_schedule(request, own, pp, len(call.chunks), microbatches, group, batched=batched)


@lru_cache(maxsize=32)
def lowered_schedule(
    request: ScheduleRequest, own: str, pp: int, vpp: int, num_microbatches: int, group: int | None, *, batched: bool
) -> Schedule:
    """Return the requested schedule, lowered; the schedule of policy `own` for evaluations, on one rank, or without a
    request. Cached by arguments. Raises ScheduleError for sizes that do not fit the schedule.
    """
    asked = request if pp > 1 and request.asks else ScheduleRequest(own)
    place = Placement(asked.kinds[0], pp, pp * vpp)
    asked.check(pp, vpp)
    evaluates = own == "forward_only"
    schedule = (ScheduleRequest(own) if evaluates else asked).made(place, num_microbatches, group)
    if evaluates and place.kind == "v":
        schedule = forwards_alone(place, num_microbatches)
    return lower(split_before_late_weights(schedule), batched=batched)


def _is_first_on_device(communicator: P2PCommunicator, name: str) -> bool:
    """Note that a schedule runs; return whether it is the first time over a communicator that sends from a GPU.

    The first time the stages' kernels are loaded, which waits until the device is idle, so no receive may be posted
    ahead. In a batched schedule nothing travels while a rank computes.
    """
    if communicator.device.type != "cuda" or name in communicator.ran:
        return False
    communicator.ran.add(name)
    return True


def _checkpoint_flags(config: Any, row: Sequence[Action], window: int) -> dict[Action, bool]:
    """For every forward of this rank's list, whether all its layers are recomputed. Raises ConfigError if the config
    asks for a negative number of microbatches."""
    name = "num_microbatches_with_partial_activation_checkpoints"
    partial = getattr(config, name, None)
    if partial is not None and partial < 0:
        raise misuse(f"{name} is {partial}: it counts microbatches", f"{name}=0")
    return checkpoint_flags(row, partial, window)


def _must_agree(call: Call, *, varying: bool) -> dict[str, int | None]:
    """The arguments that all ranks must pass alike; sizes only if every edge carries the same shape."""
    values: dict[str, int | None] = {"num_microbatches": call.num_microbatches, "forward_only": bool(call.forward_only)}
    values["number of model chunks"] = len(call.chunks)
    if not varying and not getattr(call.config, "variable_seq_lengths", False):
        values |= dict(zip(("seq_length", "micro_batch_size", "decoder_seq_length"), call.sizes, strict=True))
    return values


def _edges(call: Call, num_stages: int, adjust: AdjustShapes | None) -> Callable[[int], Edges]:
    if num_stages == 1:
        return lambda stage: Edges((), ())
    seq_length, micro_batch_size, decoder_seq_length = call.sizes
    shapes = get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        config=call.config,
        tp_group=getattr(call.groups, "tp", None),
        cp_group=getattr(call.groups, "cp", None),
    )
    return lambda stage: edges_of(shapes, call.config, first=stage == 0, last=stage == num_stages - 1, adjust=adjust)
