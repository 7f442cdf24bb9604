"""profile.json, the measurements of a run (`cost.profile=@runs/.../profile.json`), and the costs of single layers that
follow from it.

One of the two files that planning reads (`schedule_file` reads the other).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from ppctl.config.schema import RunConfig, TrainConfig
from ppctl.errors import some
from ppctl.geometry.layers import Layer, parse_layers
from ppctl.host.files import read_text
from ppctl.layout.letters import LETTERS, LayerType, canonical_text
from ppctl.plan.types import Derived
from ppctl.plan.violations import ConfigValues, Violation, Violations

KEY = "cost.profile"
_WITHOUT = {KEY: None}

_Like = TypeVar("_Like", bound=Hashable)
"""A kind of layer, as a run has it."""

ROUNDS = 500
"""Rounds of the fit, which settles in a few dozen."""


class LayerSeconds(NamedTuple):
    """Seconds of one layer, or of one stage, for one microbatch."""

    forward: float
    backward: float


class Profile(NamedTuple):
    """A profile that was read: its file, the layers and seconds of every stage, and what the run recomputed."""

    path: str
    stages: tuple[tuple[tuple[Layer, ...], LayerSeconds], ...]
    message: float | None
    """Median seconds of a message; none if the run sent none."""
    train: TrainConfig


def read_profile(values: ConfigValues, violations: Violations) -> Profile | None:
    """The measured costs; None if no profile is set or, with a violation, if it does not fit the run."""
    if values[KEY] is None:
        return None
    path = str(values[KEY]).removeprefix("@")
    try:
        data: Any = json.loads(read_text(path))
        stages = tuple(
            (tuple(row["layers"]), LayerSeconds(_seconds(row["forward_s"]), _seconds(row["backward_s"])))
            for row in data["stages"]
        )
        times = [_seconds(row["seconds"]) for row in data.get("messages", [])]
        wrong = differences(data["subject"], values.config)
        strange = {layer for layers, _ in stages for layer in layers} - _layers(values)
        if not wrong and (strange or not stages):
            raise ValueError(f"the model has no layer {sorted(strange)[0]}" if strange else "it measured no stage")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"it is not a run's profile.json ({type(error).__name__}: {error})"
        message = f"the profile {path} cannot be read: {reason}"
        violations.append(Violation("PP-E820", KEY, message, values.cite(KEY), _WITHOUT))
        return None
    if wrong:
        message = f"the profile {path} measures another model or another share of it: {some(wrong, 3, '; ')}"
        violations.append(Violation("PP-E821", KEY, message, values.cite(KEY), _WITHOUT))
        return None
    from statistics import median  # slow to import, and few plans have a profile

    held = tuple((parse_layers(layers), seconds) for layers, seconds in stages)
    return Profile(path, held, median(times) if times else None, values.config.train)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{value!r} is no number of seconds")
    return float(value)


def _layers(values: ConfigValues) -> set[str]:
    decoders, mtp = values["model.num_layers"], values["model.mtp_num_layers"] or 0
    numbered = [Layer("decoder", n) for n in range(decoders)] + [Layer("mtp", n) for n in range(mtp)]
    return set(map(str, [Layer("embedding"), *numbered, Layer("loss")]))


def origin(measured: Profile | None, layout: str) -> tuple[Derived, ...]:
    """A line on the source of measured costs, and on whether they had to be regrouped for this layout."""
    if measured is None:
        return ()
    kinds = [[LayerType(layer.kind) for layer in layers] for layers, _ in measured.stages]
    ran = canonical_text(["".join(LETTERS[kind] for kind in stage) for stage in kinds])
    source = "of this layout" if ran == layout else f"of the layout {ran}: what its layers took, put together anew"
    return (Derived("cost.profile", measured.path, f"costs measured in {measured.path}, {source}"),)


def subject(config: RunConfig) -> dict[str, Any]:
    """The values that a measurement depends on, written into profile.json and compared when it is read: layers and a
    rank's share of a microbatch. pp, vpp, dp and the layout may differ."""
    model = {f"model.{key}": value for key, value in asdict(config.model).items() if key != "from"}
    parallel, moe = config.parallel, config.model.num_moe_experts
    names = ("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "bf16", "fp16")
    recomputed = [f"train.{name}" for name in asdict(config.train) if name.startswith("recompute_")]
    return {
        **model,
        **{f"parallel.{name}": getattr(parallel, name) for name in (*names, "sequence_parallel")},
        "parallel.expert_tensor_parallel_size": parallel.expert_tensor_parallel_size if moe else 1,
        **{name: config[name] for name in ("train.micro_batch_size", *recomputed, "data.seq_length")},
    }


def differences(written: Mapping[str, Any], config: RunConfig) -> list[str]:
    """The differences, in words, between a profile's and this config's values. A key missing in `written` is newer than
    the profile, whose run had the default."""
    own, before = subject(config), {**subject(RunConfig()), **written}
    return [f"{key} {before[key]}, here {own[key]}" for key in own if before[key] != own[key]]


def fitted(
    stages: Sequence[tuple[Counter[_Like], LayerSeconds]], prior: Mapping[_Like, LayerSeconds]
) -> dict[_Like, LayerSeconds]:
    """The cost of every kind of layer in the measured stages. Kinds that stages do not tell apart keep the proportions
    of `prior`: every round spreads each stage's residue over its kinds, in proportion to `prior` (Kaczmarz). The rounds
    converge to the nearest costs that explain the stages."""
    columns = []
    for which in (0, 1):
        start = {kind: max(seconds[which], 1e-12) for kind, seconds in prior.items()}
        total = sum(start[kind] * n for counts, _ in stages for kind, n in counts.items())
        scale = sum(seconds[which] for _, seconds in stages) / total if total else 1.0
        columns.append(_settled([(counts, seconds[which]) for counts, seconds in stages], start, scale))
    return {kind: LayerSeconds(columns[0][kind], columns[1][kind]) for kind in prior}


def _settled(
    rows: Sequence[tuple[Counter[_Like], float]], start: Mapping[_Like, float], scale: float
) -> dict[_Like, float]:
    """Seconds of each kind that explain the measured stages, by Kaczmarz' method: each row in turn is met exactly, with
    changes in proportion to `start` x `scale`."""
    weights = {kind: seconds * scale for kind, seconds in start.items()}
    fit = dict(weights)
    for _ in range(ROUNDS):
        for counts, measured in rows:
            norm = sum(n * n * weights[kind] for kind, n in counts.items())
            if norm:
                residue = measured - sum(n * fit[kind] for kind, n in counts.items())
                for kind, n in counts.items():
                    fit[kind] = max(0.0, fit[kind] + residue * n * weights[kind] / norm)
    return fit
