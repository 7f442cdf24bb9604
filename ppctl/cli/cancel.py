"""`ppctl cancel [RUN]`: end a run's job; its ranks may still save."""

from __future__ import annotations

import argparse

from ppctl.cli.jobs import add_run, meant, must_be_submitted, together


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    add_run(parser)


def run(args: argparse.Namespace) -> int:
    """Cancel. A job that has ended is left as it is."""
    from ppctl.launch import slurm

    found = must_be_submitted(meant(args), "cancel")
    if found.state is None or found.state.ended:
        said = found.run.status()["state"]
        print(
            f"job {found.job} has ended: run {found.run.id} is {said if found.state is None else together(said, found)}"
        )
        return 0
    if found.state.ending:
        print(f"job {found.job} is ending already")
        return 0
    waiting = found.state.state == "PENDING"
    slurm.cancel(found.job, found.cluster)
    if waiting:
        found.run.write_status("interrupted", step=found.run.status().get("step"), message="cancelled before it ran")
    print(f"job {found.job} is cancelled" + ("" if waiting else "; its ranks have until SLURM's KillWait to save"))
    return 0
