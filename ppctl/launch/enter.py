"""`python -m ppctl.launch.enter RUN --code DIGEST`: the first step of a submitted job, once on every node.

The node must see the run directory, and its ppctl must be the one that was submitted (a job may wait for hours, and
must not run what somebody has edited since). It prints one line on stdout: the node's name, or a problem, which also
gives the exit code.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, PpctlError, Problem, pasted
from ppctl.launch.run_directory import with_value
from ppctl.runs import run_starts
from ppctl.runs.checkpoint_folder import AUTO
from ppctl.runs.finding import last_checkpoint
from ppctl.runs.heartbeat import host_name
from ppctl.runs.rundir import RunDir, unwritable

LIVE = "live"
_PACKAGE = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None) -> int:
    """Check this node; the first node also prepares the run directory for this start of the job."""
    parser = argparse.ArgumentParser(prog="python -m ppctl.launch.enter")
    parser.add_argument("run", type=Path)
    parser.add_argument("--code", required=True, help="the digest that was submitted, or live")
    args = parser.parse_args(argv)
    try:
        check_node(RunDir(args.run), args.code)
        if int(os.environ.get("SLURM_NODEID", 0)) == 0:
            _prepare(RunDir(args.run))
    except PpctlError as error:
        print(f"error {error.problems[0]}".replace("\n", "; "))
        return error.exit_code
    print(host_name())
    return 0


def _prepare(run: RunDir) -> None:
    """Begin this start of the job in its run directory. Raises ConfigError (PP-E610) if this cannot be written."""
    try:
        run_starts.write_secret(run)
        go_on(run, run_starts.slurm_start() or "")
    except OSError as error:
        raise unwritable(error, run.path, f"df -h {pasted(run.path)}", str(run.path)) from error


def check_node(run: RunDir, code: str = LIVE, remedy: str = "ppctl submit again, or launch.code=live") -> None:
    """Raise ConfigError if this node does not see the run (PP-E623) or has other code than `code` (PP-E624)."""
    if not (run.path / "config.yaml").is_file():
        message = f"node {host_name()} does not see the run directory"
        shared = "log.dir=DIR on a file system that all nodes share"
        raise ConfigError(Problem("PP-E623", message, shared, str(run.path)))
    own = package_digest()
    if code not in (LIVE, own):
        message = f"ppctl's code on {host_name()} is {own}, but {code} was submitted: it has changed since"
        raise ConfigError(Problem("PP-E624", message, remedy, str(_PACKAGE)))


def package_digest(package: Path = _PACKAGE) -> str:
    """16 hex digits of the SHA-256 of names and contents of the package's Python files, installed or in a checkout."""
    total = hashlib.sha256()
    for file in sorted(file for file in package.rglob("*.py") if file.parent.name not in ("_conf", "_recipes")):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{file.relative_to(package).as_posix()} {content}\n".encode())
    return total.hexdigest()[:16]


def code_of(config: RunConfig) -> str:
    """The digest that the code on all nodes must have, or `live`."""
    return LIVE if config.launch.code == LIVE else package_digest()


def go_on(run: RunDir, start: str) -> None:
    """Set the run to go on from its last checkpoint, if it has one, and clear the outcome of its last start."""
    run_starts.begin_start(run, start)
    run_starts.sweep(run)
    last, config = last_checkpoint(run), run.read_config()
    if last is not None and config.checkpoint.resume not in (AUTO, str(last)):
        run.write_config(with_value(config, "checkpoint", resume=str(last)))
    run.write_status("starting", job=os.environ.get("SLURM_JOB_ID"))


if __name__ == "__main__":
    sys.exit(main())
