"""What a rank has ready for the day on which its job hangs, and what all conclude from a request to stop."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path

import pytest

from ppctl.rundir import RunDir
from ppctl.train import flight
from ppctl.train.report import TIME_IS_OVER, RankReport, stop_reason
from ppctl.train.signals import Listener


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "job", lambda draft: None)


def recorder_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("TORCH_FR_", "TORCH_NCCL_"))}


def test_the_flight_recorder_is_on_and_writes_into_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in recorder_variables():
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"TORCH_NCCL_TRACE_BUFFER_SIZE": "77"})
    flight.turn_on(run)
    prefix = f"{run.path}/errors/flight_recorder_rank_"
    assert recorder_variables() == {
        "TORCH_FR_BUFFER_SIZE": "77",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "77",
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    flight.write(run, 3)
    assert run.flight_records() == [Path(f"{prefix}3")]
    assert "entries" in pickle.loads(run.flight_record(3).read_bytes())


def test_a_signals_action_is_done_while_the_main_thread_is_busy() -> None:
    before, heard = signal.getsignal(signal.SIGUSR2), []
    listener = Listener()
    try:
        listener.on(signal.SIGUSR2, lambda: heard.append(time.monotonic()))
        os.kill(os.getpid(), signal.SIGUSR2)
        deadline = time.monotonic() + 10
        while not heard and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(heard) == 1
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(
    ("stops", "reason"),
    [
        ([0, 0, 0], None),
        ([0, signal.SIGUSR1, 0], "USR1 on rank 1"),
        ([signal.SIGTERM] * 3, "TERM on every rank"),
        ([0, signal.SIGUSR1, signal.SIGUSR1], "USR1 on 2 ranks"),
        ([TIME_IS_OVER, 0, signal.SIGUSR1], "its time is nearly over"),
    ],
)
def test_all_know_why_they_stop(stops: list[int], reason: str | None) -> None:
    assert stop_reason([RankReport(stop=float(stop)) for stop in stops]) == reason
