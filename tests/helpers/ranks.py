"""`run_ranks(fn, world_size, *args)`: run an importable function on a group of gloo ranks, from any test.

The ranks are forked by a server process (`rank_server.py`), started once per session; pytest's own process never forks
ranks. Torch-free by itself.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rank_server_io import read_message, write_message


@dataclass(frozen=True)
class Failure:
    """How one rank failed. `kind` is the exception's name, or `died`, or `late` (still running at the deadline)."""

    rank: int
    kind: str
    message: str
    traceback: str = ""


class RanksFailed(Exception):
    """At least one rank failed. `failures` are in order of time: the first is the cause, the rest mostly echoes."""

    def __init__(self, failures: list[Failure], output: str) -> None:
        self.failures = failures
        first = failures[0]
        lines = [f"rank {first.rank} failed first: {first.kind}: {first.message}", first.traceback]
        lines += [
            f"then rank {f.rank}: {f.kind}: {f.message.splitlines()[0] if f.message else ''}" for f in failures[1:]
        ]
        super().__init__("\n".join(lines + (["--- output of the ranks", output] if output else [])))


class _Server:
    def __init__(self) -> None:
        request_reader, self.requests = os.pipe()
        self.replies, reply_writer = os.pipe()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_server.py")), str(request_reader), str(reply_writer)],
            pass_fds=(request_reader, reply_writer),
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        os.close(request_reader)
        os.close(reply_writer)
        if read_message(self.replies) != b"ready":
            raise RuntimeError("the rank server did not start")
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> list[tuple[str, int, Any]]:
        try:
            write_message(self.requests, pickle.dumps(request))
            reply = read_message(self.replies)
        except BaseException:  # a test's time is up: the next one must not read this one's reply
            self.process.kill()
            self.process.wait()
            raise
        if reply is None:
            raise RuntimeError("the rank server died")
        return pickle.loads(reply)

    def close(self) -> None:
        os.close(self.requests)
        self.process.wait()


_server: _Server | None = None


OVER = os.environ.get("PPCTL_TEST_RANKS", "gloo")
"""What ranks are: `gloo` (forked, on the CPU), `spawn` (the same, started anew), `nccl` (a GPU each), `shared` (all on
one GPU, over gloo)."""
GPUS = int(os.environ.get("PPCTL_TEST_GPUS", "0"))
"""With `nccl`: how many ranks there can be. More are a skip."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, over: str = OVER
) -> list[Any]:
    """Run `fn(*args)` on `world_size` ranks of a fresh world; returns their results in rank order.

    `fn` is a module-level function; arguments and results are pickled. Raises RanksFailed, first failure first, with
    the traceback; ranks still running after `timeout` seconds (or long after the first failure) are killed.
    """
    global _server
    if over == "nccl" and world_size > GPUS:
        pytest.skip(f"{world_size} ranks over NCCL need as many GPUs, and there are {GPUS}")
    if _server is None or _server.process.poll() is not None:
        _server = _Server()
    request = {
        "module": fn.__module__,
        "qualname": fn.__qualname__,
        "args": pickle.dumps(args),
        "world_size": world_size,
        "timeout": timeout,
        "over": over,
        "path": list(sys.path),
    }
    answers = _server.ask(request)
    *endings, (_, _, output) = answers
    failures = [_failure(*ending) for ending in endings if ending[0] != "ok"]
    if failures:
        raise RanksFailed(failures, output.strip())
    return [pickle.loads(payload) for _, _, payload in sorted(endings, key=lambda ending: ending[1])]


def _failure(kind: str, rank: int, payload: Any) -> Failure:
    return Failure(rank, *payload) if kind == "error" else Failure(rank, kind, payload)
