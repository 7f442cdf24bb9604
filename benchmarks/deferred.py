"""What a put-off product costs over a whole backward: F, I and W together, per product, in CPU time of one thread.

    python benchmarks/deferred.py [--rounds 400]

A chain of 40 products of 4 x 16 with 16 x 16, so small that nearly everything is what torch and ppctl do around them.
Three ways take turns: whole backwards, products that ask where their weights' gradients go (ppctl's own models), and
products that are found (`weight_gradients.intercept`: any module). At most 30 us over a whole backward for those that
ask: exit code 1 above. Needs a quiet machine; it is no test.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppctl.model.linear import product
from ppctl.weight_gradients.deferred import DeferredGradients, collecting
from ppctl.weight_gradients.intercept import intercepting

PRODUCTS, WIDTH, ROWS = 40, 16, 4
MOST = 30.0
"""Microseconds."""

Collect = Callable[..., AbstractContextManager[None]]
Way = tuple[Callable[[Tensor, Tensor], Tensor], Collect]

WAYS: dict[str, Way] = {
    "whole": (product, lambda *_, **__: nullcontext()),
    "asks": (product, collecting),
    "found": (F.linear, intercepting),
}


def step(way: Way, weights: list[nn.Parameter], x: Tensor) -> list[float]:
    """Microseconds a product of F, of I (or the whole backward), of W, and of all."""
    multiply, collect = way
    deferred = DeferredGradients()
    stamps = [time.thread_time()]
    y = x
    with collect(deferred):
        for weight in weights:
            y = multiply(y, weight)
    stamps.append(time.thread_time())
    with collect(deferred, backward=True):
        torch.autograd.backward((y,), (torch.ones_like(y),))
    stamps.append(time.thread_time())
    deferred.deliver()
    stamps.append(time.thread_time())
    parts = [after - before for before, after in pairwise(stamps)]
    return [1e6 * seconds / len(weights) for seconds in (*parts, sum(parts))]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(PRODUCTS)]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    found: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    for _ in range(options.rounds):
        for name, way in WAYS.items():
            found[name].append(step(way, weights, x))
    print(
        f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}; us a product, medians over {options.rounds} rounds"
    )
    print("| way | F | I or B | W | all | over a whole backward |\n|---|---|---|---|---|---|")
    over = {}
    for name, rounds in found.items():
        parts = " | ".join(f"{statistics.median(column):.1f}" for column in zip(*rounds, strict=True))
        over[name] = statistics.median(a[-1] - b[-1] for a, b in zip(rounds, found["whole"], strict=True))
        print(f"| {name} | {parts} | {over[name]:.1f} |")
    return int(over["asks"] > MOST)


if __name__ == "__main__":
    sys.exit(main())
