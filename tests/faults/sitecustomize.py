"""Faults for ranks that a test starts with this directory on PYTHONPATH; python imports this file by itself.

PPCTL_FAULT is `KIND RANK STEP ACTION`, as `raise 1 2 3B0`: on that rank, in that step, when that action begins. Kinds:
raise, kill (SIGKILL), stop (SIGSTOP), hold (a C call that never returns and holds the GIL), slow (every forward
takes a tenth of a second longer, from that step on), deaf-N and cut-N (the connections with rank N lose everything; are
shut), stall-AXIS and die-AXIS (held, or killed, when its next exchange along tp, cp, ep or etp starts), full (no room
on the disk for metrics any more), dumb (nor for this rank's log, to which every step then writes), noise (from that
step on, every stage input is noise), nan (the stage's output), save (SIGKILL in the STEP-th save, when this rank's
tensors are written), writer (SIGKILL of the node's writer then), room (no room for them), change (SIGKILL of the writer
before the STEP-th change of a directory), update (raise in the STEP-th optimizer step), unsummed (from the STEP-th step
on, counted from 1, all ranks leave out one sum of gradients between them: ACTION is `ties`, `tp` or `dp`), shifted
(the labels
of a job of several ranks are those of one position further on).
PPCTL_WATCH is a file to which the rank appends every path that it opens for writing from its second step on.
PPCTL_TELL is a directory in which every rank that finds it at its start leaves a file with its number.
"""

import glob
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps

_IS_WRITER = "ppctl.checkpoint.writer" in sys.orig_argv


def _arm() -> None:
    import torch

    from ppctl.engine.interpreter import Engine
    from ppctl.engine.stage import Stage

    kind, rank, step, action = os.environ["PPCTL_FAULT"].split()
    if os.environ["RANK"] != rank:
        return
    steps = [-1]
    start, forward = Engine.start, Stage.forward

    def counting_start(self: Engine) -> None:
        steps[0] += 1
        index = next((i for i, a in enumerate(self.actions) if str(a) == action), None)
        due = steps[0] == int(step) or (kind == "dumb" and steps[0] > int(step))
        if due and index is not None and kind not in ("noise", "nan", "slow"):
            # A stopped process may be anywhere; what computes has its message.
            name = "_enter" if kind == "stop" else "_begin"
            inner = getattr(self, name)

            def strike(at: int) -> None:
                inner(at)
                if at == index:
                    _strike(kind)

            setattr(self, name, strike)
        start(self)

    def spoilt_forward(self: Stage, mb: int) -> None:
        if steps[0] >= int(step) and not self.is_first:
            for tensor in self.inbox[mb].message:
                tensor.normal_() if kind == "noise" else tensor.fill_(float("nan"))
        forward(self, mb)

    def slow_forward(self: Stage, mb: int) -> None:
        time.sleep(0.1 if steps[0] >= int(step) and torch.is_grad_enabled() else 0.0)  # not in the sample at the end
        forward(self, mb)

    Engine.start = counting_start
    Stage.forward = {"noise": spoilt_forward, "nan": spoilt_forward, "slow": slow_forward}.get(kind, forward)


def _strike(kind: str) -> None:
    if kind == "raise":
        raise ValueError("struck by a test")
    if kind == "full":
        _no_room_for_metrics()
        return
    if kind == "dumb":
        _write_to_a_full_log()
        return
    if kind.startswith(("stall-", "die-")):
        _strike_exchanges(*kind.split("-"))
        return
    if kind.startswith(("deaf-", "cut-")):
        import connections

        how = connections.go_deaf if kind.startswith("deaf-") else connections.cut
        assert how(connections.sibling(int(kind.partition("-")[2]))) > 0
        return
    if kind == "hold":
        import ctypes

        # Locked twice: no signal wakes it up, as one would wake up a sleep, and Python gets no chance in between.
        mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
        while True:
            lock(mutex)
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def _strike_exchanges(kind: str, axis: str) -> None:
    """The next one along the axis does not start: what others wait for in it never comes."""
    from ppctl.parallel import exchange_counts

    def strike() -> None:
        _strike("hold" if kind == "stall" else "kill")

    for group, count in exchange_counts._counters.items():
        if count.args[0] == axis:
            exchange_counts._counters[group] = strike


def _no_room_for_metrics() -> None:
    """As on a full disk: from now on nothing can be added to metrics.jsonl; what is there is kept beside."""
    (path,) = glob.glob("runs/*/*/metrics.jsonl")
    os.rename(path, f"{path}.kept")
    os.symlink("/dev/full", path)


def _write_to_a_full_log() -> None:
    """What a rank prints goes to its log, and the disk that this is on is full."""
    full = os.open("/dev/full", os.O_WRONLY)
    for descriptor in (1, 2) if os.environ["RANK"] != "0" else (2,):  # rank 0's stdout is the launcher's pipe
        os.dup2(full, descriptor)
    os.close(full)
    print("a line for the log")
    print("a line for the log", file=sys.stderr, flush=True)


def _arm_room() -> None:
    """A disk that fills while a rank's tensors are written; the same process may write for others, who have room."""
    import errno
    import threading

    from ppctl.checkpoint import disk

    def cramped(write: Callable[[], object]) -> object:
        room, thread, write_all = 500, threading.get_ident(), disk._write_all

        def write_some(descriptor: int, data: memoryview) -> None:
            if threading.get_ident() != thread:
                write_all(descriptor, data)
                return
            os.write(descriptor, data[:room])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        disk._write_all = write_some
        try:
            return write()
        finally:
            disk._write_all = write_all

    _in_one_write(cramped)


def _in_one_write(strike: Callable[[Callable[[], object]], object]) -> None:
    """Let `strike` do the write that PPCTL_FAULT names, in whatever process the rank's tensors are written."""
    from ppctl.checkpoint import disk

    _, rank, number, _ = os.environ["PPCTL_FAULT"].split()
    write, saves = disk.write, [0]

    @wraps(write)
    def spoilt_write(writes_for: int, *arguments: object) -> object:
        saves[0] += str(writes_for) == rank
        if str(writes_for) != rank or saves[0] != int(number):
            return write(writes_for, *arguments)
        return strike(lambda: write(writes_for, *arguments))

    disk.write = spoilt_write


def _arm_update() -> None:
    from ppctl.train.optimizer import AdamW

    _, rank, number, _ = os.environ["PPCTL_FAULT"].split()
    step, steps = AdamW.step, [0]

    def spoilt_step(self: AdamW, *left_out: object) -> None:
        steps[0] += 1
        if os.environ["RANK"] == rank and steps[0] == int(number):
            _strike("raise")
        step(self, *left_out)

    AdamW.step = spoilt_step


def _arm_unsummed() -> None:
    from ppctl.parallel import replicate, ties
    from ppctl.train import replica, step

    _, _, number, which = os.environ["PPCTL_FAULT"].split()
    done, run = [0], step.Trainer.step

    def counting_step(self: step.Trainer, at: int) -> object:
        done[0] = at + 1
        return run(self, at)

    def left_out(holder: object, name: str, between_ranks: Callable[..., bool]) -> None:
        sums = getattr(holder, name)

        def some(*arguments: object) -> None:
            if done[0] < int(number) or not between_ranks(*arguments):
                sums(*arguments)

        setattr(holder, name, some)

    step.Trainer.step = counting_step
    if which == "ties":
        left_out(ties.TiedGradients, "sum", lambda self: self.group is not None)
    elif which == "tp":
        left_out(replica, "sum_partial_gradients", lambda parameters, group: True)
    else:
        left_out(replicate.GradientReducer, "_start", lambda self, parameters, group: group is not None)


def _arm_shifted() -> None:
    from dataclasses import replace

    from ppctl.data.batches import Batches

    drawn = Batches.step

    def shifted(self: Batches, step: int) -> object:
        batch = drawn(self, step)
        return replace(batch, labels=batch.labels.roll(-1, -1))

    if int(os.environ["WORLD_SIZE"]) > 1:
        Batches.step = shifted


def _arm_writer() -> None:
    def killed(write: Callable[[], object]) -> object:
        write()
        _strike("kill")

    if _IS_WRITER:
        _in_one_write(killed)


def _arm_change() -> None:
    """Die before the STEP-th change of a directory of checkpoints; ACTION is `writer:DIRECTORY`, or `all:DIRECTORY`."""
    _, _, number, action = os.environ["PPCTL_FAULT"].split()
    doomed, _, directory = action.partition(":")
    count = [0]

    def watch(event: str, arguments: tuple) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            count[0] += str(arguments[0]).startswith(directory)
            if count[0] == int(number):
                if doomed == "all":
                    os.kill(os.getppid(), signal.SIGKILL)
                _strike("kill")

    if _IS_WRITER:
        sys.addaudithook(watch)


def _arm_save() -> None:
    if _IS_WRITER:
        return
    from ppctl.checkpoint.saver import Saver

    _, rank, number, _ = os.environ["PPCTL_FAULT"].split()
    do, saves = Saver._do, [0]

    def spoilt_do(self: Saver, what: str, work: Callable[..., object], *arguments: object) -> object:
        done = do(self, what, work, *arguments)
        if work.__name__ == "write":
            saves[0] += 1
            if os.environ["RANK"] == rank and saves[0] == int(number):
                _strike("kill")
        return done

    Saver._do = spoilt_do


def _watch() -> None:
    """Log writes from the second step on: what comes before is start-up."""
    from ppctl.engine.interpreter import Engine

    target, start, steps = os.environ["PPCTL_WATCH"], Engine.start, [0]
    log = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def audit(event: str, arguments: tuple) -> None:
        if steps[0] > 1 and event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            os.write(log, f"{steps[0]} {arguments[0]}\n".encode())

    def counting_start(self: Engine) -> None:
        steps[0] += 1
        start(self)

    Engine.start = counting_start
    sys.addaudithook(audit)


def _arm_kind() -> None:
    kinds = {"save": _arm_save, "room": _arm_room, "writer": _arm_writer, "change": _arm_change}
    kinds |= {"update": _arm_update, "unsummed": _arm_unsummed, "shifted": _arm_shifted}
    kinds.get(os.environ["PPCTL_FAULT"].split()[0], (lambda: None) if _IS_WRITER else _arm)()


def _arm_when_handed_over(event: str, arguments: tuple) -> None:
    if event == "os.putenv" and arguments[0] == b"PPCTL_HANDED_OVER":  # the last one of a rank's variables
        _arm_kind()


if "PPCTL_FAULT" in os.environ and "ppctl.rank.standby" in sys.orig_argv:
    sys.addaudithook(_arm_when_handed_over)
elif "RANK" in os.environ and "PPCTL_FAULT" in os.environ:
    _arm_kind()
if "RANK" in os.environ and "PPCTL_WATCH" in os.environ and not _IS_WRITER:
    _watch()
if "RANK" in os.environ and "PPCTL_TELL" in os.environ and not _IS_WRITER:
    open(os.path.join(os.environ["PPCTL_TELL"], os.environ["RANK"]), "w").close()
