"""What needs a CUDA device: one rank's training on it, and the recorder's events. `make test-gpu`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from command import TINY, metrics, only_run, ppctl

from ppctl.engine.recorder import make_recorder
from ppctl.schedule.action import Action, Op

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")]


def test_one_rank_trains_on_cuda_as_on_the_cpu(tmp_path: Path):
    text = tmp_path / "corpus.txt"
    text.write_text(" ".join(random.Random(0).choices(["the", "of", "stage", "rank", "bubble"], k=5000)))
    losses = {}
    for device in ("cpu", "cuda"):
        cwd = tmp_path / device
        cwd.mkdir()
        tiny = [override for override in TINY if not override.startswith("launch.device")]
        command = (*tiny, f"data.path={text}", "pp=1", "vpp=1", "steps=5", f"launch.device={device}")
        done = ppctl("train", "+recipe=quickstart", *command, cwd=cwd)
        assert done.returncode == 0, done.stderr
        losses[device] = [record["loss"] for record in metrics(only_run(cwd))]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-4)


def test_fifty_milliseconds_of_queued_work_are_recorded_as_fifty():
    """Python's clock would see the launch alone."""
    device = torch.device("cuda")
    recorder = make_recorder(0, [Action(Op.F, 0, 0)], device)
    cycles = 0.050 * torch.cuda.get_device_properties(device).clock_rate * 1e3
    for _ in range(3):  # a step is read one step later
        recorder.begin_step()
        recorder.begin(0)
        torch.cuda._sleep(int(cycles))
        recorder.end(0)
        recorder.end_step()
        torch.cuda.synchronize()
    ((_, start, end),) = recorder.stamps()
    assert end - start == pytest.approx(0.050, abs=0.002)
