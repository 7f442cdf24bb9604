"""Reading a profile: the measured costs that `cost.profile=@runs/.../profile.json` names.

One of the two files that planning reads (`given` reads the other). Must not know how costs follow from it.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ppctl.cost.profile import LayerSeconds, differences
from ppctl.files import read_text
from ppctl.geometry.layers import Layer, parse_layers
from ppctl.layout.text import LETTERS, LayerType, canonical_text
from ppctl.plan.findings import Finding, Findings
from ppctl.plan.said import Said
from ppctl.plan.types import Derived

KEY = "cost.profile"
_WITHOUT = ((KEY, None),)


class Measured(NamedTuple):
    """A profile that was read: its file, and every stage's layers with what they took."""

    path: str
    stages: tuple[tuple[tuple[Layer, ...], LayerSeconds], ...]
    message: float | None
    """Median seconds of a message; none where the run sent none."""


def read_profile(said: Said, findings: Findings) -> Measured | None:
    """The measured costs; None where none are given or, with a finding, where they are of no use here."""
    if said[KEY] is None:
        return None
    path = str(said[KEY]).removeprefix("@")
    try:
        data: Any = json.loads(read_text(path))
        stages = tuple(
            (tuple(row["layers"]), LayerSeconds(_seconds(row["forward_s"]), _seconds(row["backward_s"])))
            for row in data["stages"]
        )
        times = [_seconds(row["seconds"]) for row in data.get("messages", [])]
        wrong = differences(data["subject"], said.config)
        strange = {layer for layers, _ in stages for layer in layers} - _layers(said)
        if not wrong and (strange or not stages):
            raise ValueError(f"the model has no layer {sorted(strange)[0]}" if strange else "it measured no stage")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"it is no profile.json of a run ({type(error).__name__}: {error})"
        message = f"the profile {path} cannot be read: {reason}"
        findings.append(Finding("PP-E820", KEY, message, said.told(KEY), _WITHOUT))
        return None
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        message = f"the profile {path} is of another model or another share of it: {'; '.join(wrong[:3])}{more}"
        findings.append(Finding("PP-E821", KEY, message, said.told(KEY), _WITHOUT))
        return None
    from statistics import median  # slow to import, and few plans have a profile

    held = tuple((parse_layers(layers), seconds) for layers, seconds in stages)
    return Measured(path, held, median(times) if times else None)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{value!r} are no seconds")
    return float(value)


def _layers(said: Said) -> set[str]:
    decoders, mtp = said["model.num_layers"], said["model.mtp_num_layers"] or 0
    numbered = [Layer("decoder", n) for n in range(decoders)] + [Layer("mtp", n) for n in range(mtp)]
    return set(map(str, [Layer("embedding"), *numbered, Layer("loss")]))


def origin(measured: Measured | None, layout: str) -> tuple[Derived, ...]:
    """Where measured costs come from, and whether they had to be taken apart for a plan of this layout."""
    if measured is None:
        return ()
    kinds = [[LayerType(layer.kind) for layer in layers] for layers, _ in measured.stages]
    ran = canonical_text(["".join(LETTERS[kind] for kind in stage) for stage in kinds])
    of = "of this layout" if ran == layout else f"of the layout {ran}: what its layers took, put together anew"
    return (Derived("cost.profile", measured.path, f"costs measured in {measured.path}, {of}"),)
