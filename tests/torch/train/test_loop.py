"""The states that the loop enters: by these the watch, the alarm and the clock of a job know what takes how long."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppctl.config.schema import RunConfig
from ppctl.train import loop, torch_profile

STEPS = 3


class Saves:
    """Saves nothing."""

    waits, local, failed = False, None, False

    def __init__(self, *_: Any, **__: Any) -> None:
        self.figures, self.look, self.finish = dict, lambda: None, lambda: None

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def is_due(self, step: int) -> bool:
        return False

    def save(self, *_: Any, **__: Any) -> None:
        return None


def entered(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **log: Any) -> list[Any]:
    """What a run of three steps enters and does, in order."""
    found: list[Any] = []
    config = RunConfig()
    config.train.steps, config.train.eval_interval = STEPS, 0
    for name, value in log.items():
        setattr(config.log, name, value)

    def step(number: int) -> Any:
        found.append("step")
        return SimpleNamespace(record={"loss": 1.0}, stop=None, measured=None)

    trainer = SimpleNamespace(dry_pass=lambda step: found.append("dry pass"), step=step)
    monkeypatch.setattr(loop, "Saves", Saves)
    monkeypatch.setattr(loop, "_begin", lambda *_: loop._Begin())
    monkeypatch.setattr(loop, "Trainer", lambda *_: trainer)
    session: Any = SimpleNamespace(
        config=config, device=torch.device(device), own=SimpleNamespace(rank=0), batches=lambda *_: None
    )
    loop.train(
        session,
        tmp_path,
        resume=list,
        write=None,
        profiles=tmp_path,
        stop_requested=lambda: 0,
        enter=lambda state, step: found.append((state, step)),
        say=lambda line: None,
    )
    return found


def test_loading_kernels_on_a_gpu_is_no_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where layers are compiled it takes minutes: as a step it would have the job's clock stop a run far too early."""
    on_gpu = entered("cuda", monkeypatch, tmp_path)
    steps: list[Any] = [each for step in range(STEPS) for each in (("training", step), "step")]
    assert on_gpu == [("loading kernels", 0), "dry pass", *steps, ("saving", STEPS - 1)]
    assert entered("cpu", monkeypatch, tmp_path) == [*steps, ("saving", STEPS - 1)]


def test_the_files_of_a_profile_are_written_in_a_state_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A trace of many microbatches takes longer to write than ten steps, after which the watch ends a run."""
    found = entered("cpu", monkeypatch, tmp_path, torch_profile="2:3")
    assert found[2:5] == [("training", 1), "step", ("recording", 1)]
    assert (tmp_path / torch_profile.TRACES / "iteration_2" / "rank0_trace.json").is_file()
