"""Counting GPUs without torch, and saying what is missing."""

import os
from pathlib import Path

import pytest

from ppctl.launch import machine
from ppctl.launch.machine import choose_device, count_gpus, shortage

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
