"""Planned throughput against published runs. The floors are issue 4's; every constant is the same for all rows."""

import pytest
from published_runs import kendall_tau, throughput_rows

from ppctl.config.keys import keys
from ppctl.config.metadata import OneOf
from ppctl.cost.setting import ALLOCATORS
from ppctl.host.accelerators import DEVICES, device_called


def test_published_throughput_is_planned_within_30_percent_and_in_order() -> None:
    counted = throughput_rows()
    assert len(counted) >= 8
    assert {row.name: round(row.error, 3) for row in counted if abs(row.error) > 0.30} == {}
    assert kendall_tau(counted) >= 0.7


def test_the_names_that_a_config_may_say_are_those_that_are_priced() -> None:
    for key, priced in (("cost.device", DEVICES), ("cost.allocator", ALLOCATORS)):
        limit = keys()[key].limit
        assert isinstance(limit, OneOf)
        assert set(limit.names) == set(priced)


@pytest.mark.parametrize(
    ("called", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H200", "h200"),
        ("Tesla T4", None),
        ("CPU", None),
    ],
)
def test_a_device_is_known_by_what_its_driver_calls_it(called: str, preset: str | None) -> None:
    found = device_called(called)
    assert (found.name if found else None) == preset
