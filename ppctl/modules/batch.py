"""A batch as a step reads it: the model's arguments and the labels, by microbatch.

Knows tensors and their rows. Must not know schedules or stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ppctl.config.pipeline_config import PipelineConfig
from ppctl.errors import ConfigError, Problem

CODE = "PP-E130"


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What the model is called with, and what its loss reads."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    labels: Any


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch in microbatches, in the order of its rows."""

    microbatches: tuple[Microbatch, ...]
    per_call: int
    """Microbatches of one call of the schedule."""
    autocast: torch.dtype | None = None
    """The dtype of the autocast that is on for the device, which decides what stages send."""

    @property
    def shapes(self) -> str:
        """Shapes and dtypes of a microbatch, as text that ranks can compare."""
        first = self.microbatches[0]
        told = tree_map(_told, (first.positional, first.named))
        under = "" if self.autocast is None else f" under autocast to {_short(self.autocast)}"
        return f"{len(self.microbatches)} microbatches in calls of {self.per_call}{under}: {told}"


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_short(value.dtype)}{list(value.shape)}"
    return type(value).__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def divide(given: Any, config: PipelineConfig, device: torch.device) -> Batch:
    """The microbatches of `(inputs, labels)` or of a mapping with `labels`, on the device.

    `inputs` is the model's argument, or a tuple of them; of a mapping all else goes to the model by name. Tensors whose
    first dim is as long as the first one's are divided, all else goes to every microbatch. Raises ConfigError (PP-E130)
    for another form, and for rows that make no whole microbatches or schedule calls, or that are not pp_seq_len long.
    """
    positional, named, labels = _taken_apart(given)
    tensors = [each for each in tree_leaves((positional, named)) if isinstance(each, Tensor) and each.dim()]
    if not tensors:
        raise _refused("the batch has no tensor for the model", "step((inputs, labels))")
    first = tensors[0]
    rows, size, call = first.shape[0], config.pp_microbatch_size, config.pp_batch_size
    if rows % size or not rows:
        raise _refused(
            f"{rows} sequences are not a whole number of microbatches of {size}",
            f"{max(1, rows // size) * size} sequences",
        )
    if call > 1 and (call % size or rows % call):  # 1, the default, is no wish: all of the batch is one call
        message = f"pp_batch_size={call} in microbatches of {size} does not divide {rows} sequences into whole calls"
        raise _refused(message, f"pp_batch_size={rows}")
    if config.pp_seq_len is not None and (first.dim() < 2 or first.shape[1] != config.pp_seq_len):
        message = f"pp_seq_len is {config.pp_seq_len}, and the model's first argument is {list(first.shape)}"
        raise _refused(message, "pp_seq_len=None")
    if isinstance(labels, Tensor) and labels.dim() and labels.shape[0] != rows:
        raise _refused(f"{rows} sequences have {labels.shape[0]} rows of labels", "labels for every sequence")
    number = rows // size

    def part(value: Any, mb: int) -> Any:
        if isinstance(value, Tensor):
            return value[mb * size : (mb + 1) * size] if value.dim() and value.shape[0] == rows else value
        return value

    whole = tree_map(lambda each: _moved(each, device), (positional, named, labels))
    made = tuple(Microbatch(*tree_map(lambda each, mb=mb: part(each, mb), whole)) for mb in range(number))
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return Batch(made, call // size if call > 1 else number, autocast)


def _taken_apart(given: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    if isinstance(given, Mapping):
        named = {str(name): value for name, value in given.items()}
        labels = named.pop("labels", None)
        return (), named, labels
    if isinstance(given, tuple | list) and len(given) == 2:
        inputs, labels = given
        return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}, labels
    raise _refused(f"a batch is (inputs, labels) or a mapping, not a {type(given).__name__}", "step((inputs, labels))")


def _moved(value: Any, device: torch.device) -> Any:
    """On the device: one copy ahead of the pipeline, in which nothing then waits for the device."""
    if not isinstance(value, Tensor) or value.device == device:
        return value
    on_gpu = device.type == "cuda" and value.device.type == "cpu"
    return (value.pin_memory() if on_gpu else value).to(device, non_blocking=on_gpu)


def _refused(message: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(CODE, message, remedy))
