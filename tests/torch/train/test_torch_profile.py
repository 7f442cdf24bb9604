"""`log.torch_profile`: which steps are recorded, and what the watch is told before files are written."""

import json

import torch

from ppctl.config.schema import RunConfig
from ppctl.train.torch_profile import TRACES, step_profiles


def test_the_files_of_a_step_are_written_behind_it_under_another_limit(tmp_path):
    config, told, lines = RunConfig(), [], []
    config.log.torch_profile = "2:3"
    file = tmp_path / TRACES / "iteration_2" / "rank1_trace.json"

    def writes(step):
        told.append((step, file.exists()))

    profiled = step_profiles(config, 1, torch.device("cpu"), tmp_path, lines.append, writes)
    for step in (1, 2, 3):
        with profiled(step):
            torch.ones(3).sum()
    assert told == [(2, False)] and file.exists() and not lines, "rank 0 alone speaks"
    assert [path.name for path in (tmp_path / TRACES).iterdir()] == ["iteration_2"]
    assert list(file.parent.iterdir()) == [file] and json.loads(file.read_text())["traceEvents"]
