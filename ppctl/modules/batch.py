"""A batch in microbatches, and each microbatch's share of a step's loss, by cross entropy or a user's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ppctl.config.pipeline_config import PipelineConfig
from ppctl.model.loss import NO_TOKEN, microbatch_loss
from ppctl.modules.pipeline_agreement import misuse


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The arguments of the model, and the labels for its loss."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    labels: Any
    hides: bool | None = None
    """Whether its attention_mask [rows, tokens] hides tokens; None if unknown."""
    packed: bool | None = None
    """Whether its position_ids [rows, tokens] restart within a row; None if unknown."""


@dataclass(frozen=True, slots=True)
class GivenBatch:
    """The microbatches of a batch, in the order of its rows."""

    microbatches: tuple[Microbatch, ...]
    per_call: int
    """The number of microbatches in a call of the schedule."""
    given: Microbatch
    """The first microbatch as the user gave it, before it was copied to the pipeline's device."""
    autocast: torch.dtype | None = None
    """The dtype of the device's autocast, if it is on: stages then send results of that dtype."""

    @property
    def on_host(self) -> bool:
        """Whether all tensors were given on the CPU, so that reading values does not wait for a GPU."""
        given = tree_leaves((self.given.positional, self.given.named, self.given.labels))
        return all(each.device.type == "cpu" for each in given if isinstance(each, Tensor))

    @property
    def shapes(self) -> str:
        """The number of microbatches, and the form of the first one's arguments, as text that ranks can compare."""
        first = self.microbatches[0]
        described = tree_map(_form, (first.positional, first.named))
        under = "" if self.autocast is None else f" under autocast to {_short(self.autocast)}"
        return f"{len(self.microbatches)} microbatches in calls of {self.per_call}{under}: {described}"


def _form(value: Any) -> str:
    """Return `float32[2, 8]` of a tensor, a bool, int, str or None itself, which code may ask, of other values the
    type."""
    if isinstance(value, Tensor):
        return f"{_short(value.dtype)}{list(value.shape)}"
    return repr(value) if isinstance(value, bool | int | str | None) else type(value).__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def divide(given: Any, config: PipelineConfig, device: torch.device, *, reads_masks: bool = False) -> GivenBatch:
    """Copy `(inputs, labels)`, or a mapping with `labels`, to the device and divide it into microbatches.

    `inputs` is the model's argument, or a tuple of arguments; the other entries of a mapping are arguments by name. The
    first dim of the first tensor is the number of sequences. Tensors with as many rows are divided; all other values go
    to every microbatch. With `reads_masks` each microbatch also says whether its mask hides tokens, and whether its
    positions restart within a row. Raises ConfigError (PP-E130) for batches of another form, for rows that are no whole
    number of microbatches or schedule calls, for sequences that are not pp_seq_len long, for other numbers of rows.
    """
    parts = positional, named, labels = _taken_apart(given)
    tensors = [each for each in tree_leaves((positional, named)) if isinstance(each, Tensor) and each.dim()]
    if not tensors:
        raise misuse("the batch has no tensor for the model", "step((inputs, labels))")
    first = tensors[0]
    rows, size, call = first.shape[0], config.pp_microbatch_size, config.pp_batch_size
    if rows % size or not rows:
        raise misuse(
            f"{rows} sequences are not a whole number of microbatches of {size}",
            f"{max(1, rows // size) * size} sequences",
        )
    if call > 1 and (call % size or rows % call):  # 1, the default, means that the whole batch is one call
        message = f"pp_batch_size={call} must be whole microbatches of {size} and divide the batch's {rows} sequences"
        raise misuse(message, f"pp_batch_size={rows}")
    if config.pp_seq_len is not None and (first.dim() < 2 or first.shape[1] != config.pp_seq_len):
        message = f"pp_seq_len is {config.pp_seq_len}, but the model's first argument is {list(first.shape)}"
        raise misuse(message, "pp_seq_len=None")
    if isinstance(labels, Tensor) and labels.dim() and labels.shape[0] != rows:
        raise misuse(f"there are {rows} sequences, but {labels.shape[0]} rows of labels", "labels for every sequence")
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
    """Raise ConfigError if an attention mask, or a tensor [k, tokens] beside token ids [rows, tokens], has another
    number of rows. One row is for all sequences, [tokens, tokens] is a mask without rows, other dims are not judged."""
    rows, length = first.shape[0], first.shape[1] if first.dim() > 1 else None
    of_tokens = first.dim() == 2 and not first.is_floating_point()
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or not value.dim() or value.shape[0] in (1, rows):
            continue
        alike = of_tokens and value.dim() == 2 and value.shape[1] == length
        if (alike or name == "attention_mask") and not (value.shape[0] == value.shape[-1] == length):
            message = f"{name} {list(value.shape)} has {value.shape[0]} rows, but there are {rows} sequences"
            raise misuse(message, f"{name} with a row for every sequence, or one for all")


def _known(named: Mapping[str, Any], rows: int, size: int) -> tuple[list[bool | None], list[bool | None]]:
    """Return (whether attention_mask hides tokens, whether position_ids restart), each as a list with an entry for each
    microbatch of `size` rows: None if the tensor is missing, on meta or not [rows or 1, tokens]. Reads their values."""

    def known(value: Any, usual: Callable[[Tensor], Tensor]) -> list[bool | None]:
        if not isinstance(value, Tensor) or value.dim() != 2 or value.device.type == "meta":
            return [None] * (rows // size)
        as_usual = usual(value).all(dim=1).expand(rows).view(-1, size).all(dim=1)
        return [not each for each in as_usual.tolist()]

    positions = named.get("position_ids")
    return known(named.get("attention_mask"), Tensor.bool), known(positions, lambda each: each.diff(dim=1) == 1)


def _taken_apart(given: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the positional arguments, the arguments by name, and the labels of a batch. Raises ConfigError."""
    if isinstance(given, Mapping):
        named = {str(name): value for name, value in given.items()}
        labels = named.pop("labels", None)
        return (), named, labels
    if isinstance(given, tuple | list) and len(given) == 2:
        inputs, labels = given
        return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}, labels
    raise misuse(f"a batch is (inputs, labels) or a mapping, not a {type(given).__name__}", "step((inputs, labels))")


def _moved(value: Any, device: torch.device) -> Any:
    """Return a tensor on the device, copied without a wait of the host; any other value as it is."""
    if not isinstance(value, Tensor) or value.device == device:
        return value
    on_gpu = device.type == "cuda" and value.device.type == "cpu"
    return (value.pin_memory() if on_gpu else value).to(device, non_blocking=on_gpu)


class StepLoss:
    """Each microbatch's share of a step's loss; the sum of the shares is the loss that is differentiated.

    With `loss_fn` a share is `loss_fn(output, labels)`, else the cross entropy in nats of the tokens that count:
    summed, and divided by their number in the whole batch, or with scale_grads_in_schedule their mean in the
    microbatch. scale_grads_in_schedule then divides either share by the number of microbatches. Making a StepLoss
    raises ConfigError (PP-E130) for labels that are no token ids, unless there is a `loss_fn`."""

    def __init__(self, config: PipelineConfig, microbatches: Sequence[Microbatch]) -> None:
        self.function, self.shares = config.loss_fn, len(microbatches) if config.scale_grads_in_schedule else 1
        self.scales = config.scale_grads_in_schedule
        self.total: Tensor | None = None
        if self.function is None:
            if not all(_are_tokens(each.labels) for each in microbatches):
                message = "without loss_fn the labels must be token ids [rows, tokens], int64, -100 where none counts"
                raise misuse(message, "PipelineConfig(loss_fn=torch.nn.functional.mse_loss)")
            if not self.scales:
                self.total = torch.stack([_mask(each.labels).sum() for each in microbatches]).sum().clamp(min=1)

    def try_out(self, output: Any, labels: Any, device: torch.device) -> None:
        """Raise ConfigError (PP-E130) for a model's result, on meta, from which the loss cannot be computed. A
        `loss_fn` is called once with zeros of the same shapes: its exceptions are raised before any message is sent."""
        if self.function is None:
            self._check(output, labels)
            return
        if not all(isinstance(each, Tensor) for each in tree_leaves(output)):
            return  # the model's own object, for which zeros cannot stand
        zeros = tree_map(
            lambda each: torch.zeros_like(each, device=device).requires_grad_(each.is_floating_point()), output
        )
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            value = self.function(zeros, labels)
        if not isinstance(value, Tensor) or value.dim():
            what = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            remedy = "loss_fn=lambda output, labels: torch.nn.functional.mse_loss(output, labels)"
            raise misuse(f"loss_fn returns {what}, but a loss is one number", remedy)

    def _check(self, output: Any, labels: Any) -> None:
        """Raise ConfigError (PP-E130) for a result without logits of the labels' shape."""
        logits = _logits_of(output)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != labels.shape:
            what = list(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
            message = f"without loss_fn the model must return logits [rows, tokens, n] for labels {list(labels.shape)}"
            raise misuse(f"{message}, not {what}", "PipelineConfig(loss_fn=your_loss)")

    def __call__(self, output: Any, labels: Any) -> Tensor:
        """Return the share of one microbatch, a scalar on the device of the model's result."""
        if self.function is not None:
            loss: Tensor = self.function(output, labels)
        else:
            self._check(output, labels)
            logits = _logits_of(output)
            mask = _mask(labels)
            wanted = labels.masked_fill(labels == NO_TOKEN, 0)  # torch refuses other negative labels
            loss = microbatch_loss(logits, wanted, mask, mask.sum().clamp(min=1) if self.total is None else self.total)
        return loss / self.shares if self.scales else loss


def _logits_of(output: Any) -> Any:
    """Return the logits of a result, which are the result itself or its attribute `logits`; None without either."""
    return output if isinstance(output, Tensor) else getattr(output, "logits", None)


def _are_tokens(labels: Any) -> bool:
    return isinstance(labels, Tensor) and labels.dim() == 2 and labels.dtype == torch.int64


def _mask(labels: Tensor) -> Tensor:
    """Return 1 for each label that counts, else 0, of the labels' shape in float32."""
    return (labels != NO_TOKEN).float()
