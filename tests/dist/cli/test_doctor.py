"""`ppctl doctor`: what it measures, what it finds wrong, and how it is run by others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command import environment, ppctl
from frozen import fields, hold
from ranks import run_ranks

from ppctl.cli import doctor
from ppctl.cli.doctor import _lines, _wrong
from ppctl.launch.environment import Started
from ppctl.reach import probe
from ppctl.reach.probe import device_of


def test_it_times_every_edge_of_the_ring(tmp_path: Path) -> None:
    done = ppctl("doctor", "--ranks", "2", "--json", cwd=tmp_path, timeout=110)
    told = json.loads(done.stdout)
    assert done.returncode == bool(told["wrong"]), done.stderr
    assert all("slow" in line for line in told["wrong"]), "on a busy machine; nothing else is wrong with it"
    assert [(edge["source"], edge["target"]) for edge in told["edges"]] == [(0, 1), (1, 0)]
    assert all(edge["latency_s"] > 0 and edge["bytes_per_s"] > 1e6 for edge in told["edges"])
    assert told["versions"]["torch"]
    assert told["disk"]["bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    hold("doctor --json", fields(told | {"wrong": []}))


def test_as_ranks_of_a_job_the_first_one_tells(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "ppctl", "doctor"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.stdout.count("nothing is wrong") == (done.returncode == 0), done.stderr
    assert all("slow" in line for line in done.stdout.splitlines() if line.startswith("wrong:"))
    assert "0 -> 1" in done.stdout


def test_a_rank_whose_peers_do_not_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_DEADLINE_S", 0.1)
    assert doctor._as_rank(Started("torchrun", 0, 2))["failure"].endswith(doctor._LATE)
    assert doctor._as_rank(Started("torchrun", 1, 2)) == {}


@pytest.mark.parametrize("variables", [True, False], ids=["as ranks of a job", "without LOCAL_RANK"])
@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 2), (2, 2), (7, 8), (8, 8), (8, 3), (1, 1)])
def test_all_ranks_of_a_machine_measure_with_the_same_kind_of_device(gpus: int, ranks: int, variables: bool) -> None:
    """With one GPU and two ranks, rank 0 took it and waited in NCCL for rank 1, which was on gloo."""
    taken = []
    for rank in range(ranks):
        told = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)} if variables else {}
        taken.append(device_of(rank, ranks, told, gpus))
    assert {device.type for device in taken} == {"cuda" if gpus >= ranks else "cpu"}
    assert [device.index for device in taken] == (list(range(ranks)) if gpus >= ranks else [None] * ranks)


FINE: dict[str, Any] = {
    "failure": None,
    "edges": [{"source": 0, "target": 1, "hosts": ["a", "b"], "error": None, "latency_s": 1e-5, "bytes_per_s": 1e9}],
    "versions": {"torch": "2.13.0+cpu", "python": "3.11.7", "cuda": None, "nccl": None, "devices": []},
    "disk": {"path": "/runs", "bytes_per_s": 1e9, "sync_s": 0.001, "error": None},
    "shared_memory_bytes": 2**30,
    "gpus": 0,
    "transports": [],
}
CUDA_BUILD = {"torch": "2.13.0", "python": "3.11.7", "cuda": "13.0", "nccl": None, "devices": []}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"failure": "the ranks could not be started: x"}, "could not be started"),
        ({"edges": [FINE["edges"][0] | {"error": "timed out"}]}, "rank 0 on a does not reach rank 1 on b: timed out"),
        ({"versions": {"torch": "2.9.1", "cuda": None, "devices": []}}, "older than 2.11"),
        ({"versions": CUDA_BUILD, "gpus": 8}, "sees none of the 8 GPUs"),
        ({"disk": FINE["disk"] | {"bytes_per_s": 1e6}}, "/runs is slow: 1 MB/s"),
        ({"disk": FINE["disk"] | {"error": "Permission denied"}}, "/runs cannot be written: Permission denied"),
        ({"shared_memory_bytes": 1000}, "/dev/shm"),
        ({"transports": [{"transport": "plain", "seconds": None, "error": "x"}]}, "transport=plain fails"),
        ({"edges": [FINE["edges"][0] | {"bytes_per_s": s} for s in (1e9, 1e9, 1e8)]}, "four times slower"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, Any], told: str) -> None:
    assert list(_wrong(FINE)) == list(_wrong(FINE | {"versions": CUDA_BUILD})) == []
    (line,) = _wrong(FINE | change)
    assert told in line


def test_it_refuses_no_ranks(tmp_path: Path) -> None:
    done = ppctl("doctor", "--ranks", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "PP-E641" in done.stderr


def test_what_is_wrong_comes_first_and_every_edge_has_its_row() -> None:
    dead = FINE["edges"][0] | {"error": "timed out", "latency_s": None, "bytes_per_s": None}
    lines = _lines(FINE | {"edges": [FINE["edges"][0], dead]}, ["rank 0 on a does not reach rank 1 on b: timed out"])
    assert lines[0] == "wrong: rank 0 on a does not reach rank 1 on b: timed out"
    table = lines[-1].splitlines()
    assert table[1].split() == ["0", "->", "1", "a", "b", "10", "us", "1.00", "GB/s"]
    assert table[2].split() == ["0", "->", "1", "a", "b", "no", "answer"]


@pytest.mark.parametrize(
    ("device", "devices", "told"), [("cpu", ["H9"], True), ("cuda", ["H9"], False), ("cpu", [], False)]
)
def test_too_few_gpus_are_said_with_the_key_that_shares_them(device: str, devices: list[str], told: bool) -> None:
    lines = _lines(FINE | {"device": device, "versions": CUDA_BUILD | {"devices": devices}}, [])
    assert any("launch.share_gpu=true" in line for line in lines) is told


def row(transport: str, seconds: float | None, error: str | None = None) -> dict[str, Any]:
    return {"transport": transport, "seconds": seconds, "error": error}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([row("plain", 0.02), row("channels", 0.01)], "take launch.transport=channels"),
        ([row("plain", 0.02), row("channels", 0.03)], "take launch.transport=plain (the default on CUDA)"),
        ([row("plain", 0.02), row("channels", None, "no answer within 60 s")], "take launch.transport=plain"),
        ([], "takes at least two ranks with a GPU each"),
    ],
)
def test_it_says_which_transport_to_take_or_what_it_could_not_try(rows: list[dict[str, Any]], told: str) -> None:
    text = "\n".join(_lines(FINE | {"transports": rows}, []))
    assert told in text
    assert all(f"launch.transport={each['transport']}:" in text for each in rows)


def tried() -> list[dict[str, Any]]:
    device, rows = torch.device("cpu"), []
    for transport in probe.TRANSPORTS:
        rows.append(probe.try_transport(transport, device, 60.0, elements=64))
    probe._FACTOR = 2.0 if dist.get_rank() else 4.0
    rows.append(probe.try_transport("plain", device, 60.0, elements=64))
    run_schedule = probe.run_schedule
    probe.run_schedule = lambda *given: run_schedule(*given) if dist.get_rank() else time.sleep(5)
    rows.append(probe.try_transport("channels", device, 1.0, elements=64))
    return rows


def test_a_transport_is_tried_with_a_miniature_pipeline_whose_numbers_are_known() -> None:
    for plain, channels, wrong, hanging in run_ranks(tried, 2):
        assert plain["error"] is channels["error"] is None
        assert plain["seconds"] > 0 and channels["seconds"] > 0
        assert "is right: messages went wrong" in wrong["error"]
        assert hanging == {"transport": "channels", "seconds": None, "error": "no answer within 1 s"}
