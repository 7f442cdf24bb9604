"""A rehearsal as text: what was planned beside what was measured. Standard library only.

Knows columns and units. Must not know streams or how anything was measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ppctl.cli.plan_text import prose
from ppctl.cli.table import aligned
from ppctl.plan.memory_limit import GIB, MIB, Unit, available_text
from ppctl.plan.rehearsal_result import Rehearsal
from ppctl.rehearsal_record import STEP

LAUNCH_SECONDS = 5e-6
"""What a host takes to start one kernel from PyTorch without CUDA graphs: 5 to 10 us (facts of many profiles); the
lower end, since this is a bound."""

_SAME = 0.0005
"""Differences below this share are not shown."""


def rehearsal_text(rehearsal: Rehearsal, width: int) -> str:
    """Everything, in paragraphs."""
    parts = [_state(rehearsal), _peaks(rehearsal), _kept(rehearsal), _waits(rehearsal), _launching(rehearsal)]
    return "\n\n".join([*parts, _messages(rehearsal), prose([_verdict(rehearsal)], width)])


def _state(rehearsal: Rehearsal) -> str:
    names = ("weights", "gradients", "optimizer")
    rows = [["rank", "same kind", *(f"{name} planned, measured (MiB)" for name in names)]]
    for (kind, _), each in zip(rehearsal.measured, rehearsal.ranks, strict=True):
        cost = rehearsal.cost_of(each.rank)
        pairs = zip(
            (cost.weight_bytes, cost.gradient_bytes, cost.optimizer_bytes),
            (each.weight_bytes, each.gradient_bytes, each.optimizer_bytes),
            strict=True,
        )
        rows.append([str(each.rank), f"pp_rank {_runs(kind.pp_ranks)}", *(_pair(*pair) for pair in pairs)])
    return aligned(rows)


def _pair(planned: int, measured: int) -> str:
    unit = Unit("MiB", MIB)
    return f"{unit.of(planned)}, {'equal' if planned == measured else unit.of(measured)}"


def _peaks(rehearsal: Rehearsal) -> str:
    rows = [["peak of pp_rank", "planned GiB", "measured GiB", "difference", "in"]]
    for peak in rehearsal.peaks:
        planned = rehearsal.plan.pp_ranks[peak.pp_rank].peak_bytes
        rows.append(
            [
                str(peak.pp_rank),
                GIB.of(planned),
                GIB.of(peak.peak_bytes),
                _difference(planned, peak.peak_bytes),
                peak.peak_action,
            ]
        )
    return aligned(rows, right=3)


def _difference(planned: int, measured: int) -> str:
    share = measured / planned - 1 if planned else 0.0
    return "equal" if abs(share) < _SAME else f"{share:+.1%}"


def _kept(rehearsal: Rehearsal) -> str:
    unit = Unit("MiB", MIB)
    rows = [["kept per microbatch", "planned MiB", "measured MiB", "difference", "more in F", "more in B"]]
    for each in rehearsal.ranks:
        for memory in each.stages:
            planned = rehearsal.planned_kept(memory.stage)
            cells = [unit.of(planned), unit.of(memory.kept), _difference(planned, memory.kept)]
            more = [unit.of(memory.in_forward - memory.kept), unit.of(memory.in_backward)]
            rows.append([f"stage {memory.stage} (rank {each.rank})", *cells, *more])
    return aligned(rows, right=6)


def _waits(rehearsal: Rehearsal) -> str:
    lines = []
    for each in rehearsal.ranks:
        found: Counter[tuple[str, int, str]] = Counter()
        for wait in each.host_waits:
            found[wait.file, wait.line, wait.during] += wait.count
        lines += [
            f"rank {each.rank} waits for its device at {file}:{line} {count:,} times a step"
            f"{'' if during == STEP else f', in the {during}'}"
            for (file, line, during), count in sorted(found.items(), key=lambda item: item[0][2] == STEP)
        ]
    return "\n".join(lines)


def _launching(rehearsal: Rehearsal) -> str:
    lines = []
    for each in rehearsal.ranks:
        operations = sum(part.count for part in each.operations)
        launches = sum(part.launches for part in each.operations)
        lines.append(
            f"rank {each.rank}: {operations:,} operations and {launches:,} launches a step: at least "
            f"{launches * LAUNCH_SECONDS:.3g} s at {1e6 * LAUNCH_SECONDS:.0f} us each, and the plan's step takes "
            f"{rehearsal.plan.step_time_s:.3g} s"
        )
    return "\n".join(lines)


def _messages(rehearsal: Rehearsal) -> str:
    rows = [["messages of a step", "over", "during", "count", "GiB"]]
    rows += [
        [f"rank {each.rank} {part.kind}", part.group, part.during, f"{part.count:,}", f"{GIB.of(part.bytes)}"]
        for each in rehearsal.ranks
        for part in each.traffic
    ]
    return aligned(rows)


def _verdict(rehearsal: Rehearsal) -> str:
    limit, most = rehearsal.plan.limit, max(rehearsal.peaks, key=lambda peak: peak.peak_bytes)
    if limit is None:
        return "launch.device_memory is not given: nothing is held against it"
    if most.peak_bytes > limit.available_bytes:
        return f"does not fit: a device has {available_text(limit)}"
    share = most.peak_bytes / limit.available_bytes
    return (
        f"fits{', tight' if rehearsal.tight else ''}: a device has {available_text(limit)}; {share:.1%} of it is used"
    )


def _runs(numbers: Sequence[int]) -> str:
    """`1-12, 14`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
