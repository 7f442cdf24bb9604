"""A batch as a step reads it: the model's arguments and the labels, by microbatch.

Knows tensors and their rows. Must not know schedules or stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    hides: bool | None = None
    """Whether its attention_mask [rows, tokens] hides tokens; None where nobody has looked."""
    packed: bool | None = None
    """Whether its position_ids [rows, tokens] begin anew within a row."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch in microbatches, in the order of its rows."""

    microbatches: tuple[Microbatch, ...]
    per_call: int
    """Microbatches of one call of the schedule."""
    given: Microbatch
    """The first one as it was given, on whatever device."""
    autocast: torch.dtype | None = None
    """The dtype of the autocast that is on for the device, which decides what stages send."""

    @property
    def on_host(self) -> bool:
        """Whether values can be read without a wait for a GPU."""
        given = tree_leaves((self.given.positional, self.given.named, self.given.labels))
        return all(each.device.type == "cpu" for each in given if isinstance(each, Tensor))

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


def divide(given: Any, config: PipelineConfig, device: torch.device, *, reads_masks: bool = False) -> Batch:
    """The microbatches of `(inputs, labels)` or of a mapping with `labels`, on the device.

    `inputs` is the model's argument, or a tuple of them; of a mapping all else goes to the model by name. Tensors whose
    first dim is as long as the first one's are divided, all else goes to every microbatch. Raises ConfigError (PP-E130)
    for another form, for rows that make no whole microbatches or schedule calls, or that are not pp_seq_len long, and
    for tensors that look as if they had rows, and have another number.
    """
    parts = positional, named, labels = _taken_apart(given)
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
    _refuse_other_rows({**{f"argument {n}": value for n, value in enumerate(positional)}, **named}, first)
    number = rows // size

    def part(value: Any, mb: int) -> Any:
        if isinstance(value, Tensor):
            return value[mb * size : (mb + 1) * size] if value.dim() and value.shape[0] == rows else value
        return value

    whole = tree_map(lambda each: _moved(each, device), parts)
    as_given = Microbatch(*tree_map(lambda each: part(each, 0), parts))
    hides, packed = _known(named, rows, size) if reads_masks else ([None] * number,) * 2

    def microbatch(mb: int) -> Microbatch:
        of_model, by_name, wanted = tree_map(lambda each: part(each, mb), whole)
        return Microbatch(of_model, by_name, wanted, hides[mb], packed[mb])

    made = tuple(map(microbatch, range(number)))
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return Batch(made, call // size if call > 1 else number, as_given, autocast)


def _refuse_other_rows(arguments: Mapping[str, Any], first: Tensor) -> None:
    """Raise ConfigError for a mask of k rows, and for any tensor [k, tokens] beside token ids [rows, tokens].

    One row is for all of them, and a mask [tokens, tokens] has none. What has other dims is the model's own matter.
    """
    rows, length = first.shape[0], first.shape[1] if first.dim() > 1 else None
    of_tokens = first.dim() == 2 and not first.is_floating_point()
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or not value.dim() or value.shape[0] in (1, rows):
            continue
        alike = of_tokens and value.dim() == 2 and value.shape[1] == length
        if (alike or name == "attention_mask") and not (value.shape[0] == value.shape[-1] == length):
            message = f"{name} {list(value.shape)} has {value.shape[0]} rows, and there are {rows} sequences"
            raise _refused(message, f"{name} with a row for every sequence, or one for all")


def _known(named: Mapping[str, Any], rows: int, size: int) -> tuple[list[bool | None], list[bool | None]]:
    """By microbatch of `size` rows, whether a mask [rows or 1, tokens] hides tokens, and whether such positions begin
    anew; None of any other tensor, and on meta."""

    def known(value: Any, usual: Callable[[Tensor], Tensor]) -> list[bool | None]:
        if not isinstance(value, Tensor) or value.dim() != 2 or value.device.type == "meta":
            return [None] * (rows // size)
        as_usual = usual(value).all(dim=1).expand(rows).view(-1, size).all(dim=1)
        return [not each for each in as_usual.tolist()]

    positions = named.get("position_ids")
    return known(named.get("attention_mask"), Tensor.bool), known(positions, lambda each: each.diff(dim=1) == 1)


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
