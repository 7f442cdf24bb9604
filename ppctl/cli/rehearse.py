"""`ppctl rehearse`: run the job's ranks at full size here, with meta tensors, and hold the plan against them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ppctl.cli.console import note, print_problems, width
from ppctl.cli.rehearsal_text import rehearsal_text
from ppctl.cli.timeline import add_timeline_argument, unwritable, write_timeline
from ppctl.config.argv import Arguments
from ppctl.config.compose import Composed
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, MemoryPlanError, PpctlError, Problem, TrainingError
from ppctl.host.private_files import own_directory
from ppctl.host.processes import python, unwinding_on_term
from ppctl.launch.described import absent_for
from ppctl.launch.machine import with_overrides
from ppctl.launch.planning import planned, without_memory
from ppctl.plan import Plan
from ppctl.plan.rehearsal import Rehearsal, kinds_of, shortened
from ppctl.records.json_reader import read
from ppctl.records.rehearsal_record import Rehearsed
from ppctl.runs.rundir import RunDir

_GPU = "launch.device=cuda"
_LAST_LINES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="R", help="rehearse this global rank only")
    which.add_argument("--all-kinds", action="store_true", help="rehearse one rank of every kind (the default)")
    add_timeline_argument(parser, "--page")
    parser.add_argument("--json", action="store_true", help="print one JSON object, problems included")


def run(args: argparse.Namespace) -> int:
    """Rehearse and print. Exit code 0; 1 if a rank fails; 2 for the config; 4 if the memory does not fit."""
    composed, plan, planning = _planned_for_gpus(args.line)
    problems = without_memory(planning)
    problems += _not_rehearsed(composed.config)
    if plan is not None and args.rank is not None and not 0 <= args.rank < plan.sizes.world:
        message = f"--rank {args.rank}: the ranks are 0 to {plan.sizes.world - 1}"
        problems.append(Problem("PP-E128", message, "--rank 0", "command line"))
    if args.timeline is not None:  # a rehearsal takes a minute: what is wrong with the file is known before
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
        print(rehearsal_text(rehearsal, width()))
    print_problems(problems)
    if args.timeline is not None:
        write_timeline(rehearsal.picture(), Path(args.timeline))
    return MemoryPlanError.exit_code if problems else 0


def _planned_for_gpus(line: Arguments) -> tuple[Composed, Plan | None, list[Problem]]:
    """The plan as it is on GPUs, whatever this machine has: ranks are rehearsed as they run there."""
    composed, plan, problems = planned(line, for_training=True)
    if composed.config.launch.device == "cuda":
        return composed, plan, problems
    note(f"note: rehearsed as on GPUs ({_GPU})")
    return planned(replace(line, overrides=with_overrides(line.overrides, _GPU)), for_training=True)


def _not_rehearsed(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    if find_spec("torch") is None:
        message = "torch is not installed here, and a rehearsal runs the model's own code"
        yield Problem("PP-E604", message, "pip install torch")
    else:
        yield from absent_for(config.model)
    if parallel.enable_autocast:
        message = "autocast chooses dtypes by the kind of device, and a rehearsal runs on torch's meta device"
        yield Problem("PP-E128", message, "parallel.enable_autocast=false")
    if parallel.variable_seq_lengths:
        message = "with parallel.variable_seq_lengths other ranks send the sizes of messages, and a rehearsal has none"
        yield Problem("PP-E128", message, "parallel.variable_seq_lengths=false")
    if config.train.compile:
        note("note: layers are rehearsed uncompiled (train.compile=true): what compiled ones keep is not measured")


def _rehearse(config: RunConfig, plan: Plan, rank: int | None) -> Rehearsal:
    short_config, short = shortened(config, plan)
    kinds = kinds_of(config, plan)
    chosen = [(kind, kind.ranks[0]) for kind in kinds]
    if rank is not None:
        chosen = [(kind, rank) for kind in kinds if rank in kind.ranks]
    less = f"; {short.num_microbatches} of {plan.num_microbatches} microbatches fill a device as all do"
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
    """The measurements of each rank, in order, in as many processes at a time as there are cores.

    Raises TrainingError (PP-E780) or ConfigError for the first rank that fails. No process outlives the call.
    """
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
    """The problems of the config that a rank has reported; else the end of its output (PP-E780)."""
    with suppress(ValueError, KeyError, IndexError):
        return ConfigError([Problem(**problem) for problem in json.loads(out.splitlines()[-1])["problems"]])
    lines = [line.removeprefix(f"[rank{rank}]: ") for line in error.splitlines() if line.strip()]
    # The last line that is not indented: lines of a problem's place and remedies may follow.
    reason = next((line for line in reversed(lines) if line[0] != " "), "it ended without a message")
    message = f"the rehearsal of rank {rank} failed: {reason}"
    return TrainingError(Problem("PP-E780", message, "ppctl plan", "\n".join(lines[-_LAST_LINES:])))
