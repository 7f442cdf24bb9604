"""A rank's own process: what signals do to it, how many files it may open, and where its output goes.

TERM and USR1 ask a rank to save and exit; for other signals an action runs immediately. A handler in Python waits for
the main thread, which may be in C++ for as long as a message takes, so urgent actions run in a thread that reads the
wake-up pipe, into which the interpreter's own handler writes.
"""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, NoReturn, TextIO

from ppctl.errors import visible

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

INTERRUPTED = 130
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class StopRequest:
    """Whether TERM or USR1 has asked this rank to save and exit; at the end of a step ranks agree whether they do."""

    def __init__(self) -> None:
        self.asked = 0
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # end immediately, also inside a wait in C++
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask)
        # The program that started this process has blocked these signals until now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR1))

    def _ask(self, number: int, _: object) -> None:
        self.asked = self.asked or number

    def __call__(self) -> int:
        """The number of the first signal that came; 0 before a signal comes."""
        return self.asked


class Listener:
    """Runs the actions of signals in a thread. Construct it, and call `on`, in the main thread."""

    def __init__(self) -> None:
        self._actions: dict[int, Callable[[], object]] = {}
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()

    def on(self, number: int, action: Callable[[], object]) -> None:
        """From now on `action` is called for signal `number`, as soon as the GIL is free."""
        self._actions[number] = action
        signal.signal(number, lambda *_: None)

    def _listen(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 64):
                with suppress(Exception):  # the next signal must be handled, too
                    self._actions.get(number, int)()


def end_after(action: Callable[[], object]) -> NoReturn:
    """Call `action`, then end this process with exit code 130, as interrupted."""
    try:
        action()
    finally:
        os._exit(INTERRUPTED)


class _LossyFile(io.FileIO):
    """A file that drops what does not fit on its disk."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return memoryview(data).nbytes


def raise_file_limit() -> None:
    """Raise this process's limit of open files to its hard limit. Rank 0 has three sockets for every rank: in its
    store, in a gather to it, and in a save beside training."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS allows fewer than the limit that it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def lose_lines_rather_than_fail() -> None:
    """From now on stdout and stderr drop what does not fit on a full disk, and show control characters as escapes."""
    sys.stdout, sys.stderr = (_lossy(number) for number in (1, 2))


class _VisibleText(io.TextIOWrapper):
    """Text with control characters as escapes: under torchrun it goes to a terminal, and may quote a file."""

    def write(self, text: str, /) -> int:
        return super().write(visible(text))


def _lossy(number: int) -> io.TextIOWrapper:
    raw = _LossyFile(number, "w", closefd=False)
    return _VisibleText(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def keep_stdout() -> TextIO:
    """Stdout as it was; what this process and its libraries write to stdout from now on goes to stderr."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept
