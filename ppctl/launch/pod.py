"""`python -m ppctl.launch.pod RUN --code DIGEST --files DIR --first N`: the program of a pod, a host of a run.

    enter    pod 0 makes the run directory, if there is none yet; each pod checks its code
    agent    `ppctl.agent` starts this host's ranks, again and again, to the end of the run
    leave    the pod has the agent's exit code, unless the rendezvous, in pod 0, was lost: then all meet anew

A pod that is asked to end has its ranks save: all ranks of the run stop at one step, and go on when a new pod has come.
If pod 0 does not come back, the others end with GO_ON.
"""

from __future__ import annotations

import argparse
import gzip
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ppctl.config.mapping import from_mapping
from ppctl.config.quantities import seconds
from ppctl.config.yaml_file import read_yaml
from ppctl.errors import PpctlError, visible
from ppctl.host.processes import python
from ppctl.launch.enter import check_node
from ppctl.launch.environment import Started
from ppctl.launch.outcome import DONE, GO_ON, RESTART, TERMINATED
from ppctl.launch.planning import refuse
from ppctl.launch.run_directory import Launch, new_run
from ppctl.plan import Plan
from ppctl.records.json_reader import parse
from ppctl.runs.rundir import RunDir

_PAUSE, _ARRIVAL = 1.0, 60.0
"""Seconds between checks that pod 0 answers, and before the next meeting; and seconds within which a directory that
pod 0 has made is seen here, since NFS caches that it was missing."""
_SHORT, _MOST_SHORT = 60.0, 5
"""An agent that ends sooner has done nothing; after more of these in a row this pod ends, as the cause stays here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Do this pod's part of the run to its end; returns the pod's exit code."""
    parser = argparse.ArgumentParser(prog="python -m ppctl.launch.pod")
    parser.add_argument("run", type=Path)
    parser.add_argument("--code", required=True, help="the digest that was submitted, or live")
    parser.add_argument("--files", type=Path, required=True, help="where the ConfigMap is")
    parser.add_argument("--first", type=int, required=True, help="how many hosts are before those of this pod's Job")
    args = parser.parse_args(argv)
    pod = _Pod(RunDir(args.run), args.files, args.first)
    signal.signal(signal.SIGTERM, pod.go)
    try:
        return pod.live(args.code)
    except PpctlError as error:
        print("\n".join(f"error {problem}" for problem in error.problems), file=sys.stderr)
        return error.exit_code
    except OSError as error:  # the JobSet makes all pods anew, and another try may succeed
        print(visible(f"note: this pod cannot use the run directory {args.run}: {error}"), file=sys.stderr)
        return GO_ON


class _Pod:
    def __init__(self, run: RunDir, files: Path, first: int) -> None:
        self.run, self.files = run, files
        self.config = from_mapping(read_yaml((files / "config.yaml").read_text(encoding="utf-8"))[0])
        self.index = first + int(os.environ["PET_NODE_RANK"])
        self.told_to_go = False
        self._agent: subprocess.Popen[bytes] | None = None

    def go(self, *_: object) -> None:
        """Handle the cluster's request to end: the agent has the ranks save."""
        self.told_to_go = True
        if self._agent is not None and self._agent.returncode is None:
            self._agent.terminate()

    def live(self, digest: str) -> int:
        """Run agents until the run is over or this pod has to go; returns the exit code, which is GO_ON if the JobSet
        must restart. Raises PpctlError."""
        short = 0
        while self._can_meet():
            if self._is_finished:
                return DONE
            if self.index == 0:
                self._prepare_directory()
            until = time.monotonic() + _ARRIVAL
            while not self._has_directory and time.monotonic() < until:
                time.sleep(_PAUSE)
            check_node(self.run, digest)
            began, code = time.monotonic(), self._run_agent()
            short = short + 1 if time.monotonic() - began < _SHORT else 0
            if code == RESTART or short > _MOST_SHORT:
                break
            if code != GO_ON or self.index == 0:
                return code if code >= 0 else 128 - code
            time.sleep(_PAUSE)
        return TERMINATED if self.told_to_go else GO_ON

    @property
    def _is_finished(self) -> bool:
        return self.run.result().get("state") == "finished"

    @property
    def _has_directory(self) -> bool:
        return (self.run.path / "config.yaml").is_file()

    def _prepare_directory(self) -> None:
        from ppctl.data.load import examine

        if self._has_directory:
            self.run.write_status("starting")
            return
        data, problems = examine(self.config)
        refuse(problems)
        plan = Plan.from_json(parse(gzip.decompress((self.files / "plan.json.gz").read_bytes())))
        command = (self.files / "command.txt").read_text(encoding="utf-8")
        new_run(Launch(self.config, plan, command, data), Started("env", run_id=self.run.id))

    def _run_agent(self) -> int:
        """Run this host's agent to its end; returns its exit code."""
        variables = os.environ | {"PET_NODE_RANK": str(self.index)}
        self._agent = subprocess.Popen([*python("ppctl.agent"), "--submitted", str(self.run.path)], env=variables)
        if self.told_to_go:  # while it started
            self.go()
        # As the first process of a container it must reap the children of dead ranks.
        with suppress(ChildProcessError):
            while self._agent.returncode is None:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
                if ended is None or ended.si_pid == self._agent.pid:
                    break
                os.waitpid(ended.si_pid, 0)
        return self._agent.wait()

    def _can_meet(self) -> bool:
        """Wait until pod 0's agent listens (on pod 0: until its name resolves), or the run is over; returns whether
        this happens within the time for a start."""
        until = time.monotonic() + seconds(self.config.launch.start_limit)
        address = os.environ["PET_MASTER_ADDR"], int(os.environ["PET_MASTER_PORT"])
        while not self.told_to_go and time.monotonic() < until:
            if self._is_finished:
                return True
            with suppress(OSError):
                if self.index == 0:
                    socket.getaddrinfo(*address)
                else:
                    socket.create_connection(address, 5).close()
                return True
            time.sleep(_PAUSE)
        return False


if __name__ == "__main__":
    sys.exit(main())
