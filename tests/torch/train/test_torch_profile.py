"""`log.torch_profile`: which steps are recorded, and what the watch is told before files are written."""

import json
from types import SimpleNamespace

import torch

from ppctl.config.schema import RunConfig
from ppctl.train.callback import Start, StepResult, TrainingRun
from ppctl.train.recordings import TRACES, TorchProfile


def test_the_files_of_a_step_are_written_behind_it_under_another_limit(tmp_path):
    config, told, lines = RunConfig(), [], []
    config.log.torch_profile = "2:3"
    file = tmp_path / TRACES / "iteration_2" / "rank1_trace.json"

    def enter(state, step):
        told.append((state, step, file.exists()))

    session = SimpleNamespace(config=config, own=SimpleNamespace(rank=1), device=torch.device("cpu"))
    profile = TorchProfile(session, tmp_path, lines.append)
    profile.pre_train(TrainingRun(session, Start(), enter))
    for step in (1, 2, 3):
        profile.pre_step(step)
        torch.ones(3).sum()
        profile.post_update(StepResult(step, {}, None, step == 3, (0.0,) * 4))
    profile.close(None)
    assert told == [("recording", 1, False)] and file.exists() and not lines, "rank 0 alone speaks"
    assert [path.name for path in (tmp_path / TRACES).iterdir()] == ["iteration_2"]
    assert list(file.parent.iterdir()) == [file] and json.loads(file.read_text())["traceEvents"]


def test_a_step_that_fails_ends_its_recording(tmp_path):
    config = RunConfig()
    config.log.torch_profile = "1:2"
    session = SimpleNamespace(config=config, own=SimpleNamespace(rank=1), device=torch.device("cpu"))
    profile = TorchProfile(session, tmp_path)
    profile.pre_train(TrainingRun(session, Start(), lambda state, step: None))
    profile.pre_step(1)
    profile.close(ValueError("struck by a test"))
    profile.pre_step(1)  # torch refuses a second profiler beside the first
    profile.post_update(StepResult(1, {}, None, False, (0.0,) * 4))
    assert (tmp_path / TRACES / "iteration_1" / "rank1_trace.json").is_file()
