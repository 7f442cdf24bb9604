"""A rank's signals: TERM and USR1 ask it to save and exit; for others an action is run at once.

Knows signals. Must not know runs. A handler in Python waits for the main thread, which may be in C++ for as long as a
message takes. So urgent actions run in a thread that reads the wake-up pipe, into which the interpreter's own handler
writes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import NoReturn

INTERRUPTED = 130


class StopRequest:
    """Whether TERM or USR1 has asked this rank to save and exit; the ranks agree on it at the end of a step."""

    def __init__(self) -> None:
        self.asked = 0
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, also inside a wait in C++
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask)
        # Whoever started this process has blocked them until now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR1))

    def _ask(self, number: int, _: object) -> None:
        self.asked = self.asked or number

    def __call__(self) -> int:
        """The number of the first such signal; 0 before one comes."""
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
    """Call `action`, then end this process with 130, as interrupted."""
    try:
        action()
    finally:
        os._exit(INTERRUPTED)
