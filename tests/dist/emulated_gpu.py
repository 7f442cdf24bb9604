"""GPUs that exist in one process: hosts enqueue, devices compute later, and messages have NCCL's manners.

What a CUDA device and NCCL do to a program, on plain CPU tensors and with their numbers. A `World` has one host thread
per rank and one device per rank. Under a host's dispatch mode a view is made at once, and every other operation
allocates its outputs and goes to the end of a queue of the device; `.item()` and its like wait for the device. Streams
share a bounded number of queues, and what stands behind a waiting entry of its queue waits as well. A connection is
joined by its members under its name, lazily: the first use holds the host until all have come. A message is an entry of
its connection's stream, behind what the current stream holds; its two ends stand at the head of their queues together
(rendezvous), or the sender goes on (eager, up to a size). `Work.wait` lets the current stream wait, never the host.

One thing moves at a time, chosen by a seeded generator among everything that can. When nothing can, and a host is not
through, that is a deadlock, found without a clock; `Deadlock` says what everybody waits for.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten


class Deadlock(Exception):
    """Nothing can move, and some host is not through."""


class Aborted(Exception):
    """Raised in hosts that still wait when the world has ended."""


class Actor:
    """A thread that runs only when it is chosen, and that may wait for something to become true."""

    def __init__(self, world: World, name: str, body: Callable[[], object]) -> None:
        self.world, self.name, self.body = world, name, body
        self.ready: Callable[[], bool] = lambda: True
        self.why = "to begin"
        self.is_over = False
        self.result: object = None
        self.failure: BaseException | None = None
        self.turn = threading.Semaphore(0)
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def wait(self, ready: Callable[[], bool], why: str) -> None:
        """Give the turn away until `ready`."""
        self.ready, self.why = ready, why
        self.world.returned.release()
        self.turn.acquire()
        if self.world.is_over:
            raise Aborted(why)

    def _run(self) -> None:
        self.turn.acquire()
        _current.actor = self
        try:
            if not self.world.is_over:
                self.result = self.body()
        except BaseException as error:
            self.failure = error
        self.is_over = True
        self.world.returned.release()


_current = threading.local()


class Mark:
    """An event: `record` puts it behind what a stream holds, `synchronize` holds the host until it is passed."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.ticket = SimpleNamespace(passed=True)

    def record(self, stream: int = 0) -> None:
        ticket = self.ticket = SimpleNamespace(passed=False)

        def run() -> None:
            ticket.passed = True

        self.gpu.put(stream, Entry("event", run))

    def hold(self, stream: int) -> None:
        """What is enqueued on `stream` from now on waits for the mark."""
        ticket = self.ticket
        self.gpu.put(stream, Entry("wait for an event", lambda: None, lambda: ticket.passed))

    def synchronize(self) -> None:
        ticket = self.ticket
        _current.actor.wait(lambda: ticket.passed, "for an event")
        if self.gpu.error is not None:
            raise self.gpu.error


@dataclass(eq=False)
class Entry:
    """One entry of a queue."""

    what: str
    run: Callable[[], object]
    ready: Callable[[], bool] = lambda: True
    transfers: list[Transfer] = field(default_factory=list)
    """Of a message or a fused group: it is over when all of them are."""


@dataclass(eq=False)
class Transfer:
    """One tensor's send or receive on a connection: the `number`-th from `source` to `target`."""

    connection: Connection
    source: int
    target: int
    number: int
    sends: bool
    tensor: torch.Tensor
    is_over: bool = False

    @property
    def key(self) -> tuple[int, int, int]:
        return self.source, self.target, self.number

    def __str__(self) -> str:
        move = "send" if self.sends else "receive"
        return f"{move} {self.number} from {self.source} to {self.target} on {self.connection.name}"


class Connection:
    """A communicator: its members meet under its name, and number what they send and receive there."""

    def __init__(self, name: str, members: Sequence[int]) -> None:
        self.name = name
        self.members = tuple(members)
        self.joined: set[int] = set()
        self.numbers: Counter[tuple[int, int, int, bool]] = Counter()
        self.mail: dict[tuple[int, int, int], torch.Tensor] = {}
        """Eager messages on their way."""

    def transfer(self, own: int, source: int, target: int, tensor: torch.Tensor) -> Transfer:
        sends = own == source
        number = self.numbers[own, source, target, sends]
        self.numbers[own, source, target, sends] += 1
        return Transfer(self, source, target, number, sends, tensor)


class Gpu:
    """One device: queues, streams that share them, and what has run on it for the first time."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.queues: list[deque[Entry]] = [deque() for _ in range(world.queues)]
        self.streams = 1
        """Stream 0 is where operations go."""
        self.loaded: set[object] = set()
        self.error: Exception | None = None
        self.waits: Counter[str] = Counter()
        """How often the host waited for the device, by what made it wait."""
        self.held: list[tuple[SimpleNamespace, int]] = []
        self.most_held = 0
        """Bytes of sent tensors that the allocator could not give away yet, at most."""

    def make_stream(self) -> int:
        self.streams += 1
        return self.streams - 1

    def put(self, stream: int, entry: Entry) -> None:
        self.queues[stream % len(self.queues)].append(entry)
        _current.actor.wait(lambda: True, "for its next turn")

    def launch(self, kernel: object, run: Callable[[], object]) -> None:
        """Enqueue a kernel. Under lazy loading its first launch waits until the whole device is drained."""
        if self.world.lazy_loading and kernel not in self.loaded:
            self.loaded.add(kernel)
            self.drain(f"to load {kernel}")
        self.put(0, Entry(str(kernel), run))

    def drain(self, why: str) -> None:
        """Hold the host until every queue is empty."""
        self.waits[why] += 1
        _current.actor.wait(lambda: not any(self.queues), f"for its device, {why}")

    def synchronize(self, why: str) -> None:
        """Hold the host until what the current stream holds now is over."""
        self.waits[why] += 1
        mark = Mark(self)
        mark.record()
        mark.synchronize()

    def note_sent(self, tensors: Iterable[torch.Tensor], ticket: SimpleNamespace) -> None:
        """As with recordStream: memory of what was sent is free when the host, at an allocation, finds it is over."""
        self.held.append((ticket, sum(t.untyped_storage().nbytes() for t in tensors)))
        self.most_held = max(self.most_held, sum(size for _, size in self.held))

    def poll(self) -> None:
        self.held = [(ticket, size) for ticket, size in self.held if not ticket.passed]

    @property
    def heads(self) -> list[deque[Entry]]:
        return [queue for queue in self.queues if queue]


class World:
    """Ranks with their devices. `run` gives every rank a host; the same seed gives the same interleaving.

    `queues` is how many queues a device has, `eager` up to how many bytes a send goes on without its receiver,
    `lazy_loading` whether the first launch of a kernel waits for the whole device, and `connected` whether connections
    were made before (by the warm-up) or are made on their first use.
    """

    def __init__(
        self,
        size: int,
        seed: int = 0,
        *,
        queues: int = 32,
        eager: int = 0,
        lazy_loading: bool = False,
        connected: bool = True,
    ) -> None:
        self.queues, self.eager, self.lazy_loading, self.connected = queues, eager, lazy_loading, connected
        self.random = random.Random(seed)
        self.returned = threading.Semaphore(0)
        self.is_over = False
        self.actors: list[Actor] = []
        self.connections: dict[str, Connection] = {}
        self.gpus = [Gpu(self, rank) for rank in range(size)]

    def spawn(self, name: str, body: Callable[[], object]) -> Actor:
        actor = Actor(self, name, body)
        self.actors.append(actor)
        return actor

    def run(self, host: Callable[[int], object]) -> list[object]:
        """`host(rank)` on every rank's thread; what they return. Raises Deadlock, or the first host's failure."""

        def body(rank: int) -> object:
            with OnDevice(self.gpus[rank]), HostReads(self.gpus[rank]):
                result = host(rank)
                self.gpus[rank].drain("at the end")
                return result

        hosts = [self.spawn(f"host {rank}", lambda rank=rank: body(rank)) for rank in range(len(self.gpus))]
        try:
            while not all(actor.is_over for actor in hosts):
                self._move()
                failed = next((actor for actor in self.actors if actor.failure is not None), None)
                if failed is not None:
                    raise failed.failure
        finally:
            self._end()
        return [actor.result for actor in hosts]

    def _move(self) -> None:
        """Let one thing that can move do so."""
        moves: list[Callable[[], object]] = [
            lambda actor=actor: self._resume(actor) for actor in self.actors if not actor.is_over and actor.ready()
        ]
        for gpu in self.gpus:
            for queue in gpu.heads:
                moves += self._moves_of(gpu, queue)
        if not moves:
            raise Deadlock(self._why())
        self.random.choice(moves)()

    def _moves_of(self, gpu: Gpu, queue: deque[Entry]) -> list[Callable[[], object]]:
        entry = queue[0]
        if not entry.transfers:
            return [lambda: self._execute(gpu, queue)] if entry.ready() else []
        return [
            lambda transfer=transfer: self._carry(transfer)
            for transfer in entry.transfers
            if not transfer.is_over and self._can_go(transfer)
        ]

    def _can_go(self, transfer: Transfer) -> bool:
        """A receive with its message there, an eager send; of a rendezvous the receiving end moves both."""
        if transfer.sends:
            return transfer.tensor.nbytes <= self.eager
        mail = transfer.connection.mail.get(transfer.key)
        source = self._sending(transfer)
        sent = mail if mail is not None else None if source is None else source.tensor
        return sent is not None and sent.nbytes == transfer.tensor.nbytes

    def _sending(self, transfer: Transfer) -> Transfer | None:
        """The other end of a receive, if it is at the head of its queue."""
        for queue in self.gpus[transfer.source].heads:
            for other in queue[0].transfers:
                same = other.connection is transfer.connection and other.key == transfer.key
                if same and other.sends and not other.is_over:
                    return other
        return None

    def _carry(self, transfer: Transfer) -> None:
        mail = transfer.connection.mail
        if transfer.sends:
            mail[transfer.key] = transfer.tensor.clone()
        elif transfer.key in mail:
            _write(transfer.tensor, mail.pop(transfer.key))
        else:
            other = self._sending(transfer)
            assert other is not None  # or it could not go
            _write(transfer.tensor, other.tensor)
            other.is_over = True
        transfer.is_over = True
        for gpu in self.gpus:
            for queue in gpu.heads:
                if queue[0].transfers and all(each.is_over for each in queue[0].transfers):
                    self._execute(gpu, queue)

    def _execute(self, gpu: Gpu, queue: deque[Entry]) -> None:
        entry = queue.popleft()
        try:
            entry.run()
        except Exception as error:
            gpu.error = gpu.error or error

    def _resume(self, actor: Actor) -> None:
        actor.turn.release()
        self.returned.acquire()

    def _why(self) -> str:
        lines = [f"{actor.name} waits {actor.why}" for actor in self.actors if not actor.is_over]
        for gpu in self.gpus:
            for queue in gpu.heads:
                stuck = [str(t) for t in queue[0].transfers if not t.is_over] or [queue[0].what]
                lines.append(f"device {gpu.rank}: {', '.join(stuck)}; {len(queue) - 1} behind it")
        return "\n".join(lines)

    def _end(self) -> None:
        self.is_over = True
        for actor in self.actors:
            if not actor.is_over:
                self._resume(actor)


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    with torch._C._AutoDispatchBelowADInplaceOrView():
        target.copy_(value.view(target.shape))


class OnDevice(TorchDispatchMode):
    """The host's tensors live on its device: what is computed is enqueued."""

    WAITS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default)

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        if func in self.WAITS:
            self.gpu.synchronize(str(func))
            return func(*args, **kwargs)
        if func.is_view or not tensors:
            return func(*args, **kwargs)

        def compute() -> object:
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return func(*args, **kwargs)

        if func._schema.is_mutable:
            self.gpu.launch(func, compute)
            changed = [i for i, argument in enumerate(func._schema.arguments) if argument.alias_info is not None]
            return args[changed[0]] if func._schema.returns and changed[0] < len(args) else kwargs.get("out")
        self.gpu.poll()
        outputs, flat = self._outputs(func, args, kwargs)

        def run() -> None:
            for made, value in zip(flat, tree_flatten(compute())[0], strict=True):
                if isinstance(made, torch.Tensor):
                    with torch._C._AutoDispatchBelowADInplaceOrView():
                        made.copy_(value)

        self.gpu.launch(func, run)
        return outputs

    def _outputs(self, func, args, kwargs):
        with self.fake:
            fakes = tree_map(
                lambda each: self.fake.from_tensor(each) if isinstance(each, torch.Tensor) else each, (args, kwargs)
            )
            made = func(*fakes[0], **fakes[1])

        def real(each):
            if not isinstance(each, torch.Tensor):
                return each
            return torch.empty_strided(each.size(), each.stride(), dtype=each.dtype)

        outputs = tree_map(real, made)
        return outputs, tree_flatten(outputs)[0]


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


class Work:
    """A message or a group under way."""

    def __init__(self, gpu: Gpu, done: Mark) -> None:
        self._gpu, self._done = gpu, done

    def wait(self) -> bool:
        """Let the current stream wait; the host goes on."""
        self._done.hold(0)
        return True


class Backend:
    """One rank's end of a connection, as `dist.ProcessGroupNCCL` is a channel's. Ranks are positions in `members`."""

    def __init__(self, world: World, rank: int, name: str, members: Sequence[int]) -> None:
        self.gpu = world.gpus[rank]
        self.connection = world.connections.setdefault(name, Connection(name, members))
        self.position = list(members).index(rank)
        self.stream = self.gpu.make_stream()

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work:
        return self.start([(self.position, dst, tensors[0])])

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work:
        return self.start([(src, self.position, tensors[0])])

    def start(self, moves: Sequence[tuple[int, int, torch.Tensor]]) -> Work:
        """Enqueue (source, target, tensor) as one group, behind what the current stream holds."""
        self._meet()
        members, own = self.connection.members, self.gpu.rank
        transfers = [self.connection.transfer(own, members[a], members[b], tensor) for a, b, tensor in moves]
        before, done = Mark(self.gpu), Mark(self.gpu)
        before.record()
        before.hold(self.stream)
        self.gpu.put(self.stream, Entry("messages", lambda: None, transfers=transfers))
        done.record(self.stream)
        self.gpu.note_sent([t.tensor for t in transfers if t.sends], done.ticket)
        return Work(self.gpu, done)

    def _meet(self) -> None:
        """The first use holds the host until all members have come."""
        joined, members = self.connection.joined, set(self.connection.members)
        if not self.gpu.world.connected and self.gpu.rank not in joined:
            joined.add(self.gpu.rank)
            _current.actor.wait(lambda: joined == members, f"for all of {self.connection.name}")


@dataclass(eq=False)
class HostSemaphore:
    """`threading.Semaphore` for code that runs in a world."""

    value: int

    def acquire(self) -> None:
        _current.actor.wait(lambda: self.value > 0, "for a semaphore")
        self.value -= 1

    def release(self) -> None:
        self.value += 1


class HostQueue:
    """`queue.SimpleQueue` for code that runs in a world."""

    def __init__(self) -> None:
        self.items: deque[object] = deque()

    def put(self, item: object) -> None:
        self.items.append(item)

    def get(self) -> object:
        _current.actor.wait(lambda: bool(self.items), "for a queue's item")
        return self.items.popleft()

    def empty(self) -> bool:
        return not self.items


class HostThread:
    """`threading.Thread` for code that runs in a world: an actor beside the host that starts it."""

    def __init__(self, *, target: Callable[[], object], name: str, daemon: bool) -> None:
        self.target, self.name = target, name

    def start(self) -> None:
        starter = _current.actor
        self.actor = starter.world.spawn(f"{self.name} of {starter.name}", self.target)

    def join(self) -> None:
        _current.actor.wait(lambda: self.actor.is_over, f"for {self.name} to end")


def current_rank() -> int:
    """The rank whose host calls this."""
    return int(_current.actor.name.removeprefix("host "))
