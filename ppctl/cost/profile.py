"""Measured costs of stages, and what they say of single layers: so that one run prices every other cut.

Knows the keys of profile.json. Must not know files, schedules or presets' rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from ppctl.config.schema import RunConfig
from ppctl.geometry.layers import Kind

ROUNDS = 500
"""Passes of the fit; it settles in a few dozen."""


def subject(config: RunConfig) -> dict[str, Any]:
    """What a measurement is of: the same layers on the same share of a microbatch. pp, vpp, dp, the layout are free.

    Written into profile.json and compared when it is read.
    """
    model = {f"model.{key}": value for key, value in asdict(config.model).items() if key != "from"}
    parallel = config.parallel
    names = ("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "bf16", "fp16")
    return {
        **model,
        **{f"parallel.{name}": getattr(parallel, name) for name in names},
        "train.micro_batch_size": config.train.micro_batch_size,
        "train.recompute_granularity": config.train.recompute_granularity,
        "data.seq_length": config.data.seq_length,
    }


def differences(written: Mapping[str, Any], config: RunConfig) -> list[str]:
    """In words, what a profile was measured with and this config says otherwise.

    A key that `written` does not have is younger than the profile: its run had the default.
    """
    own, before = subject(config), {**subject(RunConfig()), **written}
    return [f"{key} {before[key]}, here {own[key]}" for key in own if before[key] != own[key]]


class LayerSeconds(NamedTuple):
    """One layer and one microbatch."""

    forward: float
    backward: float


def fitted(
    stages: Sequence[tuple[Counter[Kind], LayerSeconds]], prior: Mapping[Kind, LayerSeconds]
) -> dict[Kind, LayerSeconds]:
    """The cost of every kind that makes up the measured stages.

    Where stages do not tell kinds apart, they keep the proportions of `prior`: every pass moves each stage's kinds by
    its residue, in proportion to what they were (Kaczmarz), which ends at the nearest costs that explain the stages.
    """
    columns = []
    for which in (0, 1):
        start = {kind: max(seconds[which], 1e-12) for kind, seconds in prior.items()}
        total = sum(start[kind] * n for counts, _ in stages for kind, n in counts.items())
        scale = sum(seconds[which] for _, seconds in stages) / total if total else 1.0
        columns.append(_settled([(counts, seconds[which]) for counts, seconds in stages], start, scale))
    return {kind: LayerSeconds(columns[0][kind], columns[1][kind]) for kind in prior}


def _settled(
    rows: Sequence[tuple[Counter[Kind], float]], start: Mapping[Kind, float], scale: float
) -> dict[Kind, float]:
    weights = {kind: seconds * scale for kind, seconds in start.items()}
    found = dict(weights)
    for _ in range(ROUNDS):
        for counts, measured in rows:
            norm = sum(n * n * weights[kind] for kind, n in counts.items())
            if norm:
                residue = measured - sum(n * found[kind] for kind, n in counts.items())
                for kind, n in counts.items():
                    found[kind] = max(0.0, found[kind] + residue * n * weights[kind] / norm)
    return found
