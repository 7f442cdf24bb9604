"""Writers of a step's record: metrics.jsonl, the line on the screen, TensorBoard and Weights & Biases.

`step` counts from 1, so that record N belongs to checkpoint step-N. Must not know how a step is computed. Rank 0 alone
writes.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ppctl.errors import ConfigError, Problem, pasted
from ppctl.step_lines import WIDE, Record, StepLines

Writer = Callable[[Record], None]
"""Something that takes one record a step."""


class Screen:
    """Prints every step to stdout, as wide as the launcher says that the terminal is."""

    def __init__(self, steps: int) -> None:
        self.shown = StepLines(steps, shutil.get_terminal_size((WIDE, 24)).columns)

    def __call__(self, record: Record) -> None:
        """Print the record's lines."""
        print("\n".join(self.shown.lines(record)), flush=True)


@contextmanager
def tensorboard_writer(directory: str) -> Iterator[Writer]:
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

    try:
        yield write
    finally:
        writer.close()


@contextmanager
def wandb_writer(directory: str, name: str, run_id: str, config: Mapping[str, Any]) -> Iterator[Writer]:
    """Log every number of a record to Weights & Biases (WANDB_MODE=offline works). Raises ConfigError without wandb.

    Records go through another process: if it is not closed at the end, the last ones or all are lost.
    """
    try:
        import wandb
    except ImportError as missing:
        raise _missing("log.wandb", "wandb") from missing
    run = wandb.init(project=name, id=run_id, name=run_id, dir=directory, config=dict(config), resume="allow")

    def write(record: Record) -> None:
        run.log(_numbers(record), step=record["step"])

    try:
        yield write
    finally:
        run.finish()


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
        Problem(
            "PP-E704",
            f"{key} is on and {package} is not installed",
            f"{pasted(sys.executable)} -m pip install {package}",
        )
    )
