"""Sharding over data-parallel ranks: the shares of Muon's owners, and the memory of sums and of an optimizer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ppctl.config.schema import RunConfig
from ppctl.cost.owned_matrices import Orthogonalised, iteration_bytes, orthogonalised
from ppctl.cost.parameter_counts import largest_matrices, trained_count
from ppctl.cost.setting import TORCH_ON_CPU, Setting
from ppctl.cost.state import ADAMW_ALONE, Ends, State, passing
from ppctl.cost.step_traffic import copied_for_sums
from ppctl.geometry.layers import Layer
from ppctl.plan.stages import precision_of
from ppctl.plan.types import StageSpec
from ppctl.schedule.action import LIFE_ENDS, WEIGHT_GRADIENTS, Action, F, stages_with_backwards
from ppctl.topology import BUCKET_ELEMENTS, ParallelSizes


def sharding_of(config: RunConfig, sizes: ParallelSizes) -> str:
    """The kind of data-parallel sharding; `none` if there is no other rank to share with."""
    return config.parallel.data_parallel_sharding if sizes.dp * sizes.cp > 1 else "none"


def moved_by_muon(config: RunConfig, stages: Iterable[Sequence[Layer]], sizes: ParallelSizes) -> Orthogonalised:
    """The matrices of a pp_rank with stages of these layers that Muon moves; nothing if AdamW moves all."""
    if config.optim.name != "muon":
        return ADAMW_ALONE
    shared = sharding_of(config, sizes) != "none"
    return orthogonalised(config.model, stages, sizes, shared=shared)


def updating_bytes(
    config: RunConfig, own: Sequence[StageSpec], sizes: ParallelSizes, setting: Setting, state: State
) -> int:
    """The most bytes that a rank holds while the optimizer steps: weights and optimizer state of `state`, gradients or
    this rank's parts of them, and Muon's buffers; 0 for an allocator that does not count that moment."""
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
    """By stage, the bytes of a copy that whole gradients are summed in over replicas; empty if none is made, or
    allocators know nothing of it."""
    if not setting.allocator.backward or sizes.dp * sizes.cp * sizes.edp == 1 or sharding_of(config, sizes) != "none":
        return {}
    width = precision_of(config).gradient
    return {stage.stage: copied_for_sums(config.model, stage.layers, sizes, width) for stage in own}


def while_summed(
    actions: Sequence[Action], kept: Sequence[int], copies: Mapping[int, int], ends: Ends | None = None
) -> int:
    """The most bytes of activations and such a copy at once: after the last backward of each stage."""
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
