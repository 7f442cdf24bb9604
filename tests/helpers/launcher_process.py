"""A launcher in a process of its own, for tests that send it signals.

python launcher_process.py RUN WORLD BEHAVIOUR...

The file `directory` in the run says which directory the start has on this machine.
"""

import os
import sys
from pathlib import Path

from ppctl.errors import PpctlError
from ppctl.host.private_files import own_directory, shared_memory
from ppctl.launch.watch import LocalJob, supervise
from ppctl.runs.rundir import RunDir

run, world, *behaviours = sys.argv[1:]
actor = Path(__file__).with_name("acting_rank.py")
try:
    with own_directory(shared_memory()) as directory:
        (Path(run) / "directory").write_text(str(directory))
        job = LocalJob(
            RunDir(Path(run)),
            int(world),
            directory,
            command=(sys.executable, str(actor), run, *behaviours),
            environment={"COLOUR": "green", "OMP_NUM_THREADS": "3"},
            stop_grace=float(os.environ.get("STOP_GRACE", "4")),
            kill_grace=1.0,
        )
        outcome = supervise(job)
except PpctlError as error:
    print(f"error {error}", file=sys.stderr)
    sys.exit(error.exit_code)
print(outcome.report, file=sys.stderr)
sys.exit(outcome.exit_code)
