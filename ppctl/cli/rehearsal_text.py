"""A rehearsal as text: the verdict, then what was planned beside what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import ceil

from ppctl.checkpoint.tensor_parts import spans
from ppctl.cli.console import aligned, prose
from ppctl.plan.memory_limit import MIB, Unit, amount, size_text, unit_for, used_text
from ppctl.plan.rehearsal import Rehearsal
from ppctl.records.rehearsal_record import STEP, LayerKernels, Rehearsed, StageMemory

LAUNCH_SECONDS = 5e-6
"""Seconds that a host takes to start one kernel from PyTorch without CUDA graphs: 5 to 10 us in many profiles. The
lower end, since this is a bound."""

_MIB = Unit("MiB", MIB)
_EQUAL = "equal to the byte"


def rehearsal_text(rehearsal: Rehearsal, width: int) -> str:
    """Everything, in paragraphs: the verdict first."""
    parts = [_verdict(rehearsal), _peaks(rehearsal), _state(rehearsal), _kept(rehearsal), _waits(rehearsal)]
    parts += [_launching(rehearsal), _layers(rehearsal), _messages(rehearsal)]
    return "\n\n".join(f"{prose(head, width)}\n{table}".rstrip() for head, table in parts if head)


_Part = tuple[list[str], str]
"""Lines of words, which are wrapped, and below them a table, which is not; without lines it is left out."""
_Key = tuple[str, str]


def _verdict(rehearsal: Rehearsal) -> _Part:
    most = max(rehearsal.peaks, key=lambda peak: peak.peak_bytes)
    planned = rehearsal.plan.pp_ranks[most.pp_rank].peak_bytes
    peak = f"{amount(most.peak_bytes)} on pp_rank {most.pp_rank} in {most.peak_action} (planned: {amount(planned)})"
    lines = [f"{rehearsal.plan.name} {_fits(rehearsal, most.peak_bytes)}: memory peaks at {peak}"]
    lines += used_text(rehearsal.plan.limit, most.peak_bytes)
    kept = ((rehearsal.planned_kept(memory.stage), memory.kept) for _, memory in _stages(rehearsal))
    peaks = ((rehearsal.plan.pp_ranks[peak.pp_rank].peak_bytes, peak.peak_bytes) for peak in rehearsal.peaks)
    state = max(abs(measured - planned) for _, _, planned, measured in _state_of(rehearsal))
    lines.append(
        f"against the plan: weights, gradients and optimizer "
        f"{f'within {size_text(state)}' if state else _EQUAL}, "
        f"kept activations {_within(kept)}, peaks {_within(peaks)}"
    )
    return [*lines, _rehearsed(rehearsal)], ""


def _rehearsed(rehearsal: Rehearsal) -> str:
    plan, (short, whole) = rehearsal.plan, rehearsal.microbatches
    covered = [peak.pp_rank for peak in rehearsal.peaks]
    kinds = "one of each kind" if len(covered) == len(plan.pp_ranks) else f"for pp_rank {', '.join(spans(covered))}"
    count = f"{short} of a step's {whole} microbatches" if short < whole else f"all {whole} microbatches"
    return f"rehearsed: {len(rehearsal.ranks)} of {plan.sizes.world} ranks, {kinds}, with {count}"


def _fits(rehearsal: Rehearsal, peak: int) -> str:
    limit = rehearsal.plan.limit
    if limit is None:
        return "is held against no limit (launch.device_memory=null)"
    if peak > limit.available_bytes:
        return "does not fit"
    return "fits, tight" if rehearsal.tight else "fits"


def _within(pairs: Iterable[tuple[int, int]]) -> str:
    shares = [abs(_share(*pair)) for pair in pairs if pair[0] != pair[1]]
    return f"within {ceil(1000 * max(shares)) / 1000:.1%}" if shares else _EQUAL


def _share(planned: int, measured: int) -> float:
    return measured / planned - 1 if planned else float(bool(measured))


def _difference(planned: int, measured: int) -> str:
    if planned == measured:
        return "equal"
    share = f"{_share(planned, measured):+.2%}"
    return "<0.01%" if share[1:] == "0.00%" else share


def _peaks(rehearsal: Rehearsal) -> _Part:
    rows = [["pp_rank", "planned", "measured", "difference", "at", "from"]]
    unit = unit_for(max(peak.peak_bytes for peak in rehearsal.peaks))
    source = {pp_rank: each.rank for kind, each in rehearsal.measured for pp_rank in kind.pp_ranks}
    for peak in rehearsal.peaks:
        pair = rehearsal.plan.pp_ranks[peak.pp_rank].peak_bytes, peak.peak_bytes
        cells = [*map(unit.of, pair), _difference(*pair), peak.peak_action, f"rank {source[peak.pp_rank]}"]
        rows.append([str(peak.pp_rank), *cells])
    return [f"Peak memory in {unit.name}, the action at the peak, and the rank that it follows from"], aligned(
        rows, right=4
    )


def _state_of(rehearsal: Rehearsal) -> Iterator[tuple[int, str, int, int]]:
    """Rank, what, planned and measured bytes."""
    for each in rehearsal.ranks:
        cost = rehearsal.cost_of(each.rank)
        yield each.rank, "weights", cost.weight_bytes, each.weight_bytes
        yield each.rank, "gradients", cost.gradient_bytes, each.gradient_bytes
        yield each.rank, "optimizer", cost.optimizer_bytes, each.optimizer_bytes


def _state(rehearsal: Rehearsal) -> _Part:
    rows = [["", "planned", "measured", "difference"]]
    for rank, what, planned, measured in _state_of(rehearsal):
        if planned != measured:
            more = f"{'-+'[measured > planned]}{size_text(abs(measured - planned))}"
            rows.append([f"rank {rank} {what}", _MIB.of(planned), _MIB.of(measured), more])
    return (["State in MiB, where it is not as planned"] if len(rows) > 1 else []), aligned(rows, right=4)


def _stages(rehearsal: Rehearsal) -> Iterator[tuple[Rehearsed, StageMemory]]:
    return ((each, memory) for each in rehearsal.ranks for memory in each.stages)


def _kept(rehearsal: Rehearsal) -> _Part:
    rows: dict[tuple[str, ...], list[int]] = {}
    for _, memory in _stages(rehearsal):
        pair = rehearsal.planned_kept(memory.stage), memory.kept
        more = max(memory.in_forward - memory.kept, 0), memory.in_backward
        rows.setdefault((*map(_MIB.of, pair), _difference(*pair), *map(_MIB.of, more)), []).append(memory.stage)
    head = ["stage", "planned", "measured", "difference", "more in F", "more in B"]
    text = (
        "Activations of a microbatch in MiB: kept from forward to backward, and what is needed besides while these run"
    )
    return [text], aligned([head, *([", ".join(spans(stages)), *cells] for cells, stages in rows.items())], right=6)


def _waits(rehearsal: Rehearsal) -> _Part:
    by_place = _by_rank(
        ((f"{wait.file}:{wait.line}", wait.during), each.rank, wait.count, 0)
        for each in rehearsal.ranks
        for wait in each.host_waits
    )
    if not by_place:
        return ["The host never waits for the device"], ""
    rows = []
    for (place, during), sums in sorted(by_place.items(), key=lambda item: (item[0][1] == STEP, item[0])):
        counts = sorted(count for count, _ in sums.values())
        rows.append([place, _times(counts, during, rehearsal.microbatches[1]), _ranks(rehearsal, sums)])
    return ["Where the host waits for the device"], aligned(rows)


def _times(counts: Sequence[int], during: str, microbatches: int) -> str:
    """`once per step`, `12 to 14 per microbatch in forward`."""
    whole = during != STEP and not any(count % microbatches for count in counts)
    often = [count // microbatches if whole else count for count in counts]
    times = "once" if often[-1] == 1 else _range(often)
    return f"{times} per {'microbatch' if whole else 'step'}{'' if during == STEP else f' in {during}'}"


def _launching(rehearsal: Rehearsal) -> _Part:
    rows = [["rank", "operations", "launches", "seconds"]]
    for each in rehearsal.ranks:
        operations = sum(part.count for part in each.operations)
        launches = sum(part.launches for part in each.operations)
        rows.append([str(each.rank), f"{operations:,}", f"{launches:,}", f"{launches * LAUNCH_SECONDS:.3g}"])
    head = (
        f"Operations and kernel launches of a step, and the least that the host needs for them at "
        f"{1e6 * LAUNCH_SECONDS:.0f} us a launch (the plan's step: {rehearsal.plan.step_time_s:.3g} s)"
    )
    return [head], aligned(rows, right=4)


def _layers(rehearsal: Rehearsal) -> _Part:
    sums: dict[tuple[str, str], Counter[str]] = {}
    for layer in (layer for each in rehearsal.ranks for layer in each.layers):
        counts = sums.setdefault((layer.kind, layer.during), Counter())
        counts.update({name: getattr(layer, name) for name in ("passes", *layer.COUNTED)})
    rows = [["layer", "pass", "kernels", "others", "their GB", "host waits"]]
    for (kind, during), counts in sums.items():
        kernels, others, size, waits = (counts[name] / counts["passes"] for name in LayerKernels.COUNTED)
        rows.append([kind, during, f"{kernels:.4g}", f"{others:.4g}", f"{size / 1e9:.2f}", f"{waits:.3g}"])
    head = (
        "Kernels of a layer and microbatch, those that are neither products nor attention, and what these read and "
        "write. A backward computes again what is recomputed and adds to the weights' gradients, unless a W does"
    )
    return ([head] if sums else []), aligned(rows, right=6)


def _messages(rehearsal: Rehearsal) -> _Part:
    by_kind = _by_rank(
        ((part.kind, part.group), each.rank, part.count, part.bytes)
        for each in rehearsal.ranks
        for part in each.traffic
    )
    unit = unit_for(max((size for sums in by_kind.values() for _, size in sums.values()), default=0))
    rows = [["what", "over", "count", unit.name, "ranks"]]
    for (what, group), sums in sorted(by_kind.items()):
        counts, sizes = (sorted(column) for column in zip(*sums.values(), strict=True))
        size = " to ".join(dict.fromkeys(map(unit.of, (sizes[0], sizes[-1]))))
        rows.append([what, group, _range(counts), size, _ranks(rehearsal, sums)])
    return (["Messages and collectives of one rank in a step"] if by_kind else []), aligned(rows, right=4)


def _by_rank(parts: Iterable[tuple[_Key, int, int, int]]) -> dict[_Key, dict[int, tuple[int, int]]]:
    """Counts and bytes of the same key, added up for each rank. A part is its key, rank, count and bytes."""
    by_key: dict[_Key, dict[int, tuple[int, int]]] = {}
    for key, rank, count, size in parts:
        sums = by_key.setdefault(key, {})
        counts, sizes = sums.get(rank, (0, 0))
        sums[rank] = counts + count, sizes + size
    return by_key


def _range(counts: Sequence[int]) -> str:
    return f"{counts[0]:,}" if counts[0] == counts[-1] else f"{counts[0]:,} to {counts[-1]:,}"


def _ranks(rehearsal: Rehearsal, ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return "all ranks" if len(numbers) == len(rehearsal.ranks) else f"rank {', '.join(spans(numbers))}"
