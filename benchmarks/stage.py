"""One stage's step through ppctl against the same model in a bare loop: what the engine, its recorder and hooks cost.

    python benchmarks/stage.py [--device cuda|cpu] [--rounds 9]

One rank, the whole model as one stage. Both run the same module on the same batch: ppctl its pipeline (schedule,
recorder, gradient sum), the loop `forward, loss, backward` over the microbatches. They take turns, and the medians are
compared: 1.00 is as fast as the loop. Exits with 1 below 0.98 on a GPU, with 77 where a GPU is asked for and none is
there. Writes nothing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.model.loss import microbatch_loss
from ppctl.plan import build_plan
from ppctl.train.session import build_session
from ppctl.train.step import Trainer

SIZES = {"cuda": (8, 2048, 5632, 16, 2048, 4), "cpu": (4, 256, 704, 8, 256, 2)}
"""Layers, hidden size, width of the feed-forward, heads, sequence, samples of a microbatch."""


FLOOR = 0.98
"""How fast ppctl must be on a GPU beside the loop. On a CPU other processes decide."""


def main() -> int:
    """Measure, print one line, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=usual)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here: nothing measured")
        return 77
    device = torch.device(arguments.device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as directory:
        trainer = trainer_of(Path(directory) / "text.txt", device)
        seconds = measure(trainer, arguments.rounds)
    ours, bare = (statistics.median(seconds[name]) for name in ("ppctl", "loop"))
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}: ppctl {ours * 1e3:.2f} ms, bare loop {bare * 1e3:.2f} ms a step: {bare / ours:.3f}x")
    dist.destroy_process_group()
    return verdict(bare / ours, device.type)


def verdict(ratio: float, kind: str) -> int:
    """The exit code: 1 on a GPU below the floor, which is said."""
    if kind == "cuda" and ratio < FLOOR:
        print(f"below the floor: {ratio:.3f} of the bare loop's speed, and {FLOOR} is the least")
        return 1
    return 0


def trainer_of(text: Path, device: torch.device) -> Trainer:
    """One rank that trains the whole model as one stage, eight microbatches a step."""
    text.write_text(" ".join(random.Random(0).choices(["one", "stage", "of", "the", "pipeline"], k=100_000)))
    layers, hidden, wide, heads, sequence, samples = SIZES[device.type]
    config = RunConfig(
        model=ModelConfig(num_layers=layers, hidden_size=hidden, ffn_hidden_size=wide, num_attention_heads=heads)
    )
    config.parallel.bf16 = device.type == "cuda"
    config.data.path, config.data.seq_length = str(text), sequence
    config.train.micro_batch_size, config.train.global_batch_size = samples, 8 * samples
    config.launch.device = device.type
    session = build_session(config, build_plan(config), 0, device)
    return Trainer(session, session.data.batches())


def measure(trainer: Trainer, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round by contender, after two rounds that do not count."""
    contenders: dict[str, Callable[[], object]] = {
        "ppctl": lambda: trainer._run_pipeline(0),
        "loop": lambda: bare_loop(trainer),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 2):
        for name, run in contenders.items():
            trainer.session.replica.weights.clear_gradients()
            settle(trainer)
            begun = time.perf_counter()
            run()
            settle(trainer)
            if turn >= 2:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def bare_loop(trainer: Trainer) -> None:
    """What the pipeline computes, without ppctl."""
    assert trainer.batches is not None
    (module,) = trainer.session.model.stages.values()
    batch, device = trainer.batches.step(0), trainer.session.device
    tokens, labels, mask = (part.to(device) for part in (batch.tokens, batch.labels, batch.loss_mask))
    for mb in range(len(tokens)):
        (logits,) = module(tokens[mb])
        microbatch_loss(logits, labels[mb], mask[mb], batch.total_tokens).backward()


def settle(trainer: Trainer) -> None:
    """Wait for a GPU."""
    if trainer.session.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
