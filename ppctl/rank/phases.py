"""How long each phase of a rank's start took: import, groups, build, warm-up, load, and the launcher's compose.

Knows a clock and the process's age. Must not know what a phase does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppctl.processes import started


class Phases:
    """Name -> seconds, in the order in which they came. A phase that is entered twice counts together."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        """`name` took so long."""
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 3)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body as the phase `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def line(self) -> str:
        """`start-up 4.1 s: import 2.9, groups 0.3, build 0.9`, for a person."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"start-up {sum(self.seconds.values()):.1f} s: {parts}"


def process_age() -> float:
    """Seconds since this process began; what it has computed so far, where the system does not say."""
    ticks = started(os.getpid())
    if ticks is not None:
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return time.process_time()
