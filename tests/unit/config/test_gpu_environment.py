"""What ranks on GPUs find in their environment: set where nothing sets it, refused where it would hang or differ."""

from __future__ import annotations

import pytest

from ppctl.config.gpu_environment import MOST_QUEUES, QUEUES, WORKSPACES, gpu_environment
from ppctl.config.schema import ParallelConfig


@pytest.mark.parametrize(
    ("environ", "launch_env", "set_to", "place"),
    [
        ({}, {}, MOST_QUEUES, None),
        ({QUEUES: "8"}, {}, None, None),
        ({QUEUES: "1"}, {QUEUES: "8"}, "8", None),
        ({QUEUES: "1"}, {}, None, "environment"),
        ({QUEUES: "8"}, {QUEUES: "1"}, "1", f"launch.env.{QUEUES} = 1"),
    ],
)
def test_every_stream_gets_a_queue_and_a_single_one_is_refused(environ, launch_env, set_to, place) -> None:
    variables, problems = gpu_environment(ParallelConfig(), 2, environ, launch_env | {"OTHER": "1"})
    assert variables == {"OTHER": "1"} | ({} if set_to is None else {QUEUES: set_to})
    assert [problem.place for problem in problems] == ([] if place is None else [place])
    assert all("posted ahead of need would block" in problem.message for problem in problems)
    assert gpu_environment(ParallelConfig(), 1, environ, launch_env)[1] == [], "one rank receives nothing"


@pytest.mark.parametrize(
    ("environ", "launch_env", "set_to", "place"),
    [
        ({}, {}, ":4096:8", None),
        ({}, {WORKSPACES: ":16:8"}, ":16:8", None),
        ({WORKSPACES: ":16:8"}, {}, None, None),
        ({WORKSPACES: ":0:0"}, {WORKSPACES: ":4096:8"}, ":4096:8", None),
        ({WORKSPACES: ":0:0"}, {}, None, "environment"),
        ({}, {WORKSPACES: ":0:0"}, ":0:0", f"launch.env.{WORKSPACES} = :0:0"),
    ],
)
def test_deterministic_mode_sets_cublas_workspaces_or_refuses_others(environ, launch_env, set_to, place) -> None:
    parallel, environ = ParallelConfig(deterministic_mode=True), environ | {QUEUES: "32"}
    variables, problems = gpu_environment(parallel, 2, environ, launch_env | {"OTHER": "1"})
    assert variables.pop("OTHER") == "1"
    assert variables == ({} if set_to is None else {WORKSPACES: set_to})
    assert [problem.place for problem in problems] == ([] if place is None else [place])
    for problem in problems:
        name, value = problem.remedy.removeprefix("launch.env.").split("=")
        assert gpu_environment(parallel, 2, environ, launch_env | {name: value})[1] == []
