"""How much memory is taken before the first message, by torch's figures of a device."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ppctl.config.gpu_environment import EXPANDABLE, expanding, kept_allocator
from ppctl.engine.dry_pass import FRAGMENTS, AllocatorFigures, reserve
from ppctl.engine.pace import HELD
from ppctl.modules import calls
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule

CPU = torch.device("cpu")
MIB = 2**20


class Card:
    """What torch says of a device: MiB in use and free, and what small blocks have left in its cache."""

    def __init__(self, patch: pytest.MonkeyPatch, used: int, free: int, small: int = 0, split: int = 0) -> None:
        pools = {"all": used + small, "small_pool": small}
        stats = {
            "reserved_bytes": {pool: {"current": size * MIB} for pool, size in pools.items()},
            "allocated_bytes": {"all": {"current": used * MIB}, "small_pool": {"current": 0}},
            "max_split_size": split * MIB or -1,
            "num_alloc_retries": 3,
            "num_device_alloc": 8,
        }
        for name, found in (
            ("memory_allocated", used * MIB),
            ("memory_reserved", (used + small) * MIB),
            ("mem_get_info", (free * MIB, 2**50)),
            ("memory_stats_as_nested_dict", stats),
            ("empty_cache", None),
        ):
            patch.setattr(torch.cuda, name, lambda *_, found=found: found)


class Taken(TorchFunctionMode):
    """Sizes of blocks."""

    def __init__(self, most: int = 2**40) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.most = most

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.sizes.append(args[0])
        if args[0] > self.most:
            raise torch.OutOfMemoryError
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("used", "free", "peak", "varying", "large", "lacks"),
    [
        (10, 200, 100, 0, 90 + 5, 0),
        (10, 200, 100, 40, 90 + 45, 0),
        (10, 100, 100, 40, 90 + 5, 0),  # half of the 10 that are left
        (10, 90, 100, 40, 90 * 0.95, 0),  # a twentieth of what is free stays so
        (10, 60, 100, 40, 60 * 0.95, 30),
        (10, 200, 8, 0, 0, 0),  # more is in use than the plan's peak
    ],
)
def test_what_is_missing_to_the_peak_is_taken_with_a_share_for_the_rest(
    monkeypatch, used: int, free: int, peak: int, varying: int, large: int, lacks: int
) -> None:
    Card(monkeypatch, used, free)
    with Taken() as taken:
        assert reserve(CPU, peak * MIB, 3, varying * MIB) == lacks * MIB
    assert FRAGMENTS == 0.05
    assert taken.sizes == [pytest.approx(large * MIB, abs=MIB)]


def test_memory_that_another_process_takes_meanwhile_is_lacking(monkeypatch) -> None:
    Card(monkeypatch, used=10, free=200)
    with Taken(most=50 * MIB):
        assert reserve(CPU, 100 * MIB, 3) == 90 * MIB


def test_small_blocks_are_kept_for_all_microbatches_in_flight_and_as_small_ones(monkeypatch) -> None:
    Card(monkeypatch, used=10, free=100, small=2)
    with Taken() as taken:
        reserve(CPU, 20 * MIB, in_flight=4)
    assert sum(taken.sizes[1:]) == 4 * 2 * MIB
    assert max(taken.sizes[1:]) <= MIB, "torch keeps blocks of more than 1 MiB apart"


@pytest.mark.parametrize("split", [21, 64])
def test_where_large_blocks_are_not_divided_the_peak_is_taken_in_smaller_ones(monkeypatch, split: int) -> None:
    """One large block would take the device's memory, and serve no request but one as large."""
    Card(monkeypatch, used=10, free=400, split=split)
    with Taken() as taken:
        reserve(CPU, 200 * MIB, in_flight=3)
    assert sum(taken.sizes) == (190 + 10) * MIB
    assert max(-(-size // (2 * MIB)) * 2 * MIB for size in taken.sizes) < split * MIB, "as torch rounds them"


BOTH = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:101", "PYTORCH_ALLOC_CONF": "max_split_size_mb:202"}


@pytest.mark.parametrize("names", [tuple(BOTH), *((name,) for name in BOTH)])
def test_settings_that_are_told_are_those_that_torch_reads_and_the_remedy_reaches_it(names: tuple[str, ...]) -> None:
    def read(environ: dict[str, str]) -> str:
        others = {name: value for name, value in os.environ.items() if name not in BOTH}
        command = [sys.executable, "-c", "import torch; print(torch._C._accelerator_getAllocatorSettings())"]
        done = subprocess.run(command, env=others | environ, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    environ = {name: BOTH[name] for name in names}
    note, remedy = kept_allocator(environ, {}), expanding(environ)
    assert note is not None and f"={read(environ)} is kept" in note
    assert remedy is not None
    name, _, value = remedy.removeprefix("launch.env.").partition("=")
    assert read(environ | {name: value}) == EXPANDABLE


def test_figures_are_torchs_own_and_nothing_on_a_cpu(monkeypatch) -> None:
    Card(monkeypatch, used=10, free=100, small=2)
    assert AllocatorFigures.of(torch.device("cuda")) == (3, 8, 2 * MIB)
    assert AllocatorFigures.of(CPU) == (0, 0, 0)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_module_s_memory_is_taken_behind_its_dry_pass_on_a_gpu(monkeypatch, pp: int) -> None:
    Card(monkeypatch, used=10, free=100)
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: order.append("dry pass is over"))
    monkeypatch.setattr(torch.random, "fork_rng", lambda _: nullcontext())
    monkeypatch.setattr(calls, "_reserve", lambda *_: order.append("reserved"))
    schedule = lower(make_schedule("1f1b", pp=pp, vpp=1, num_microbatches=4))
    stages = SimpleNamespace(restored=nullcontext)
    run = SimpleNamespace(prepared=SimpleNamespace(schedule=schedule), stages=stages, programs=lambda *_, **__: [])
    calls.run_dry(run, torch.device("cuda"))
    assert order == ["dry pass is over", *["reserved"] * (pp > 1)], "one rank receives nothing"


def test_a_module_s_step_reserves_what_its_dry_pass_measured_for_all_in_flight(monkeypatch) -> None:
    Card(monkeypatch, used=10, free=100)
    asked: list[tuple] = []
    monkeypatch.setattr(calls, "reserve", lambda *of: asked.append(of))
    schedule = lower(make_schedule("interleaved_1f1b", pp=2, vpp=2, num_microbatches=4))
    crossing = SimpleNamespace(edges=[torch.empty(5, 7, device="meta")])
    run = SimpleNamespace(prepared=SimpleNamespace(schedule=schedule, crossing=crossing), pp_rank=0)
    calls._reserve(run, CPU, {0: 1000, 2: 10})
    posted = sum(capacity for channel, capacity in schedule.capacities.items() if channel.target == 0)
    assert posted > 0
    # 0F0 0F1 2F0 2F1 0F2 2B0 0F3: four microbatches of stage 0 and one of stage 2 are the most bytes.
    assert asked == [(CPU, 10 * MIB + 4 * 1000 + 10 + (posted + HELD) * 4 * 5 * 7, 5)]
