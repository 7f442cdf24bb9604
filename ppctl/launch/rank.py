"""`python -m ppctl.launch.rank RUN`: one task of a submitted job's srun becomes one rank.

Knows SLURM's variables and where a rank's output goes. Must not know configs or torch. Everything on stderr, and all
that ranks other than 0 print, goes to the rank's own log; rank 0's step lines go to the job's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ppctl.launch.environment import slurm_rank
from ppctl.launch.others import become_worker
from ppctl.rundir import RunDir


def main(argv: Sequence[str] | None = None) -> int:
    """Become the worker of this rank."""
    (path,) = sys.argv[1:] if argv is None else argv
    run, started = RunDir(Path(path)), slurm_rank(os.environ)
    log = os.open(run.log(started.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stderr.fileno())
    if started.rank != 0:
        os.dup2(log, sys.stdout.fileno())
    become_worker(started, "--submitted", str(run.path))


if __name__ == "__main__":
    sys.exit(main())
