"""What a rank writes if its job hangs: the stacks of its threads, and the last collectives by torch's flight recorders.

Knows SIGUSR2, the recorders' variables (torch 2.13's names; the older ones count as well) and their dumps. Must not
know when a job hangs. gloo and NCCL have a recorder each, and each dump is a file of its own. gloo records collectives
but no single messages, which the pipeline's channels are on a CPU. NCCL's record has not been seen yet.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress

from ppctl.rank.own_process import Listener
from ppctl.rundir import RunDir

_ENTRIES = "2000"
_NAMES = {"gloo": "_dump_fr_trace", "nccl": "_dump_nccl_trace"}
"""Private functions of torch; nothing else depends on them. NCCL's is in builds with NCCL alone."""

Dump = Callable[[bool, bool], bytes]
"""(with collectives, with stacks) -> a pickle of plain lists."""


def dump_on_request(run: RunDir, rank: int, listener: Listener) -> None:
    """From now on SIGUSR2 writes stacks to this rank's log and flight records into the run.

    Call it before the first process group is made.
    """
    turn_on_recorders(run)
    listener.on(signal.SIGUSR2, lambda: write_records(run, rank, recorders()))
    write_stacks_on_request()


def write_stacks_on_request() -> None:
    """From now on SIGUSR2 writes every thread's stack to stderr, also out of a C call that holds the GIL.

    The handler that SIGUSR2 had before is called as well.
    """
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=True)


def turn_on_recorders(run: RunDir) -> None:
    """Let this process record, and NCCL's own watchdog write into the run."""
    prefix = str(run.flight_record("nccl", 0)).removesuffix("0")  # NCCL's watchdog appends the rank
    for names, value in (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), _ENTRIES),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), prefix),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    ):
        # The newest name alone: torch warns of the older one in every rank's log.
        os.environ.setdefault(names[0], next((os.environ[name] for name in names if name in os.environ), value))


def recorders(module: object = None) -> dict[str, Dump]:
    """The dump function of each recorder that this build of torch has, by backend; without NCCL's on the CPU."""
    names = _NAMES
    if module is None:
        import torch
        from torch._C import _distributed_c10d

        module = _distributed_c10d
        if not torch.cuda.is_initialized():  # a build for CUDA would write an empty record
            names = {backend: name for backend, name in names.items() if backend != "nccl"}
    found = {backend: getattr(module, name, None) for backend, name in names.items()}
    return {backend: dump for backend, dump in found.items() if dump is not None}


def write_records(run: RunDir, rank: int, dumps: Mapping[str, Dump]) -> None:
    """Write the record of each recorder, without stacks, which take seconds to format.

    gloo's comes first: NCCL's may have to wait for a thread that does not move.
    """
    for backend, dump in dumps.items():
        with suppress(OSError, RuntimeError):
            run.write_flight_record(backend, rank, dump(True, False))
