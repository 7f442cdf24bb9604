"""`python -m ppctl.launch.pod RUN --code DIGEST --files DIR`: the program of a pod, one node of a run in a cluster.

    enter    pod 0 makes the run directory, if there is none yet, and begins a start; each pod checks its code
    agent    torchrun starts this node's ranks (`ppctl.launch.rank`), and ends as they do
    leave    what the ranks have written says how it went: it is over, or all begin once more

A pod that is told to go has its ranks save: all ranks of the run stop at one step, and the other pods wait for the one
that takes its place. If pod 0, which has the rendezvous, does not come back, the others end with GO_ON.
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
from ppctl.errors import PpctlError
from ppctl.host.files import read_text
from ppctl.host.processes import python
from ppctl.launch.enter import check_node, go_on
from ppctl.launch.environment import Started
from ppctl.launch.leave import job_outcome
from ppctl.launch.outcome import DONE, FINAL, GO_ON, TERMINATED, JobOutcome
from ppctl.launch.planning import refuse
from ppctl.launch.run_directory import Launch, new_run
from ppctl.plan import Plan
from ppctl.records.json_reader import parse
from ppctl.records.run_records import ASKED_WORDS
from ppctl.runs import fence
from ppctl.runs.heartbeat import host_name
from ppctl.runs.rundir import RunDir

_PAUSE = 1.0
"""Seconds between looks whether pod 0 answers, and before the next start, in which other pods see that this is over."""


def main(argv: Sequence[str] | None = None) -> int:
    """Be this pod's node to the end of the run; returns the pod's exit code."""
    parser = argparse.ArgumentParser(prog="python -m ppctl.launch.pod")
    parser.add_argument("run", type=Path)
    parser.add_argument("--code", required=True, help="the digest that was submitted, or live")
    parser.add_argument("--files", type=Path, required=True, help="where the ConfigMap is")
    args = parser.parse_args(argv)
    pod = _Pod(RunDir(args.run), args.files)
    signal.signal(signal.SIGTERM, pod.go)
    try:
        return pod.live(args.code)
    except PpctlError as error:
        print("\n".join(f"error {problem}" for problem in error.problems), file=sys.stderr)
        return error.exit_code


class _Pod:
    def __init__(self, run: RunDir, files: Path) -> None:
        self.run, self.files = run, files
        self.config = from_mapping(read_yaml((files / "config.yaml").read_text(encoding="utf-8"))[0])
        self.limit, self.index = seconds(self.config.launch.start_limit), int(os.environ["PET_NODE_RANK"])
        self.told_to_go = False
        self._agent: subprocess.Popen[bytes] | None = None

    def go(self, *_: object) -> None:
        """The cluster ends this pod: its ranks save. The agent itself is not told, since others' wait for it to end."""
        self.told_to_go = True
        if self._agent is not None and self._agent.poll() is None:
            with suppress(OSError):  # they end meanwhile
                tasks = Path(f"/proc/{self._agent.pid}/task").glob("*/children")
                for number in [int(rank) for task in tasks for rank in task.read_text().split()] or [self._agent.pid]:
                    os.kill(number, signal.SIGTERM)

    def live(self, digest: str) -> int:
        """Run agents until the run is over or this pod has to go; returns the exit code. Raises PpctlError."""
        most, lives = self.config.launch.max_requeues, 0
        while lives <= most:
            began = time.monotonic()
            if self.index == 0:
                self._begin()
            elif not self._answered():
                return TERMINATED if self.told_to_go else GO_ON
            check_node(self.run, digest)
            code = self._run_agent()
            over = JobOutcome(DONE, "finished")  # whatever a rank of an earlier start may have said since
            outcome = over if self.is_finished else job_outcome(self.run, code, ended=self.told_to_go)
            if (end := self._end_of(outcome)) is not None:
                return end
            # To have waited in vain, for a pod that no machine has room for, is no start.
            lives += bool(self.run.heartbeats()) or time.monotonic() - began < self.limit
            print(f"note: once more, start {lives + 1}: {outcome.report or 'all have saved'}", file=sys.stderr)
            time.sleep(_PAUSE)
        print(f"error PP-E626: its ranks have started {lives} times (launch.max_requeues={most})", file=sys.stderr)
        return self._leave(outcome, 1)

    def _begin(self) -> None:
        """Begin a start of all pods' ranks, before this pod's agent listens, for which the others wait."""
        if not (self.run.path / "config.yaml").is_file():
            from ppctl.data.load import examine

            data, problems = examine(self.config)
            refuse(problems)
            plan = Plan.from_json(parse(gzip.decompress((self.files / "plan.json.gz").read_bytes())))
            command = (self.files / "command.txt").read_text(encoding="utf-8")
            new_run(Launch(self.config, plan, command, data), Started("env", run_id=self.run.id))
        if not self.is_finished:
            go_on(self.run, f"{host_name()}.{time.time():.0f}")

    @property
    def is_finished(self) -> bool:
        return self.run.result().get("state") == "finished"

    def _end_of(self, outcome: JobOutcome) -> int | None:
        """The exit code with which this pod ends now; None if its ranks are to start once more."""
        if outcome.exit_code == DONE or outcome.exit_code in FINAL:
            return self._leave(outcome, outcome.exit_code)
        if outcome.state == "stopped" and self.run.status().get("message") == ASKED_WORDS:
            return self._leave(outcome, DONE)
        return self._leave(outcome, TERMINATED) if self.told_to_go else None

    def _leave(self, outcome: JobOutcome, code: int) -> int:
        print(outcome.report or f"this pod's part is over: {outcome.state}", file=sys.stderr)
        if self.index == 0:
            outcome.write(self.run, ())
        return code

    def _run_agent(self) -> int:
        """Start this node's ranks, unless they have done all before; returns the agent's exit code."""
        if self.told_to_go or self.is_finished:
            return TERMINATED
        agent = [*python("torch.distributed.run"), "-m", "ppctl.launch.rank", str(self.run.path)]
        start = fence.variables(read_text(self.run.path / "life"), self.run.path)
        self._agent = subprocess.Popen(agent, env=dict(os.environ) | self.config.launch.env | dict(start))
        if self.told_to_go:  # meanwhile
            self.go()
        return self._agent.wait()

    def _answered(self) -> bool:
        """Wait until pod 0's agent listens, or all is done; returns whether it does within the time for a start."""
        until = time.monotonic() + self.limit
        address = os.environ["PET_MASTER_ADDR"], int(os.environ["PET_MASTER_PORT"])
        while not self.told_to_go and time.monotonic() < until:
            if self.is_finished:
                return True
            with suppress(OSError):
                socket.create_connection(address, 5).close()
                return True
            time.sleep(_PAUSE)
        return False


if __name__ == "__main__":
    sys.exit(main())
