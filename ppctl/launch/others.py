"""Becoming a worker, in a process that torchrun, srun or another scheduler has started as one rank.

Knows how the process turns into `python -m ppctl.rank.worker`. Must not know configs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

from ppctl.launch.environment import Started, usual
from ppctl.launch.process import dies_with_its_parent


def become_worker(started: Started, *arguments: str, environment: Mapping[str, str] | None = None) -> NoReturn:
    """Replace this process by a worker of the same rank: `--publish DIR`, `--join` or `--refuse CODE`.

    `environment` is `launch.env`. SIGTERM and SIGUSR1, which mean "save and leave", are kept back until the worker
    hears them: none is lost while it starts.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
    if started.by == "torchrun":  # its agent is this process's parent, and nobody else ends the ranks of a killed one
        dies_with_its_parent()()
    variables = usual() | dict(os.environ) | dict(environment or {}) | dict(started.variables)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", "ppctl.rank.worker", *arguments], variables)
