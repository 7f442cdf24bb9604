"""One rank's process: started in a session of its own, ended with everything that it started.

Knows processes. Must not know why a rank is started or ended, nor what it prints.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1


def dies_with_its_parent() -> Callable[[], None]:
    """A function that arranges for the kernel to kill the calling process when its parent dies (on Linux).

    All that needs loading is loaded here. The arrangement outlives exec.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def arrange() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return arrange


def _before_exec() -> Callable[[], None]:
    """What the child does between fork and exec. All that needs loading is loaded here, in the parent.

    SIGTERM and SIGUSR1 mean "save and leave": ignored, so that they do no harm before the worker can hear them. SIGKILL
    follows when the launcher dies; a launcher that died before that was arranged is no longer this child's parent.
    """
    launcher = os.getpid()
    arrange = dies_with_its_parent()

    def prepare() -> None:
        arrange()
        if os.getppid() != launcher:
            os._exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    return prepare


class RankProcess:
    """A started rank. Start all before any thread: the child runs Python between fork and exec."""

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path, piped: bool
    ) -> None:
        self.rank = rank
        self.returncode: int | None = None
        """As subprocess has it: negative for a signal. None while it runs."""
        with open(log, "ab") as file:
            self._popen = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else file,
                stderr=file,
                start_new_session=True,
                preexec_fn=_before_exec(),
            )

    @property
    def stdout(self) -> IO[bytes] | None:
        """The pipe of a piped rank."""
        return self._popen.stdout

    def poll(self) -> int | None:
        """The return code once it has ended. What it has started dies with it.

        The rank is looked at before it is reaped: as long as it is a zombie, its process group's number is its own.
        """
        if self.returncode is None:
            pid = self._popen.pid
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._signal_group(signal.SIGKILL)
                self.returncode = self._popen.wait()
        return self.returncode

    def ask(self, number: int) -> None:
        """Send a signal to the rank itself."""
        if self.returncode is None:
            os.kill(self._popen.pid, number)

    def end(self, number: int) -> None:
        """Send a signal to the rank and everything that it started."""
        if self.returncode is None:
            self._signal_group(number)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)
