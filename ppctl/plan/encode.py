"""The parts of a plan as plain data and back; `Plan` puts them together.

Knows the keys of each part in plan.json. Must not know a plan as a whole, nor how it is derived.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from ppctl.geometry.layers import parse_layers
from ppctl.plan.types import StageCost, StageSpec, TensorSpec, Timing
from ppctl.schedule.action import Action


def fields_of(value: Any) -> dict[str, Any]:
    """One level of a dataclass; `asdict` copies every leaf and takes ten times as long."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def encode_row(actions: Iterable[Action]) -> str:
    """A rank's actions as one string in torch's spelling."""
    return " ".join(map(str, actions))


def decode_row(text: str) -> tuple[Action, ...]:
    """The inverse of `encode_row`."""
    return tuple(map(Action.parse, text.split()))


def encode_stage(stage: StageSpec) -> dict[str, Any]:
    """A stage, with its layers by name."""
    data = fields_of(stage)
    data["layers"] = list(map(str, stage.layers))
    for edge in ("receives", "sends"):
        data[edge] = _specs(data[edge])
    return data


def decode_stage(data: Mapping[str, Any]) -> StageSpec:
    """The inverse of `encode_stage`."""
    edges = {
        edge: tuple(TensorSpec(tuple(spec["shape"]), spec["dtype"]) for spec in data[edge])
        for edge in ("receives", "sends")
    }
    return StageSpec(**{**data, "layers": parse_layers(data["layers"]), **edges})


def encode_timing(timing: Timing) -> dict[str, Any]:
    """Predicted times."""
    data = fields_of(timing)
    data["stages"] = [cost._asdict() for cost in timing.stages]
    data["critical"] = dict(timing.critical)
    data["bubbles"] = list(timing.bubbles)
    return data


def decode_timing(data: Mapping[str, Any]) -> Timing:
    """The inverse of `encode_timing`."""
    stages = tuple(StageCost(**cost) for cost in data["stages"])
    critical = tuple(data["critical"].items())
    return Timing(**{**data, "stages": stages, "critical": critical, "bubbles": tuple(data["bubbles"])})


def _specs(specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    return [{"shape": list(spec.shape), "dtype": spec.dtype} for spec in specs]
