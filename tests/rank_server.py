"""The process that test ranks are forked from: it has imported torch, computed nothing, and owns one thread.

Started by `ranks.py` with `python rank_server.py REQUEST_FD REPLY_FD`. A request is a pickled dict; the reply is a list
of `(kind, rank, payload)`, one per rank in the order in which they ended, then the tail of what they printed. A process
that has computed hangs the ranks it forks (thread pools do not survive a fork), therefore the server imports no test
module and unpickles no argument: the ranks do.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from datetime import timedelta

import torch
import torch._dynamo  # the first optimizer step imports it: a second per rank unless the server has
import torch.distributed as dist
from rank_server_io import read_message, write_message

GRACE = 15.0
"""Seconds that the others have to end by themselves after the first failure."""


def run_rank(rank: int, size: int, listener: socket.socket, request: dict, reply: int) -> None:
    """The life of one forked rank; never returns. A failed rank leaves at once, so that its peers' connections break.

    One that is done stays until the server ends the group: rank 0 serves the store, and leaving is not a success's job.
    """
    os.setpgid(0, request["group"])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    try:
        sys.path[:] = request["path"]
        timeout = timedelta(seconds=request["timeout"])
        store = dist.TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            size,
            rank == 0,
            timeout,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()) if rank == 0 else None,
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        fn = importlib.import_module(request["module"])
        for name in request["qualname"].split("."):
            fn = getattr(fn, name)
        answer = ("ok", rank, pickle.dumps(fn(*pickle.loads(request["args"]))))
    except BaseException as error:
        answer = ("error", rank, (type(error).__qualname__, str(error), traceback.format_exc()))
    write_message(reply, pickle.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    while answer[0] == "ok":
        signal.pause()
    os._exit(0)


def serve_group(request: dict) -> list[tuple]:
    """Run one group, gather its answers, and leave none of its processes behind."""
    with tempfile.TemporaryFile() as output:
        pids, readers = fork_group(request, output.fileno())
        try:
            answers = gather(readers, request["timeout"])
        finally:
            os.killpg(pids[0], signal.SIGKILL)
            statuses = [os.waitpid(pid, 0)[1] for pid in pids]
            for reader in readers:
                os.close(reader)
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - 4000))
        tail = output.read().decode(errors="replace")
    return [describe(answer, statuses) for answer in answers] + [("output", -1, tail)]


def fork_group(request: dict, output: int) -> tuple[list[int], list[int]]:
    """Fork the ranks into a process group of their own; returns their pids and the pipes they answer on."""
    size = request["world_size"]
    pipes = [os.pipe() for _ in range(size)]
    pids: list[int] = []
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        for rank in range(size):
            request["group"] = pids[0] if pids else 0
            pid = os.fork()
            if pid == 0:
                os.dup2(output, 1)
                os.dup2(output, 2)
                for _, writer in pipes[:rank] + pipes[rank + 1 :]:
                    os.close(writer)  # else a dead rank's pipe would stay open
                run_rank(rank, size, listener, request, pipes[rank][1])
            if not pids:
                os.setpgid(pid, pid)
            pids.append(pid)
    for _, writer in pipes:
        os.close(writer)
    return pids, [reader for reader, _ in pipes]


def describe(answer: tuple, statuses: list[int]) -> tuple:
    """Say how a rank ended that sent no answer."""
    kind, rank, _ = answer
    if kind != "died":
        return answer
    return ("died", rank, f"ended without an answer (exit code {os.waitstatus_to_exitcode(statuses[rank])})")


def gather(readers: list[int], timeout: float) -> list[tuple]:
    """The ranks' answers in order of arrival; a rank silent at the deadline is reported as such."""
    answers: list[tuple] = []
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for rank, reader in enumerate(readers):
            selector.register(reader, selectors.EVENT_READ, rank)
        while selector.get_map():
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                late = sorted(key.data for key in selector.get_map().values())
                return answers + [("late", rank, "was still running at the deadline") for rank in late]
            for key, _ in events:
                selector.unregister(key.fd)
                message = read_message(key.fd)
                answer = ("died", key.data, "") if message is None else pickle.loads(message)
                if answer[0] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE)
                answers.append(answer)
    return answers


def main() -> None:
    torch.set_num_threads(1)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("importing torch started threads: ranks forked from here could hang")
    requests, replies = int(sys.argv[1]), int(sys.argv[2])
    write_message(replies, b"ready")
    while (message := read_message(requests)) is not None:
        write_message(replies, pickle.dumps(serve_group(pickle.loads(message))))


if __name__ == "__main__":
    main()
