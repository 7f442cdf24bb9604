"""Rules on the keys of `cpu_offloading`: which belong together, and what layers must be for it.

Must not know stages: how many layers these have is the plan's (`plan/layout_choice.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from ppctl.config.keys import Finding
from ppctl.config.schema import RunConfig

SWITCH, LAYERS = "parallel.cpu_offloading", "parallel.cpu_offloading_num_layers"
_ACTIVATIONS = "parallel.cpu_offloading_activations"


def broken_rules(config: RunConfig) -> Iterator[Finding]:
    """Every rule that is broken. Unlike in Megatron, several stages and recomputation are no obstacle."""
    parallel = config.parallel
    if not parallel.cpu_offloading:
        if parallel.cpu_offloading_num_layers:
            message = f"{LAYERS} is a detail of {SWITCH}, and that is false"
            yield (LAYERS, SWITCH), message, f"{SWITCH}=true"
        if not parallel.cpu_offloading_activations:
            message = f"{_ACTIVATIONS} is a detail of {SWITCH}, and that is false"
            yield (_ACTIVATIONS, SWITCH), message, f"{_ACTIVATIONS}=true"
        return
    if not parallel.cpu_offloading_num_layers:
        message = f"{SWITCH} moves the first layers of every stage, and their number is 0"
        yield (SWITCH, LAYERS), message, f"{LAYERS}=1"
    if not parallel.cpu_offloading_activations:
        message = f"{SWITCH} has nothing to move: activations are left out"
        yield (_ACTIVATIONS, SWITCH), message, f"{_ACTIVATIONS}=true"
    if config.train.compile:
        message = "torch.compile decides what a layer keeps, which then cannot be moved to the host"
        yield ("train.compile", SWITCH), message, "train.compile=false"
