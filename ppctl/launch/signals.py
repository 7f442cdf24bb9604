"""Signals and children's deaths as a list to wait for, with no busy loop and no work inside a handler.

Knows the wake-up pipe. Must not know what a signal means.
"""

from __future__ import annotations

import os
import select
import signal
from types import FrameType, TracebackType
from typing import Any

CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def _noted(number: int, frame: FrameType | None) -> None:
    """Python writes the number into the wake-up pipe by itself."""


class Signals:
    """While entered, the signals above and SIGCHLD arrive through `wait`; those that were ignored stay ignored."""

    def __enter__(self) -> Signals:
        self._reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if hasattr(os, "pipe2") else _pipe()
        self._writer = writer
        self._wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        heard = [number for number in CAUGHT if signal.getsignal(number) is not signal.SIG_IGN]
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, _noted) for number in (*heard, signal.SIGCHLD)
        }
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, timeout: float | None) -> list[int]:
        """The signals that came, in order; empty after `timeout` seconds (None waits for the next one)."""
        readable, _, _ = select.select([self._reader], [], [], timeout)
        return list(os.read(self._reader, 4096)) if readable else []


def _pipe() -> tuple[int, int]:
    """A pipe that does not block and is not inherited, where the system has no pipe2 (macOS)."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends
