"""A step as a line for a person: rank 0 prints it while it trains, and `ppctl logs` shows it later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

WIDE = 120
"""From this number of columns on, a step's line has its long form."""


def clock_text(seconds: float) -> str:
    """Seconds as `1:23` or `2:03:45`."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def step_line(record: Record, steps: int, eta_s: float, columns: int = WIDE) -> str:
    """One step in fixed columns; in a short form on a screen of less than WIDE columns, as far as it fits."""
    done = f"{record['step']:>{len(str(steps))}}/{steps}"
    bubble, stage = record.get("bubble_fraction"), record.get("slowest_stage")
    if bubble is None or bubble != bubble:  # a GPU's times are read one step late: the first step has none
        share, stage = "-", "-"
    else:
        share = format(bubble, ".1%" if columns >= WIDE else ".0%")
    if columns < WIDE:
        line = f"{done} loss {figure(record, 'loss', '.3f')}  norm {figure(record, 'grad_norm', '5.2f')}"
        for more in (
            f"  {figure(record, 'tokens_per_s', '>5,.0f')} tok/s",
            f" bubble {share:>3}",
            f" slow stage {stage!s:<2}",
            f" ETA {clock_text(eta_s)}",
        ):
            line += more if len(line) + len(more) <= columns else ""
        return line
    norm, rate = figure(record, "grad_norm", "6.3f"), figure(record, "lr", ".2e")
    return (
        f"step {done}  loss {figure(record, 'loss', '.4f')}  grad norm {norm}  lr {rate}"
        f"  {figure(record, 'tokens_per_s', '>7,.0f')} tokens/s  bubble {share:>5}"
        f"  slowest stage {stage!s:<2}  ETA {clock_text(eta_s)}"
    )


def figure(record: Record, key: str, form: str) -> str:
    """A figure of a step as text; `nan` if it is missing, or null, which metrics.jsonl has for one not finite."""
    value = record.get(key)
    return "nan" if value is None else format(value, form)


RECENT = 20
"""The number of last steps whose mean predicts later steps' time."""


def mean_step_time(records: Sequence[Record]) -> float | None:
    """The mean seconds of the last RECENT steps; None before the first step."""
    recent = [record["step_time_s"] for record in records[-RECENT:] if record.get("step_time_s")]
    return sum(recent) / len(recent) if recent else None


class StepLines:
    """The lines of consecutive steps."""

    def __init__(self, steps: int, columns: int) -> None:
        self.steps = steps
        self.columns = columns
        self.recent: list[Record] = []

    def lines(self, record: Record) -> list[str]:
        """The step's line, and one for its evaluation if there was one."""
        self.recent = [*self.recent, record][-RECENT:]
        left = (self.steps - record["step"]) * (mean_step_time(self.recent) or 0.0)
        lines = [step_line(record, self.steps, left, self.columns)]
        if "eval_loss" in record:
            loss, samples = figure(record, "eval_loss", ".4f"), figure(record, "eval_samples", ",")
            lines.append(f"  held out  loss {loss}  over {samples} samples")
        return lines
