"""What signals mean to a rank: TERM and USR1 ask it to save and leave, others want an answer at once.

Knows signals. Must not know runs. A handler in Python waits for the main thread, which may be in C++ for as long as a
message takes; what cannot wait is done by a thread that listens to the wake-up pipe, which the interpreter's own
handler writes to.
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
    """Which of TERM and USR1 has asked this rank to save and leave; the ranks agree at a step boundary."""

    def __init__(self) -> None:
        self.asked = 0
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, also inside a wait in C++
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask)
        # A starter has kept them back until now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR1))

    def _ask(self, number: int, _: object) -> None:
        self.asked = self.asked or number

    def __call__(self) -> int:
        """The signal's number; 0 where none came."""
        return self.asked


class Listener:
    """Does what belongs to a signal in a thread of its own. Make it, and call `on`, in the main thread."""

    def __init__(self) -> None:
        self._actions: dict[int, Callable[[], object]] = {}
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()

    def on(self, number: int, action: Callable[[], object]) -> None:
        """From now on `action` follows signal `number`, unless the GIL is held."""
        self._actions[number] = action
        signal.signal(number, lambda *_: None)

    def _listen(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 64):
                with suppress(Exception):  # the next signal is answered all the same
                    self._actions.get(number, int)()


def end_after(last_words: Callable[[], object]) -> NoReturn:
    """End this process with 130, as one that was interrupted, when `last_words` are said."""
    try:
        last_words()
    finally:
        os._exit(INTERRUPTED)
