"""The states that the loop enters: by these the watch, the alarm and the clock of a job know what takes how long."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppctl.config.schema import RunConfig
from ppctl.train import loop
from ppctl.train.callback import Callback, Callbacks, Start, StepResult
from ppctl.train.recordings import TRACES, TorchProfile

STEPS = 3


class States(Callback):
    """Notes what a run enters."""

    def __init__(self, found: list[Any]) -> None:
        self.found = found

    def enter(self, state: str, step: int) -> None:
        self.found.append((state, step))


def entered(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **log: Any) -> list[Any]:
    """What a run of three steps enters and does, in order."""
    found: list[Any] = []
    config = RunConfig()
    config.train.steps, config.train.eval_interval = STEPS, 0
    for name, value in log.items():
        setattr(config.log, name, value)

    def step(number: int) -> StepResult:
        found.append("step")
        return StepResult(number + 1, {"loss": 1.0}, None, number + 1 == STEPS, (0.0,) * 4)  # type: ignore[arg-type]

    trainer = SimpleNamespace(dry_pass=lambda step: found.append("dry pass"), step=step, on_gpu=device == "cuda")
    monkeypatch.setattr(loop, "Trainer", lambda *_: trainer)
    session: Any = SimpleNamespace(
        config=config,
        device=torch.device(device),
        own=SimpleNamespace(rank=0),
        data=SimpleNamespace(batches=lambda *_: None),
    )
    profile = TorchProfile(session, tmp_path, lambda line: None)
    loop.train(session, Start(), Callbacks(States(found), profile))
    return found


def test_loading_kernels_on_a_gpu_is_no_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where layers are compiled it takes minutes: as a step it would have the job's clock stop a run far too early."""
    on_gpu = entered("cuda", monkeypatch, tmp_path)
    steps: list[Any] = [each for step in range(STEPS) for each in (("training", step), "step")]
    assert on_gpu == [("loading kernels", 0), "dry pass", *steps]
    assert entered("cpu", monkeypatch, tmp_path) == steps


def test_the_files_of_a_profile_are_written_in_a_state_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A trace of many microbatches takes longer to write than ten steps, after which the watch ends a run."""
    found = entered("cpu", monkeypatch, tmp_path, torch_profile="2:3")
    assert found[2:5] == [("training", 1), "step", ("recording", 1)]
    assert (tmp_path / TRACES / "iteration_2" / "rank0_trace.json").is_file()


def test_a_callback_is_called_at_its_places_in_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As `Callback` documents it, with an error in the second step, which ends the run."""
    called: list[str] = []

    def failing(result: StepResult) -> None:
        called.append("post_step")
        if result.step == 2:
            raise ValueError("struck by a test")

    noting = Callback()
    for name in ("pre_train", "enter", "pre_step", "pre_update", "post_update", "log_metrics", "post_train"):
        setattr(noting, name, lambda *_, name=name: called.append(name))
    noting.post_step, noting.close = failing, lambda error: called.extend(["close", str(error)])  # type: ignore[method-assign]
    config = RunConfig()
    config.train.steps, config.log.interval = STEPS, 5
    trainer = SimpleNamespace(
        step=lambda number: StepResult(number + 1, {"loss": 1.0}, None, False, (0.0,) * 4), on_gpu=False
    )
    monkeypatch.setattr(loop, "Trainer", lambda *_: trainer)
    data = SimpleNamespace(batches=lambda *_: None)
    session: Any = SimpleNamespace(config=config, device=torch.device("cpu"), data=data)
    with pytest.raises(ValueError, match="struck"):
        loop.train(session, Start(), Callbacks(Callback(), noting))
    step = ["enter", "pre_step", "post_update"]
    assert called == ["pre_train", *step, "log_metrics", "post_step", *step, "post_step", "close", "struck by a test"]


@pytest.mark.parametrize("fails", ["pre_train", "Trainer", "dry_pass", "Evaluator"])
def test_callbacks_are_closed_also_if_training_cannot_begin(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []

    def fail(*_: object) -> None:
        raise ValueError("struck by a test")

    callback, config, trainer = Callback(), RunConfig(), SimpleNamespace(on_gpu=True, dry_pass=lambda step: None)
    callback.close = closed.append  # type: ignore[method-assign]
    config.train.steps, config.train.eval_interval = STEPS, 1
    monkeypatch.setattr(loop, "Trainer", lambda *_: trainer)
    owner = {"pre_train": callback, "dry_pass": trainer}.get(fails, loop)
    monkeypatch.setattr(owner, fails, fail)
    session: Any = SimpleNamespace(config=config, data=SimpleNamespace(batches=lambda *_: None))
    with pytest.raises(ValueError, match="struck") as struck:
        loop.train(session, Start(), callback)
    assert closed == [struck.value]
