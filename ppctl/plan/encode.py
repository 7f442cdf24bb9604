"""A plan as plain data and back, and its digest.

Knows the keys of plan.json, a superset of what `ppctl plan --json` prints. Must not know how a plan is derived.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from ppctl.errors import Problem
from ppctl.geometry.layers import parse_layers
from ppctl.plan.types import Derived, RankCost, StageCost, StageSpec, TensorSpec, Timing
from ppctl.schedule.action import Action, Channel, Placement, Schedule
from ppctl.topology import ParallelSizes

if TYPE_CHECKING:
    from ppctl.plan.plan import Plan

_NOT_DIGESTED = ("name", "provenance", "derived", "problems", "timing")
_TIMES = ("bubble_fraction", "step_time_s", "time_calibrated")
_NUMBERS = ("params_total", "params_mtp", "params_active", "params_hf", "p2p_capacity")
_CALLS = "gradient_accumulation_steps"


def report(plan: Plan) -> dict[str, Any]:
    """What `ppctl plan --json` prints: everything but the schedule's rows, the provenance and the digest."""
    sizes = asdict(plan.sizes)
    world = sizes.pop("world")
    schedule = plan.schedule
    return {
        "name": plan.name,
        "world_size": world,
        "parallel": sizes,
        "layout": plan.layout,
        "stages": [_stage(stage) for stage in plan.stages],
        "pp_ranks": [_fields(cost) for cost in plan.pp_ranks],
        **{name: getattr(plan, name) for name in _NUMBERS},
        "replicated_params": [stage.replicated_params for stage in plan.stages],
        "tie_groups": [{"name": name, "stages": list(stages)} for name, stages in plan.tie_groups],
        "schedule": {
            "name": schedule.name,
            "microbatches": plan.num_microbatches,
            _CALLS: plan.gradient_accumulation_steps,
            "actions_per_rank": [len(row) for row in schedule.actions],
            **{name: getattr(plan, name) for name in _TIMES},
            "placement": schedule.placement.kind,
            "batched": schedule.batched,
            "capacities": {str(channel): size for channel, size in schedule.capacities.items()},
        },
        "timing": _timing(plan.timing),
        "derived": [_fields(derived) for derived in plan.derived],
        "problems": [problem.to_json() for problem in plan.problems],
    }


def encode(plan: Plan) -> dict[str, Any]:
    """The whole plan, with its digest; each rank's actions are one string in torch's spelling."""
    data = _body(plan)
    return {**data, "provenance": dict(plan.provenance), "digest": plan.digest}


def digest(plan: Plan) -> str:
    """sha256 of the canonical JSON of what the run executes, without sources, texts and predicted times."""
    data = {key: value for key, value in _body(plan).items() if key not in _NOT_DIGESTED}
    data["schedule"] = {key: value for key, value in data["schedule"].items() if key not in _TIMES}
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def decode(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the plan that `encode` wrote."""
    schedule = data["schedule"]
    sizes = ParallelSizes(data["world_size"], **data["parallel"])
    placement = Placement(schedule["placement"], sizes.pp, sizes.num_stages)
    capacities = {Channel.parse(text): size for text, size in schedule["capacities"].items()}
    rows = tuple(_row(text) for text in schedule["actions"])
    return dict(
        name=data["name"],
        sizes=sizes,
        layout=data["layout"],
        stages=tuple(_decode_stage(stage) for stage in data["stages"]),
        pp_ranks=tuple(RankCost(**cost) for cost in data["pp_ranks"]),
        schedule=Schedule(schedule["name"], placement, schedule["microbatches"], rows, capacities, schedule["batched"]),
        num_microbatches=schedule["microbatches"],
        gradient_accumulation_steps=schedule[_CALLS],
        **{name: schedule[name] for name in _TIMES},
        **{name: data[name] for name in _NUMBERS},
        tie_groups=tuple((group["name"], tuple(group["stages"])) for group in data["tie_groups"]),
        timing=_decode_timing(data["timing"]),
        derived=tuple(Derived(**derived) for derived in data["derived"]),
        provenance=dict(data["provenance"]),
        problems=tuple(Problem(**problem) for problem in data["problems"]),
    )


def _body(plan: Plan) -> dict[str, Any]:
    data = report(plan)
    data["schedule"]["actions"] = [" ".join(map(str, row)) for row in plan.schedule.actions]
    return data


def _row(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def _fields(value: Any) -> dict[str, Any]:
    """One level of a dataclass; `asdict` copies every leaf and takes ten times as long."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _stage(stage: StageSpec) -> dict[str, Any]:
    data = _fields(stage)
    data["layers"] = list(map(str, stage.layers))
    for edge in ("receives", "sends"):
        data[edge] = _specs(data[edge])
    return data


def _timing(timing: Timing) -> dict[str, Any]:
    data = _fields(timing)
    data["stages"] = [cost._asdict() for cost in timing.stages]
    data["critical"] = dict(timing.critical)
    data["bubbles"] = list(timing.bubbles)
    return data


def _decode_timing(data: Mapping[str, Any]) -> Timing:
    stages = tuple(StageCost(**cost) for cost in data["stages"])
    critical = tuple(data["critical"].items())
    return Timing(**{**data, "stages": stages, "critical": critical, "bubbles": tuple(data["bubbles"])})


def _specs(specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    return [{"shape": list(spec.shape), "dtype": spec.dtype} for spec in specs]


def _decode_stage(data: Mapping[str, Any]) -> StageSpec:
    edges = {
        edge: tuple(TensorSpec(tuple(spec["shape"]), spec["dtype"]) for spec in data[edge])
        for edge in ("receives", "sends")
    }
    return StageSpec(**{**data, "layers": parse_layers(data["layers"]), **edges})
