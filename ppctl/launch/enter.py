"""`python -m ppctl.launch.enter RUN --code DIGEST`: once on every node of a submitted job, before its ranks start.

Knows what must hold on a node: it sees the run, and its ppctl is the one that was submitted, because a job that starts
hours later must not run what somebody has edited since. And, on the first node, how a run directory is set to go on.
Must not import torch. Prints one sentence on stdout and leaves with 1 where this node must not run the ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ppctl import run_starts
from ppctl.errors import ConfigError, PpctlError, Problem
from ppctl.heartbeat import host_name
from ppctl.launch.prepare import with_value
from ppctl.rundir import RunDir
from ppctl.runs import last_checkpoint

LIVE = "live"
_PACKAGE = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None) -> int:
    """Check this node; the first one also prepares the run directory for this life of the run."""
    parser = argparse.ArgumentParser(prog="python -m ppctl.launch.enter")
    parser.add_argument("run", type=Path)
    parser.add_argument("--code", required=True, help="the digest that was submitted, or live")
    args = parser.parse_args(argv)
    try:
        problem = wrong_here(RunDir(args.run), args.code)
        if problem is not None:
            raise ConfigError(problem)
        if int(os.environ.get("SLURM_NODEID", 0)) == 0:
            go_on(RunDir(args.run))
    except PpctlError as error:
        print(f"error {error.problems[0]}".replace("\n", "; "))
        return error.exit_code
    return 0


def wrong_here(run: RunDir, code: str) -> Problem | None:
    """What keeps this node from running the job, or None."""
    if not (run.path / "config.yaml").is_file():
        message = f"node {host_name()} does not see the run directory"
        return Problem("PP-E623", message, "log.dir=DIR on a file system that all nodes share", str(run.path))
    found = package_digest()
    if code not in (LIVE, found):
        message = f"ppctl's code on {host_name()} is {found}, and {code} was submitted: it has changed since"
        return Problem("PP-E624", message, "ppctl submit again, or launch.code=live", str(Path(__file__).parent.parent))
    return None


def package_digest(package: Path = _PACKAGE) -> str:
    """16 hex digits of the SHA-256 over names and contents of the package's Python files."""
    total = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{file.relative_to(package).as_posix()} {content}\n".encode())
    return total.hexdigest()[:16]


def go_on(run: RunDir) -> None:
    """Let the run go on from its last checkpoint, if it has one, and forget how its last life ended."""
    run_starts.begin_start(run, run_starts.slurm_start() or "")
    run_starts.sweep(run)
    last, config = last_checkpoint(run), run.read_config()
    if last is not None and config.checkpoint.resume != str(last):
        run.write_config(with_value(config, "checkpoint", resume=str(last)))
    run.write_status("starting", job=os.environ.get("SLURM_JOB_ID"))


if __name__ == "__main__":
    sys.exit(main())
