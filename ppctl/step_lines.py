"""A step as a line for a person: rank 0 prints it while it trains, and `ppctl logs` shows it later.

Knows the keys of a metrics record and how wide a line may be. Must not know where records come from, nor torch.
"""

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
    if columns < WIDE:
        line = f"{done} loss {record['loss']:.3f}  norm {record['grad_norm']:5.2f}"
        for more in (
            f"  {record['tokens_per_s']:>5,.0f} tok/s",
            f" bubble {record['bubble_fraction']:3.0%}",
            f" slow stage {record['slowest_stage']:<2}",
            f" ETA {clock_text(eta_s)}",
        ):
            line += more if len(line) + len(more) <= columns else ""
        return line
    return (
        f"step {done}  loss {record['loss']:.4f}  grad norm {record['grad_norm']:6.3f}  lr {record['lr']:.2e}"
        f"  {record['tokens_per_s']:>7,.0f} tokens/s  bubble {record['bubble_fraction']:5.1%}"
        f"  slowest stage {record['slowest_stage']:<2}  ETA {clock_text(eta_s)}"
    )


RECENT = 20
"""Steps from whose mean the time of those to come is estimated."""


def mean_step_time(records: Sequence[Record]) -> float | None:
    """Seconds of one of the last RECENT steps; None without one."""
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
            lines.append(f"  held out  loss {record['eval_loss']:.4f}  over {record['eval_samples']:,} samples")
        return lines
