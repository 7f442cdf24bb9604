"""What every stage holds, receives and sends, and what every pp_rank pays for it.

Knows StageSpec and RankCost. Must not know how sizes, layouts or schedules are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.cost.flops import stage_flops
from ppctl.cost.memory import PRECISIONS, Precision, Shares, peaks, stage_activation_bytes
from ppctl.cost.parameters import replicated_parameters, stage_count
from ppctl.layout import PipelineParallelLayerLayout
from ppctl.plan.types import RankCost, StageSpec, TensorSpec
from ppctl.schedule.action import Placement, Schedule
from ppctl.topology import ParallelSizes


def precision_of(config: RunConfig) -> Precision:
    """The precision recipe: bf16 weights where `parallel.bf16` or `params_dtype` says so, else fp32."""
    parallel = config.parallel
    return PRECISIONS["bfloat16" if parallel.bf16 else str(parallel.params_dtype or "float32").removeprefix("torch.")]


def stage_specs(
    config: RunConfig, layout: PipelineParallelLayerLayout, micro_batch_size: int, placement: str = "loop"
) -> tuple[StageSpec, ...]:
    """All stages in model order, placed as a loop over the pp_ranks or as a V."""
    model, pp = config.model, layout.pipeline_model_parallel_size
    place = Placement(placement, pp, len(layout.stages))
    message = _message(config, micro_batch_size)
    count = len(layout.stages)
    specs = []
    crossing: tuple[TensorSpec, ...] = ()
    for stage in range(count):
        layers = layout.layer_names(stage)
        mtp = sum(name.startswith("mtp") for name in layers)
        # MTP's hidden states travel on beside the main ones, to where the loss is.
        sends = (message,) * (max(1, len(crossing)) + mtp) if stage < count - 1 else ()
        specs.append(
            StageSpec(
                stage=stage,
                pp_rank=place.rank_of(stage),
                vpp_rank=place.chunk_of(stage),
                layers=layers,
                receives=crossing,
                sends=sends,
                params=stage_count(model, layers).total,
                replicated_params=replicated_parameters(model, layers),
                flops_forward=stage_flops(model, layers, micro_batch_size, config.data.seq_length),
            )
        )
        crossing = sends
    return tuple(specs)


def _message(config: RunConfig, micro_batch_size: int) -> TensorSpec:
    """One hidden state between stages: (micro batch, sequence on this rank, hidden)."""
    parallel = config.parallel
    seq = -(-config.data.seq_length // parallel.context_parallel_size)
    if parallel.sequence_parallel:
        seq = -(-seq // parallel.tensor_model_parallel_size)
    dtype = str(parallel.pipeline_dtype or precision_of(config).dtype).removeprefix("torch.")
    return TensorSpec((micro_batch_size, seq, config.model.hidden_size), dtype)


def rank_costs(
    config: RunConfig, stages: Sequence[StageSpec], sizes: ParallelSizes, schedule: Schedule, micro_batch_size: int
) -> tuple[RankCost, ...]:
    """What each pp_rank's device holds: state, replicated over dp, and the activations of the schedule as it runs."""
    model, precision = config.model, precision_of(config)
    shares = Shares(micro_batch_size, config.data.seq_length, sizes.tp, sizes.cp)
    alive = [stage_activation_bytes(model, stage.layers, shares, precision) for stage in stages]
    held = [_per_device(model, stage, sizes) for stage in stages]
    costs = []
    for pp_rank, actions in enumerate(schedule.actions):
        own = [stage for stage in stages if stage.pp_rank == pp_rank]
        here = sum(held[stage.stage] for stage in own)
        state = (here * precision.weight, here * precision.gradient, here * precision.optimizer)
        in_flight, activations = peaks(actions, alive)
        costs.append(
            RankCost(
                pp_rank,
                sum(stage.params for stage in own),
                *state,
                activation_bytes=activations,
                peak_bytes=sum(state) + activations,
                in_flight=in_flight,
            )
        )
    return tuple(costs)


def _per_device(model: ModelConfig, stage: StageSpec, sizes: ParallelSizes) -> int:
    return stage_count(model, stage.layers).per_device(sizes.tp, sizes.ep, sizes.etp)


def tie_groups(model: ModelConfig, stages: Sequence[StageSpec]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Parameters with more than one use, with the stages of their uses in canonical order: embedding, output, MTP."""
    uses = [stage.stage for stage in stages if "embedding" in stage.layers]
    if model.share_embeddings_and_output_weights:
        uses += [stage.stage for stage in stages if "loss" in stage.layers]
    uses += [stage.stage for stage in stages if any(name.startswith("mtp") for name in stage.layers)]
    return (("tok_embeddings.weight", tuple(uses)),) if len(uses) > 1 else ()
