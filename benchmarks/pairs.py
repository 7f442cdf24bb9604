"""How much of the exchanges of experts disappears where a forward and a backward run as a pair.

    python benchmarks/pairs.py [--delay 10] [--compute 12] [--repeats 3] [--out benchmarks]

Two ranks with half of the experts each, over gloo, and DualPipeV on one pipeline rank. Every exchange takes `--delay`
milliseconds more than it takes; between two exchanges a stage computes (sleeps) `--compute` milliseconds. A step is
measured with and without the delay, with pairs and with the two of a pair one after the other. Exit code 1 where less
than 80 % of the delay of exchanges inside pairs disappears, or a bit differs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from engine import free_port, hardware
from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.engine.interpreter import run_schedule
from ppctl.engine.stage import StageProgram
from ppctl.parallel.dispatch import ExpertExchange
from ppctl.plan.types import TensorSpec
from ppctl.schedule.action import COMPUTE, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule

MICROBATCHES, TOKENS, WIDTH, EXPERTS = 6, 16, 8, 4
FLOOR = 0.80


class _Compute(torch.autograd.Function):
    """The identity, which takes a while in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0].clone(), None


class Layer(nn.Module):
    """One layer with experts over the ranks: something before, the experts' rows, the experts, something behind."""

    def __init__(self, stage: int, exchange: ExpertExchange, seconds: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH)
        self.exchange, self.seconds = exchange, seconds

    def forward(self, x: Tensor) -> Tensor:
        x = _Compute.apply(x @ self.weight, self.seconds)
        counts = torch.full((EXPERTS,), TOKENS // EXPERTS)
        chosen = torch.arange(TOKENS)[:, None] % EXPERTS
        x = self.exchange(
            _Compute.apply(x, self.seconds),
            chosen,
            torch.ones(TOKENS, 1),
            counts,
            lambda rows, weights, _: _Compute.apply(rows.tanh() * weights, self.seconds),
        )
        return _Compute.apply(x, self.seconds)


class _Later:
    """An exchange that takes longer than it takes."""

    def __init__(self, work: dist.Work, at: float) -> None:
        self.work, self.at = work, at

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.at - time.monotonic()))


def delayed(exchange: Any, seconds: float) -> Any:
    """`all_to_all_single`, of which every call takes this much longer."""

    def start(*arguments: Any, **options: Any) -> _Later:
        return _Later(exchange(*arguments, **options), time.monotonic() + seconds)

    return start


def step(schedule: Schedule, exchange: ExpertExchange, compute: float) -> list[Tensor]:
    """One step; its losses and gradients."""
    layers, losses = [Layer(stage, exchange, compute) for stage in range(2)], []

    def forward(stage: int, mb: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        x = inputs[0] if stage else torch.full((TOKENS, WIDTH), 0.1 * mb + dist.get_rank()).requires_grad_()
        out = layers[stage](x)
        if stage == 0:
            return (out,)
        losses.append(out.square().mean())
        return (losses[-1],)

    edge = (TensorSpec((TOKENS, WIDTH), "float32"),)
    programs = [
        StageProgram(s, lambda mb, inputs, s=s: forward(s, mb, inputs), edge if s else (), () if s else edge)
        for s in range(2)
    ]
    run_schedule(schedule, programs)
    return [loss.detach() for loss in losses] + [layer.weight.grad for layer in layers]


def rank(number: int, port: int, options: argparse.Namespace, report: Any) -> None:
    """One rank: the medians of its step times by (pairs, delay)."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(number), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = ModelConfig(num_moe_experts=EXPERTS, moe_router_topk=1)
    exchange, plain = ExpertExchange({"ep": dist.group.WORLD}, model), dist.all_to_all_single
    schedules = schedules_of()
    times: dict[tuple[str, float], list[float]] = {}
    bits: list[list[Tensor]] = []
    for _ in range(options.repeats):
        for name, schedule in schedules.items():
            for delay in (0.0, options.delay / 1e3):
                dist.all_to_all_single = delayed(plain, delay) if delay else plain
                dist.barrier()
                begin = time.monotonic()
                bits.append(step(schedule, exchange, options.compute / 1e3))
                times.setdefault((name, delay), []).append(time.monotonic() - begin)
    same = all(torch.equal(a, b) for other in bits[1:] for a, b in zip(bits[0], other, strict=True))
    if number == 0:
        report.put(({key: statistics.median(of) for key, of in times.items()}, same))
    dist.destroy_process_group()


def schedules_of() -> dict[str, Schedule]:
    """DualPipeV with its pairs, and the same lists without."""
    paired = lower(make_schedule("dualpipev", pp=1, vpp=2, num_microbatches=MICROBATCHES))
    return {"pairs": paired, "in turn": replace(paired, pairs=frozenset())}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--delay", type=float, default=10.0, help="milliseconds that an exchange takes longer")
    parser.add_argument("--compute", type=float, default=12.0, help="milliseconds between two exchanges")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    options = parser.parse_args()
    context, port = mp.get_context("spawn"), free_port()
    report = context.Queue()
    ranks = [context.Process(target=rank, args=(number, port, options, report)) for number in range(2)]
    for process in ranks:
        process.start()
    times, same = report.get(timeout=600)
    for process in ranks:
        process.join()
    lines = page(times, options, same=same)
    print("\n".join(lines))
    path = options.out / f"results-pairs-{time.strftime('%Y-%m-%d')}.md"
    path.write_text("\n".join(lines) + "\n")
    print(f"wrote {path}")
    return int(not same or gone(times, options) < FLOOR)


def gone(times: dict[tuple[str, float], float], options: argparse.Namespace) -> float:
    """The share of the delay of exchanges inside pairs that no step is longer for.

    Rows travel twice in a forward and twice in a backward. Outside of pairs nothing hides them: that much is taken off.
    """
    paired, delay = schedules_of()["pairs"], options.delay / 1e3
    actions = sum(action.op in COMPUTE for row in paired.actions for action in row)
    inside, outside = 4 * len(paired.pairs) * delay, 2 * (actions - 2 * len(paired.pairs)) * delay
    return 1 - (times["pairs", delay] - times["pairs", 0.0] - outside) / inside


def page(times: dict[tuple[str, float], float], options: argparse.Namespace, *, same: bool) -> list[str]:
    """The results as a page."""
    delay, share = options.delay / 1e3, gone(times, options)
    rows = [
        f"| {name} | {1e3 * times[name, 0.0]:.0f} ms | {1e3 * times[name, delay]:.0f} ms "
        f"| {1e3 * (times[name, delay] - times[name, 0.0]):.0f} ms |"
        for name in ("in turn", "pairs")
    ]
    return [
        f"# Exchanges of experts inside pairs, {time.strftime('%Y-%m-%d')}",
        "",
        f"Hardware: {hardware()}.",
        f"Command: `{' '.join(('python benchmarks/pairs.py', *sys.argv[1:]))}`.",
        f"DualPipeV on one pipeline rank, {MICROBATCHES} microbatches, experts over 2 ranks (gloo), the median of "
        f"{options.repeats} steps.",
        f"Every exchange takes {options.delay:g} ms longer. Between two a stage computes {options.compute:g} ms.",
        "",
        "| forward and backward | a step | with the delay | more |",
        "|---|---|---|---|",
        *rows,
        "",
        f"Of the delay of exchanges inside pairs {100 * share:.0f} % disappears (floor: {100 * FLOOR:.0f} %, "
        f"{'held' if share >= FLOOR else 'MISSED'}).",
        f"Losses and gradients have {'the same bits' if same else 'DIFFERENT BITS'} in all steps.",
    ]


if __name__ == "__main__":
    sys.exit(main())
