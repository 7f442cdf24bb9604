"""The parts of a pipeline, agreed on by all ranks: the model in stages, their places, the schedule of a step."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ppctl.checkpoint.rank_agreement import AgreeingRanks
from ppctl.config.keys import keys
from ppctl.config.pipeline_config import PipelineConfig
from ppctl.errors import ConfigError, Problem
from ppctl.geometry.foreign_model import Anatomy
from ppctl.host.devices import MOST_QUEUES, QUEUES, group_backends
from ppctl.modules.pipeline_agreement import CODE, agreed, misuse, refuse_unlike
from ppctl.modules.sources import (
    OwnModel,
    PipelineModel,
    TransformersModel,
    is_transformers,
    wanted_policy,
    weights_in,
    weights_of,
    whole_config,
)
from ppctl.schedule.action import Placement, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.schedule_request import ScheduleRequest, read_schedule


def source_of(model: Any, config: PipelineConfig, ranks: AgreeingRanks) -> PipelineModel:
    """Return the model to cut, agreed on by all ranks; the first rank proves that a transformers model can be cut."""
    _agree_on(config, ranks)
    pp = ranks.size
    directory = None if isinstance(model, nn.Module) else Path(model)
    patched = config.patch_inner_model and config.patch_causal_lm_model
    if directory is None and not (patched and is_transformers(model)):
        own: PipelineModel = agreed(ranks, "cut the model", lambda: OwnModel(model, config, pp), own=True)
        refuse_unlike(ranks, "models", [f"{name} {list(each.shape)}" for name, each in model.state_dict().items()])
        return own
    if not patched:
        message = "a directory is run by transformers' code, whose forward does not take hidden states"
        raise misuse(message, "patch_inner_model=True patch_causal_lm_model=True")

    def known() -> tuple[Any, torch.dtype]:
        from ppctl.foreign.library import read_own_config

        if directory is None:
            return whole_config(model)
        config = read_own_config(directory)
        return config, config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32

    its_config, dtype = agreed(ranks, "read the model's config", known, own=True)

    def proof() -> Any:
        from ppctl.foreign.describe import proved, refuse_dropout

        if ranks.rank > 0:
            return None
        place = directory or Path(type(model).__name__)
        refuse_dropout(its_config, place)
        anatomy = proved(its_config, place).anatomy
        if anatomy.routers:
            message = (
                "output_router_logits=True adds to the model's own loss, but a pipeline computes the loss from logits"
            )
            raise ConfigError(Problem(CODE, message, "model.config.output_router_logits = False", str(place)))
        return anatomy

    anatomy = agreed(ranks, "prove that the model can be cut", proof, of=Anatomy | None)
    source: TransformersModel = agreed(
        ranks, "cut the model", lambda: TransformersModel(its_config, anatomy, dtype, config, pp), own=True
    )
    if directory is None:
        source.untrained = [n for n, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad]
    weights = (lambda: weights_of(model)) if directory is None else (lambda: weights_in(directory, its_config))
    source.weights = agreed(ranks, "find the weights", weights, own=True)
    return source


def _agree_on(config: PipelineConfig, ranks: AgreeingRanks) -> None:
    """Raise ConfigError on all ranks if a value of the config is wrong, or ranks have unlike ones."""
    agreed(ranks, "read the config", lambda: _check_values(config))
    refuse_unlike(ranks, "configs", _comparable(config))
    if config.pp_schedule_csv is None:
        agreed(ranks, "read the config", lambda: wanted_policy(config), of=str)


def check_kinds(model: Any, config: Any, loss_fn: Any, parallelize: Any) -> None:
    """Raise ConfigError (PP-E130) for arguments of types that `pipeline` does not take."""
    loss = loss_fn if loss_fn is not None else getattr(config, "loss_fn", None)
    kinds = (
        ("model", isinstance(model, nn.Module | str | os.PathLike), model, "a module, or the directory of a model"),
        ("config", isinstance(config, PipelineConfig), config, "ppctl.PipelineConfig(pp_schedule='1f1b')"),
        ("loss_fn", loss is None or callable(loss), loss, "a function of the model's result and the labels"),
        ("parallelize", parallelize is None or callable(parallelize), parallelize, "a function of a stage's module"),
    )
    problems = [
        Problem(CODE, f"{name}={value!r} is a {type(value).__name__}", remedy)
        for name, right, value, remedy in kinds
        if not right
    ]
    if problems:
        raise ConfigError(problems)


def _check_values(config: PipelineConfig) -> None:
    """Raise ConfigError (PP-E130) naming every field whose value is beyond its limit."""
    problems = []
    for field in fields(config):
        key = keys().get(f"pipeline.{field.name}")
        if key is None or key.limit is None:
            continue
        value, sound = getattr(config, key.attribute), False
        with suppress(TypeError, ValueError, AttributeError):  # a value of another type than the field's
            sound = key.allows(value)
        if not sound:
            message = f"{key.field}={value!r} must be {key.limit.words}"
            problems.append(Problem(CODE, message, f"{key.field}={key.default!r}"))
    wanted = message_dtype(config)
    if wanted is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        problems.append(Problem(CODE, f"dtype={config.dtype!r} is no floating dtype of torch", "dtype='bfloat16'"))
    if problems:
        raise ConfigError(problems)


def message_dtype(config: PipelineConfig) -> Any:
    """The dtype of messages in the config, a dtype or its name; None takes the dtype of the stages' results."""
    wanted = config.dtype
    return getattr(torch, wanted.removeprefix("torch."), wanted) if isinstance(wanted, str) else wanted


def _comparable(config: PipelineConfig) -> list[str]:
    """The fields that must be equal on all ranks, as text; functions cannot be compared."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return [f"{name}={value!r}" for name, value in values.items() if not callable(value)]


def placement_of(config: PipelineConfig, pp: int, num_stages: int) -> Placement:
    """The placement of the stages. Raises ScheduleError if the schedule needs another number per rank."""
    request = request_of(config)
    request.check(pp, num_stages // pp)
    return Placement(request.kinds[0], pp, num_stages)


def schedule_of(config: PipelineConfig, place: Placement, num_microbatches: int, batched: bool) -> Schedule:
    """The schedule of a call, with its messages. Raises ScheduleError if there is none for these sizes."""
    return lower(request_of(config).made(place, num_microbatches), batched=batched)


def request_of(config: PipelineConfig) -> ScheduleRequest:
    """The schedule that a config asks for, by its policy or in a file. Raises ScheduleError for an invalid file."""
    if config.pp_schedule_csv is None:
        return ScheduleRequest(wanted_policy(config), argument="pp_schedule")
    return ScheduleRequest(given=read_schedule(config.pp_schedule_csv), argument="pp_schedule_csv")


def device_of(asked: torch.device | str | None) -> torch.device:
    """Return this rank's device: `asked` with its number, else the GPU of LOCAL_RANK, else the CPU. Before CUDA starts
    it sets `QUEUES` in the environment. Raises ConfigError (PP-E130) for a device that torch does not have."""
    unset = QUEUES not in os.environ
    if str(asked or "cuda").startswith("cuda") and not torch.cuda.is_initialized():
        os.environ.setdefault(QUEUES, MOST_QUEUES)  # CUDA reads it when it starts
    has_gpus = torch.cuda.is_available()
    if unset and not has_gpus:
        os.environ.pop(QUEUES, None)  # not needed here, and child processes would inherit it
    if asked is not None:
        try:
            chosen = torch.device(asked)
        except RuntimeError as error:
            raise misuse(f"device={asked!r}: {str(error).splitlines()[0]}", "device='cpu'") from None
        if chosen.type == "cuda" and not has_gpus:
            raise misuse(f"device={asked!r}, but torch sees no GPU here", "device='cpu'")
        return torch.device("cuda", torch.cuda.current_device()) if str(chosen) == "cuda" else chosen
    if has_gpus:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device("cpu")


def start_process_group(device: torch.device) -> None:
    """Set the GPU, and make the default group if torchrun has started this process and the group does not exist."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized() or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return
    dist.init_process_group(group_backends(device.type, None, os.environ, share=False))


def refuse_uneven_groups(ranks: AgreeingRanks, members: Collection[int]) -> None:
    """Raise ConfigError (PP-E130) on all ranks if `members` have made different numbers of process groups. torch names
    a group that only its members make (`ppctl.comm.groups`) by that number: members would look for different names."""

    def conclude(counts_of: list[int]) -> None:
        if len({counts_of[rank] for rank in members}) > 1:
            counts = ", ".join(f"rank {rank} {counts_of[rank]}" for rank in sorted(members))
            message = f"ranks have made different numbers of process groups ({counts}), by which torch names the next"
            remedy = "torch.distributed.new_group([rank], use_local_synchronization=True) on ranks that have made fewer"
            raise misuse(message, remedy)

    agreed(ranks, "count process groups", lambda: len(dist.distributed_c10d._world.pg_names), of=int, joined=conclude)
