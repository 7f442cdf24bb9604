"""The process that test ranks are forked from: it has imported torch and ppctl, computed nothing, and owns one thread.

Ranks that use a GPU, or are to be processes of their own, are not forked but started anew (`spawn_group`).

Started by `ranks.py` with `python rank_server.py REQUEST_FD REPLY_FD`. A request is a pickled dict; the reply is a list
of `(kind, rank, payload)`, one per rank in the order in which they ended, then the tail of what they printed. A process
that has computed hangs the ranks it forks (thread pools do not survive a fork), therefore the server imports no test
module and unpickles no argument: the ranks do.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
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
import torch.distributed as dist
from rank_server_io import read_message, write_message
from torch.overrides import TorchFunctionMode

IMPORTED_ONCE = ("torch._dynamo", "pytest", "ppctl.train.loop", "ppctl.rank.worker", "ppctl.checkpoint.saver")
"""What forked ranks need not import again: the first for an optimizer's first step, the others for a test's module.
They would be most of a rank's seconds."""
IMPORTED_IF_THERE = ("transformers.modeling_utils",)
"""What ranks of foreign models need not import again, where it is installed."""

GRACE = 15.0
"""Seconds that the others have to end by themselves after the first failure."""


STARTING = 120.0
"""Seconds that ranks which are started anew have to import torch, in which they are no less alive."""


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
        settle(request["over"], rank)
        backend = "cpu:gloo,cuda:nccl" if request["over"] == "nccl" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        fn = importlib.import_module(request["module"])
        for name in request["qualname"].split("."):
            fn = getattr(fn, name)
        answer = ("ok", rank, packed(fn(*pickle.loads(request["args"]))))
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
        make_group = fork_group if request["over"] == "gloo" else spawn_group
        pids, readers = make_group(request, output.fileno())
        try:
            answers = gather(readers, request["timeout"] + (0 if make_group is fork_group else STARTING))
        finally:
            os.killpg(pids[0], signal.SIGKILL)
            statuses = [os.waitpid(pid, 0)[1] for pid in pids]
            for reader in readers:
                os.close(reader)
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - 4000))
        tail = output.read().decode(errors="replace")
    # Who left without a word comes first: a rank that fails because of another one always says so.
    answers.sort(key=lambda answer: answer[0] != "died")
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


def spawn_group(request: dict, output: int) -> tuple[list[int], list[int]]:
    """The same with ranks that are started anew: CUDA does not survive a fork."""
    size = request["world_size"]
    pipes = [os.pipe() for _ in range(size)]
    pids: list[int] = []
    request["group"] = 0
    text = os.memfd_create("request", 0)
    os.write(text, pickle.dumps(request))
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        listener.set_inheritable(True)
        for rank in range(size):
            _, writer = pipes[rank]
            os.set_inheritable(writer, True)
            numbers = map(str, (rank, listener.fileno(), text, writer))
            onto = [(os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)]
            leader = pids[0] if pids else 0
            command = [sys.executable, __file__, "--rank", *numbers]
            pids.append(os.posix_spawn(sys.executable, command, os.environ, file_actions=onto, setpgroup=leader))
            os.close(writer)
    os.close(text)
    return pids, [reader for reader, _ in pipes]


def be_spawned(rank: int, listener: int, text: int, reply: int) -> None:
    """The life of a rank that was started anew."""
    request = pickle.loads(os.pread(text, os.fstat(text).st_size, 0))
    request["group"] = os.getpgid(0)
    torch.set_num_threads(1)
    run_rank(rank, request["world_size"], socket.socket(fileno=listener), request, reply)


class OnDevice(TorchFunctionMode):
    """What a test draws from a generator of the CPU has its numbers, and lies on the default device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("generator") is None or "device" in kwargs:
            return function(*args, **kwargs)
        wants = kwargs.pop("requires_grad", False)
        return function(*args, **kwargs, device="cpu").to(torch.get_default_device()).requires_grad_(wants)


def settle(over: str, rank: int) -> None:
    """Let tensors lie where the ranks are to work: on a GPU each, all on one, or on the CPU."""
    if over == "gloo":
        return
    if over in ("nccl", "shared"):
        torch.cuda.set_device(rank % torch.cuda.device_count() if over == "nccl" else 0)
        torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
    OnDevice().__enter__()


class Packer(pickle.Pickler):
    """Takes tensors off the GPU: who reads them has none."""

    def reducer_override(self, value):
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def packed(value: object) -> bytes:
    text = io.BytesIO()
    Packer(text).dump(value)
    return text.getvalue()


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
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    for name in IMPORTED_IF_THERE:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("importing torch started threads: ranks forked from here could hang")
    requests, replies = int(sys.argv[1]), int(sys.argv[2])
    write_message(replies, b"ready")
    while (message := read_message(requests)) is not None:
        write_message(replies, pickle.dumps(serve_group(pickle.loads(message))))


if __name__ == "__main__":
    be_spawned(*map(int, sys.argv[2:])) if sys.argv[1] == "--rank" else main()
