"""What tracing costs: CPU time of steps without stamps, with them (as every run has them), and kept by `log.trace`.

    python benchmarks/tracing.py [--pairs 40] [--microbatches 64] [--out benchmarks]

Two ranks with two stages each of a model so small that the engine is most of a step. The three kinds of step take turns
in one run, in which every rank counts its own CPU time (not the clock: other processes do not count); figures are
medians of differences within a turn, over the actions of a rank. It is no test.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
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
from ppctl.rundir import RunDir
from ppctl.train.session import Parts, build_session
from ppctl.train.step import Trainer

RANKS, SEQ, WARM = 2, 8, 3
KINDS = ("without stamps", "with stamps", "kept")
MODEL = (
    "pp=2", "vpp=2", "pipeline.pp_schedule=interleaved_1f1b", "model.num_layers=4", "model.hidden_size=8",
    "model.ffn_hidden_size=8", "model.num_attention_heads=1", "model.num_query_groups=1", "model.vocab_size=32",
    f"seq={SEQ}", "mbs=1", "launch.device=cpu", "steps=1000",
)  # fmt: skip


class Silent(Recorder):
    """A recorder that keeps the stamps it was given."""

    def begin(self, index: int) -> None:
        """Nothing."""

    def end(self, index: int) -> None:
        """Nothing."""


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
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    arguments = parser.parse_args()
    busy = os.getloadavg()
    with tempfile.TemporaryDirectory() as root:
        mp.spawn(_rank, (arguments.pairs, arguments.microbatches, root), RANKS)
        rows = [torch.load(Path(root) / f"{rank}.pt") for rank in range(RANKS)]
    lines = [
        f"# What tracing costs, {date.today()}",
        "",
        f"`python benchmarks/tracing.py --pairs {arguments.pairs} --microbatches {arguments.microbatches}` on "
        f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}; load {busy[0]:.1f} before.",
        "CPU time of a rank, medians over turns; microseconds an action are of the actions that are stamped.",
        "",
        "| rank | actions | ms a step without stamps | stamps, µs an action | log.trace besides, µs an action |",
        "|---|---|---|---|---|",
    ]
    for rank, (actions, turns) in enumerate(rows):
        stamps, kept = (
            1e6 * statistics.median(turn[more] - turn[less] for turn in turns) / actions
            for less, more in ((0, 1), (1, 2))
        )
        whole = 1e3 * statistics.median(turn[0] for turn in turns)
        lines.append(f"| {rank} | {actions} | {whole:.1f} | {stamps:.2f} | {kept:.2f} |")
    lines += ["", f"A stamp alone, begin and end, in a loop: {1e6 * _alone():.2f} µs.", ""]
    text = "\n".join(lines)
    (arguments.out / f"results-tracing-{date.today()}.md").write_text(text)
    print(text)


def _alone(count: int = 200_000) -> float:
    """CPU seconds of one action's two stamps."""
    recorder = Recorder(0, build_plan(compose(MODEL).config).schedule.actions[0])
    began = time.process_time()
    for _ in range(count):
        recorder.begin(1)
        recorder.end(1)
    return (time.process_time() - began) / count


def _connected(config: RunConfig, plan: Plan, group: dist.ProcessGroup, device: torch.device) -> Communicator:
    return Communicator(group, Modes.of(config.parallel), channels=plan.schedule.capacities, device=device)


def _rank(rank: int, pairs: int, microbatches: int, root: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{root}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    turns = WARM + pairs
    last = len(KINDS) * turns
    config = compose([*MODEL, f"gbs={microbatches}"]).config
    plan, run = build_plan(config), RunDir(Path(root))
    if rank == 0:
        run.write_plan(plan)
    dist.barrier()
    session = build_session(config, plan, rank, torch.device("cpu"), parts=Parts(connect=_connected))
    trainer = Trainer(session, Words(microbatches), lambda: 0)  # type: ignore[arg-type]  # has what a step reads
    stamping = session.recorder
    silent = Silent(stamping.pp_rank, stamping.actions)
    silent._starts, silent._ends = stamping._starts, stamping._ends
    found = []
    trainer.step(0)
    trainer.tracer.steps = range(1 + len(KINDS), 2 + last, len(KINDS))  # counted from 1: every third
    for turn in range(turns):
        seconds = []
        for kind in range(len(KINDS)):
            object.__setattr__(session, "recorder", stamping if kind else silent)
            dist.barrier()
            began = time.process_time()
            result = trainer.step(1 + len(KINDS) * turn + kind)
            if result.measured is not None:
                run.write_measured_step(result.measured.step, result.measured.to_json())
            seconds.append(time.process_time() - began)
            assert (result.measured is not None) == (kind == 2 and rank == 0)
        found.append(seconds)
    torch.save((len(stamping.stamps()), found[WARM:]), f"{root}/{rank}.pt")
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
