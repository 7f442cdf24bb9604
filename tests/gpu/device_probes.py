"""What a device, its driver and NCCL do by themselves, without a step of ppctl's: each probe returns its findings.

Knows CUDA and the backends that ppctl makes. Must not know plans or runs.
"""

from __future__ import annotations

import os
import pickle
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ppctl.comm.connections import MAKERS, MAX_CTAS
from ppctl.rank.watchdog import recorders

_SPIN = 2.0
"""Seconds for which the device is kept busy: by a kernel that stands for a posted receive, which spins as well."""
_LIMIT = timedelta(seconds=60)


class Skipped(Exception):
    """Why a measurement makes no sense here."""


def need_cuda(device: str) -> None:
    """Raise Skipped on the CPU."""
    if device != "cuda":
        raise Skipped("there is no CUDA device")


def cycles_per_second() -> float:
    """Of the clock that `_sleep` counts, once it has sped up."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        start.record()
        torch.cuda._sleep(10_000_000)
        end.record()
        torch.cuda.synchronize()
    return 1e7 / (start.elapsed_time(end) / 1e3)


def spinning() -> torch.cuda.Event:
    """Keep another stream busy; the event is over when that is."""
    other, cycles = torch.cuda.Stream(), int(_SPIN * cycles_per_second())
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(cycles)
        over = torch.cuda.Event()
        over.record()
    return over


def nccl_alone(name: str, device: str) -> dict[str, Any]:
    """A bare backend of one rank with the options of a channel, and a process group of one rank: messages to itself."""
    need_cuda(device)
    log = Path(tempfile.mkdtemp()) / "nccl.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log), "TORCH_FR_BUFFER_SIZE": "100"}
    torch.cuda.set_device(0)
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, timeout=_LIMIT)
    row: dict[str, Any] = {"answers": {}, "max_ctas": MAX_CTAS}

    def ask(what: str, how: Callable[[], object]) -> None:
        began = time.perf_counter()
        try:
            answer = str(how())
        except Exception as error:  # the answer is what went wrong
            answer = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            row["failed"] = f"{what}: {answer}"
        row["answers"][what] = {"answer": answer, "seconds": time.perf_counter() - began}

    made: list[Any] = []
    ask("a backend with max_ctas and a stream of high priority", lambda: made.append(_bare(store)) or "made")
    if made:
        for size in (1, 1 << 22):
            ask(f"bare: {4 * size} bytes to itself, waited for", lambda size=size: _to_itself(made[0], size))
        ask("bare: get_error", lambda: made[0].get_error().name)
        ask("bare: entries in NCCL's flight record", lambda: _recorded("ppctl/probe"))
    for size in (1, 1 << 22):
        ask(f"group: {4 * size} bytes by batch_isend_irecv", lambda size=size: _batched(size))
    if made:
        ask("bare: shutdown", lambda: made[0].shutdown() or "returned")
    text = log.read_text(errors="replace") if log.exists() else ""
    row["p2p_channels"] = sorted(set(re.findall(r"\d+ coll channels.*", text)))
    row["grids"] = sorted(set(re.findall(r".*(?:minCTAs|maxCTAs|min_ctas|max_ctas).*", text)))[:4]
    return row


def _bare(store: dist.Store) -> Any:
    return MAKERS["nccl"](dist.PrefixStore("probe/", store), 0, (0,), "ppctl/probe", _LIMIT)


def _to_itself(backend: Any, size: int) -> str:
    device = torch.device("cuda", 0)
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
    sent = torch.arange(size, device=device, dtype=torch.float32)
    arrived = torch.empty_like(sent)
    # A receive alone would be waited for by the send behind it, for ever: NCCL gets both at once.
    group._start_coalescing(device)
    backend.recv([arrived], 0, 0)
    backend.send([sent], 0, 0)
    group._end_coalescing(device).wait()
    return "arrived" if torch.equal(sent, arrived) else "WRONG VALUES"


def _batched(size: int) -> str:
    sent = torch.arange(size, device="cuda", dtype=torch.float32)
    arrived = torch.empty_like(sent)
    group = dist.group.WORLD
    ops = [dist.P2POp(op, each, group=group, group_peer=0) for op, each in ((dist.isend, sent), (dist.irecv, arrived))]
    works = dist.batch_isend_irecv(ops)
    for work in works:
        work.wait()
    return f"arrived, {len(works)} work" if torch.equal(sent, arrived) else "WRONG VALUES"


def _recorded(name: str) -> int:
    record = pickle.loads(recorders()["nccl"](True, False))
    return sum(name in str(entry["process_group"]) for entry in record["entries"])


def launches(name: str, device: str) -> dict[str, Any]:
    """Seconds until the host has launched kernels for the first time while another one runs, and what loading costs."""
    need_cuda(device)
    began = time.perf_counter()
    values = torch.rand(1024, device="cuda")
    torch.cuda.synchronize()
    start, (free, total) = time.perf_counter() - began, torch.cuda.mem_get_info()
    rows = {}
    # Kernels that torch was built with: others (erfinv, lgamma) are compiled, and loaded, when they are first called.
    for kernel in ("tan", "asinh", "log1p"):
        spun = spinning()
        began = time.perf_counter()
        getattr(torch, kernel)(values)
        rows[kernel] = {"seconds": time.perf_counter() - began, "spin_was_over": spun.query()}
    torch.cuda.synchronize()
    waited = any(row["spin_was_over"] for row in rows.values())
    spun, began = spinning(), time.perf_counter()
    pinned = torch.empty(2**20, dtype=torch.uint8, device="cpu", pin_memory=True)  # as headers of messages take some
    rows["pinning 1 MiB of host memory"] = {"seconds": time.perf_counter() - began, "spin_was_over": spun.query()}
    torch.cuda.synchronize()
    del pinned
    return {
        "loading": os.environ.get("CUDA_MODULE_LOADING", "LAZY"),
        "first_kernel_s": start,
        "taken_bytes": total - free,
        "kernels": rows,
        "waits_for_the_device": waited,
    }


def queues(name: str, device: str) -> dict[str, Any]:
    """16 streams with two kernels each, one after the other: 2.0 spins in all if no stream waits for another."""
    need_cuda(device)
    spin = 0.05
    cycles = int(spin * cycles_per_second())
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


def retry(name: str, device: str) -> dict[str, Any]:
    """Make torch's allocator free memory while a kernel spins on another stream: does the host wait for that one?"""
    need_cuda(device)
    torch.zeros(1, device="cuda")
    block, blocks = 256 * 2**20, list[torch.Tensor]()
    with suppress(torch.OutOfMemoryError):
        while torch.cuda.mem_get_info()[0] > 4 * block:
            blocks.append(torch.empty(block, dtype=torch.uint8, device="cuda"))
    count = len(blocks)
    del blocks  # the cache has them, and the device has no room for what is larger than one of them
    spun, retries = spinning(), torch.cuda.memory_stats().get("num_alloc_retries", 0)
    began = time.perf_counter()
    held = torch.empty(max(count // 2, 2) * block, dtype=torch.uint8, device="cuda")
    seconds, was_over = time.perf_counter() - began, spun.query()
    made = torch.cuda.memory_stats().get("num_alloc_retries", 0) - retries
    del held
    return {
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "torch's default"),
        "seconds": seconds,
        "waited_for_the_spin": was_over,
        "retries": made,
    }


PROBES: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "nccl-alone": nccl_alone,
    "launches": launches,
    "queues": queues,
    "retry": retry,
}
