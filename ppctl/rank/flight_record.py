"""Torch's flight recorders: the last collectives that a rank asked for, kept in the run directory when the job hangs.

Knows the recorders' variables (torch 2.13's names; an older one is heeded where it is set) and their dumps. Must not
know when a job hangs. gloo and NCCL record apart from each other, and each record has a file of its own. gloo records
collectives, and no single messages, which the pipeline's edges are on a CPU. What NCCL records was not seen yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress

from torch._C import _distributed_c10d as c10d

from ppctl.rundir import RunDir

_ENTRIES = "2000"
_NAMES = {"gloo": "_dump_fr_trace", "nccl": "_dump_nccl_trace"}
"""Private names of torch: it may drop them, and nothing else depends on them. NCCL's is in builds with NCCL alone."""

Dump = Callable[[bool, bool], bytes]
"""(with collectives, with stacks) -> a pickle of plain lists."""


def turn_on(run: RunDir) -> None:
    """Let this process record, and NCCL's own watchdog write into the run. Before the first process group."""
    prefix = str(run.flight_record("nccl", 0)).removesuffix("0")  # NCCL's watchdog appends the rank
    for names, value in (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), _ENTRIES),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), prefix),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    ):
        # The newest name alone: torch warns of the older one in every rank's log.
        os.environ.setdefault(names[0], next((os.environ[name] for name in names if name in os.environ), value))


def dumps(module: object = c10d) -> dict[str, Dump]:
    """What writes out each recorder that this build of torch has, by backend."""
    found = {backend: getattr(module, name, None) for backend, name in _NAMES.items()}
    return {backend: dump for backend, dump in found.items() if dump is not None}


def write(run: RunDir, rank: int, recorders: Mapping[str, Dump]) -> None:
    """Write what each of the `recorders` holds; without stacks, which take seconds to put into words.

    gloo's comes first: NCCL's may have to wait for a thread that stands still.
    """
    for backend, dump in recorders.items():
        with suppress(OSError, RuntimeError):
            run.write_flight_record(backend, rank, dump(True, False))
