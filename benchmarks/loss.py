"""The loss against `F.cross_entropy` over all logits in float32: seconds of a forward and backward.

`python benchmarks/loss.py [--device cuda]`: both in one process, by turns, the fastest of three each. Two
minutes on one CPU core. Prints rows of a table; results-loss-*.md has those of dated runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ppctl.model.loss import token_losses

TURNS = 3


def whole(logits: Tensor, labels: Tensor) -> Tensor:
    """What the loss would be without blocks."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")


def blockwise(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss as training has it."""
    return token_losses(logits, labels, overwrite=True)


def seconds(loss: Callable[[Tensor, Tensor], Tensor], leaf: Tensor, labels: Tensor) -> float:
    """Of the loss's forward, and of its backward down to the logits."""
    logits, ends = leaf * 1, []
    logits.register_hook(lambda _: ends.append(_now(leaf)))
    begun = _now(leaf)
    value = loss(logits, labels).sum()
    del logits
    value.backward()
    leaf.grad = None
    return ends[0] - begun


def _now(leaf: Tensor) -> float:
    if leaf.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Print a row for each dtype and size."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--device", default="cpu")
    device = arguments.parse_args().device
    print(f"torch {torch.__version__} on {device}, {torch.get_num_threads()} thread(s)")
    print("| dtype | tokens | vocabulary | whole, s | by blocks, s | ratio |")
    print("|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, vocabulary in ((2048, 32000), (1024, 128256)):
            leaf = torch.randn(1, tokens, vocabulary, device=device).to(dtype).requires_grad_()
            labels = torch.randint(vocabulary, (1, tokens), device=device)
            best = [sys.float_info.max] * 2
            for _ in range(TURNS):
                for number, loss in enumerate((whole, blockwise)):
                    best[number] = min(best[number], seconds(loss, leaf, labels))
            name = str(dtype).removeprefix("torch.")
            print(f"| {name} | {tokens} | {vocabulary} | {best[0]:.3f} | {best[1]:.3f} | {best[1] / best[0]:.2f} |")


if __name__ == "__main__":
    main()
