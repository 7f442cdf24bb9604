"""What `plan` accepts, every command accepts that plans: each policy, a search with a limit, a schedule of a file."""

import argparse
from pathlib import Path

import pytest

from ppctl.cli import parity, rehearse
from ppctl.cli import train as train_command
from ppctl.cli.main import main, parse
from ppctl.config.argv import normalise
from ppctl.launch.environment import detect
from ppctl.plan.rehearsal import shortened
from ppctl.schedule.policies import POLICIES, SPELLINGS

BASE = ("+recipe=quickstart", "launch.device=cpu", "pp=2", "gbs=4", "mbs=1", "layout=null")
MORE = {
    "v_half": "vpp=2", "v_min": "vpp=2", "zbv_zero_bubble": "vpp=2", "dualpipev": "vpp=2",
    "interleaved_1f1b": "vpp=2", "interleaved_zero_bubble": "vpp=2",
}  # fmt: skip
SCHEDULES = {
    **{name: (f"pipeline.pp_schedule={name}", MORE.get(name, "vpp=null")) for name in POLICIES if name in SPELLINGS},
    "put off": ("pipeline.pp_schedule=zb_h1", "pipeline.put_off_limit=1", "vpp=null"),
    "more warm-up": ("pipeline.pp_schedule=1f1b", "pipeline.extra_warmup=1", "vpp=null"),
    "auto": ("pipeline.pp_schedule=auto", "vpp=null"),
    "auto, limited": ("pipeline.pp_schedule=auto", "pipeline.schedule_memory=2", "vpp=null"),
    "file": ("pipeline.pp_schedule_csv=schedule.csv", "vpp=null"),
}


@pytest.fixture(params=SCHEDULES)
def typed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.chdir(tmp_path)
    if request.param == "file":
        words = (*BASE, "pipeline.pp_schedule=1f1b", "vpp=null", "--dump-schedule", "schedule.csv")
        assert main(["plan", *words]) == 0
    return (*BASE, *SCHEDULES[request.param])


def arguments(command: str, module: object, typed: tuple[str, ...]) -> argparse.Namespace:
    return parse(command, module, typed)


def test_train_accepts_it(typed: tuple[str, ...]) -> None:
    train_command.prepare(arguments("train", train_command, typed), detect({}))


def test_parity_accepts_it(typed: tuple[str, ...]) -> None:
    (_, one), (_, cut) = parity._planned(arguments("parity", parity, typed))
    assert (one.sizes.world, cut.sizes.world, one.num_microbatches) == (1, 2, cut.num_microbatches)


def test_rehearse_accepts_it(typed: tuple[str, ...]) -> None:
    composed, plan, problems = rehearse._planned_for_gpus(normalise(typed))
    assert problems == [] and composed is not None and plan is not None
    assert shortened(composed.config, plan)[1].sizes == plan.sizes


def test_submit_accepts_it(typed: tuple[str, ...]) -> None:
    assert main(["submit", *typed, "--dry-run"]) == 0
