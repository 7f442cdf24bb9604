"""One rank as a process: started by the local launcher, or this process, which becomes a rank."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn, TextIO, cast

from ppctl.host.files import silence
from ppctl.host.processes import python
from ppctl.launch.environment import Started, default_variables

_PR_SET_PDEATHSIG = 1
LAST_LINES = 2.0
"""Seconds to wait for the end of a rank's output after the rank has ended."""


def become_worker(started: Started, *arguments: str, environment: Mapping[str, str] | None = None) -> NoReturn:
    """Replace this process by `python -m ppctl.rank.worker` with `arguments` and the same rank.

    The arguments are `--publish DIR`, `--join` or `--refuse CODE`; `environment` is `launch.env`. SIGTERM and SIGUSR1,
    which mean "save and leave", stay blocked until the worker handles them, so that none is lost.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
    if started.by == "torchrun":  # its agent is the parent, and nothing else ends the ranks of a killed agent
        _parent_death_signal()()
    variables = default_variables() | dict(os.environ) | dict(environment or {}) | dict(started.variables)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [*python("ppctl.rank.worker"), *arguments], variables)


def _parent_death_signal() -> Callable[[], None]:
    """A function that asks the kernel to kill the calling process when its parent dies (Linux only; survives exec). The
    C library is loaded here, since between fork and exec that is not safe."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def arrange() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return arrange


def _before_exec(waits: bool) -> Callable[[], None]:
    """Return the function that the child runs between fork and exec; libraries are loaded in the parent. SIGTERM and
    SIGUSR1 mean "save and leave": the child ignores them until the worker can handle them; a standby (`waits`) keeps
    them pending. The kernel kills the child when the launcher dies; if it has died already, the child exits."""
    launcher = os.getpid()
    arrange = _parent_death_signal()

    def prepare() -> None:
        arrange()
        if os.getppid() != launcher:
            os._exit(1)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # an agent blocks it while it forks
        if waits:
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))

    return prepare


class RankProcess:
    """A started rank in a session of its own. Start all ranks before any thread: a child runs Python before exec."""

    _waits = False

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path, piped: bool
    ) -> None:
        self.rank = rank
        self.returncode: int | None = None
        """The rank's exit code, negative for a signal; None until `poll` has seen the rank's end."""
        with open(log, "ab") as file:
            self._popen = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.PIPE if self._waits else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else file,
                stderr=file,
                start_new_session=True,
                preexec_fn=_before_exec(self._waits),
            )
        self.stdout: IO[bytes] | None = self._popen.stdout
        """The pipe of a piped rank."""

    def poll(self) -> int | None:
        """The return code once the rank has ended, else None. What is left of its process group is killed first."""
        # While the rank is a zombie, no other process group can have its number.
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self.returncode is None and os.waitid(os.P_PID, self._popen.pid, flags) is not None:
            self.send_to_group(signal.SIGKILL)
            self.returncode = self._popen.wait()
        return self.returncode

    def send(self, number: int) -> None:
        """Send a signal to the rank itself."""
        if self.returncode is None:
            os.kill(self._popen.pid, number)

    def send_to_group(self, number: int) -> None:
        """Send a signal to the rank and to its process group."""
        if self.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, number)


class Standby(RankProcess):
    """A process that imports a rank's modules, at a lower priority if `nice`, and waits to `become` a rank.
    `environment` has the variables that must be set at its start."""

    _waits = True

    def __init__(self, environment: Mapping[str, str], nice: int) -> None:
        command = [*python("ppctl.rank.standby"), "ppctl.rank.worker", str(nice)]
        super().__init__(-1, command, environment, Path(os.devnull), piped=True)
        self.environment = environment

    def become(self, rank: int, arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        """Make the process this rank, even if it still imports; never waits. If the process has died, so has the
        rank."""
        self.rank = rank
        message = {"variables": dict(variables), "arguments": arguments, "log": str(log), "prints": rank == 0}
        with suppress(BrokenPipeError), cast(IO[bytes], self._popen.stdin) as pipe:
            pipe.write(json.dumps(message).encode())


def writer_to(out: TextIO) -> Callable[[str], None]:
    """A function that writes text to a stream and flushes it. If the stream's reader has gone, it raises OSError or
    ValueError, and later output is discarded."""

    def write(text: str) -> None:
        try:
            out.write(text)
            out.flush()
        except (OSError, ValueError):
            silence(out)
            raise

    return write


def copy_lines(source: IO[bytes] | None, show: Callable[[str], None]) -> threading.Thread:
    """Start a thread that passes a rank's output to `show` line by line, so that a stopped terminal never blocks the
    launcher. Once `show` has raised OSError or ValueError, the rest is read and dropped."""

    def run() -> None:
        lost = False
        for line in source or ():
            if not lost:
                try:
                    show(line.decode(errors="replace"))
                except (OSError, ValueError) as error:
                    lost = True
                    _warn_of_lost_lines(error)

    thread = threading.Thread(target=run, name="output", daemon=True)
    thread.start()
    return thread


def _warn_of_lost_lines(error: Exception) -> None:
    why = error.strerror if isinstance(error, OSError) else error
    with suppress(OSError, ValueError):
        text = f"note: stdout cannot be written any more ({why}); the run goes on: `ppctl logs -f` shows it, `kill"
        print(f"{text} {os.getpid()}` saves and ends it", file=sys.stderr, flush=True)
