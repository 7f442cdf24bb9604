"""Writers of a step's record: the screen, TensorBoard and Weights & Biases, each a callback of rank 0.

`step` counts from 1, so that record N belongs to checkpoint step-N.
"""

from __future__ import annotations

import shutil
from typing import Any, cast

from ppctl.config.mapping import to_mapping
from ppctl.config.run_rules import not_installed
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError
from ppctl.records.step_lines import WIDE, Record, StepLines
from ppctl.train.callback import Callback


class Screen(Callback):
    """Prints every record to stdout, as wide as the launcher says that the terminal is."""

    def __init__(self, steps: int) -> None:
        self.shown = StepLines(steps, shutil.get_terminal_size((WIDE, 24)).columns)

    def log_metrics(self, record: Record) -> None:
        """Print the record's lines."""
        print("\n".join(self.shown.lines(record)), flush=True)


class TensorBoard(Callback):
    """Writes every number of a record as a TensorBoard scalar. Raises ConfigError without tensorboard."""

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as missing:
            raise ConfigError(not_installed("log.tensorboard")) from missing
        self._writer = SummaryWriter(directory)

    def log_metrics(self, record: Record) -> None:
        """Add a scalar for each number."""
        for key, value in _numbers(record).items():
            self._writer.add_scalar(key, value, record["step"])
        self._writer.flush()

    def end(self) -> None:
        """End the file."""
        self._writer.close()


class WeightsAndBiases(Callback):
    """Logs every number of a record to Weights & Biases, as `log.wandb_*` say. Raises ConfigError without wandb.
    Records go through another process: unless `end` ends it, the last records, or all, are lost."""

    def __init__(self, directory: str, run_id: str, config: RunConfig) -> None:
        try:
            import wandb
        except ImportError as missing:
            raise ConfigError(not_installed("log.wandb")) from missing
        log = config.log
        self._run = wandb.init(
            project=log.wandb_project or log.name,
            entity=log.wandb_entity,
            tags=log.wandb_tags,
            mode=cast(Any, log.wandb_mode),
            id=run_id,
            name=run_id,
            dir=directory,
            config=to_mapping(config),
            resume="allow",
        )
        self._run.define_metric("step")  # W&B's own step only grows, and drops records after going back
        self._run.define_metric("*", step_metric="step")

    def log_metrics(self, record: Record) -> None:
        """Log the numbers."""
        self._run.log({"step": record["step"], **_numbers(record)})

    def end(self) -> None:
        """End the process that sends records. Called after a failure is written, since this may take long."""
        self._run.finish()


def _numbers(record: Record) -> dict[str, float]:
    return {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}
