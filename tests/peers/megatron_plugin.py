"""pytest's plugin under which Megatron's own unit tests run on CPUs over gloo, with ppctl in its places if asked.

It takes the place of Megatron's conftest, which fetches data for other tests. What is patched: `real_megatron.on_cpus`,
and `nccl` is gloo. Outcomes go to the file of this rank in $PEERS_OUT, one JSON list a test: name, outcome, reason.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from real_megatron import on_cpus

on_cpus()
torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
_init, _group = dist.init_process_group, dist.new_group


def _over_gloo(backend):
    return "gloo" if backend == "nccl" else backend


def _initialise(backend=None, *arguments, **named):
    named.pop("device_id", None)
    return _init(_over_gloo(backend), *arguments, **named)


def _new_group(*arguments, **named):
    if "backend" in named:
        named["backend"] = _over_gloo(named["backend"])
    named.pop("pg_options", None)
    return _group(*arguments, **named)


dist.init_process_group, dist.new_group = _initialise, _new_group

import megatron.core.pipeline_parallel  # noqa: E402, F401

if os.environ.get("PEERS_ADOPT"):
    import ppctl

    told = str(ppctl.adopt())
    if os.environ["RANK"] == "0":
        print(told)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a test's outcome: its call's, or that of a set-up that did not pass."""
    if report.when == "call" or report.outcome != "passed":
        reason = str(report.longrepr).strip().splitlines()[-1] if report.longrepr else ""
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2]
        line = json.dumps([report.nodeid, report.outcome, reason])
        with (Path(os.environ["PEERS_OUT"]) / os.environ["RANK"]).open("a") as file:
            file.write(line + "\n")
