"""What a rank has ready for the day on which its job hangs, and what all conclude from a request to stop."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ppctl.rank import watchdog
from ppctl.rank.own_process import Listener
from ppctl.runs.rundir import RunDir
from ppctl.train.callback import TIME_IS_OVER
from ppctl.train.reports import RankReport, Reports, stop_reason


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "job", lambda draft: None)


def recorder_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("TORCH_FR_", "TORCH_NCCL_"))}


def test_the_flight_recorder_is_on_and_writes_into_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in recorder_variables():
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"TORCH_NCCL_TRACE_BUFFER_SIZE": "77"})
    watchdog.turn_on_recorders(run)
    prefix = f"{run.path}/errors/flight_recorder_"
    assert recorder_variables() == {
        "TORCH_FR_BUFFER_SIZE": "77",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "77",
        "TORCH_FR_DUMP_TEMP_FILE": f"{prefix}nccl_rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    watchdog.write_records(run, 3, watchdog.recorders())
    assert run.flight_records()[0] == Path(f"{prefix}gloo_rank_3")
    assert "entries" in pickle.loads(run.flight_record("gloo", 3).read_bytes())
    assert torch.cuda.is_initialized() or [*watchdog.recorders()] == ["gloo"], "also in a build for CUDA"


def broken(collectives: bool, stacks: bool) -> bytes:
    raise RuntimeError("the recorder's thread is gone")


class CudaBuild:
    """The recorders that torch has where it was built with NCCL."""

    @staticmethod
    def _dump_fr_trace(collectives: bool, stacks: bool) -> bytes:
        return f"gloo {collectives} {stacks}".encode()

    @staticmethod
    def _dump_nccl_trace(collectives: bool, stacks: bool) -> bytes:
        return f"nccl {collectives} {stacks}".encode()


def test_gloos_and_nccls_records_are_both_written_each_into_a_file_of_its_own(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's tools take the files of one prefix together: ranks at the end, no two recorders under one name."""
    monkeypatch.setattr(torch._C, "_distributed_c10d", CudaBuild)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    found = watchdog.recorders()
    assert list(found) == ["gloo", "nccl"], "what may wait for a thread that stands still comes last"
    watchdog.write_records(run, 12, found)
    written = {path.name: path.read_bytes() for path in run.flight_records()}
    assert written == {
        "flight_recorder_gloo_rank_12": b"gloo True False",
        "flight_recorder_nccl_rank_12": b"nccl True False",
    }


def test_a_recorder_that_fails_takes_no_other_one_with_it(run: RunDir) -> None:
    watchdog.write_records(run, 1, {"gloo": broken, "nccl": CudaBuild._dump_nccl_trace})
    assert run.flight_records() == [run.flight_record("nccl", 1)]


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
    assert stop_reason(Reports(np.array([RankReport(stop=float(stop)).pack() for stop in stops]), 0)) == reason
