"""What trackers keep of a run that goes back; the real package writes its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import wandb

from ppctl.config.schema import RunConfig
from ppctl.train.metrics import WeightsAndBiases


def test_weights_and_biases_keeps_the_lower_steps_behind_a_step_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = WeightsAndBiases(str(tmp_path), "an-id", RunConfig())
    losses = {1: 4.25, 2: 3.125, 3: 2.0625}
    again = {2: 9.34375, 3: 8.21875}
    for step, loss in (*losses.items(), *again.items()):
        tracker.log_metrics({"step": step, "loss": loss})
    tracker.end()
    wandb.teardown()  # the process that writes the file has ended
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = file.read_bytes()
    assert [loss for loss in (*losses.values(), *again.values()) if repr(loss).encode() not in written] == []
