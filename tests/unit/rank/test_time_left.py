"""When rank 0 begins the stop by itself, and what a start is made of."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ppctl.hang.progress import MARGIN
from ppctl.rank.live_state import Phases, TimeLeft, job_end, process_age


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(clock: Clock, left: TimeLeft, *phases: tuple[str, float]) -> None:
    for state, seconds in phases:
        left.enter(state)
        clock.now += seconds


def test_without_a_limit_time_is_never_over() -> None:
    clock = Clock()
    left = TimeLeft(clock=clock)
    run(clock, left, ("training", 1e6), ("saving", 1e6), ("training", 1e6))
    assert not left.over()


@pytest.mark.parametrize(
    ("save", "step", "needed"), [(0.0, 0.0, MARGIN), (20.0, 0.0, 40 + MARGIN), (20.0, 5.0, 40 + 15 + MARGIN)]
)
def test_the_stop_begins_with_two_saves_three_steps_and_a_margin_left(save: float, step: float, needed: float) -> None:
    clock = Clock()
    left = TimeLeft(clock=clock)
    run(clock, left, ("training", step), ("saving", save), ("training", 0.0))
    left.job_end = clock.now + needed + 0.5
    assert not left.over()
    left.job_end = clock.now + needed - 0.5
    assert left.over()


def test_the_slowest_save_counts_and_of_the_steps_the_slowest_of_the_last_ten() -> None:
    clock = Clock()
    left = TimeLeft(clock=clock)
    run(clock, left, ("training", 300.0), *[("saving", s) for s in (3.0, 9.0, 4.0)], *[("training", 2.0)] * 11)
    left.enter("training")
    left.job_end = clock.now + 2 * 9 + 3 * 2 + MARGIN + 1
    assert not left.over()
    left.job_end -= 2
    assert left.over()


def test_what_is_no_step_and_no_save_is_not_reckoned_with() -> None:
    """Kernels are compiled once, and a profile's files are no checkpoint: else a run would stop an hour too early."""
    clock = Clock()
    left = TimeLeft(clock=clock, slowest_save=1.0)
    run(clock, left, ("loading kernels", 900.0), ("training", 2.0), ("recording", 300.0), ("training", 0.0))
    left.job_end = clock.now + 2 * 1 + 3 * 2 + MARGIN + 0.5
    assert not left.over()


def test_before_the_first_save_the_bytes_say_how_long_one_takes() -> None:
    """A slow disk is assumed until one has been measured: else a large model's first save would begin too late."""
    clock = Clock()
    left = TimeLeft(clock=clock, saved_bytes=10 * 100 * 2**20)
    run(clock, left, ("training", 2.0))
    left.job_end = clock.now + 2 * 10 + 3 * 2 + MARGIN - 0.5
    assert left.over()
    left.note_save(1.0)
    assert not left.over()


def test_exit_after_is_over_when_it_is_over() -> None:
    clock = Clock()
    left = TimeLeft(exit_at=1010.0, clock=clock)
    clock.now = 1009.9
    assert not left.over()
    clock.now = 1010.0
    assert left.over()


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ("2026-11-21T15:00:00", time.mktime((2026, 11, 21, 15, 0, 0, 0, 0, -1))),
        ("NONE", None),
        ("N/A", None),
        ("", None),
    ],
)
def test_slurm_is_asked_once_when_the_job_ends(answer: str, end: float | None, tmp_path: Path, monkeypatch) -> None:
    tool = tmp_path / "squeue"
    tool.write_text(f'#!/bin/bash\n[[ "$*" =~ ^"-h -j 77"(_4)?" -o %e"$ ]] && echo "{answer}"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert job_end({"SLURM_JOB_ID": "77"}) == end
    assert job_end({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "4"}) == end


def test_outside_a_job_and_without_slurm_there_is_no_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert job_end({}) is None
    assert job_end({"SLURM_JOB_ID": "77"}) is None


def test_phases_add_up() -> None:
    phases = Phases()
    phases.add("import", 2.0)
    with phases("groups"):
        time.sleep(0.01)
    with phases("groups"):
        time.sleep(0.01)
    assert list(phases.seconds) == ["import", "groups"]
    assert 0.02 <= phases.seconds["groups"] < 5


def test_phases_are_told_in_their_order_with_their_sum() -> None:
    phases = Phases()
    for name, seconds in (("import", 2.0), ("groups", 0.25), ("groups", 0.5)):
        phases.add(name, seconds)
    assert phases.line() == "start-up 2.8 s: import 2.0, groups 0.8"


def test_a_process_knows_how_old_it_is() -> None:
    first = process_age()
    time.sleep(0.05)
    assert 0 < first < process_age()


def test_a_container_that_is_younger_than_its_machine_makes_no_process_younger(monkeypatch) -> None:
    """lxcfs gives it an uptime of its own: `train.exit_after` was never over there."""
    before, read = process_age(), Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, *words: "0.50 0.10\n" if path.name == "uptime" else read(path, *words)
    )
    assert before <= process_age() < before + 5
