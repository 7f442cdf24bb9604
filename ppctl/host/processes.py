"""This machine's processes: how they start, and whether they have ended or are stopped; SIGTERM to this one."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")
HANDED_OVER = "PPCTL_HANDED_OVER"  # when a standby process became a rank, by `time.monotonic`


def python(module: str) -> list[str]:
    """The command that runs `module` in a new process, with the modules that this process can import. `python -m` takes
    modules from the working directory first, where another user may have put a `torch.py`: that directory is left out
    (-P) unless this process uses it, too."""
    with suppress(OSError):  # the working directory has been removed
        if not {"", os.getcwd()} & set(sys.path):
            return [sys.executable, "-P", "-m", module]
    return [sys.executable, "-m", module]


def own_share() -> tuple[int, int]:
    """(cores, bytes of memory) of this machine for each of its ranks."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "")
    ranks = max(1, int(said)) if said.isdecimal() else 1
    return max(1, cores // ranks), memory // ranks


def identity(pid: int | None = None) -> dict[str, Any]:
    """The identity of a process on this machine (None: this process), which exec keeps: machine, boot, pid, start."""
    pid = os.getpid() if pid is None else pid
    return {"machine": socket.gethostname(), "boot": boot(), "pid": pid, "started": started(pid)}


def is_gone(process: Mapping[str, Any]) -> bool:
    """Whether the process with this identity ran on this machine and has ended; False if this is unknown."""
    pid, began = process.get("pid"), process.get("started")
    same_machine = process.get("machine") == socket.gethostname() and process.get("boot") == boot() != ""
    return same_machine and isinstance(pid, int) and began is not None and (started(pid) != began or _state(pid) == "Z")


def started(pid: int) -> int | None:
    """When a process started, in clock ticks after the machine's boot; None if it has no entry in /proc."""
    fields = _fields(pid)
    return int(fields[19]) if fields else None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, a debugger); False on a system without /proc."""
    return _state(pid) in ("T", "t")


@contextmanager
def unwinding_on_term() -> Iterator[None]:
    """Let SIGTERM raise SystemExit(143) in the main thread, so that this process cleans up its files and processes."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _state(pid: int) -> str:
    return next(iter(_fields(pid)), "")


def _fields(pid: int) -> list[str]:
    """/proc/PID/stat after the process's name: the state first. Empty if there is no such file."""
    with suppress(OSError):
        # A name's 15 bytes may end within a letter, and Latin-1 reads any byte.
        return Path(f"/proc/{pid}/stat").read_text("latin-1").rpartition(")")[2].split()
    return []


def boot() -> str:
    """An id of this machine's present boot; empty on a system without /proc."""
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return ""
