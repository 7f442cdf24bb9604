"""The layers of every stage, the tensors that it receives and sends, and the division of its state over data-parallel
ranks: Muon's owners, and the memory of sums and of an optimizer step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from ppctl.config.precision import autocast_dtype, weight_dtype
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.cost.flops import stage_backward_flops, stage_flops
from ppctl.cost.parameter_counts import (
    Orthogonalised,
    iteration_bytes,
    largest_matrices,
    orthogonalised,
    replicated_parameters,
    stage_count,
    trained_count,
)
from ppctl.cost.setting import TORCH_ON_CPU, Setting
from ppctl.cost.state import ADAMW_ALONE, PRECISIONS, Ends, Precision, State, passing
from ppctl.cost.step_traffic import copied_for_sums
from ppctl.geometry.canonical_names import embedding_uses, uses_of_embedding
from ppctl.geometry.foreign_model import ForeignModel, foreign_of
from ppctl.geometry.layers import Layer, alike, count_of, parse_layers
from ppctl.host.accelerators import MEGATRON
from ppctl.layout import PipelineParallelLayerLayout
from ppctl.plan.types import StageSpec, TensorSpec
from ppctl.schedule.action import LIFE_ENDS, WEIGHT_GRADIENTS, Action, F, Placement, stages_with_backwards
from ppctl.topology import BUCKET_ELEMENTS, ParallelSizes


def precision_of(config: RunConfig) -> Precision:
    """The precision recipe of the weights' dtype. Megatron's performance recipes sum gradients of 16-bit weights in 16
    bits (`grad_reduce_in_fp32=False`)."""
    precision = PRECISIONS[weight_dtype(config.parallel)]
    return precision._replace(gradient=precision.weight) if config.cost.stack == MEGATRON else precision


def stage_specs(
    config: RunConfig, layout: PipelineParallelLayerLayout, micro_batch_size: int, placement: str = "loop"
) -> tuple[StageSpec, ...]:
    """All stages in model order, placed as a loop over the pp_ranks or as a V."""
    model, pp = config.model, layout.pipeline_model_parallel_size
    place = Placement(placement, pp, len(layout.stages))
    message, foreign = _message(config, micro_batch_size), foreign_of(model)
    count = len(layout.stages)
    specs = []
    crossing: tuple[TensorSpec, ...] = ()
    numbers: dict[Hashable, tuple[int, int, int, int | None]] = {}
    states, decoders = 1, 0
    for stage in range(count):
        layers = parse_layers(layout.layer_names(stage))
        # MTP's hidden states are sent on beside the main ones, to the loss's stage.
        states += count_of("mtp", layers)
        decoders += count_of("decoder", layers)
        routed = () if foreign is None else _router_logits(config, foreign, decoders, message)
        sends = (message,) * states + routed if stage < count - 1 else ()
        if (kind := alike(model, config.train, stage, layers)) not in numbers:
            per_microbatch = model, layers, micro_batch_size, config.data.seq_length
            numbers[kind] = (
                stage_count(model, layers).total(),
                replicated_parameters(model, layers),
                stage_flops(*per_microbatch),
                stage_backward_flops(*per_microbatch),
            )
        specs.append(
            StageSpec(stage, place.rank_of(stage), place.chunk_of(stage), layers, crossing, sends, *numbers[kind])
        )
        crossing = sends
    return tuple(specs)


def frozen_stages(model: ModelConfig, stages: Sequence[StageSpec]) -> int:
    """The number of stages, counted from the first, that train nothing and so need no gradients (decision 65)."""
    return next((stage.stage for stage in stages if trained_count(model, stage.layers).total()), 0)


def _message(config: RunConfig, micro_batch_size: int) -> TensorSpec:
    """One hidden state between stages: (micro batch, sequence on this rank, hidden)."""
    parallel = config.parallel
    seq = -(-config.data.seq_length // parallel.context_parallel_size)
    if parallel.sequence_parallel:
        seq = -(-seq // parallel.tensor_model_parallel_size)
    dtype = str(parallel.pipeline_dtype or precision_of(config).dtype).removeprefix("torch.")
    return TensorSpec((micro_batch_size, seq, config.model.hidden_size), dtype)


def _router_logits(
    config: RunConfig, foreign: ForeignModel, decoders: int, state: TensorSpec
) -> tuple[TensorSpec, ...]:
    """One tensor for the logits that the routers of the first `decoders` layers recorded; () if none did."""
    logits, number = foreign.router_logits, foreign.routed(decoders)
    if logits is None or not number:
        return ()
    cast, tokens = autocast_dtype(config.parallel), state.shape[0] * state.shape[1]
    fp32 = logits.wide if cast is None else logits.wide_in_autocast
    return (TensorSpec((number, tokens, logits.width), "float32" if fp32 else cast or state.dtype),)


def tie_groups(model: ModelConfig, stages: Sequence[StageSpec]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Parameters with more than one use, with the stages of their uses in canonical order: embedding, output, MTP."""
    held = [(stage.stage, embedding_uses(model, stage.layers)) for stage in stages]
    names = uses_of_embedding(model)
    uses = tuple(stage for name in names for stage, own in held if name in own)
    return ((names[0], uses),) if len(uses) > 1 else ()


def sharding_of(config: RunConfig, sizes: ParallelSizes) -> str:
    """The kind of data-parallel sharding; `none` also with a single replica."""
    return config.parallel.data_parallel_sharding if sizes.dp * sizes.cp > 1 else "none"


def moved_by_muon(config: RunConfig, stages: Iterable[Sequence[Layer]], sizes: ParallelSizes) -> Orthogonalised:
    """The matrices that Muon updates on a pp_rank with stages of these layers; none if AdamW updates all."""
    if config.optim.name != "muon":
        return ADAMW_ALONE
    shared = sharding_of(config, sizes) != "none"
    return orthogonalised(config.model, stages, sizes, shared=shared)


def updating_bytes(
    config: RunConfig, own: Sequence[StageSpec], sizes: ParallelSizes, setting: Setting, state: State
) -> int:
    """The most bytes that a rank holds while the optimizer steps: weights and optimizer state of `state`, gradients or
    this rank's parts of them, and Muon's buffers; 0 for an allocator without figures for backwards."""
    if not setting.allocator.backward:
        return 0
    sharding, precision, model = sharding_of(config, sizes), precision_of(config), config.model
    layers = [layer for stage in own for layer in stage.layers]
    gradients = state.gradients
    if sharding != "none":
        largest, moved = largest_matrices(model, layers, sizes), moved_by_muon(config, [layers], sizes)
        gradients = passing(trained_count(model, layers), sizes, precision, largest, muon=moved).parts
    limit = 1 if setting.allocator is TORCH_ON_CPU else BUCKET_ELEMENTS
    iterates = iteration_bytes(model, [layers], sizes, precision.gradient, limit) if config.optim.name == "muon" else 0
    return state.weights + state.optimizer + gradients + iterates


def summed_copies(
    config: RunConfig, own: Sequence[StageSpec], sizes: ParallelSizes, setting: Setting
) -> dict[int, int]:
    """By stage, the bytes of the copy in which whole gradients are summed over replicas; empty if no copy is made, or
    for an allocator without figures for backwards."""
    if not setting.allocator.backward or sizes.dp * sizes.cp * sizes.edp == 1 or sharding_of(config, sizes) != "none":
        return {}
    width = precision_of(config).gradient
    return {stage.stage: copied_for_sums(config.model, stage.layers, sizes, width) for stage in own}


def while_summed(
    actions: Sequence[Action], kept: Sequence[int], copies: Mapping[int, int], ends: Ends | None = None
) -> int:
    """The most bytes of activations and a stage's entry of `copies` together, after the stage's last backward."""
    frees = dict.fromkeys(LIFE_ENDS, kept) if ends is None else ends.frees
    left = Counter(action.stage for action in actions if action.op in WEIGHT_GRADIENTS)
    trained = stages_with_backwards(actions)
    held = largest = 0
    for op, stage, _ in actions:
        if op is F and stage in trained:
            held += kept[stage]
        elif op in frees:
            held -= frees[op][stage]
            left[stage] -= op in WEIGHT_GRADIENTS
            if not left[stage]:
                largest = max(largest, held + copies[stage])
    return largest
