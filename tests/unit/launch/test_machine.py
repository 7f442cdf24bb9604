"""Counting GPUs without torch, and saying what is missing."""

import os
from pathlib import Path

import pytest

from ppctl.launch import machine
from ppctl.launch.machine import QUEUES, WORKSPACES, choose_device, count_gpus, one_queue, repeatable, shortage

GPU = "GPU {n}: NVIDIA H200 (UUID: GPU-0000)"


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that lists four GPUs, one of them with a MIG instance below it."""
    tool = tmp_path / "nvidia-smi"
    lines = "\n".join([*(GPU.format(n=n) for n in range(4)), "  MIG 1g.18gb Device 0: (UUID: MIG-0000)"])
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("", 0), ("-1", 0), ("0", 1), ("2,3", 2), ("0,9,1", 1), ("1,-1,2", 1), ("GPU-aa,GPU-bb", 2)],
)
def test_gpus_are_those_that_cuda_would_see(visible: str | None, count: int) -> None:
    assert count_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == count


def test_a_driver_that_does_not_answer_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert count_gpus({}) == 0


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("asked", "ranks", "device"),
    [("any", 4, "cuda"), ("any", 5, "cpu"), ("cpu", 1, "cpu"), ("cuda", 5, "cuda")],
)
def test_any_device_is_cuda_where_every_rank_has_one(asked: str, ranks: int, device: str) -> None:
    assert choose_device(asked, ranks, {}) == device


@pytest.mark.usefixtures("four_gpus")
def test_too_few_gpus_are_told_with_commands_that_work_here() -> None:
    assert shortage("cuda", 4, ["recipe=x"], {}) == []
    (problem,) = shortage("cuda", 2048, ["recipe=x"], {})
    assert problem.code == "PP-E601"
    assert problem.message == "needs 2,048 GPUs, this machine has 4"
    assert problem.remedy.splitlines() == ["ppctl plan +recipe=x", "ppctl train +recipe=x +scale=smoke"]
    (problem,) = shortage("cuda", 1, ["recipe=x"], {"CUDA_VISIBLE_DEVICES": ""})
    assert problem.message == "needs 1 GPU, this machine has 0"
    assert "ppctl train +recipe=x launch.device=cpu" in problem.remedy.splitlines()


def test_a_laptop_is_not_flooded_with_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    assert shortage("cpu", 64, [], {}) == []
    (problem,) = shortage("cpu", 2048, ["recipe=x"], {})
    assert (problem.code, problem.message) == ("PP-E602", "needs 2,048 processes, this machine has 2 cores")


@pytest.mark.parametrize(
    ("environ", "launch_env", "place"),
    [
        ({}, {}, None),
        ({QUEUES: "8"}, {}, None),
        ({QUEUES: "1"}, {QUEUES: "8"}, None),
        ({QUEUES: "1"}, {}, "environment"),
        ({QUEUES: "8"}, {QUEUES: "1"}, f"launch.env.{QUEUES} = 1"),
    ],
)
def test_a_single_queue_on_the_gpu_is_refused_with_the_reason(environ, launch_env, place: str | None) -> None:
    problems = one_queue(environ, launch_env)
    assert [problem.place for problem in problems] == ([] if place is None else [place])
    assert all("posted ahead of need would block" in problem.message for problem in problems)


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
    variables, problems = repeatable(environ, launch_env | {"OTHER": "1"})
    assert variables.pop("OTHER") == "1"
    assert variables == ({} if set_to is None else {WORKSPACES: set_to})
    assert [problem.place for problem in problems] == ([] if place is None else [place])
    for problem in problems:
        name, value = problem.remedy.removeprefix("launch.env.").split("=")
        assert repeatable(environ, launch_env | {name: value})[1] == []
