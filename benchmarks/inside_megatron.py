"""A GPTModel of the real Megatron-core under Megatron's functions and under ppctl's schedules: time and peak memory.

    python benchmarks/inside_megatron.py [--steps 5] [--only CELL ...] [--out benchmarks]    # with megatron-core

All cells run on the CPUs of this machine over gloo. `gpt`: GPTModels of two ranks compute. `stated times`: four ranks
sleep for as long as F, I and W are said to take, so that two cores suffice, and the ideal is known. Contenders of a
cell run one after the other inside the same processes, and their losses are compared: figures hold within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "helpers"))
sys.path.insert(0, str(HERE.parent))

MICROBATCHES = 8
F_SECONDS = I_SECONDS = W_SECONDS = 0.020
"""Of a stage of `stated times`; of a chunk half as much."""

LOOP = ("Megatron 1F1B", "ppctl 1f1b", "ppctl zb_h1", "ppctl auto")
CHUNKS = ("Megatron interleaved", "ppctl interleaved_1f1b", "ppctl interleaved_zero_bubble")
V = ("ppctl zbv_zero_bubble",)
CELLS = {"gpt": (2, 1, LOOP), "gpt, two chunks": (2, 2, CHUNKS), "stated times": (4, 1, LOOP)}
CELLS |= {"stated times, two chunks": (4, 2, CHUNKS), "stated times, V": (4, 2, V)}


# --- one rank ---------------------------------------------------------------------------------------------------------


def rank_main(cell: str, steps: int, out: Path) -> None:
    """Run a cell's contenders in turn on this rank; rank 0 writes seconds, every rank its peak in MiB."""
    import torch
    import torch.distributed as dist
    from real_megatron import on_cpus

    import ppctl

    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # torch's compiler, which this loads, looks at what is replaced next
    on_cpus()
    dist.init_process_group("gloo")
    pp, chunks, contenders = CELLS[cell]
    figures: dict[str, Any] = {name: {"seconds": [], "MiB": []} for name in contenders}
    runs = {name: contender(cell, name, pp, chunks) for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    for name, run in runs.items():
        if not name.startswith("Megatron"):
            ppctl.adopt(name.removeprefix("ppctl "))
        for step in range(-2, steps):  # schedules and connections are made in the first, measured orders searched for
            Path("/proc/self/clear_refs").write_text("5")
            before = _status("VmRSS")
            dist.barrier()
            begin = time.perf_counter()
            losses[name] += run(step + 2)
            dist.barrier()
            if step >= 0:
                figures[name]["seconds"].append(time.perf_counter() - begin)
                figures[name]["MiB"].append((_status("VmHWM") - before) / 1024)
        ppctl.release()
    first = next(iter(losses.values()))
    assert all(each == first for each in losses.values()), f"losses differ: {losses}"
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


def contender(cell: str, name: str, pp: int, chunks: int) -> Any:
    """A function of the step's number that trains one step and returns the losses of this rank."""
    import real_megatron
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    vpp = chunks if chunks > 1 else None
    if not parallel_state.model_parallel_is_initialized():
        real_megatron.M = MICROBATCHES
        if cell.startswith("gpt"):
            real_megatron.SEQ, real_megatron.VOCABULARY = 128, 512
        real_megatron.initialise(real_megatron.Case(pp=pp, vpp=vpp))
    case = real_megatron.Case(pp=pp, vpp=vpp)
    models, optimizer = (gpt if cell.startswith("gpt") else sleeping)(case, name)

    def run(step: int) -> list[float]:
        optimizer.zero_grad()
        arguments = real_megatron.arguments_of(case, models, step)
        if not cell.startswith("gpt"):
            arguments["forward_step_func"] = _step
        store = schedules.get_forward_backward_func()(**arguments)
        optimizer.step()
        return [float(data["loss"]) for data in store]

    return run


def gpt(case: Any, _: str) -> tuple[list[Any], Any]:
    """A GPTModel of the helper's sizes, wider."""
    import real_megatron

    plain = real_megatron.config_of

    def wider(each: Any) -> Any:
        config = plain(each)
        config.hidden_size, config.ffn_hidden_size, config.kv_channels = 256, 1024, 64
        return config

    real_megatron.config_of = wider
    try:
        _, models, optimizer = real_megatron.build(case)
    finally:
        real_megatron.config_of = plain
    return models, optimizer


def sleeping(case: Any, name: str) -> tuple[list[Any], Any]:
    """Chunks that sleep for the stated times, with a message of 1 MiB between them."""
    import real_megatron
    import torch
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from torch import nn

    import ppctl

    class Sleeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, part: float) -> Any:
            time.sleep(F_SECONDS * part)
            ctx.part = part
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return of_input(ctx, gradient)[0], *of_weight(ctx, gradient), None

    def of_input(ctx: Any, gradient: Any) -> Any:
        time.sleep(I_SECONDS * ctx.part)
        return gradient * 1.0, None, None

    def of_weight(ctx: Any, gradient: Any) -> Any:
        time.sleep(W_SECONDS * ctx.part)
        return (torch.ones(2, 2),)

    ppctl.split_backward(Sleeps, weights=("weight",), of_input=of_input, of_weights=of_weight)

    class Chunk(nn.Module):
        def __init__(self, config: Any, stage: int) -> None:
            super().__init__()
            self.config, self.stage = config, stage
            self.model_type = ModelType.encoder_or_decoder
            self.weight, self.first = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(()))
            self.input: Any = None

        def set_input_tensor(self, tensors: Any) -> None:
            self.input = tensors[0]

        def forward(self) -> Any:
            x = self.first * torch.ones(real_megatron.SEQ, real_megatron.MBS, config.hidden_size)
            return Sleeps.apply(x if self.stage == 0 else self.input, self.weight, 1 / (case.vpp or 1))

    config = real_megatron.config_of(case)
    config.hidden_size = 2**18 // (real_megatron.SEQ * real_megatron.MBS)
    rank, pp = parallel_state.get_pipeline_model_parallel_rank(), case.pp
    last = 2 * pp - 1 - rank if "zbv" in name else pp + rank
    models = [Chunk(config, stage) for stage in (rank, last)[: case.vpp or 1]]
    return models, torch.optim.SGD([p for model in models for p in model.parameters()], lr=1e-3)


def _step(_: Any, model: Any) -> Any:
    def loss(output: Any) -> Any:
        mean = output.mean()
        return mean, {"loss": mean.detach().clone()}

    return model(), loss


# --- the page ---------------------------------------------------------------------------------------------------------


def measure(cell: str, steps: int) -> dict[str, tuple[float, float, list[float]]]:
    """Contender -> median and least seconds of a step, and every rank's median peak in MiB."""
    pp = CELLS[cell][0]
    with tempfile.TemporaryDirectory() as place:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(pp)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        words = [str(Path(__file__).resolve()), "--rank", cell, "--steps", str(steps), "--out", place]
        subprocess.run([*run, *words], env=environment, check=True, timeout=400)
        ranks = [json.loads((Path(place) / f"rank{rank}.json").read_text()) for rank in range(pp)]
    return {
        name: (
            statistics.median(ranks[0][name]["seconds"]),
            min(ranks[0][name]["seconds"]),
            [statistics.median(rank[name]["MiB"]) for rank in ranks],
        )
        for name in ranks[0]
    }


def ideal(cell: str) -> float | None:
    """Seconds of a rank's own F, I and W, where they are stated."""
    return MICROBATCHES * (F_SECONDS + I_SECONDS + W_SECONDS) if cell.startswith("stated") else None


def main() -> None:
    """Measure all cells and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args.rank, args.steps, args.out)
        return
    import torch
    from megatron.core import __version__ as megatron

    day, load = date.today().isoformat(), os.getloadavg()[0]
    lines = [
        f"# GPTModel under Megatron's functions and under ppctl's, {day}",
        "",
        f"`python benchmarks/inside_megatron.py --steps {args.steps}` with megatron-core {megatron}, torch",
        f"{torch.__version__}, gloo, {os.cpu_count()} cores ({platform.machine()}), {MICROBATCHES} microbatches.",
        f"Load of the machine at the start: {load:.1f}. Contenders of a cell run one after the other in the same",
        "processes; all losses are equal. Peak: growth of the resident memory of each rank within a step, median.",
        "",
    ]
    for cell in args.only:
        found = measure(cell, args.steps)
        print(cell, found, flush=True)
        first = next(iter(found.values()))
        base = ideal(cell)
        lines += [f"## {cell}", ""]
        if base is not None:
            stated = ", ".join(f"{1e3 * each:.0f}" for each in (F_SECONDS, I_SECONDS, W_SECONDS))
            lines += [f"Stated: F, I, W {stated} ms a rank; without any bubble {base:.3f} s.", ""]
        lines += ["| | s a step (median) | least | against the first | peak MiB by rank |", "|---|---|---|---|---|"]
        for name, (median, least, peaks) in found.items():
            row = (
                name,
                f"{median:.3f}",
                f"{least:.3f}",
                f"{first[0] / median:.2f}",
                ", ".join(f"{p:.0f}" for p in peaks),
            )
            lines.append("| " + " | ".join(row) + " |")
        lines.append("")
    (args.out / f"results-inside-megatron-{day}.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
