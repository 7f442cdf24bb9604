"""A rank that behaves as its command line says, by the worker's contract and without torch.

python acting_rank.py RUN BEHAVIOUR...: rank N plays the N-th behaviour (the last one counts for all further ranks).
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ppctl.host.private_files import NODE_DIRECTORY
from ppctl.records.rank_records import RankFailure
from ppctl.runs.heartbeat import HeartbeatFile, leave_failure
from ppctl.runs.rundir import RunDir

RUN = RunDir(Path(sys.argv[1]))
RANK = int(os.environ["RANK"])
BEHAVIOUR = sys.argv[2:][min(RANK, len(sys.argv) - 3)]

DIRECTORY = Path(os.environ[NODE_DIRECTORY])
beat = HeartbeatFile(DIRECTORY, RANK)


def say(name: str, text: object = "") -> None:
    """Leave a file for the test."""
    draft = RUN.path / f".{name}.{RANK}"
    draft.write_text(str(text))
    draft.rename(RUN.path / f"{name}.{RANK}")


def wait() -> None:
    say("pid", os.getpid())
    while True:
        time.sleep(60)


def fail(error: str, message: str, **more: object) -> None:
    RUN.write_error(RankFailure(RANK, message, error, **{"code": "PP-E701", **more}))


def train() -> None:
    beat.set_state("training")
    beat.step = 16
    beat.enter(4)


def finish() -> None:
    print(f"rank {RANK} says hello", flush=True)
    say("environment", "\n".join(f"{name}={value}" for name, value in os.environ.items()))


def raises() -> None:
    time.sleep(0.2)
    fail(
        "ValueError",
        "boom\nand why",
        stage=5,
        action="5B2",
        traceback='x\n  File "model.py", line 3, in forward\n    y',
    )
    os._exit(1)


def raises_config() -> None:
    fail("CheckpointError", "PP-E501: not there\n  try: this", code="PP-E501", exit_code=3)
    os._exit(3)


def finds_the_disk_full() -> None:
    """Leaves half a file, and its reason where there is room."""
    (RUN.path / "errors" / f".rank-{RANK:04d}.json.7.tmp").write_text("{")
    leave_failure(DIRECTORY, RankFailure(RANK, "No space left", "OSError", code="PP-E701"))
    os._exit(1)


def follows() -> None:
    """Tells that it lost its connection to rank 0 before rank 0 is dead, and leaves right after."""
    leaving = RUN.path / "leaving.0"
    while not leaving.exists():
        time.sleep(0.005)
    fail("RuntimeError", "[pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
    stat = Path(f"/proc/{leaving.read_text()}/stat")
    while stat.exists() and ") Z" not in stat.read_text():
        time.sleep(0.005)
    os._exit(1)


def is_killed() -> None:
    train()
    say("leaving", os.getpid())
    while len(RUN.errors()) < int(os.environ["WORLD_SIZE"]) - 1:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


def is_silent() -> None:
    print("no module named torch", file=sys.stderr)
    os._exit(7)


def saves() -> None:
    """Saves and leaves when asked to; ignores being asked while it is starting."""
    asked: list[int] = []
    time.sleep(1.2)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, frame: asked.append(n))
    beat.set_state("training")
    say("pid", os.getpid())
    while not asked:
        time.sleep(0.02)
    if RANK == 0:
        RUN.write_status("stopped", step=7)
    say("saved", asked)
    time.sleep(1.2)


def saves_steps() -> None:
    """Has done 7 steps."""
    beat.step = 7
    saves()


def trains_on() -> None:
    """Has done 7 steps, and does not hear that it should save."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    beat.step = 7
    beat.set_state("training")
    wait()


def trains_on_stubbornly() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    trains_on()


def leaves_unsaved() -> None:
    signal.signal(signal.SIGTERM, lambda n, frame: sys.exit(0))
    beat.set_state("training")
    wait()


def is_stubborn() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    wait()


def has_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    say("child", child.pid)
    if BEHAVIOUR == "has_child":
        wait()


def floods() -> None:
    for n in range(20000):
        print(f"step {n}", flush=True)


ROLES = [finish, raises, raises_config, follows, is_killed, is_silent, saves, leaves_unsaved, is_stubborn, has_child]
ROLES += [finds_the_disk_full, floods, wait, saves_steps, trains_on, trains_on_stubbornly]
{role.__name__: role for role in ROLES}[BEHAVIOUR.partition("+")[0]]()
beat.close()
