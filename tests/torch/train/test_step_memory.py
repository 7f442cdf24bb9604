"""What a rank takes from the driver before the first message, beside the plan's peak."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ppctl.engine.pace import HELD
from ppctl.train import step
from ppctl.train.step import Trainer

CPU = torch.device("cpu")


@pytest.mark.parametrize(("routed", "shared", "rows"), [(False, False, 0), (True, False, 1000), (True, True, 0)])
@pytest.mark.parametrize("lacks", [0, 3 << 20])
def test_room_for_messages_that_are_held_for_experts_rows_and_in_host_memory(
    monkeypatch, capsys, routed: bool, shared: bool, rows: int, lacks: int
) -> None:
    """Ranks that share a device take no more than the plan's peak, for another may need the rest."""
    asked: list[tuple] = []
    pinned: list[int] = []
    monkeypatch.setattr(step, "reserve", lambda *of: asked.append(of) or lacks)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1, 80 << 30))
    own = SimpleNamespace(peak_bytes=5 << 20, activation_bytes=1000, in_flight=3)
    stage = SimpleNamespace(receives=[torch.empty(5, 7)], sends=[torch.empty(5, 7, dtype=torch.float64)])
    session = SimpleNamespace(
        plan=SimpleNamespace(pp_ranks=[None, own], routed=routed),
        own=SimpleNamespace(pp_rank=1, rank=6, stages=[stage]),
        config=SimpleNamespace(launch=SimpleNamespace(share_gpu=shared)),
        device=CPU,
        model=SimpleNamespace(
            offload=SimpleNamespace(copies=SimpleNamespace(buffers=SimpleNamespace(multiply=pinned.append)))
        ),
    )
    Trainer._reserve(SimpleNamespace(session=session))
    assert asked == [(CPU, 5 << 20, 3, HELD * 8 * 35 + rows)]
    assert pinned == [3], "to pin memory may wait for the device as well"
    said = capsys.readouterr().err
    assert bool(said) == bool(lacks)
    if lacks:
        assert "PP-E823" in said and "rank 6 lacks 3 MiB of the plan's peak of 5 MiB" in said
        assert "launch.device_memory=80GiB" in said
