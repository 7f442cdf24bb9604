"""Lines of a plan on what its stages do: whose code runs, which have forwards alone, what waits in host memory.

Knows Derived. Must not know closed forms (`ppctl.cost`), how a model was described, or how layouts are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.config.parallel_rules import TRANSPORT, is_plain
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.geometry.foreign_model import ForeignModel, foreign_of
from ppctl.geometry.layers import count_of, offloaded_layers
from ppctl.plan.memory_limit import GIB, amount
from ppctl.plan.types import Derived, RankCost, StageCost, StageSpec


def whose_code(model: ModelConfig) -> tuple[Derived, ...]:
    """Notes on a transformers model: what was proved, and what is trained differently."""
    foreign = foreign_of(model)
    if foreign is None:
        return ()
    proof = f"a miniature in {len(foreign.stages)} stages gave the same bits as the whole"
    equation = f"its own code, of transformers {foreign.transformers}, runs on every stage: {proof}"
    return (Derived("implementation", "transformers", "; ".join((equation, *foreign.notes))), *_kinds_of(foreign))


def _kinds_of(foreign: ForeignModel) -> tuple[Derived, ...]:
    """A line on the kinds of layers of a transformers model; empty if all layers are of one kind."""
    if len(foreign.kinds) < 2:
        return ()
    parts, unnamed = [], "parameters of other shapes" if foreign.adapters is None else "a whole backward"
    for number, kind in enumerate(foreign.kinds):
        own = [index for index, structure in enumerate(foreign.layers) if structure == number]
        shown = ", ".join(map(str, own[:4])) + (", …" if len(own) > 4 else "")
        parts.append(f"{len(own)} with {kind.name or unnamed} (layers {shown})")
    return (Derived("kinds of layers", len(foreign.kinds), "layers: " + "; ".join(parts)),)


def forwards_only(frozen: int) -> tuple[Derived, ...]:
    """Which stages have forwards alone, in words; nothing where all have backwards."""
    if not frozen:
        return ()
    which = "stage 0 trains" if frozen == 1 else f"stages 0 to {frozen - 1} train"
    first = f"stage {frozen} makes no gradient of its input"
    return (Derived("forwards only", frozen, f"{which} nothing: forwards alone, no gradient is sent there, {first}"),)


def transport(config: RunConfig, pp: int, pairs: int) -> tuple[Derived, ...]:
    """A line on the plain transport of messages, and on what it leaves out; none for channels."""
    if pp == 1 or not is_plain(config):
        return ()
    why = ", which auto takes on CUDA" * (config.launch.transport == "auto")
    asked = pairs or config.parallel.overlap_moe_expert_parallel_comm
    alone = ", and no forward beside a backward" if asked else ""
    equation = f"messages: plain{why}: batches on the pipeline's process group, none beside computation{alone}"
    return (Derived("transport", "plain", f"{equation}; {TRANSPORT}=channels overlaps them"),)


def offloaded(
    config: RunConfig, stages: Sequence[StageSpec], costs: Sequence[StageCost], ranks: Sequence[RankCost]
) -> tuple[Derived, ...]:
    """A line on the bytes that move to the host and back, and their seconds; none where nothing is moved."""
    if not any(cost.offloaded_bytes for cost in costs):
        return ()
    slowest = max(costs, key=lambda cost: cost.copy_s)
    layers = max(len(offloaded_layers(config.parallel, stage.layers)) for stage in stages)
    host = max(cost.host_bytes for cost in ranks)
    whole = sum(count_of("decoder", stage.layers) > layers for stage in stages)
    which = f"the first {layers} decoder layers of every stage leave" if whole else "all decoder layers leave"
    equation = (
        f"offloaded: {which} up to {amount(slowest.offloaded_bytes)} of a microbatch to the host, and a rank up to "
        f"{amount(host)} at once; copying takes {slowest.copy_s:.3g} s each way, beside a forward and a backward of "
        f"{slowest.forward_s:.3g} and {slowest.backward_s:.3g} s"
    )
    return (Derived("offloaded", round(host / GIB.size, 2), equation),)
