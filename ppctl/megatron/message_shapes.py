"""The tensors between stages: their shapes from a call's sizes, their dtype from the config."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ppctl.comm.modes import torch_dtype
from ppctl.megatron.models import misuse, whole_number

TensorShape = tuple[int, ...]
AdjustShapes = Callable[[list[TensorShape], list[TensorShape]], tuple[list[TensorShape], list[TensorShape]]]


class Edges(NamedTuple):
    """The tensors, on meta, that a stage receives from the previous stage and sends to the next."""

    receives: tuple[torch.Tensor, ...]
    sends: tuple[torch.Tensor, ...]


def get_tensor_shapes(
    *, seq_length: int, micro_batch_size: int, decoder_seq_length: int | None, config: Any, tp_group: Any, cp_group: Any
) -> list[TensorShape]:
    """The shapes of one message: [(sequence, micro batch, hidden)], or [()] if lengths vary.

    The sequence is the decoder's if that is given, divided by the context parallel size and, with
    `config.sequence_parallel`, by the tensor parallel size; sizes without a group come from the config. Raises
    ConfigError if the sequence cannot be divided: ranks would drop the rest.
    """
    if getattr(config, "variable_seq_lengths", False):
        return [()]
    asked = ("seq_length", seq_length) if decoder_seq_length is None else ("decoder_seq_length", decoder_seq_length)
    sequence = whole_number(asked[1], asked[0])
    if min(sequence, whole_number(micro_batch_size, "micro_batch_size")) < 0:
        message = f"{asked[0]}={sequence} and micro_batch_size={micro_batch_size} must not be negative"
        raise misuse(message, f"{asked[0]}={max(sequence, 1)}, micro_batch_size={max(micro_batch_size, 1)}")
    cp = getattr(config, "context_parallel_size", 1) if cp_group is None else cp_group.size()
    tp = 1
    if getattr(config, "sequence_parallel", False):
        tp = getattr(config, "tensor_model_parallel_size", 1) if tp_group is None else tp_group.size()
    if sequence % (cp * tp):
        message = f"a sequence of {sequence} cannot be divided over cp {cp}" + f" x tp {tp}" * (tp > 1)
        raise misuse(message, f"seq_length={max(sequence // (cp * tp), 1) * cp * tp}")
    hidden = getattr(config, "hidden_size", None)
    if hidden is None:
        raise misuse("messages between stages need the hidden size, but the config has none", "config.hidden_size=...")
    return [(sequence // cp // tp, micro_batch_size, hidden)]


def edges_of(
    shapes: list[TensorShape], config: Any, *, first: bool, last: bool, adjust: AdjustShapes | None = None
) -> Edges:
    """A stage's edges from the shapes of the model's messages, which the user's function, if any, adjusts. The first
    stage receives nothing, the last sends nothing. Raises ConfigError if the function does not return two lists."""
    before, after = list(shapes), list(shapes)
    if adjust is not None:
        adjusted = adjust(before, after)
        if not isinstance(adjusted, tuple | list) or len(adjusted) != 2:
            message = f"adjust_tensor_shapes_fn returned a {type(adjusted).__name__}, but must return both lists"
            raise misuse(message, "return receive_shapes, send_shapes")
        before, after = adjusted
    made = partial(torch.empty, dtype=message_dtype(config), device="meta")
    return Edges(() if first else tuple(map(made, before)), () if last else tuple(map(made, after)))


def message_dtype(config: Any) -> torch.dtype:
    """The dtype of all messages, `config.pipeline_dtype` (a dtype or its name). Raises ConfigError without one."""
    wanted = torch_dtype(getattr(config, "pipeline_dtype", None), "pipeline_dtype")
    if wanted is None:
        raise misuse("pipeline_dtype is None, but messages need a dtype", "pipeline_dtype=torch.float32")
    return wanted
