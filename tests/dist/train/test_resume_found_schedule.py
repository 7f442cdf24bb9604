"""`ppctl resume` of a run whose schedule was found by search: the same schedule, the bits of a run without a break."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import TINY, metrics, only_run, ppctl

pytestmark = pytest.mark.timeout(180)

SEARCHED = ("pp=2", "vpp=1", "pipeline.pp_schedule=auto", "layout=Et|t*5L")
KEPT = ("loss", "grad_norm")


def test_a_resumed_run_keeps_the_schedule_that_was_found_and_changes_no_bit(tmp_path: Path) -> None:
    words = tmp_path / "corpus.txt"
    words.write_text("a stage waits for a stage " * 500)
    saved = ("steps=4", "checkpoint.interval=2", "checkpoint.keep=0", f"data.path={words}")
    done = ppctl("train", "+recipe=quickstart", *TINY, *SEARCHED, *saved, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    schedule, whole = (run / "schedule.csv").read_bytes(), metrics(run)
    assert "I0" in schedule.decode() and len(whole) == 4, "the search found an order with split backwards"
    shutil.rmtree(run / "checkpoints" / "step-4")
    (run / "checkpoints" / "latest").write_text("step-2\n")
    done = ppctl("resume", str(run), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = next(each for each in json.loads((run / "plan.json").read_text())["derived"] if each["key"] == "schedule")
    assert "kept from the run's earlier start" in found["equation"]
    assert (run / "schedule.csv").read_bytes() == schedule
    assert [[record[key] for key in KEPT] for record in metrics(run)] == [[r[key] for key in KEPT] for r in whole]
