"""What keeping documents apart one by one costs, beside a mask and beside the whole sample without one.

    python benchmarks/packed_attention.py [cpu|cuda]

Attention alone, forward and backward, of 8 heads x 2,048 tokens x 64; samples of 1, 8, 64 and 512 equal documents. One
thread's CPU time in float32, or seconds of a device in bfloat16, the best of five. Figures stand in decision 22.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppctl.model.packing import Documents

HEADS, TOKENS, DIM = 8, 2048, 64
ON_GPU = sys.argv[1:] == ["cuda"]


def seconds(attend: Callable[..., Tensor], *inputs: Tensor) -> float:
    """The best of five forwards and backwards."""
    best = float("inf")
    for _ in range(6):  # the first warms up, and is never the best
        clock = time.perf_counter if ON_GPU else time.process_time
        began = clock()
        attend(*inputs).sum().backward()
        if ON_GPU:
            torch.cuda.synchronize()
        best = min(best, clock() - began)
    return best


def main() -> None:
    """Print a line for each number of documents."""
    torch.set_num_threads(1)
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    for count in (1, 8, 64, 512):
        documents = Documents(((TOKENS // count,) * count,))
        number = torch.arange(TOKENS, device=device) // (TOKENS // count)
        seen = (number[:, None] == number).tril()
        mask = torch.zeros(1, 1, TOKENS, TOKENS, device=device, dtype=dtype).masked_fill(~seen, float("-inf"))
        inputs = [torch.randn(1, HEADS, TOKENS, DIM, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
        apart = seconds(lambda *qkv, documents=documents: documents.each(causal, *qkv, dim=2), *inputs)
        masked = seconds(partial(F.scaled_dot_product_attention, attn_mask=mask), *inputs)
        whole = seconds(causal, *inputs)
        ratios = f"{apart / masked:.2f} of a mask, {apart / whole:.2f} of the whole sample"
        print(f"{count:4} documents: {apart * 1e3:7.1f} ms, {ratios}")


if __name__ == "__main__":
    main()
