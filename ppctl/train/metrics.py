"""What is said about a step: the record, the line on the screen, and the writers behind both.

Knows the keys of metrics.jsonl and how a person reads them. Must not know how a step is computed. Rank 0 alone writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from ppctl.errors import ConfigError, Problem

Record = Mapping[str, Any]


Writer = Callable[[Record], None]
"""Something that takes one record a step."""


def clock_text(seconds: float) -> str:
    """Seconds as `1:23` or `2:03:45`."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def step_line(record: Record, steps: int, eta_s: float) -> str:
    """One step for the screen: what a person watches, in fixed columns."""
    width = len(str(steps))
    return (
        f"step {record['step'] + 1:>{width}}/{steps}  loss {record['loss']:.4f}  grad norm {record['grad_norm']:7.3f}"
        f"  lr {record['lr']:.2e}  {record['tokens_per_s']:>8,.0f} tokens/s"
        f"  bubble {record['bubble_fraction']:6.1%}  slowest stage {record['slowest_stage']}  ETA {clock_text(eta_s)}"
    )


class Screen:
    """Prints one line a step to stdout, with the time that is left judged from the last twenty steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.recent: list[float] = []

    def __call__(self, record: Record) -> None:
        """Print the record's line."""
        self.recent = [*self.recent[-19:], record["step_time_s"]]
        left = self.steps - record["step"] - 1
        print(step_line(record, self.steps, left * sum(self.recent) / len(self.recent)), flush=True)


def tensorboard_writer(directory: str) -> Writer:
    """Write every number of a record as a TensorBoard scalar. Raises ConfigError where tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as missing:
        raise _missing("log.tensorboard", "tensorboard") from missing
    writer = SummaryWriter(directory)

    def write(record: Record) -> None:
        for key, value in _numbers(record).items():
            writer.add_scalar(key, value, record["step"])
        writer.flush()

    return write


def wandb_writer(directory: str, name: str, run_id: str, config: Mapping[str, Any]) -> Writer:
    """Log every number of a record to Weights & Biases (WANDB_MODE=offline works). Raises ConfigError without wandb."""
    try:
        import wandb
    except ImportError as missing:
        raise _missing("log.wandb", "wandb") from missing
    run = wandb.init(project=name, id=run_id, name=run_id, dir=directory, config=dict(config), resume="allow")

    def write(record: Record) -> None:
        run.log(_numbers(record), step=record["step"])

    return write


def writers(append: Callable[[Record], None], others: list[Writer], screen: bool, steps: int) -> Writer:
    """One writer of all: metrics.jsonl first (it is the truth), then the trackers, then the screen."""
    every: list[Writer] = [append, *others, *([Screen(steps)] if screen else [])]

    def write(record: Record) -> None:
        for one in every:
            one(record)

    return write


def _numbers(record: Record) -> dict[str, float]:
    return {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}


def _missing(key: str, package: str) -> ConfigError:
    return ConfigError(
        Problem("PP-E704", f"{key} is on and {package} is not installed", f"{sys.executable} -m pip install {package}")
    )
