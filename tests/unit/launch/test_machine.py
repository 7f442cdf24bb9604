"""Counting GPUs without torch, and saying what is missing."""

import os
from pathlib import Path

import pytest

from ppctl.host.devices import SEVERAL_RANKS, device_index, group_backends
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
    ("asked", "ranks", "share", "device"),
    [
        *(("any", 4, False, "cuda"), ("any", 5, False, "cpu"), ("cpu", 1, False, "cpu"), ("cuda", 5, False, "cuda")),
        *(("any", 5, True, "cuda"), ("cpu", 5, True, "cpu")),
    ],
)
def test_any_device_is_cuda_where_every_rank_has_one_or_shares_one(asked, ranks, share, device) -> None:
    assert choose_device(asked, ranks, {}, share=share) == device


def test_nothing_is_shared_where_there_is_none() -> None:
    assert choose_device("any", 1, {"CUDA_VISIBLE_DEVICES": ""}, share=True) == "cpu"


@pytest.mark.parametrize(
    ("share", "gpus", "taken"),
    [(False, 4, [0, 1, 2, 3]), (True, 4, [0, 1, 2, 3]), (True, 1, [0] * 4), (True, 3, [0, 1, 2, 0])],
)
def test_ranks_that_share_take_gpus_in_turn(share: bool, gpus: int, taken: list[int]) -> None:
    assert [device_index(rank, gpus, share=share) for rank in range(4)] == taken


@pytest.mark.parametrize(
    ("kind", "share", "nccl", "variable", "backends"),
    [
        ("cpu", False, None, None, "gloo"),
        ("cuda", False, (2, 28, 9), None, "cpu:gloo,cuda:nccl"),
        ("cuda", True, (2, 28, 9), None, "gloo"),
        ("cuda", True, (2, 28, 9), "1", "gloo"),
        ("cuda", True, (2, 30, 6), "1", "gloo"),
        ("cuda", True, (2, 30, 7), None, "gloo"),
        ("cuda", True, (2, 30, 7), "0", "gloo"),
        ("cuda", True, (2, 30, 7), "1", "cpu:gloo,cuda:nccl"),
        ("cuda", True, (2, 31, 0), "1", "cpu:gloo,cuda:nccl"),
        ("cuda", True, None, "1", "gloo"),
    ],
)
def test_ranks_on_one_gpu_use_nccl_only_where_it_takes_them(kind, share, nccl, variable, backends) -> None:
    environ = {} if variable is None else {SEVERAL_RANKS: variable}
    assert group_backends(kind, nccl, environ, share=share) == backends


@pytest.mark.usefixtures("four_gpus")
def test_too_few_gpus_are_told_with_commands_that_work_here() -> None:
    assert shortage("cuda", 4, ["recipe=x"], {}, share=False) == []
    (problem,) = shortage("cuda", 2048, ["recipe=x"], {}, share=False)
    assert problem.code == "PP-E601"
    assert problem.message == "needs 2,048 GPUs, this machine has 4"
    assert problem.remedy.splitlines() == ["ppctl plan +recipe=x", "ppctl train +recipe=x +scale=smoke"]
    (problem,) = shortage("cuda", 1, ["recipe=x"], {"CUDA_VISIBLE_DEVICES": ""}, share=False)
    assert problem.message == "needs 1 GPU, this machine has 0"
    assert "ppctl train +recipe=x launch.device=cpu" in problem.remedy.splitlines()


@pytest.mark.usefixtures("four_gpus")
def test_a_few_ranks_too_many_may_share_the_gpus() -> None:
    (problem,) = shortage("cuda", 6, ["recipe=x"], {}, share=False)
    shared = "ppctl train +recipe=x launch.share_gpu=true"
    assert shared in problem.remedy.splitlines()
    assert shortage("cuda", 6, ["recipe=x", "launch.share_gpu=true"], {}, share=True) == []
    (problem,) = shortage("cuda", 2, ["launch.share_gpu=true"], {"CUDA_VISIBLE_DEVICES": ""}, share=True)
    assert problem.message == "needs 1 GPU, this machine has 0"
    assert "ppctl train launch.device=cpu launch.share_gpu=false" in problem.remedy.splitlines()


def test_a_command_on_a_run_is_typed_again_on_that_run_and_no_other_is_begun() -> None:
    (problem,) = shortage("cuda", 2, ["pp=2"], {"CUDA_VISIBLE_DEVICES": ""}, share=False, command="resume runs/r/1")
    assert problem.remedy == "ppctl resume runs/r/1 pp=2 launch.device=cpu"
    (problem,) = shortage("cuda", 2048, [], {"CUDA_VISIBLE_DEVICES": ""}, share=False, command="resume runs/r/1")
    assert problem.remedy == "ppctl doctor"
    (problem,) = shortage("cuda", 1, ["recipe=x"], {"CUDA_VISIBLE_DEVICES": ""}, share=False, command="parity")
    assert "ppctl parity +recipe=x launch.device=cpu" in problem.remedy.splitlines()


def test_a_laptop_is_not_flooded_with_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    assert shortage("cpu", 64, [], {}, share=False) == []
    (problem,) = shortage("cpu", 2048, ["recipe=x"], {}, share=False)
    assert (problem.code, problem.message) == ("PP-E602", "needs 2,048 processes, this machine has 2 cores")
