"""Torch's flight recorder: the last collectives that a rank asked for, kept in the run directory when the job hangs.

Knows the recorder's variables (torch 2.13's names; an older one is heeded where it is set) and its dump. Must not know
when a job hangs. gloo records collectives, and no single messages, which the pipeline's edges are on a CPU. What NCCL
records was not seen yet.
"""

from __future__ import annotations

import os
from contextlib import suppress

from torch._C import _distributed_c10d as c10d

from ppctl.rundir import RunDir

_ENTRIES = "2000"


def turn_on(run: RunDir) -> None:
    """Let this process record, and NCCL's own watchdog write into the run. Before the first process group."""
    prefix = str(run.flight_record(0)).removesuffix("0")  # torch appends the rank
    for names, value in (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), _ENTRIES),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), prefix),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    ):
        # The newest name alone: torch warns of the older one in every rank's log.
        os.environ.setdefault(names[0], next((os.environ[name] for name in names if name in os.environ), value))


def write(run: RunDir, rank: int) -> None:
    """Write what this process has recorded; without stacks, which take seconds to put into words."""
    dump = getattr(c10d, "_dump_fr_trace", None)  # a private name: torch may drop it, and nothing else depends on it
    if dump is not None:
        with suppress(OSError):
            run.write_flight_record(rank, dump(True, False))
