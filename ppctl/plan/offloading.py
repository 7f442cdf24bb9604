"""Activations that wait in host memory: whether the stages have such layers, and the figures in words.

Knows the keys of `cpu_offloading`. Must not know closed forms (`ppctl.cost`), or how layouts are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.config.offloading_rules import LAYERS, SWITCH
from ppctl.config.schema import RunConfig
from ppctl.geometry.layers import count_of
from ppctl.geometry.offloading import offloaded_layers
from ppctl.layout.letters import LayerType
from ppctl.plan.config_values import ConfigValues
from ppctl.plan.memory_limit import GIB, amount
from ppctl.plan.types import Derived, RankCost, StageCost, StageSpec
from ppctl.plan.violations import Violation, Violations


def check_offloading(values: ConfigValues, stages: Sequence[Sequence[LayerType]], violations: Violations) -> None:
    """Refuse more layers than any of a layout's stages has."""
    number, most = values[LAYERS], max(stage.count(LayerType.decoder) for stage in stages)
    if values[SWITCH] and number > most:
        message = f"{LAYERS}={number} counts decoder layers of one stage, and no stage has more than {most}"
        place = values.cite(LAYERS, "pp", "vpp", "model.num_layers")
        violations.append(Violation("PP-E226", LAYERS, message, place, {LAYERS: most}, {SWITCH: False, LAYERS: 0}))


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
