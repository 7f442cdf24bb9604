"""What tracing costs: CPU time of steps without stamps, with them (as every run has them), and kept by `log.trace`.

    python benchmarks/tracing.py [--rounds 120] [--microbatches 64] [--out benchmarks]

Two ranks with two stages each of a model so small that the engine is most of a step, each on a core of its own. The
three kinds of step take turns within a round, each round beginning with another, so that what changes slowly is in all
three alike. A rank counts the CPU time of the thread that runs the schedule: neither the clock, nor the threads of
gloo, whose polling depends on the other rank. What is measured is done REPEATS times in a step, and the difference to
a step without it is divided by that, so that a step's own noise counts that much less. Figures are medians of the
differences within rounds, over the actions of a rank, with the interval that holds the median with 95 % (order
statistics; no assumption on the noise). An interval wider than the goal of 5 microseconds is told: then the machine was
too busy for an answer, and more rounds are needed. It is no test.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ppctl.comm.communicator import Communicator
from ppctl.comm.modes import Modes
from ppctl.config.compose import compose
from ppctl.config.schema import RunConfig
from ppctl.data.batches import StepBatch
from ppctl.engine.recorder import Recorder
from ppctl.plan import Plan, build_plan
from ppctl.runs.rundir import RunDir
from ppctl.schedule.measured_step import MeasuredStep
from ppctl.train.recordings import StepTraces
from ppctl.train.session import SessionParts, build_session
from ppctl.train.step import Trainer

RANKS, SEQ, WARM = 2, 8, 3
REPEATS = 20
GOAL = 5.0
"""Microseconds of CPU time an action."""
KINDS = ("without stamps", "with stamps", "kept")
MODEL = (
    "pp=2", "vpp=2", "pipeline.pp_schedule=interleaved_1f1b", "model.num_layers=4", "model.hidden_size=8",
    "model.ffn_hidden_size=8", "model.num_attention_heads=1", "model.num_query_groups=1", "model.vocab_size=32",
    f"seq={SEQ}", "mbs=1", "launch.device=cpu", "steps=1000",
)  # fmt: skip


class Repeated(Recorder):
    """A recorder that stamps an action `times` times; none keeps the stamps it was given."""

    times = 0

    def begin(self, index: int) -> None:
        """Stamp."""
        for _ in range(self.times):
            super().begin(index)

    def end(self, index: int) -> None:
        """Stamp."""
        for _ in range(self.times):
            super().end(index)


class Words:
    """The same batch in every step."""

    def __init__(self, microbatches: int) -> None:
        tokens = torch.randint(32, (microbatches, 1, SEQ), generator=torch.Generator().manual_seed(0))
        mask = torch.ones(microbatches, 1, SEQ)
        self.batch = StepBatch(tokens, tokens, mask, total_tokens=microbatches * SEQ, checksum=0)

    def step(self, step: int) -> StepBatch:
        """It."""
        return self.batch


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    arguments = parser.parse_args()
    busy = os.getloadavg()
    with tempfile.TemporaryDirectory() as root:
        mp.spawn(_rank, (arguments.rounds, arguments.microbatches, root), RANKS)
        rows = [torch.load(Path(root) / f"{rank}.pt") for rank in range(RANKS)]
    lines = [
        f"# What tracing costs, {date.today()}",
        "",
        f"`python benchmarks/tracing.py --rounds {arguments.rounds} --microbatches {arguments.microbatches}` on "
        f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}; load {busy[0]:.1f} before.",
        "CPU time of the thread that runs the schedule; medians of differences within rounds, in microseconds for each",
        "action that is stamped, with 95 % intervals of the median. log.trace is gather, file and all.",
        "",
        "| rank | actions | ms a step without stamps | stamps | log.trace besides |",
        "|---|---|---|---|---|",
    ]
    wide = False
    for rank, (actions, rounds) in enumerate(rows):
        cells = []
        # A kept step has stamps once, which its tracing is measured besides.
        stamps = statistics.median(each[1] - each[0] for each in rounds) / REPEATS
        for kind, less in ((1, 0.0), (2, stamps)):
            apart = [each[kind] - each[0] - less for each in rounds]
            low, middle, high = (1e6 * each / actions / REPEATS for each in _median(apart))
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
            wide |= high - low > GOAL
        whole = 1e3 * statistics.median(each[0] for each in rounds)
        lines.append(f"| {rank} | {actions} | {whole:.1f} | {' | '.join(cells)} |")
    lines += ["", *(["The machine was too busy: an interval is wider than the goal.", ""] if wide else [])]
    stamp, figures = (1e6 * each for each in _alone())
    lines += [f"In a loop, an action: {stamp:.2f} µs for its two stamps, {figures:.2f} µs in the step's figures.", ""]
    text = "\n".join(lines)
    (arguments.out / f"results-tracing-{date.today()}.md").write_text(text)
    print(text)


def _median(values: Sequence[float]) -> tuple[float, float, float]:
    """(low, median, high): the ranks between which the median lies with 95 %, by the binomial's normal form."""
    ordered, reach = sorted(values), 0.98 * math.sqrt(len(values))
    low, high = math.floor(len(values) / 2 - reach), math.ceil(len(values) / 2 + reach)
    return ordered[max(low, 0)], statistics.median(ordered), ordered[min(high, len(ordered) - 1)]


def _alone(count: int = 200_000) -> tuple[float, float]:
    """CPU seconds of one action's two stamps, and of its part in the figures of a step."""
    recorder = Recorder(0, build_plan(compose([*MODEL, "gbs=64"]).config).schedule.actions[0])
    began = time.thread_time()
    for _ in range(count):
        recorder.begin(1)
        recorder.end(1)
    stamped, steps = time.thread_time(), count // len(recorder.actions)
    for _ in range(steps):
        recorder.totals()
    return (stamped - began) / count, (time.thread_time() - stamped) / steps / len(recorder.stamps())


def _connected(config: RunConfig, plan: Plan, group: dist.ProcessGroup, device: torch.device) -> Communicator:
    return Communicator(group, Modes.of(config.parallel), channels=plan.schedule.capacities, device=device)


def _rank(rank: int, rounds: int, microbatches: int, root: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    store = dist.FileStore(f"{root}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    config = compose([*MODEL, f"gbs={microbatches}"]).config
    plan, run = build_plan(config), RunDir(Path(root))
    if rank == 0:
        run.write_plan(plan)
    dist.barrier()
    session = build_session(config, plan, rank, torch.device("cpu"), parts=SessionParts(connect=_connected))
    trainer = Trainer(session, Words(microbatches))  # type: ignore[arg-type]  # has what a step reads
    stamping = session.pipeline.recorder
    repeated = Repeated(stamping.pp_rank, stamping.actions)
    repeated._starts, repeated._ends = stamping._starts, stamping._ends
    # Without stamps it reads those of a step before: figures are made in all three.
    recorders = (repeated, repeated, stamping)
    trainer.step(0)  # has them
    found: list[list[float]] = []
    kept: list[int] = []

    def keep(measured: MeasuredStep) -> None:
        run.write_measured_step(measured.step, measured.to_json())
        kept.append(measured.step)

    traces = StepTraces(session, keep)
    # Counted from 1; a kept step is one of each round, at another place in each.
    order = [(number, (place + number) % len(KINDS)) for number in range(WARM + rounds) for place in range(len(KINDS))]
    traces.steps = {step + 1 for step, (_, kind) in enumerate(order, 1) if kind == 2}
    for step, (number, kind) in enumerate(order, 1):
        if number == len(found):
            found.append([0.0] * len(KINDS))
        session.pipeline.recorder = recorders[kind]
        repeated.times = REPEATS * (kind == 1)
        gc.collect()
        dist.barrier()
        began = time.thread_time()
        result = trainer.step(step)
        kept.clear()
        for _ in range(max(1, REPEATS * (kind == 2))):
            traces.post_update(result)
        found[number][kind] = time.thread_time() - began
        assert len(kept) == REPEATS * (kind == 2 and rank == 0)
    torch.save((len(stamping.stamps()), found[WARM:]), f"{root}/{rank}.pt")
    session.pipeline.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
