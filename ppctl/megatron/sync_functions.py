"""The functions of a config that hold back, reduce and gather, called at the events of a SyncPlan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from torch import nn

from ppctl.megatron.models import per_chunk, setting
from ppctl.schedule.action import Action
from ppctl.schedule.sync_events import Sync, SyncKind, SyncPlan


class Synchroniser:
    """Runs a plan's events; a context that leaves `no_sync` on every path, exceptions included.

    `no_sync_func` makes a context; a list of them makes one each, entered together. `grad_sync_func` and
    `param_sync_func` take an iterable of parameters; a list has one function per chunk. The config is only read.
    """

    def __init__(self, plan: SyncPlan, config: Any, chunks: Sequence[nn.Module], stages: Sequence[int]) -> None:
        self._plan = plan
        no_sync = setting(config, "no_sync_func")
        self._holds = no_sync if isinstance(no_sync, list | tuple) else [no_sync] if no_sync is not None else []
        self._calls: dict[SyncKind, Mapping[int, Callable[[], object]]] = {
            kind: _calls(setting(config, name), name, chunks, stages)
            for kind, name in ((SyncKind.REDUCE, "grad_sync_func"), (SyncKind.GATHER, "param_sync_func"))
        }
        self._held = ExitStack()

    def __enter__(self) -> Synchroniser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.__exit__(kind, error, trace)

    def start(self) -> None:
        """Run what comes before the first action."""
        self._run(self._plan.start)

    def before(self, action: Action) -> None:
        """Run what comes before an action."""
        self._run(self._plan.before.get(action, ()))

    def after(self, action: Action) -> None:
        """Run what comes after an action."""
        self._run(self._plan.after.get(action, ()))

    def end(self) -> None:
        """Run what comes when all messages are through."""
        self._run(self._plan.end)

    def _run(self, events: Iterable[Sync]) -> None:
        for kind, stage in events:
            if kind is SyncKind.HOLD:
                self._hold()
            elif kind is SyncKind.RELEASE:
                self._held.close()
            else:
                self._calls[kind][stage]()

    def _hold(self) -> None:
        for make in self._holds:
            context: AbstractContextManager[Any] = make()
            self._held.enter_context(context)


def _calls(
    functions: Any, name: str, chunks: Sequence[nn.Module], stages: Sequence[int]
) -> dict[int, Callable[[], object]]:
    """Stage -> the call of its function on its parameters."""
    if functions is None:
        return {}

    def call(function: Callable[..., object], chunk: nn.Module) -> Callable[[], object]:
        return lambda: function(chunk.parameters())

    listed = per_chunk(functions, chunks, name)
    return {stage: call(f, chunk) for stage, f, chunk in zip(stages, listed, chunks, strict=True)}
