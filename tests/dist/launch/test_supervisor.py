"""The local launcher against ranks that fail, hang, save and are killed: real processes, no torch."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from ppctl.host.private_files import NODE_DIRECTORY
from ppctl.runs import heartbeat
from ppctl.runs.rundir import RunDir

HELPERS = Path(__file__).parents[2] / "helpers"
GONE_WITHIN = 10.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "job", lambda draft: None)


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    """A test that fails leaves no launcher behind, and so no ranks."""
    yield
    while Launcher.started:
        process = Launcher.started.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


class Launcher:
    """A launcher at work on `run`."""

    started: ClassVar[list[subprocess.Popen[str]]] = []

    def __init__(self, run: RunDir, world: int, *behaviours: str, **environment: str) -> None:
        self.run = run
        self.world = world
        self.process = subprocess.Popen(
            [sys.executable, str(HELPERS / "launcher_process.py"), str(run.path), str(world), *behaviours],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: v for name, v in os.environ.items() if name != "OMP_NUM_THREADS"} | environment,
        )

        self.started.append(self.process)

    def wait_for(self, name: str, count: int | None = None) -> list[str]:
        """What the ranks left in their files of this name, once all have."""
        deadline = time.monotonic() + 30
        while True:
            files = sorted(self.run.path.glob(f"{name}.*"))
            if len(files) >= (count or self.world):
                return [file.read_text() for file in files]
            assert time.monotonic() < deadline, (name, self.process.poll())
            time.sleep(0.01)

    def end(self, number: int | None = None) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, at most GONE_WITHIN seconds after the signal."""
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=GONE_WITHIN)
        return self.process.returncode, out, err


def node_directory(run: RunDir) -> Path:
    """The directory that the last start of the run had on this machine."""
    return Path((run.path / "directory").read_text())


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie that nobody has reaped yet does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def all_gone(pids: list[int], within: float = 2.0) -> bool:
    deadline = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


def test_ranks_that_finish_end_the_job_with_0_and_rank_0_is_heard(run: RunDir) -> None:
    code, out, err = Launcher(run, 3, "finish").end()
    assert (code, out, err.strip()) == (0, "rank 0 says hello\n", "")
    assert run.status()["state"] == "finished"
    assert run.log(1).read_text() == "rank 1 says hello\n"
    assert not node_directory(run).exists()


def test_every_rank_finds_its_variables(run: RunDir) -> None:
    launcher = Launcher(run, 2, "finish")
    launcher.end()
    first, second = (
        dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        for text in launcher.wait_for("environment")
    )
    own = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert second | own == second
    assert first[NODE_DIRECTORY] == second[NODE_DIRECTORY]
    assert first["COLOUR"] == "green"
    assert first["OMP_NUM_THREADS"] == "3", "launch.env is stronger than what is usual"


def test_the_first_failure_is_reported_and_the_others_are_one_line(run: RunDir) -> None:
    code, _, err = Launcher(run, 4, "wait", "wait", "wait", "raises").end()
    assert code == 1
    assert err.splitlines() == [
        "error PP-E701: rank 3 (stage 5) failed in 5B2: ValueError: boom",
        "  and why",
        '  File "model.py", line 3, in forward',
        f"  its log: {run.log(3)}",
        "  the other 3 ranks were ended",
        "  more: ppctl explain PP-E701",
    ]
    status = run.status()
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert status["message"] == err.splitlines()[0]


def test_a_killed_rank_is_named_by_its_heartbeat_even_when_its_victims_speak_first(run: RunDir) -> None:
    code, _, err = Launcher(run, 3, "is_killed", "follows").end()
    first, *rest = err.splitlines()
    assert code == 1
    assert first == "error PP-E702: rank 0 failed in action 4: killed by signal 9 (SIGKILL)"
    assert rest[0].startswith("  at step 17; its log: ")
    assert rest[2].startswith("  followed by rank ")
    assert "Connection closed by peer" in rest[2]


def test_a_rank_that_gives_no_reason_is_quoted(run: RunDir) -> None:
    code, _, err = Launcher(run, 2, "wait", "is_silent").end()
    assert code == 1
    assert err.startswith("error PP-E703: rank 1 failed while starting: the process left with exit code 7")
    assert "  | no module named torch" in err.splitlines()


def test_a_reason_that_the_full_disk_did_not_take_is_told_and_nothing_half_written_stays(run: RunDir) -> None:
    code, _, err = Launcher(run, 2, "wait", "finds_the_disk_full").end()
    assert code == 1
    assert err.startswith("error PP-E701: rank 1 failed while starting: OSError: No space left\n")
    assert list(run.path.rglob("*.tmp")) == []
    assert not node_directory(run).exists()


def test_the_culprits_exit_code_and_code_are_the_jobs(run: RunDir) -> None:
    code, _, err = Launcher(run, 2, "wait", "raises_config").end()
    assert code == 3
    assert err.startswith("error PP-E501: rank 1 failed while starting: not there\n    try: this\n")


def test_a_rank_that_hears_nothing_is_killed(run: RunDir) -> None:
    started = time.monotonic()
    code, _, _ = Launcher(run, 2, "is_stubborn", "raises").end()
    assert code == 1
    assert time.monotonic() - started < GONE_WITHIN


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_asked_to_stop_the_ranks_save_and_the_job_ends_with_75(run: RunDir, number: signal.Signals) -> None:
    launcher = Launcher(run, 2, "saves")
    while not run.log(1).exists():
        time.sleep(0.01)
    time.sleep(0.3)
    code, _, _ = launcher.end(number)
    assert code == 75, "although the ranks were still starting when the signal came"
    assert (run.status()["state"], run.status()["step"]) == ("stopped", 7)
    heard = signal.SIGTERM if number == signal.SIGHUP else number
    assert launcher.wait_for("saved") == [str([int(heard)])] * 2, "once each"


def test_a_signal_to_one_rank_is_enough(run: RunDir) -> None:
    launcher = Launcher(run, 1, "saves")
    (pid,) = launcher.wait_for("pid")
    os.kill(int(pid), signal.SIGUSR1)
    assert launcher.end()[0] == 75


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [("is_stubborn", "before all had saved"), ("leaves_unsaved", "did not report that they saved")],
)
def test_ranks_that_do_not_save_when_asked_end_the_job_with_143(run: RunDir, behaviour: str, text: str) -> None:
    launcher = Launcher(run, 2, behaviour)
    pids = [int(pid) for pid in launcher.wait_for("pid")]
    code, _, err = launcher.end(signal.SIGTERM)
    assert code == 143
    assert text in err
    assert run.status()["state"] == "interrupted"
    assert all_gone(pids)


def test_a_second_term_does_not_wait_for_the_grace(run: RunDir) -> None:
    launcher = Launcher(run, 1, "is_stubborn")
    launcher.wait_for("pid")
    launcher.process.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    started = time.monotonic()
    assert launcher.end(signal.SIGTERM)[0] == 143
    assert time.monotonic() - started < 2.2


def test_ctrl_c_saves_once_a_step_is_done_and_the_job_ends_with_75(run: RunDir) -> None:
    launcher = Launcher(run, 2, "saves_steps")
    launcher.wait_for("pid")
    code, out, err = launcher.end(signal.SIGINT)
    assert (code, out) == (75, "")
    assert err == "saving after step 8, then stopping; Ctrl-C once more ends immediately\nstopped by Ctrl-C\n"
    status = run.status()
    assert (status["state"], status["step"], status["message"]) == ("stopped", 7, "stopped by Ctrl-C")
    assert launcher.wait_for("saved") == [str([int(signal.SIGTERM)])] * 2


def test_ctrl_c_once_more_ends_all_with_130_and_after_that_they_are_killed(run: RunDir) -> None:
    launcher = Launcher(run, 2, "trains_on", "trains_on_stubbornly")
    pids = [int(pid) for pid in launcher.wait_for("pid")]
    launcher.process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    launcher.process.send_signal(signal.SIGINT)  # make and the terminal both pass one press on
    time.sleep(0.9)
    assert launcher.process.poll() is None
    code, _, err = launcher.end(signal.SIGINT)
    assert code == 130
    assert err.splitlines()[-1] == "interrupted: all ranks were ended, nothing more was saved"
    assert run.status()["state"] == "interrupted"
    assert all_gone(pids)


@pytest.mark.whole
def test_a_term_after_ctrl_c_gives_the_ranks_their_grace(run: RunDir) -> None:
    """Nobody may be there any more, and the save may hang."""
    launcher = Launcher(run, 1, "trains_on", STOP_GRACE="0.2")
    launcher.wait_for("pid")
    launcher.process.send_signal(signal.SIGINT)
    time.sleep(0.4)
    assert launcher.process.poll() is None, "a person may wait for longer"
    code, _, err = launcher.end(signal.SIGTERM)
    assert code == 143 and "before all had saved" in err


def test_who_signals_ranks_and_launcher_to_end_is_not_told_of_a_failure_of_ranks(run: RunDir) -> None:
    """As a service manager signals every process of a group: ranks may have died before the launcher wakes."""
    launcher = Launcher(run, 2, "trains_on")
    pids = [int(pid) for pid in launcher.wait_for("pid")]
    launcher.process.send_signal(signal.SIGINT)
    time.sleep(0.6)
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    time.sleep(0.05)
    code, _, err = launcher.end(signal.SIGINT)
    assert (code, run.status()["state"]) == (130, "interrupted"), err
    assert err.splitlines()[-1] == "interrupted: all ranks were ended, nothing more was saved"


def test_ctrl_c_before_a_step_is_done_ends_all_quietly_with_130(run: RunDir) -> None:
    launcher = Launcher(run, 2, "is_stubborn", "wait")
    pids = [int(pid) for pid in launcher.wait_for("pid")]
    code, out, err = launcher.end(signal.SIGINT)
    assert (code, out) == (130, "")
    assert err == "interrupted: all ranks were ended, before the first step: nothing was saved\n"
    assert run.status()["state"] == "interrupted"
    assert all_gone(pids)


def test_nobody_survives_a_launcher_that_is_killed(run: RunDir) -> None:
    launcher = Launcher(run, 3, "is_stubborn")
    pids = [int(pid) for pid in launcher.wait_for("pid")]
    launcher.process.kill()
    assert all_gone(pids)
    launcher.process.communicate()
    left = node_directory(run)
    assert len(heartbeat.read_all(left, range(3))) == 3
    Launcher(run, 1, "finish").end()
    assert not left.exists(), "the next launcher removes what a killed one left"


@pytest.mark.parametrize("behaviours", [("has_child", "raises"), ("has_child+finish", "finish")])
def test_what_a_rank_has_started_ends_with_it(run: RunDir, behaviours: tuple[str, ...]) -> None:
    launcher = Launcher(run, 2, *behaviours)
    children = [int(pid) for pid in launcher.wait_for("child", 1)]
    launcher.end()
    assert all_gone(children)


def test_ranks_that_cannot_be_started_are_an_error_and_nobody_stays(run: RunDir) -> None:
    run.log(0).parent.rmdir()
    code, _, err = Launcher(run, 2, "wait").end()
    assert code == 2
    assert err.startswith("error PP-E614: the ranks cannot be started: [Errno 2] No such file or directory")
    assert run.status()["state"] == "failed"


def test_a_reader_that_leaves_does_not_end_the_job(run: RunDir) -> None:
    launcher = Launcher(run, 1, "floods")
    assert launcher.process.stdout is not None
    assert launcher.process.stdout.readline() == "step 0\n"
    launcher.process.stdout.close()
    assert launcher.process.wait(timeout=20) == 0
    assert run.status()["state"] == "finished"


def test_what_the_ranks_did_last_is_published(run: RunDir) -> None:
    launcher = Launcher(run, 2, "wait")
    launcher.wait_for("pid")
    launcher.end(signal.SIGINT)
    (published,) = run.heartbeats().values()
    assert [row["rank"] for row in published["ranks"]] == [0, 1]
    assert all(row["pid"] and row["state"] == "starting" for row in published["ranks"])
    assert json.dumps(published)


def test_the_launcher_waits_without_working(run: RunDir) -> None:
    launcher = Launcher(run, 1, "wait")
    launcher.wait_for("pid")
    time.sleep(0.3)

    def ticks() -> int:
        fields = Path(f"/proc/{launcher.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(1.0)
    assert ticks() - before <= 1
    launcher.end(signal.SIGINT)
