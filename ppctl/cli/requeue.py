"""`ppctl requeue [RUN]`: let a submitted run go on.

One that runs saves and starts again; one that has ended is submitted again. Must not know how either is done.
"""

from __future__ import annotations

import argparse

from ppctl.cli.jobs import add_run, meant, must_be_submitted
from ppctl.errors import ConfigError, Problem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    add_run(parser)


def run(args: argparse.Namespace) -> int:
    """Requeue. Raises ConfigError where the run has done its steps."""
    from ppctl.cli.submit import hand_over
    from ppctl.launch import slurm
    from ppctl.launch.prepare import last_checkpoint

    found = must_be_submitted(meant(args), "requeue")
    going_on = found.run
    if found.state is not None and not found.state.ended:
        if found.state.state == "PENDING":
            print(f"job {found.job} is waiting already")
            return 0
        if found.state.ending:
            message = f"job {found.job} is ending, and cannot be requeued before it has ended"
            raise ConfigError(Problem("PP-E613", message, f"ppctl status {going_on.path}", str(going_on.path)))
        slurm.signal(found.job, "USR1", found.cluster)
        print(f"job {found.job} was asked to save; its script then requeues it")
        return 0
    if going_on.status()["state"] == "finished":
        steps = going_on.read_config().train.steps
        message = f"run {going_on.id} has done its {steps} steps"
        raise ConfigError(Problem("PP-E618", message, f"ppctl resume {going_on.path} steps={2 * steps}"))
    last = last_checkpoint(going_on)
    hand_over(going_on)
    print(f"job {going_on.job()['job']} goes on from {last.name if last else 'the beginning'}\nrun {going_on.path}")
    return 0
