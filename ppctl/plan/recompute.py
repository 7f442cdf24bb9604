"""Whether the stages that are to recompute exist.

Knows the number of stages. Must not know what a stage recomputes: that is `geometry/recompute.py`.
"""

from __future__ import annotations

from ppctl.plan.findings import Finding, Findings
from ppctl.plan.said import Said

KEY = "train.recompute_stages"


def check_recompute(said: Said, stages: int, findings: Findings) -> None:
    """Refuse numbers of stages that the pipeline does not have, and an empty list."""
    chosen = said[KEY]
    if chosen is None:
        return
    missing = [number for number in chosen if not 0 <= number < stages]
    if missing or not chosen:
        what = f"stage {missing[0]} is not there" if missing else "no stage is named"
        message = f"{KEY}={chosen}: {what}; stages are 0 to {stages - 1}, pp x vpp of them"
        findings.append(Finding("PP-E217", KEY, message, said.told(KEY, "pp", "vpp"), ((KEY, None),)))
