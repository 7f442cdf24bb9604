"""Megatron's forward-backward functions: each names a policy and when gradients are synchronised.

Knows policies, passes and the functions' arguments. Must not know how an action is carried out.

All functions have the same arguments. `forward_step_func(data_iterator, model)` returns a stage's output and a loss
function (see `forward_step`). `data_iterator` and `model` are one, or a list of one, on a rank with one chunk, and
lists with one per chunk where the schedule interleaves. `num_microbatches` counts those of this call. `seq_length` (or
`decoder_seq_length`, unless None), `micro_batch_size` and the config's `hidden_size` are the shape of messages between
stages. `forward_only` runs no backward, under no_grad. `collect_non_loss_data` stores what the loss function returns
for other purposes. `first_val_step` goes to models that treat the first microbatch differently. `p2p_communicator` is
the pipeline's; without it `pg_collection.pp`, else the world, is the pipeline. `pg_collection` (`pp`, `tp`, `cp`) and
`force_all_reduce`, unless None, are passed to `finalize_model_grads_func`.

The scale of losses inside layers (expert load balancing, multi-token prediction) is set on Megatron's own autograd
functions if they are imported, and on modules with `set_moe_loss_scale(scale)` or `set_mtp_loss_scale(scale)`.

Everything else comes from `model.config`, which is only read. All return the list of what the last stage stored, one
entry per microbatch in order; on ranks without the last stage it is empty.

Raises ConfigError (ScheduleError for sizes that no schedule fits) before anything runs, and EngineError, which names
rank, stage and action, for whatever fails within.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from ppctl.comm.connections import moves_on_device
from ppctl.errors import ScheduleError
from ppctl.megatron.call import Call, CallOnRank
from ppctl.megatron.message_shapes import AdjustShapes, Edges, edges_of, get_tensor_shapes
from ppctl.megatron.models import all_chunks, config_of, misuse, only_chunk, setting, whole_number
from ppctl.megatron.p2p_communication import P2PCommunicator
from ppctl.megatron.steps import ForwardStep
from ppctl.schedule.action import Action, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.sync_events import (
    checkpoint_flags,
    forwards_in_flight,
    sync_of_chunks,
    sync_of_one_chunk,
    sync_without_pipelining,
)
from ppctl.schedule.verify import verify


def forward_backward_no_pipelining(
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
    """Run all microbatches through a whole model, one after the other; gradients are synchronised in the last one.

    No message is sent, so that the sizes are not used. Raises ConfigError for a communicator of several ranks.
    """
    _refuse_adjusting(adjust_tensor_shapes_fn)
    if p2p_communicator is not None and p2p_communicator.total_stages > 1:
        message = f"the communicator has {p2p_communicator.total_stages} ranks, and this function does not pipeline"
        raise misuse(message, "get_forward_backward_func()")
    chunks, iterators = only_chunk(model, "model"), only_chunk(data_iterator, "data_iterator")
    sizes = (seq_length, micro_batch_size, decoder_seq_length)
    options = (sizes, forward_only, collect_non_loss_data, first_val_step, pg_collection, force_all_reduce)
    call = Call(forward_step_func, iterators, chunks, config_of(chunks[0]), num_microbatches, *options)
    schedule = _lowered(call, None)
    sync = sync_without_pipelining(schedule.actions[0])
    return CallOnRank(call, schedule, 0, sync, {}, lambda stage: Edges((), ())).run(None)


def forward_backward_pipelining_without_interleaving(
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
    """Run 1F1B with one chunk per rank, any number of microbatches.

    `adjust_tensor_shapes_fn(receive_shapes, send_shapes)` returns both lists as they are on this rank's edges, one
    shape per tensor; a stage then takes and returns lists of tensors. Both ends of an edge must agree.
    """
    chunks, iterators = only_chunk(model, "model"), only_chunk(data_iterator, "data_iterator")
    sizes = (seq_length, micro_batch_size, decoder_seq_length)
    options = (sizes, forward_only, collect_non_loss_data, first_val_step, pg_collection, force_all_reduce)
    call = Call(forward_step_func, iterators, chunks, config_of(chunks[0]), num_microbatches, *options)
    return _run_pipeline(call, p2p_communicator, adjust_tensor_shapes_fn)


def forward_backward_pipelining_with_interleaving(
    *,
    forward_step_func: ForwardStep,
    data_iterator: list[Any] | None,
    model: list[nn.Module],
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
    """Run interleaved 1F1B with one or more chunks per rank, in groups of `microbatch_group_size_per_vp_stage`.

    The groups must fill the pipeline; the last one need not, and fewer microbatches than ranks work as well.
    """
    _refuse_adjusting(adjust_tensor_shapes_fn)
    chunks, iterators = all_chunks(model, data_iterator)
    sizes = (seq_length, micro_batch_size, decoder_seq_length)
    options = (sizes, forward_only, collect_non_loss_data, first_val_step, pg_collection, force_all_reduce)
    call = Call(forward_step_func, iterators, chunks, config_of(chunks[0]), num_microbatches, *options, True)
    return _run_pipeline(call, p2p_communicator, None)


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> Callable[..., list[Any]]:
    """The function for these sizes: no pipelining for one rank, interleaving wherever `vp_size` is a number, even 1.

    Without `pp_size` the returned function chooses when it is called: by the size of the communicator or the world,
    and by whether `model` is a list. Raises ConfigError for a size below 1.
    """
    for name, size in (("pp_size", pp_size), ("vp_size", vp_size)):
        if size is not None and whole_number(size, name) < 1:
            raise misuse(f"{name} is {size}, and is at least 1", f"{name}=1")
    if pp_size is None:
        return _choose_and_call
    if pp_size == 1:
        return forward_backward_no_pipelining
    if vp_size is None:
        return forward_backward_pipelining_without_interleaving
    return forward_backward_pipelining_with_interleaving


def _choose_and_call(**arguments: Any) -> list[Any]:
    """Call the function that fits the model and the pipeline of these arguments."""
    model = arguments.get("model")
    chunks = model if isinstance(model, list) else [model]
    if not chunks or chunks[0] is None:
        raise misuse("there is no model", "model=...")
    communicator = pipeline_of(chunks[0], arguments.get("p2p_communicator"), arguments.get("pg_collection"))
    if communicator is None and len(chunks) == 1:
        return forward_backward_no_pipelining(**arguments)
    if isinstance(model, list):
        return forward_backward_pipelining_with_interleaving(**arguments)
    return forward_backward_pipelining_without_interleaving(**arguments)


def _refuse_adjusting(adjust: AdjustShapes | None) -> None:
    if adjust is not None:
        message = "adjust_tensor_shapes_fn belongs to the schedule without interleaving"
        raise misuse(message, "forward_backward_pipelining_without_interleaving")


def _run_pipeline(call: Call, communicator: P2PCommunicator | None, adjust: AdjustShapes | None) -> list[Any]:
    """Run a call on its pipeline, when all ranks have agreed on its sizes."""
    communicator = pipeline_of(call.chunks[0], communicator, call.groups)
    pp, pp_rank = (1, 0) if communicator is None else (communicator.total_stages, communicator.current_stage)
    schedule = _lowered(call, communicator)
    row = schedule.actions[pp_rank]
    trains = not call.forward_only
    reduces = setting(call.config, "grad_sync_func") is not None
    if call.interleaved:
        window = forwards_in_flight(row)
        sync = sync_of_chunks(
            row,
            pp_rank,
            stages=schedule.placement.stages_of(pp_rank),
            num_microbatches=call.num_microbatches,
            reduces=trains and reduces,
            gathers=trains and setting(call.config, "param_sync_func") is not None,
        )
    else:
        window = min(pp - pp_rank - 1, call.num_microbatches) + 1
        sync = sync_of_one_chunk(row, reduces=reduces)
    flags, edges = _checkpoint_flags(call.config, row, window), _edges(call, pp * len(call.chunks), adjust)
    agree(communicator, _must_agree(call, varying=adjust is not None))
    return CallOnRank(call, schedule, pp_rank, sync, flags, edges).run(communicator)


def _lowered(call: Call, communicator: P2PCommunicator | None) -> Schedule:
    """The call's schedule as the communicator carries it."""
    pp, group, name = 1 if communicator is None else communicator.total_stages, None, "1f1b"
    if call.interleaved:
        name, group = "interleaved_1f1b", setting(call.config, "microbatch_group_size_per_vp_stage")
    name = "forward_only" if call.forward_only else name
    num_microbatches = whole_number(call.num_microbatches, "num_microbatches")
    batched = communicator is not None and (communicator.batched or _is_first_on_device(communicator, name))
    return _make(name, pp, len(call.chunks), num_microbatches, group, batched)


def _is_first_on_device(communicator: P2PCommunicator, name: str) -> bool:
    """Whether a schedule runs for the first time over a communicator whose messages are kernels of a GPU.

    The stages' kernels are loaded then, for which the device has to drain: no receive may be posted ahead. In a batched
    schedule nothing travels while a rank computes.
    """
    if communicator.device.type != "cuda" or name in communicator.ran:
        return False
    communicator.ran.add(name)
    return True


@lru_cache(maxsize=32)
def _make(name: str, pp: int, vpp: int, num_microbatches: int, group: int | None, batched: bool) -> Schedule:
    """A schedule, verified. It is a value: every step with the same arguments uses the same one."""
    schedule = make_schedule(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches, microbatch_group_size=group)
    lowered = lower(schedule, batched=batched)
    if problems := verify(lowered):
        raise ScheduleError(problems)
    return lowered


def _checkpoint_flags(config: Any, row: Sequence[Action], window: int) -> dict[Action, bool]:
    """For every forward of this rank's list whether all its layers are recomputed. Raises ConfigError below 0."""
    name = "num_microbatches_with_partial_activation_checkpoints"
    partial = setting(config, name)
    if partial is not None and partial < 0:
        raise misuse(f"{name} is {partial}: it counts microbatches", f"{name}=0")
    return checkpoint_flags(row, partial, window)


def _must_agree(call: Call, *, varying: bool) -> dict[str, int | None]:
    """The arguments that all ranks must pass alike; sizes only where every edge carries the same shape."""
    values: dict[str, int | None] = {"num_microbatches": call.num_microbatches, "forward_only": bool(call.forward_only)}
    values["number of model chunks"] = len(call.chunks)
    if not varying and not setting(call.config, "variable_seq_lengths", False):
        values |= dict(zip(("seq_length", "micro_batch_size", "decoder_seq_length"), call.sizes, strict=True))
    return values


def _edges(call: Call, num_stages: int, adjust: AdjustShapes | None) -> Callable[[int], Edges]:
    """The edges of this rank's stages, by stage."""
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


_MODES = (
    "pipeline_dtype",
    "variable_seq_lengths",
    "batch_p2p_comm",
    "batch_p2p_sync",
    "overlap_p2p_comm",
    "overlap_p2p_comm_warmup_flush",
    "use_ring_exchange_p2p",
    "pipeline_model_parallel_comm_backend",
    "mtp_standalone",
)

_made: WeakKeyDictionary[nn.Module, tuple[object, P2PCommunicator]] = WeakKeyDictionary()
"""Communicators made for calls without one, by the rank's first chunk: channels and buffers outlive a step."""


def pipeline_of(model: nn.Module, communicator: P2PCommunicator | None, groups: Any) -> P2PCommunicator | None:
    """`communicator`, else one over `groups.pp`, else one over the world; None for a pipeline of one rank.

    A communicator that is made here is kept as long as the model lives and its modes stay the same. Raises
    ConfigError where the config says that the world is not one pipeline.
    """
    if communicator is None:
        group = getattr(groups, "pp", None)
        if group is None and dist.is_initialized():
            group = _world(config_of(model))
        communicator = None if group is None or group.size() == 1 else _kept(model, group)
    if communicator is not None and not isinstance(communicator, P2PCommunicator):
        message = f"p2p_communicator is a {type(communicator).__name__}"
        raise misuse(message, "p2p_communicator=P2PCommunicator(pp_group, config)")
    return None if communicator is None or communicator.total_stages == 1 else communicator


def _world(config: Any) -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # distributed is initialised
    size = setting(config, "pipeline_model_parallel_size", 1)
    if size > 1 and size != world.size():
        message = f"the config has {size} pipeline ranks and the world {world.size()}: which of them are this pipeline?"
        raise misuse(message, "p2p_communicator=P2PCommunicator(pp_group, config)")
    return world


def _kept(model: nn.Module, group: ProcessGroup) -> P2PCommunicator:
    config = config_of(model)
    key = [group, *(setting(config, name) for name in _MODES)]
    kept = _made.get(model)
    if kept is None or kept[0] != key:
        kept = (key, P2PCommunicator(group, config))
        _made[model] = kept
    return kept[1]


_agreed: WeakSet[P2PCommunicator] = WeakSet()


def agree(communicator: P2PCommunicator | None, asked: dict[str, int | None]) -> None:
    """Compare what this rank asks for, by name, with all others, at the first call over a communicator.

    Ranks that differ in chunks, microbatches or shapes would wait for each other for ever, or fail in the transport.
    Later calls are not compared: an exchange at every step would cost as much as a message. A collective of the
    communicator's group. Raises ConfigError on every rank, naming what differs and on which pp_ranks.
    """
    if communicator is None or communicator in _agreed:
        return
    group = communicator.pp_group
    device = communicator.device if moves_on_device(group) else torch.device("cpu")
    own = torch.tensor([-1 if value is None else value for value in asked.values()], device=device)
    table = torch.empty(group.size(), len(own), dtype=own.dtype, device=device)
    dist.all_gather(list(table.unbind()), own, group=group)
    columns = dict(zip(asked, table.T.tolist(), strict=True))
    differing = {name: values for name, values in columns.items() if len(set(values)) > 1}
    if differing:
        listed = "; ".join(_difference(name, values) for name, values in differing.items())
        name, (first, *_) = next(iter(differing.items()))
        message = f"the ranks of a pipeline do not call for the same: {listed}"
        raise misuse(message, f"{name}={None if first == -1 else first} on every rank")
    _agreed.add(communicator)


def _difference(name: str, values: list[int]) -> str:
    """`num_microbatches is 4 on pp_rank 0 and 5 on pp_rank 1`."""
    first = values[0]
    rank = next(rank for rank, value in enumerate(values) if value != first)
    return f"{name} is {first} on pp_rank 0 and {values[rank]} on pp_rank {rank}"
