"""Processes of this machine, seen from outside: which one it is, whether it still lives, whether it is stopped.

Knows what the system tells of a process. Must not know what it does, nor runs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def identity() -> dict[str, Any]:
    """What this process alone is called: machine, boot, number and start. Stays when it becomes another program."""
    return {"machine": socket.gethostname(), "boot": _boot(), "pid": os.getpid(), "started": started(os.getpid())}


def is_gone(process: Mapping[str, Any]) -> bool:
    """Whether the process with this identity was one of this machine's and has ended; False where nobody can say."""
    pid, began = process.get("pid"), process.get("started")
    here = process.get("machine") == socket.gethostname() and process.get("boot") == _boot() != ""
    return here and isinstance(pid, int) and began is not None and (started(pid) != began or _state(pid) == "Z")


def started(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None where the system does not say."""
    fields = _fields(pid)
    return int(fields[19]) if fields else None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, a debugger); False where the system does not say."""
    return _state(pid) in ("T", "t")


def _state(pid: int) -> str:
    return next(iter(_fields(pid)), "")


def _fields(pid: int) -> list[str]:
    """/proc/PID/stat behind the name: the state first. Empty where there is no such process, or no such file."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _boot() -> str:
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return ""
