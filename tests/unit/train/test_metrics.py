"""The line that a person watches."""

import math

import pytest

from ppctl.records.step_lines import clock_text, step_line
from ppctl.train.metrics import Screen

RECORD = {
    "step": 7, "loss": 4.87504, "grad_norm": 13.1391, "lr": 7e-4, "tokens_per_s": 11600.4, "bubble_fraction": 0.1291,
    "step_time_s": 0.5, "slowest_stage": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (80, "  7/400 loss 4.875  norm 13.14  11,600 tok/s bubble 13% slow stage 2  ETA 3:17"),
        (
            120,
            "step   7/400  loss 4.8750  grad norm 13.139  lr 7.00e-04   11,600 tokens/s  bubble 12.9%"
            "  slowest stage 2   ETA 3:17",
        ),
    ],
)
def test_a_step_fits_into_one_line_of_the_terminal(columns: int, line: str) -> None:
    assert step_line(RECORD, 400, 197, columns) == line
    assert len(line) <= columns


@pytest.mark.parametrize("unknown", [None, math.nan])
def test_a_step_whose_times_are_not_read_yet_has_dashes(unknown: float | None) -> None:
    """The first one on a GPU; metrics.jsonl has null."""
    record = {**RECORD, "bubble_fraction": unknown, "slowest_stage": 3}
    assert "bubble     -  slowest stage -   ETA" in step_line(record, 400, 197, 200)
    assert " bubble   - slow stage -  ETA" in step_line(record, 400, 197, 100)


@pytest.mark.parametrize(("columns", "start"), [("80", "  7/400"), ("200", "step   7/400"), ("", "step   7/400")])
def test_the_screen_takes_the_width_that_the_launcher_passes_on(
    columns: str, start: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("shutil.os.get_terminal_size", lambda fd: (_ for _ in ()).throw(OSError()))
    Screen(400).log_metrics(RECORD)
    line = capsys.readouterr().out
    assert line.startswith(start) and line.endswith(f"ETA {clock_text(393 * 0.5)}\n")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (83, "1:23"), (7425, "2:03:45")])
def test_time_is_read_off_a_clock(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text
