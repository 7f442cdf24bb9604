"""Reading a profile: the measured costs that `cost.profile=@runs/.../profile.json` names.

One of the two files that planning reads (`given` reads the other). Must not know how costs follow from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.cost.profile import LayerSeconds, differences
from ppctl.plan.findings import Finding, Findings
from ppctl.plan.said import Said

KEY = "cost.profile"
_WITHOUT = ((KEY, None),)


class Measured(NamedTuple):
    """A profile that was read: its file, and every stage's layers with what they took."""

    path: str
    stages: tuple[tuple[tuple[str, ...], LayerSeconds], ...]
    message: float | None
    """Median seconds of a message; none where the run sent none."""


def read_profile(said: Said, findings: Findings) -> Measured | None:
    """The measured costs; None where none are given or, with a finding, where they are of no use here."""
    if said[KEY] is None:
        return None
    path = str(said[KEY]).removeprefix("@")
    try:
        data: Any = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        stages = tuple(
            (tuple(map(str, row["layers"])), LayerSeconds(float(row["forward_s"]), float(row["backward_s"])))
            for row in data["stages"]
        )
        times = [float(row["seconds"]) for row in data.get("messages", [])]
        wrong = differences(data["subject"], said.config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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

    return Measured(path, stages, median(times) if times else None)
