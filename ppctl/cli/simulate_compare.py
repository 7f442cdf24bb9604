"""`ppctl simulate --compare`: all schedules that fit, in one table or one picture.

Knows what is printed of them. Must not know how they are made, run or drawn (`ppctl.schedule`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ppctl.cli.console import width
from ppctl.cli.table import aligned, folded, prose
from ppctl.cli.timeline import write_timelines
from ppctl.schedule.action import Placement
from ppctl.schedule.compare import PolicyFigures, compare
from ppctl.schedule.picture import Picture, StageNote
from ppctl.schedule.simulate import Costs
from ppctl.schedule.trace import step_time

_LEGEND = (
    ("step", "of 1F1B's"),
    ("bubble", "idle share of pp x step time"),
    ("rate", "the papers' count: idle share of the longest span of a rank, without filling and draining"),
    ("activations", "at most on any rank, whole until the weight gradient; 1 is what 1F1B's first rank holds"),
    ("messages", "that all ranks send in a step"),
)


def print_comparison(
    pp: int,
    num_microbatches: int,
    vpp: int | None,
    costs: Callable[[int, int], Costs],
    timeline: str | None,
    as_json: bool,
) -> None:
    """Compare, draw into the file `timeline` where one is named, and print. Raises ScheduleError, ConfigError."""
    found, left_out = compare(pp, num_microbatches, vpp, costs)
    if timeline is not None:
        write_timelines([_picture(each) for each in found], Path(timeline))
    if as_json:
        rows = [_fields(each) for each in found]
        print(
            json.dumps({"pp": pp, "microbatches": num_microbatches, "schedules": rows, "left_out": left_out}, indent=2)
        )
        return
    print(f"pp {pp}, {num_microbatches} microbatches\n\n{_table(found)}\n\n{aligned(folded(_LEGEND, width(), ' '))}")
    if left_out:
        print(prose((f"without {name}: {reason}" for name, reason in left_out.items()), width()))


def _fields(each: PolicyFigures) -> dict[str, Any]:
    return {
        "schedule": each.policy.name,
        "vpp": each.vpp,
        "placement": each.policy.placement,
        "step_time_ms": 1e3 * step_time(each.trace),
        "step_of_1f1b": each.step,
        "bubble_fraction": each.bubble_fraction,
        "bubble_rate": each.bubble_rate,
        "activations_of_1f1b": each.activations,
        "messages": each.messages,
    }


def _table(found: Sequence[PolicyFigures]) -> str:
    head = ("schedule", "chunks", "step", "bubble", "rate", "activations", "messages")
    rows = [
        (
            each.policy.name,
            f"{each.vpp}{' in a V' * (each.policy.placement == 'v')}",
            f"{each.step:.3f}",
            f"{each.bubble_fraction:.4f}",
            f"{each.bubble_rate:.4f}",
            f"{each.activations:.2f}",
            str(each.messages),
        )
        for each in found
    ]
    return aligned([head, *rows], right=len(head))


def _picture(each: PolicyFigures) -> Picture:
    place = Placement(each.policy.placement, each.trace.pp, each.trace.pp * each.vpp)
    notes = tuple(StageNote(s, place.rank_of(s), place.chunk_of(s)) for s in range(place.num_stages))
    figures = f"step {each.step:.2f} of 1F1B's, bubble {each.bubble_fraction:.0%}, activations {each.activations:.2f}"
    chunks = f", {each.vpp} chunks per rank" * (each.vpp > 1) + ", in a V" * (each.policy.placement == "v")
    return Picture(each.policy.name + chunks, figures, each.trace, notes)
