"""Faults for the ranks of a submitted job's first life: python imports this file by itself from PYTHONPATH.

SLOW_STEP is seconds that every step takes at least. SLOW_SAVE is `0.2,1,2,5`: seconds that each rank takes to bring its
files to the disk. RAISE is `RANK STEP`: that rank raises in that step (counted in its process, from 0). A process is
armed once it knows that it is a rank.
"""

import os
import sys
import time
import traceback
from functools import wraps


def _arm() -> None:
    from ppctl.engine.interpreter import Engine
    from ppctl.train.step import Trainer

    run, step = Engine.start, Trainer.step
    begun = [0]

    def slow_step(self: Trainer, number: int) -> object:
        time.sleep(float(os.environ.get("SLOW_STEP", 0)))
        return step(self, number)

    def raising_run(self: Engine) -> None:
        if os.environ.get("RAISE") == f"{os.environ['RANK']} {begun[0]}":
            raise ValueError("struck by a test")
        begun[0] += 1
        run(self)

    Engine.start, Trainer.step = raising_run, slow_step


def _arm_disk() -> None:
    """In ranks and in the writers of their nodes."""
    from ppctl.checkpoint import disk

    write = disk.write

    @wraps(write)
    def slow_write(rank: int, *arguments: object) -> object:
        if "SLOW_SAVE" in os.environ:
            time.sleep(float(os.environ["SLOW_SAVE"].split(",")[rank]))
        return write(rank, *arguments)

    disk.write = slow_write


def _arm_process(*, is_rank: bool) -> None:
    try:
        _arm_disk()
        if is_rank:
            _arm()
    except BaseException:
        # Python only mentions an error in this file, and the test would test nothing.
        traceback.print_exc()
        os._exit(99)


def _arm_when_handed_over(event: str, arguments: tuple) -> None:
    if event == "os.putenv" and arguments[0] == b"PPCTL_HANDED_OVER":  # the last one of a rank's variables
        _arm_process(is_rank=True)


if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    if "ppctl.rank.standby" in sys.orig_argv:
        sys.addaudithook(_arm_when_handed_over)
    elif "RANK" in os.environ and {"ppctl.rank.worker", "ppctl.checkpoint.writer"} & {*sys.orig_argv}:
        _arm_process(is_rank="ppctl.rank.worker" in sys.orig_argv)
