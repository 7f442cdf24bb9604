"""`python -m ppctl.launch.rank RUN`: the second step of a submitted job. Each task of its srun becomes one rank, and
in a pod each process of torchrun.

Its stderr, and the stdout of all ranks but 0, go to the rank's own log; rank 0's step lines go to the job's log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ppctl.launch.environment import detect, slurm_rank
from ppctl.launch.process import become_worker
from ppctl.runs import fence
from ppctl.runs.run_starts import slurm_start
from ppctl.runs.rundir import RunDir


def main(argv: Sequence[str] | None = None) -> int:
    """Send this task's output to its logs, and replace this process by the rank's worker."""
    (path,) = sys.argv[1:] if argv is None else argv
    started = detect(os.environ) if "TORCHELASTIC_RUN_ID" in os.environ else slurm_rank(os.environ)
    run = RunDir(Path(path))
    log = os.open(run.log(started.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stderr.fileno())
    if started.rank != 0:
        os.dup2(log, sys.stdout.fileno())
    own = {} if started.by == "torchrun" else fence.variables(slurm_start() or "", run.path)  # pods know their start
    become_worker(started, "--submitted", str(run.path), environment=own)


if __name__ == "__main__":
    sys.exit(main())
