"""`ppctl rehearse`: run the job's ranks at full size here, with meta tensors, and compare the plan with them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from math import ceil
from pathlib import Path

from ppctl.checkpoint.tensor_parts import spans
from ppctl.cli.console import aligned, duration, note, print_problems, prose, width
from ppctl.cli.timeline import add_timeline_argument, unwritable, write_timeline
from ppctl.config.argv import Arguments
from ppctl.config.compose import Composed
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, MemoryPlanError, PpctlError, Problem, TrainingError, pip_install
from ppctl.host.private_files import own_directory
from ppctl.host.processes import python, unwinding_on_term
from ppctl.launch import planning
from ppctl.launch.described import absent_for
from ppctl.launch.machine import with_overrides
from ppctl.plan import Plan
from ppctl.plan.memory_limit import MIB, Unit, amount, size_text, unit_for, used_text
from ppctl.plan.rehearsal import Rehearsal, kinds_of, shortened
from ppctl.records.json_reader import read
from ppctl.records.rehearsal_record import STEP, LayerKernels, Rehearsed, StageMemory
from ppctl.runs.rundir import RunDir

_GPU = "launch.device=cuda"
_LAST_LINES = 12
_LAUNCH_SECONDS = 5e-6
"""The least seconds in which a host starts a kernel from PyTorch without CUDA graphs: 5 to 10 us in many profiles."""
_MIB = Unit("MiB", MIB)
_EQUAL = "equal to the byte"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="R", help="rehearse this global rank only")
    which.add_argument("--all-kinds", action="store_true", help="rehearse one rank of every kind (the default)")
    add_timeline_argument(parser, "--page")
    parser.add_argument("--json", action="store_true", help="print one JSON object, problems included")


def run(args: argparse.Namespace) -> int:
    """Rehearse and print. Exit code 0; 1 if a rank fails; 2 for the config; 4 if the memory does not fit."""
    composed, plan, found = _planned_for_gpus(args.line)
    problems = planning.without_memory(found)
    problems += _not_rehearsed(composed.config)
    if plan is not None and args.rank is not None and not 0 <= args.rank < plan.sizes.world:
        message = f"--rank {args.rank} is no rank of the job: the ranks are 0 to {plan.sizes.world - 1}"
        problems.append(Problem("PP-E128", message, "--rank 0", "command line"))
    if args.timeline is not None:  # check the file first: a rehearsal takes a minute
        problems += unwritable(Path(args.timeline))
    if plan is None or problems:
        raise ConfigError(problems)
    for line in composed.notes:
        note(f"note: {line}")
    with unwinding_on_term():
        rehearsal = _rehearse(composed.config, plan, args.rank)
    problems = [*rehearsal.problems()]
    if args.json:
        print(json.dumps(rehearsal.report() | {"problems": [problem.to_json() for problem in problems]}, indent=2))
    else:
        print(_text(rehearsal, width()))
    print_problems(problems)
    if args.timeline is not None:
        write_timeline(rehearsal.picture(), Path(args.timeline))
    return MemoryPlanError.exit_code if problems else 0


def _planned_for_gpus(line: Arguments) -> tuple[Composed, Plan | None, list[Problem]]:
    """The plan on GPUs, whatever this machine has: ranks are rehearsed as they run on GPUs."""
    composed, plan, problems = planning.planned(line, for_training=True)
    if composed.config.launch.device == "cuda":
        return composed, plan, problems
    note(f"note: rehearsed as on GPUs ({_GPU})")
    return planning.planned(replace(line, overrides=with_overrides(line.overrides, _GPU)), for_training=True)


def _not_rehearsed(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    if find_spec("torch") is None:
        message = "torch is not installed here, but a rehearsal runs the model's own code"
        yield Problem("PP-E604", message, pip_install("torch"))
    else:
        yield from absent_for(config.model)
    if parallel.enable_autocast:
        message = "autocast chooses dtypes by the kind of device, but a rehearsal runs on torch's meta device"
        yield Problem("PP-E128", message, "parallel.enable_autocast=false")
    if parallel.variable_seq_lengths:
        message = "with parallel.variable_seq_lengths other ranks send message sizes, but a rehearsed rank is alone"
        yield Problem("PP-E128", message, "parallel.variable_seq_lengths=false")
    if config.train.compile:
        note("note: layers are rehearsed uncompiled (train.compile=true): what compiled ones keep is not measured")


def _rehearse(config: RunConfig, plan: Plan, rank: int | None) -> Rehearsal:
    short_config, short = shortened(config, plan)
    kinds = kinds_of(config, plan)
    chosen = [(kind, kind.ranks[0]) for kind in kinds]
    if rank is not None:
        chosen = [(kind, rank) for kind in kinds if rank in kind.ranks]
    less = f"; {short.num_microbatches} of {plan.num_microbatches} microbatches fill a device as fully as all do"
    note(
        f"rehearsing {len(chosen)} of {plan.sizes.world} ranks, which are of {len(kinds)} kind{'s' * (len(kinds) > 1)}"
        f"{less if short.num_microbatches < plan.num_microbatches else ''}"
    )
    with own_directory() as directory:
        files = RunDir(directory)
        files.write_config(short_config)
        files.write_plan(short)
        measured = _measure_all(directory, [each for _, each in chosen])
    kinds_measured = tuple((kind, each) for (kind, _), each in zip(chosen, measured, strict=True))
    return Rehearsal(config, plan, short, kinds_measured)


def _measure_all(directory: Path, ranks: Sequence[int]) -> list[Rehearsed]:
    """The measurements of each rank, in order. Each rank is a process; as many run at a time as there are cores, and
    none outlives the call. Raises TrainingError (PP-E780) or ConfigError for the first rank that fails."""
    waiting, found = [*ranks], dict[int, Rehearsed]()
    running = dict[int, tuple[subprocess.Popen[bytes], float]]()
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                rank = waiting.pop(0)
                note(f"  rank {rank} starts")
                running[rank] = _start(directory, rank), time.monotonic()
            for rank in [rank for rank, (process, _) in running.items() if process.poll() is not None]:
                process, began = running.pop(rank)
                out, error = (_output(directory, rank, name).read_text(errors="replace") for name in ("out", "err"))
                if process.returncode:
                    raise _failure(rank, out, error)
                note(f"  rank {rank}: {time.monotonic() - began:.0f} s")
                found[rank] = read(Rehearsed, json.loads(out.splitlines()[-1]))
            time.sleep(0.05)
    finally:
        for process, _ in running.values():
            process.kill()
            process.wait()
    return [found[rank] for rank in ranks]


def _start(directory: Path, rank: int) -> subprocess.Popen[bytes]:
    command = [*python("ppctl.rehearsal.rank"), str(directory), str(rank)]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    with open(_output(directory, rank, "out"), "wb") as out, open(_output(directory, rank, "err"), "wb") as error:
        return subprocess.Popen(command, stdout=out, stderr=error, env=environment)


def _output(directory: Path, rank: int, name: str) -> Path:
    return directory / f"rank-{rank}.{name}"


def _failure(rank: int, out: str, error: str) -> PpctlError:
    """A failed rank's error: the problems of the config that it reported, else the end of its output (PP-E780)."""
    with suppress(ValueError, KeyError, IndexError):
        return ConfigError([Problem(**problem) for problem in json.loads(out.splitlines()[-1])["problems"]])
    lines = [line.removeprefix(f"[rank{rank}]: ") for line in error.splitlines() if line.strip()]
    # The last line that is not indented: lines of a problem's place and remedies may follow.
    reason = next((line for line in reversed(lines) if line[0] != " "), "it ended without a message")
    message = f"the rehearsal of rank {rank} failed: {reason}"
    return TrainingError(Problem("PP-E780", message, "ppctl plan", "\n".join(lines[-_LAST_LINES:])))


# The text: the verdict, then what was planned beside what was measured


def _text(rehearsal: Rehearsal, columns: int) -> str:
    """The whole rehearsal in paragraphs, the verdict first."""
    parts = [_verdict(rehearsal), _peaks(rehearsal), _state(rehearsal), _kept(rehearsal), _waits(rehearsal)]
    parts += [_launching(rehearsal), _layers(rehearsal), _messages(rehearsal)]
    return "\n\n".join(f"{prose(head, columns)}\n{table}".rstrip() for head, table in parts if head)


_Part = tuple[list[str], str]
"""(lines of prose, which are wrapped; a table below, which is not). Without lines the table is left out."""
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
    """Yield (rank, name of the bytes, planned bytes, measured bytes) of the ranks' state."""
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
    text = "Activations of a microbatch in MiB: kept from forward to backward, and what each needs on top while it runs"
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
        rows.append([str(each.rank), f"{operations:,}", f"{launches:,}", f"{launches * _LAUNCH_SECONDS:.3g}"])
    head = (
        f"Operations and kernel launches of a step, and the least that the host needs for them at "
        f"{1e6 * _LAUNCH_SECONDS:.0f} us a launch (the plan's step: {duration(rehearsal.plan.step_time_s)})"
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
    """Counts and bytes of equal keys, added up for each rank. A part is (key, rank, count, bytes)."""
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
