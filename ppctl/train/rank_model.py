"""One rank's stages of the model, with their weights, kernels, exchanges and recomputation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ppctl.config.precision import weight_dtype
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.geometry.foreign_model import foreign_of
from ppctl.geometry.layers import offloaded_layers
from ppctl.geometry.rows import Parameter, Parts
from ppctl.model.attention import Attend, attend
from ppctl.model.compile import compile_stage
from ppctl.model.feed_forward import ExchangeRows
from ppctl.model.initialize import Initialize, initialize
from ppctl.model.kernels import Capability, Kernels, choose_kernels
from ppctl.model.offload import Offload
from ppctl.model.outside_kernels import use_norm
from ppctl.model.recompute import Switch, recompute
from ppctl.model.stage import build_stage
from ppctl.model.stage_model import StageModel
from ppctl.parallel.axis_groups import AxisGroups
from ppctl.parallel.context import context_attention
from ppctl.parallel.dispatch import ExpertExchange
from ppctl.plan import StageSpec


@dataclass(frozen=True)
class ModelParts:
    """Makers of the parts of a model that no config determines; a rehearsal (`ppctl/rehearsal`) has its own."""

    exchange: Callable[[Mapping[str, ProcessGroup], ModelConfig], ExchangeRows] = ExpertExchange
    """(groups along ep or etp, the model) -> the exchange of rows with experts on other ranks."""
    initialize: Initialize = initialize
    """Fills a stage's weights."""
    capability: Callable[..., Capability] = Capability.of
    """(device, packed=whether documents are kept apart) -> the kernels to choose from."""


@dataclass(frozen=True)
class RankModel:
    """The stages of one rank. Collections go by stage, in chunk order."""

    stages: Mapping[int, StageModel]
    kernels: Kernels
    parts: Parts
    """The part of each parameter that the axes leave to this rank."""
    recompute: Mapping[int, Switch]
    offload: Offload | None
    """Offloads activations to the host; None if none are."""

    @cached_property
    def rows(self) -> Mapping[str, Parameter]:
        """The row of the parameter table of each parameter and buffer of these stages, by canonical name."""
        return {name: row for stage in self.stages.values() for name, row in stage.parameter_rows().items()}


def build_model(
    config: RunConfig,
    specs: Sequence[StageSpec],
    own: Parts,
    groups: AxisGroups,
    device: torch.device,
    parts: ModelParts,
) -> RankModel:
    """Build a rank's stages (`specs`), with its part `own` of their parameters. Sets torch's deterministic mode."""
    if config.parallel.deterministic_mode != torch.are_deterministic_algorithms_enabled():
        # Only if needed: the call imports torch's compiler.
        torch.use_deterministic_algorithms(config.parallel.deterministic_mode)
    kernels = choose_kernels(config, parts.capability(device, packed=config.data.reset_attention_mask))
    stages = _build_stages(config, own, specs, device, kernels, groups, parts)
    chosen = {spec.stage: offloaded_layers(config.parallel, spec.layers) for spec in specs}
    offload = Offload(device) if any(chosen.values()) else None
    switches = {
        number: recompute(stage, config.train, number, offload, chosen[number]) for number, stage in stages.items()
    }
    return RankModel(stages, kernels, own, switches, offload)


def _build_stages(
    config: RunConfig,
    own: Parts,
    specs: Sequence[StageSpec],
    device: torch.device,
    kernels: Kernels,
    groups: AxisGroups,
    parts: ModelParts,
) -> dict[int, StageModel]:
    """Build the stages, then give each its exchanges over `groups` and kernels that are not ppctl's, and compile it
    last: what is compiled are the forwards replaced before."""
    given: dict[str, Any] = dict(
        seed=config.train.seed,
        dtype=getattr(torch, weight_dtype(config.parallel)),
        device=device,
        parts=own,
        initialize=parts.initialize,
    )
    build: Callable[[StageSpec, ModelConfig], StageModel] = partial(build_stage, kernels=kernels, **given)
    if (foreign := foreign_of(config.model)) is not None:
        from ppctl.foreign.foreign_stage import build_foreign_stage  # transformers, which few runs need

        build = partial(build_foreign_stage, foreign=foreign, **given)
    stages = {spec.stage: build(spec, config.model) for spec in specs}
    for stage in stages.values():
        # Splits and exchanges set attributes of blocks, `use_norm` replaces forwards; compiling reads both.
        if groups.split is not None:
            stage.split_over(groups.split)
        if "cp" in groups:
            stage.share_sequences(own.cp, _ways(config, kernels, groups))
        if groups.same_sequences.groups:
            stage.share_tokens(groups.same_sequences)
        if "ep" in groups or "etp" in groups:
            outside = kernels.outside.get("dispatch")
            exchange = parts.exchange if outside is None else outside.function
            stage.spread_experts(exchange(groups, config.model))
        if "norm" in kernels.outside and isinstance(stage, torch.nn.Module):
            use_norm(stage, kernels.outside["norm"])
        if config.train.compile:
            compile_stage(stage, device, packed=config.data.reset_attention_mask)
    return stages


def _ways(config: RunConfig, kernels: Kernels, groups: Mapping[str, ProcessGroup]) -> dict[str, Attend]:
    """The attention over all cp ranks' tokens for every `cp_comm_type` that a layer of the model names, and `p2p`."""
    assert kernels.blocks is not None  # chosen if ranks share sequences
    listed = config.model.cp_comm_type
    levels = (groups["cp-inner"], groups["cp-outer"]) if "cp-inner" in groups else None
    make = partial(
        context_attention, group=groups["cp"], kernel=kernels.blocks, attend=partial(attend, kernels=kernels)
    )
    return {kind: make(kind, levels=levels) for kind in {"p2p", *([listed] if isinstance(listed, str) else listed)}}
