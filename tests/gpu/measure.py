"""The measurements of `first_run.sh`: each prints what it does, and as its last line one JSON object for the page.

    measure.py facts                                what the machine has
    measure.py train NAME [--floor F --goal G] -- OVERRIDES     a run's mfu and memory, against its plan's
    measure.py same NAME -- OVERRIDES               pp ranks on one GPU: their losses against one rank's
    measure.py nccl NAME -- OVERRIDES               the same over NCCL, where it connects several ranks on one GPU
    measure.py fp8 NAME -- OVERRIDES                as `train`, where ppctl has model.fp8
    measure.py memory NAME -- OVERRIDES             bytes allocated after every action of a step, against the plan's
    measure.py launches NAME                        whether the first launch of a kernel waits for a busy device
    measure.py queues NAME                          whether streams that should not wait for each other do

Exit codes: 0 measured, 1 failed or below its floor, 77 skipped (the last line says why).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ppctl.config.compose import compose
from ppctl.config.keys import text_keys
from ppctl.host.devices import SEVERAL_RANKS, nccl_shares_gpus
from ppctl.plan import build_plan
from ppctl.plan.plan_picture import picture
from ppctl.schedule.action import Op

SKIPPED = 77
_WARM = 3
"""Steps whose times do not count: compilation, autotuning."""
_SPIN = 2.0
"""Seconds for which the device is kept busy."""


class Skipped(Exception):
    """Why a measurement makes no sense here."""


def facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Versions and the device."""
    cuda = torch.cuda.is_available()
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi"], check=False)
    free, total = torch.cuda.mem_get_info() if cuda else (None, None)
    return {
        "host": platform.node(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "devices": torch.cuda.device_count(),
        "total_bytes": total,
        "context_bytes": None if total is None or free is None else total - free,
        "commit": _commit(),
    }


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """A run's median step after the first ones, beside what its plan says."""
    plan, run = _planned(arguments.overrides), _trained(arguments.overrides)
    steps = run[_WARM:] or run[-1:]
    mfu = [step["mfu"] for step in steps]
    row = {
        "mfu": None if None in mfu else statistics.median(mfu),
        "planned_mfu": plan["timing"]["mfu"],
        "tokens_per_s": statistics.median(step["tokens_per_s"] for step in steps),
        "measured_bytes": max(step["max_memory_bytes"] for step in run),
        "planned_bytes": max(rank["peak_bytes"] for rank in plan["pp_ranks"]),
        "losses": [step["loss"] for step in run],
        "floor": arguments.floor,
        "goal": arguments.goal,
    }
    # The CPU's share of a rate that nobody published says nothing.
    if arguments.floor is not None and torch.cuda.is_available() and (row["mfu"] or 0.0) < arguments.floor:
        row["failed"] = f"mfu {row['mfu']} is below the floor of {arguments.floor}"
    return row


def _planned(overrides: Sequence[str]) -> dict[str, Any]:
    done = _ppctl("plan", *overrides, "--json")
    plan: dict[str, Any] = json.loads(done.stdout)
    if plan["problems"]:
        raise RuntimeError(str(plan["problems"]))
    return plan


def _trained(overrides: Sequence[str], **environment: str) -> list[dict[str, Any]]:
    """The records of a run's steps."""
    with tempfile.TemporaryDirectory() as runs:
        done = _ppctl("train", *overrides, f"log.dir={runs}", "--json", **environment)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}")
        text = (Path(json.loads(done.stdout)["run"]) / "metrics.jsonl").read_text()
    return [record for record in map(json.loads, text.splitlines()) if "loss" in record]


def _ppctl(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ppctl", *words]
    print("+", " ".join(command), flush=True)
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | environment)


def same(arguments: argparse.Namespace, **environment: str) -> dict[str, Any]:
    """The losses of a pipeline and of one rank that holds the same model."""
    shared = [step["loss"] for step in _trained(arguments.overrides, **environment)]
    one = [step["loss"] for step in _trained([*_without(arguments.overrides, "launch.share_gpu", "pp"), "pp=1"])]
    apart = max(abs(a - b) / abs(b) for a, b in zip(shared, one, strict=True))
    row: dict[str, Any] = {"losses": shared, "one_rank": one, "apart": apart}
    return row | ({"failed": f"losses differ by {apart:.2g}"} if apart > 1e-4 else {})


def _without(overrides: Sequence[str], *keys: str) -> list[str]:
    return [override for override in overrides if override.partition("=")[0] not in keys]


def nccl(arguments: argparse.Namespace) -> dict[str, Any]:
    """`same`, over NCCL."""
    several = {SEVERAL_RANKS: "1"}
    if not torch.cuda.is_available():
        raise Skipped("there is no CUDA device")
    if not nccl_shares_gpus(torch.cuda.nccl.version(), several):
        raise Skipped(f"NCCL {torch.cuda.nccl.version()} takes one rank a GPU; 2.30.7 takes several")
    return same(arguments, **several)


def fp8(arguments: argparse.Namespace) -> dict[str, Any]:
    """`train`, in fp8."""
    if "model.fp8" not in text_keys():
        raise Skipped("this ppctl has no model.fp8")
    return train(arguments)


def memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is allocated after every action of the third step of one rank, and what the plan counts then."""
    import torch.distributed as dist

    from ppctl.train.session import build_session
    from ppctl.train.step import Trainer

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    composed = compose(arguments.overrides)
    config, plan = composed.config, build_plan(composed.config, composed.provenance)
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=0, world_size=1)
    session = build_session(config, plan, 0, device)
    trainer = Trainer(session, session.data.batches())
    recorder, held = session.pipeline.recorder, []
    end, now = recorder.end, torch.cuda.memory_allocated if cuda else (lambda: None)

    def count(index: int) -> None:
        end(index)
        held.append((index, now()))

    for step in range(2):
        trainer.step(step)
    recorder.end = count  # type: ignore[method-assign]
    trainer.step(2)
    planned = _planned_levels(plan, picture(plan, config).memory[0])
    actions = plan.schedule.actions[0]
    rows = [
        {"action": str(actions[index]), "measured_bytes": level, "planned_bytes": planned[index]}
        for index, level in held
        if actions[index].op in (Op.F, Op.B)
    ]
    dist.destroy_process_group()
    return {"actions": rows, "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None}


def _planned_levels(plan: Any, of_rank: Any) -> list[int]:
    """Bytes after each action: what is always there, and every microbatch between its F and its B."""
    level, levels = of_rank.fixed, []
    for action in plan.schedule.actions[0]:
        if action.op is Op.F:
            level += of_rank.per_microbatch[action.stage]
        elif action.op is Op.B:
            level -= of_rank.per_microbatch[action.stage]
        levels.append(level)
    return levels


def launches(arguments: argparse.Namespace) -> dict[str, Any]:
    """Finding 2: seconds until the host has launched a kernel for the first time while another one runs."""
    _need_cuda()
    values = torch.rand(1024, device="cuda")
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(int(_SPIN * _cycles_per_second()))
        spun = torch.cuda.Event()
        spun.record()
    rows = {}
    for name in ("erfinv", "lgamma", "digamma"):
        began = time.perf_counter()
        getattr(torch, name)(values)
        rows[name] = {"seconds": time.perf_counter() - began, "spin_was_over": spun.query()}
    torch.cuda.synchronize()
    waited = any(row["spin_was_over"] for row in rows.values())
    return {"loading": os.environ.get("CUDA_MODULE_LOADING", "LAZY"), "kernels": rows, "waits_for_the_device": waited}


def queues(arguments: argparse.Namespace) -> dict[str, Any]:
    """Finding 3: 16 streams with two kernels each, one after the other: 2.0 spins in all if no stream waits."""
    _need_cuda()
    spin = 0.05
    cycles = int(spin * _cycles_per_second())
    streams = [torch.cuda.Stream() for _ in range(16)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {"queues": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8 (default)"), "spins": seconds / spin}


def _need_cuda() -> None:
    if not torch.cuda.is_available():
        raise Skipped("there is no CUDA device")


def _cycles_per_second() -> float:
    """Of the clock that `_sleep` counts, once it has sped up."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        start.record()
        torch.cuda._sleep(10_000_000)
        end.record()
        torch.cuda.synchronize()
    return 1e7 / (start.elapsed_time(end) / 1e3)


STEPS = {
    "facts": facts, "train": train, "same": same, "nccl": nccl, "fp8": fp8, "memory": memory,
    "launches": launches, "queues": queues,
}  # fmt: skip


def main() -> int:
    """Measure one thing."""
    random.seed(0)
    words, _, overrides = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--floor", type=float)
    parser.add_argument("--goal", type=float)
    arguments = parser.parse_args(words.split())
    arguments.overrides = overrides.split()
    try:
        found = STEPS[arguments.step](arguments)
    except Skipped as reason:
        found = {"skipped": str(reason)}
    print(json.dumps({"step": arguments.step, "name": arguments.name} | found))
    return SKIPPED if "skipped" in found else int("failed" in found)


if __name__ == "__main__":
    sys.exit(main())
