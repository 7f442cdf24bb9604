"""The batch and the loss of a step: the model's arguments and the labels by microbatch, and a function of the user's or
cross entropy.

Knows tensors, their rows and outputs. Must not know schedules or stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ppctl.config.pipeline_config import PipelineConfig
from ppctl.errors import ConfigError, Problem
from ppctl.model.loss import NO_TOKEN, microbatch_loss

CODE = "PP-E130"


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The arguments of the model, and the labels for its loss."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    labels: Any
    hides: bool | None = None
    """Whether its attention_mask [rows, tokens] hides tokens; None where nobody has looked."""
    packed: bool | None = None
    """Whether its position_ids [rows, tokens] begin anew within a row."""


@dataclass(frozen=True, slots=True)
class GivenBatch:
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
        described = tree_map(_form, (first.positional, first.named))
        under = "" if self.autocast is None else f" under autocast to {_short(self.autocast)}"
        return f"{len(self.microbatches)} microbatches in calls of {self.per_call}{under}: {described}"


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_short(value.dtype)}{list(value.shape)}"
    return type(value).__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def divide(given: Any, config: PipelineConfig, device: torch.device, *, reads_masks: bool = False) -> GivenBatch:
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
    return GivenBatch(made, call // size if call > 1 else number, as_given, autocast)


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


class StepLoss:
    """Each microbatch's share of a step's loss, whose sum over the step is the loss that is differentiated.

    With `loss_fn` a share is `loss_fn(output, labels)`, with scale_grads_in_schedule divided by the number of
    microbatches. Without, it is cross entropy in nats over the tokens that count, divided by their number in the whole
    batch; with scale_grads_in_schedule the mean over the microbatch's own, divided by the number of microbatches.
    """

    def __init__(self, config: PipelineConfig, microbatches: Sequence[Microbatch]) -> None:
        self.function, self.shares = config.loss_fn, len(microbatches) if config.scale_grads_in_schedule else 1
        self.scales = config.scale_grads_in_schedule
        self.total: Tensor | None = None
        if self.function is None:
            if not all(_are_tokens(each.labels) for each in microbatches):
                message = "without loss_fn the labels are token ids [rows, tokens], int64, -100 where none counts"
                raise ConfigError(Problem("PP-E130", message, "PipelineConfig(loss_fn=torch.nn.functional.mse_loss)"))
            if not self.scales:
                self.total = torch.stack([_mask(each.labels).sum() for each in microbatches]).sum().clamp(min=1)

    def try_out(self, output: Any, labels: Any, device: torch.device) -> None:
        """Raise ConfigError (PP-E130) where no loss can be taken of such a result, which is without values.

        A `loss_fn` is called once with zeros, ahead of all messages: what it raises is raised here.
        """
        if self.function is None:
            self._check(output, labels)
            return
        if not all(isinstance(each, Tensor) for each in tree_leaves(output)):
            return  # of an object of the model's own, which zeros cannot stand for
        zeros = tree_map(
            lambda each: torch.zeros_like(each, device=device).requires_grad_(each.is_floating_point()), output
        )
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            value = self.function(zeros, labels)
        if not isinstance(value, Tensor) or value.dim():
            what = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            remedy = "loss_fn=lambda output, labels: torch.nn.functional.mse_loss(output, labels)"
            raise ConfigError(Problem("PP-E130", f"loss_fn returns {what}, but a loss is one number", remedy))

    def _check(self, output: Any, labels: Any) -> None:
        """Raise ConfigError (PP-E130) for a result that cross entropy cannot be taken of."""
        logits = _logits_of(output)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != labels.shape:
            what = list(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
            message = f"without loss_fn the model returns logits [rows, tokens, words] for labels {list(labels.shape)}"
            raise ConfigError(Problem("PP-E130", f"{message}, not {what}", "PipelineConfig(loss_fn=your_loss)"))

    def __call__(self, output: Any, labels: Any) -> Tensor:
        """The share of one microbatch."""
        if self.function is not None:
            loss: Tensor = self.function(output, labels)
        else:
            self._check(output, labels)
            logits = _logits_of(output)
            mask = _mask(labels)
            wanted = labels.masked_fill(labels == NO_TOKEN, 0)  # other negative ones are no tokens: torch refuses them
            loss = microbatch_loss(logits, wanted, mask, mask.sum().clamp(min=1) if self.total is None else self.total)
        return loss / self.shares if self.scales else loss


def _logits_of(output: Any) -> Any:
    return output if isinstance(output, Tensor) else getattr(output, "logits", None)


def _are_tokens(labels: Any) -> bool:
    return isinstance(labels, Tensor) and labels.dim() == 2 and labels.dtype == torch.int64


def _mask(labels: Tensor) -> Tensor:
    return (labels != NO_TOKEN).float()
