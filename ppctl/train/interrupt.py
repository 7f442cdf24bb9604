"""Ctrl-C on a rank that has no launcher of ppctl's above it: somebody has to write down how the run ended.

Knows one signal. Must not know runs. A handler in Python would wait for the main thread, which may be in C++ for as
long as a message takes; therefore a thread listens to the wake-up pipe, which the interpreter's own handler writes to.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from threading import Thread

INTERRUPTED = 130


def on_interrupt(last_words: Callable[[], object]) -> None:
    """From now on SIGINT ends this process with 130, at once, after `last_words`. Call it from the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)
    Thread(target=_listen, args=(reader, last_words), name="interrupt", daemon=True).start()


def _listen(reader: int, last_words: Callable[[], object]) -> None:
    while signal.SIGINT not in os.read(reader, 64):
        pass
    try:
        last_words()
    finally:
        os._exit(INTERRUPTED)
