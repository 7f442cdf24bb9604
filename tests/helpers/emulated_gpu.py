"""A GPU that exists in one process: its host enqueues, and the device computes later.

Knows streams, queues, events and kernels, with what CUDA and torch do to a program, on plain CPU tensors and with their
numbers. Must not know messages between devices (`emulated_nccl`), nor whose turn it is (`emulated_world`).

Under a host's dispatch mode a view is made at once, and every other operation takes memory for its outputs and goes to
the end of the current stream. `.item()` and its like wait for that stream. Streams share a bounded number of queues,
and what stands behind a waiting entry of its queue waits as well.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from emulated_hosts import current_actor, take_turns
from emulated_memory import Memory, beneath
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

import ppctl

if TYPE_CHECKING:
    from emulated_nccl import Transfer

aten = torch.ops.aten
PPCTL = Path(ppctl.__file__).parent

CURRENT = 0
"""The stream that operations go to."""


def _always() -> bool:
    return True


def _nothing() -> None:
    """What an entry does that only waits."""


@dataclass(eq=False)
class Entry:
    """One entry of a queue."""

    what: str
    run: Callable[[], object] = _nothing
    ready: Callable[[], bool] = _always
    transfers: list[Transfer] = field(default_factory=list)
    """Of a message or a fused group: it is over when all of them are."""

    @property
    def carried(self) -> bool:
        return all(transfer.is_over for transfer in self.transfers)


class Mark:
    """An event: `record` puts it behind what a stream holds, `synchronize` holds the host until it is passed."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.ticket = SimpleNamespace(passed=True)

    def record(self, stream: int = CURRENT) -> None:
        self.ticket = self.gpu.mark(stream)
        take_turns()

    def hold(self, stream: int) -> None:
        """What is enqueued on `stream` from now on waits for the mark."""
        ticket = self.ticket
        self.gpu.put(stream, Entry("wait for an event", ready=lambda: ticket.passed))

    def synchronize(self) -> None:
        ticket = self.ticket
        current_actor().wait(lambda: ticket.passed, "for an event")
        if self.gpu.error is not None:
            raise self.gpu.error


class Gpu:
    """One device. `queues` is how many it has, `lazy_loading` whether a kernel's first launch waits for the device.

    `full` says how the allocator frees memory before it takes more from the driver: `frees` (cudaFree, which waits for
    the whole device), `unmaps` (expandable segments: for the current stream and for what other streams were recorded
    to use), or empty: there is enough.
    """

    def __init__(self, rank: int, *, queues: int, lazy_loading: bool, record_streams: bool, full: str) -> None:
        self.rank, self.lazy_loading, self.full = rank, lazy_loading, full
        self.queues: list[deque[Entry]] = [deque() for _ in range(queues)]
        self.streams = 1
        self.loaded: set[object] = set()
        self.error: Exception | None = None
        self.memory = Memory(self.mark, self.ask_driver, records=record_streams)
        self.waits: Counter[str] = Counter()
        """How often the host waited for the device, by the function of ppctl's, or what else made it wait."""

    def make_stream(self) -> int:
        self.streams += 1
        return self.streams - 1

    def queue(self, stream: int) -> deque[Entry]:
        return self.queues[stream % len(self.queues)]

    def put(self, stream: int, entry: Entry) -> None:
        self.queue(stream).append(entry)
        take_turns()

    def mark(self, stream: int) -> SimpleNamespace:
        """Put a mark behind what a stream holds; its `passed` becomes true. Others get no turn."""
        ticket = SimpleNamespace(passed=False)

        def run() -> None:
            ticket.passed = True

        self.queue(stream).append(Entry("event", run))
        return ticket

    def launch(self, kernel: object, run: Callable[[], object]) -> None:
        """Enqueue a kernel. Under lazy loading its first launch waits until the whole device is drained."""
        if self.lazy_loading and kernel not in self.loaded:
            self.loaded.add(kernel)
            self.drain(f"to load {kernel}")
        self.put(CURRENT, Entry(str(kernel), run))

    def stop(self) -> None:
        """Enqueue a kernel that never ends."""
        self.put(CURRENT, Entry("a kernel that does not end", ready=lambda: False))

    def ask_driver(self) -> None:
        """Hold the host as an allocation does that the driver has to serve."""
        if self.full == "frees":
            self.drain("to free memory")
        elif self.full == "unmaps":
            self.waits["to free memory"] += 1
            tickets = [self.mark(CURRENT), *(ticket for _, held in self.memory.held for ticket in held)]
            current_actor().wait(lambda: all(ticket.passed for ticket in tickets), "for its device, to free memory")

    def drain(self, why: str) -> None:
        """Hold the host until every queue is empty."""
        self.waits[why] += 1
        current_actor().wait(lambda: not any(self.queues), f"for its device, {why}")

    def synchronize(self, why: str) -> None:
        """Hold the host until what the current stream holds now is over."""
        self.waits[_place() or why] += 1
        mark = Mark(self)
        mark.record()
        mark.synchronize()

    def execute(self, queue: deque[Entry]) -> None:
        """Run a queue's head. Of several errors the first one stays."""
        entry = queue.popleft()
        try:
            entry.run()
        except Exception as error:
            self.error = self.error or error

    @property
    def heads(self) -> list[deque[Entry]]:
        """The queues that hold something."""
        return [queue for queue in self.queues if queue]


def _place() -> str:
    """`file: function` of ppctl's innermost frame; empty if there is none."""
    own = [frame for frame in traceback.extract_stack() if PPCTL in Path(frame.filename).parents]
    return f"{Path(own[-1].filename).name}: {own[-1].name}" if own else ""


class OnDevice(TorchDispatchMode):
    """The host's tensors live on its device: what is computed is enqueued. Random numbers are drawn on the host."""

    WAITS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default)
    EMPTY = (aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default)
    EMPTY += (aten.new_empty.default, aten.new_empty_strided.default)

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        flat, spec = tree_flatten((args, kwargs or {}))
        if func in self.WAITS:
            return self._wait(func, args, kwargs)
        if func.is_view or "generator" in (kwargs or {}):
            return func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            self.gpu.launch(func, self._computing(func, flat, spec))
            changed = [i for i, argument in enumerate(func._schema.arguments) if argument.alias_info is not None]
            return args[changed[0]] if func._schema.returns and changed[0] < len(args) else kwargs.get("out")
        made = _metadata(func, flat, spec)
        if made is None:
            return self._wait(func, args, kwargs)
        forms, form_spec = made
        outputs = [self.gpu.memory.empty(*each) if isinstance(each, tuple) else each for each in forms]
        if func not in self.EMPTY:
            compute = self._computing(func, flat, spec)
            targets = [self.gpu.memory.seen_by_device(t) if isinstance(t, torch.Tensor) else None for t in outputs]

            def run() -> None:
                values = tree_flatten(compute())[0]
                with beneath():
                    for target, value in zip(targets, values, strict=True):
                        if target is not None:
                            target.copy_(value)

            self.gpu.launch(func, run)
        return tree_unflatten(outputs, form_spec)

    def _wait(self, func, args, kwargs):
        self.gpu.synchronize(str(func))
        return func(*args, **(kwargs or {}))

    def _computing(self, func, flat, spec) -> Callable[[], object]:
        see = self.gpu.memory.seen_by_device
        args, kwargs = tree_unflatten([see(each) if isinstance(each, torch.Tensor) else each for each in flat], spec)

        def compute() -> object:
            with beneath():
                return func(*args, **kwargs)

        return compute


_known: dict[object, object] = {}
_fake = FakeTensorMode(allow_non_fake_inputs=True)


def _metadata(func, flat, spec):
    """([(size, stride, dtype) of each output tensor], their tree); None where they depend on values."""
    forms = tuple(
        (tuple(each.size()), each.stride(), each.dtype) if isinstance(each, torch.Tensor) else each for each in flat
    )
    key = (func, spec, forms, tuple(map(type, forms)))
    if key not in _known:
        _known[key] = _infer(func, flat, spec)
    return _known[key]


def _infer(func, flat, spec):
    with _fake:
        args, kwargs = tree_unflatten(
            [
                torch.empty_strided(each.size(), each.stride(), dtype=each.dtype)
                if isinstance(each, torch.Tensor)
                else each
                for each in flat
            ],
            spec,
        )
        try:
            made, made_spec = tree_flatten(func(*args, **kwargs))
        except (DataDependentOutputException, DynamicOutputShapeException):
            return None
    return [
        (tuple(map(int, t.size())), tuple(map(int, t.stride())), t.dtype) if isinstance(t, torch.Tensor) else t
        for t in made
    ], made_spec


class HostReads(TorchFunctionMode):
    """What reads a tensor's memory without an operation waits for the device, as its copy to the host would."""

    READS = (torch.Tensor.tolist, torch.Tensor.numpy)

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.READS:
            self.gpu.synchronize(func.__name__)
        return func(*args, **(kwargs or {}))
