"""Access to a user's models, configs and iterators, as the forward-backward functions need them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ppctl.errors import ConfigError, Problem

_LATER: dict[str, tuple[object, object]] = {
    "overlap_moe_expert_parallel_comm": (True, False),
    "delay_wgrad_compute": (True, False),
    "fine_grained_activation_offloading": (True, False),
    "hybrid_context_parallel": (True, False),
    "cuda_graph_impl": ("local", "none"),
}
"""What Megatron's schedules carry out and these do not yet: option -> its value there, and the value without it."""


def holder_of(model: Any, attribute: str) -> Any:
    """Return the first that has the attribute: the model, what it wraps (`.module`), what that wraps; or else None."""
    while model is not None and not hasattr(model, attribute):
        model = getattr(model, "module", None)
    return model


def config_of(model: nn.Module) -> Any:
    """`model.config`, of the model or of what it wraps.

    Raises ConfigError if there is none, if it switches on what comes later, or if it offloads activations without
    layers that do it (Megatron's do, and set `_cpu_offloading_context`): schedules cannot do it.
    """
    holder = holder_of(model, "config")
    if holder is None:
        raise misuse(f"{type(model).__name__} has no config", "model.config = ModelParallelConfig(...)")
    config = holder.config
    problems = [
        Problem("PP-E110", f"config.{name} = {on!r} comes in a later release", f"config.{name} = {off!r}")
        for name, (on, off) in _LATER.items()
        if getattr(config, name, off) == on
    ]
    if getattr(config, "cpu_offloading", False) and getattr(config, "_cpu_offloading_context", None) is None:
        message = (
            "config.cpu_offloading is on, but no layer of the model has taken it up (_cpu_offloading_context is None)"
        )
        problems.append(Problem("PP-E396", message, "config.cpu_offloading = False"))
    if problems:
        raise ConfigError(problems)
    return config


@contextmanager
def timed(config: Any, name: str, level: int = 2, **start: Any) -> Iterator[None]:
    """While entered, run the config's timer with this name, if any. It is looked up at both ends, as in Megatron."""
    timers = getattr(config, "timers", None)
    if timers is not None:
        timers(name, log_level=level).start(**start)
    try:
        yield
    finally:
        if timers is not None:
            timers(name, log_level=level).stop()


def give_input(model: Any, tensors: list[Any]) -> None:
    """Give a stage its input through `set_input_tensor`, as a list (of None on the first stage). Raises ConfigError if
    there is an input but no such method."""
    holder = holder_of(model, "set_input_tensor")
    if holder is not None:
        holder.set_input_tensor(tensors)
    elif any(tensor is not None for tensor in tensors):
        message = f"{type(model).__name__} gets its input from the stage before it, but cannot take it"
        raise misuse(message, "def set_input_tensor(self, input_tensor): ...")


def only_chunk(things: Any, what: str) -> list[Any]:
    """One thing, or a list of one, as a list of one. Raises ConfigError for longer lists."""
    if not isinstance(things, list):
        return [things]
    if len(things) == 1:
        return things
    message = f"{what} is a list of {len(things)}, but a rank has one chunk unless the schedule interleaves"
    raise misuse(message, "forward_backward_pipelining_with_interleaving")


def all_chunks(model: Any, data_iterator: Any) -> tuple[list[nn.Module], list[Any]]:
    """A rank's chunks and their iterators, or a None for each. Raises ConfigError unless both lists have one length."""
    if not isinstance(model, list) or not model:
        raise misuse("interleaving takes a list of models, one per chunk", "model=[chunk_0, chunk_1]")
    iterators = [None] * len(model) if data_iterator is None else data_iterator
    if not isinstance(iterators, list) or len(iterators) != len(model):
        given = f"{len(iterators)}" if isinstance(iterators, list) else f"a {type(iterators).__name__}"
        message = f"interleaving takes a list of data iterators, one for each of the {len(model)} chunks, not {given}"
        raise misuse(message, "data_iterator=[iterator_0, iterator_1]")
    return model, iterators


def whole_number(value: Any, name: str) -> int:
    """Return `value` as an int. Raises ConfigError naming the argument if it is no whole number."""
    try:
        return operator.index(value)
    except TypeError:
        raise misuse(f"{name} is {value!r}, but must be a whole number", f"{name}=1") from None


def per_chunk(functions: Any, chunks: Sequence[Any], name: str) -> list[Any]:
    """Return a list of one function per chunk: `functions`, or one for all. Raises ConfigError for other lengths."""
    if not isinstance(functions, list | tuple):
        return [functions] * len(chunks)
    if len(functions) != len(chunks):
        raise misuse(f"{name} lists {len(functions)} functions for {len(chunks)} chunks", f"{name}=[...] with one each")
    return list(functions)


def misuse(message: str, remedy: str) -> ConfigError:
    """The error of a wrong call (PP-E396)."""
    return ConfigError(Problem("PP-E396", message, remedy))
