"""Messages between emulated devices, with NCCL's manners.

Knows connections, what matches on them, and torch's backend object around them. Must not know pipelines or schedules.

A connection is joined by its members under its name, lazily: the first use holds the host until all have come. A
message is an entry of its connection's stream, behind what the current stream holds. Its two ends, the n-th send and
the n-th receive between two ranks, move when both are at the head of their queues (rendezvous); up to a size the sender
goes on alone (eager). Ends of different sizes wait for ever. Of a fused group all messages are one entry, which is over
when all are. `Work.wait` lets the current stream wait, never the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from emulated_gpu import CURRENT, Entry, Gpu, Mark
from emulated_hosts import current_actor
from emulated_memory import beneath
from torch._C._distributed_c10d import ErrorType

if TYPE_CHECKING:
    from emulated_world import World


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

    @property
    def owner(self) -> int:
        """The rank whose end it is."""
        return self.source if self.sends else self.target

    def __str__(self) -> str:
        move = "send" if self.sends else "receive"
        return f"{move} {self.number} from {self.source} to {self.target} on {self.connection.name}"


class Connection:
    """A communicator: its members meet under its name, and number what they send and receive there."""

    def __init__(self, name: str, members: Sequence[int]) -> None:
        self.name = name
        self.members = tuple(members)
        self.joined: set[int] = set()
        self.aborted: set[int] = set()
        """The ranks whose ends were aborted."""
        self.numbers: Counter[tuple[int, int, int, bool]] = Counter()
        self.mail: dict[tuple[int, int, int], torch.Tensor] = {}
        """Eager messages on their way."""

    def transfer(self, own: int, source: int, target: int, *, sends: bool, tensor: torch.Tensor) -> Transfer:
        number = self.numbers[own, source, target, sends]
        self.numbers[own, source, target, sends] += 1
        return Transfer(self, source, target, number, sends, tensor)


class Network:
    """What carries messages between `gpus`; sends of up to `eager` bytes go on without their receiver."""

    def __init__(self, gpus: Sequence[Gpu], eager: int) -> None:
        self.gpus, self.eager = gpus, eager
        self.connections: dict[str, Connection] = {}

    def moves_of(self, entry: Entry) -> list[Callable[[], object]]:
        """What can move of an entry at the head of its queue."""
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
        with beneath():
            if transfer.sends:
                mail[transfer.key] = transfer.tensor.clone()
            elif transfer.key in mail:
                transfer.tensor.copy_(mail.pop(transfer.key).view(transfer.tensor.shape))
            else:
                other = self._sending(transfer)
                assert other is not None  # or it could not go
                transfer.tensor.copy_(other.tensor.view(transfer.tensor.shape))
                other.is_over = True
        transfer.is_over = True

    def waiting(self) -> list[Transfer]:
        """Transfers at the heads of queues whose other ends have not come."""
        heads = [queue[0] for gpu in self.gpus for queue in gpu.heads]
        return [each for entry in heads for each in entry.transfers if not each.is_over]

    def abort(self, connection: Connection, rank: int) -> None:
        """End everything on a rank's end of a connection: its kernels leave, and what they received is undefined."""
        connection.aborted.add(rank)
        for queue in self.gpus[rank].queues:
            for transfer in [each for entry in queue for each in entry.transfers]:
                if transfer.connection is connection:
                    transfer.is_over = True
                    if not transfer.sends and transfer.tensor.is_floating_point():
                        transfer.tensor.fill_(torch.nan)


class Work:
    """A message or a group under way."""

    def __init__(self, gpu: Gpu, done: Mark, connection: Connection) -> None:
        self._gpu, self._done, self._connection = gpu, done, connection

    def wait(self) -> bool:
        """Let the current stream wait; the host goes on. Raises what the watchdog has found."""
        self._done.hold(CURRENT)
        _refuse_aborted(self._connection, self._gpu.rank)
        return True


def _refuse_aborted(connection: Connection, rank: int) -> None:
    if rank in connection.aborted:
        raise torch.distributed.DistBackendError(
            f"NCCL communicator was aborted on rank {rank}. Original reason for failure was: watchdog: time-out on "
            f"{connection.name}"
        )


class Backend:
    """One rank's end of a connection, as `dist.ProcessGroupNCCL` is a channel's. Ranks are positions in `members`."""

    def __init__(self, world: World, rank: int, name: str, members: Sequence[int]) -> None:
        self.gpu, self.world = world.gpus[rank], world
        self.connection = world.network.connections.setdefault(name, Connection(name, members))
        self.position = list(members).index(rank)
        self.stream = self.gpu.make_stream()

    def rank(self) -> int:
        return self.position

    def size(self) -> int:
        return len(self.connection.members)

    def get_error(self) -> ErrorType:
        """What the watchdog has found."""
        return ErrorType.TIMEOUT if self.gpu.rank in self.connection.aborted else ErrorType.SUCCESS

    _device_types = (torch.device("cpu"),)

    def _get_backend(self, device: torch.device) -> Backend:
        """Itself: it is group and backend in one."""
        return self

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work:
        return self.start([(tensors[0], dst, True)])

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work:
        return self.start([(tensors[0], src, False)])

    def start(self, moves: Sequence[tuple[torch.Tensor, int, bool]], then: Callable[[], object] | None = None) -> Work:
        """Enqueue (tensor, peer, whether it is sent) as one group, behind what the current stream holds; and behind it
        what the device computes `then`."""
        _refuse_aborted(self.connection, self.gpu.rank)
        self._meet()
        before, done = Mark(self.gpu), Mark(self.gpu)
        before.record()
        before.hold(self.stream)
        self.gpu.put(self.stream, Entry("messages", transfers=[self._transfer(*move) for move in moves]))
        if then is not None:
            self.gpu.put(self.stream, Entry("a sum", then))
        done.record(self.stream)
        for tensor, _, _ in moves:
            self.gpu.memory.record(tensor, self.stream)
        return Work(self.gpu, done, self.connection)

    def _transfer(self, tensor: torch.Tensor, peer: int, sends: bool) -> Transfer:
        own, other = self.gpu.rank, self.connection.members[peer]
        source, target = (own, other) if sends else (other, own)
        seen = self.gpu.memory.seen_by_device(tensor)
        return self.connection.transfer(own, source, target, sends=sends, tensor=seen)

    def _meet(self) -> None:
        """The first use holds the host until all members have come."""
        joined, members = self.connection.joined, set(self.connection.members)
        if not self.world.connected and self.gpu.rank not in joined:
            joined.add(self.gpu.rank)
            current_actor().wait(lambda: joined == members, f"for all of {self.connection.name}")


def _sum(own: torch.Tensor, shares: Sequence[torch.Tensor], group: Backend, async_op: bool) -> Work | None:
    """Each rank gets into `own` the sum of what all have in its share, in memory of NCCL's."""
    with beneath():
        parts = torch.empty(group.size(), own.numel(), dtype=own.dtype)
    into = group.gpu.memory.seen_by_device(own)

    def add() -> None:
        with beneath():
            into.copy_(parts.sum(0).view(into.shape))

    moves = [(share, peer, True) for peer, share in enumerate(shares)]
    with beneath():
        moves += [(part, peer, False) for peer, part in enumerate(parts)]
    return _waited(group.start(moves, add), async_op)


def _waited(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None


class Dist:
    """What ppctl calls of `torch.distributed` beside backends, on backends as groups."""

    isend, irecv = "send", "receive"

    @staticmethod
    def P2POp(op: str, tensor: torch.Tensor, *, group: Backend, group_peer: int) -> SimpleNamespace:
        return SimpleNamespace(move=(tensor, group_peer, op == Dist.isend), group=group)

    @staticmethod
    def batch_isend_irecv(ops: Sequence[SimpleNamespace]) -> list[Work]:
        return [ops[0].group.start([op.move for op in ops])]

    @staticmethod
    def all_to_all_single(
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        group: Backend,
        async_op: bool,
    ) -> Work:
        """As NCCL has it: one group of sends and receives, where a size of 0 is left out."""
        assert async_op, "ppctl starts an exchange, and waits for it later"
        size = group.size()
        parts = [
            (whole.split(list(sizes) if sizes is not None else len(whole) // size), sends)
            for whole, sizes, sends in ((tensor, input_split_sizes, True), (output, output_split_sizes, False))
        ]
        moves = [(part, peer, sends) for each, sends in parts for peer, part in enumerate(each) if part.numel()]
        return group.start(moves)

    @staticmethod
    def all_gather(
        output: torch.Tensor, tensor: torch.Tensor, *, group: Backend, async_op: bool = False
    ) -> Work | None:
        """Of flat tensors, as `ppctl.parallel.shard` has it."""
        size = group.size()
        moves = [(tensor, peer, True) for peer in range(size)]
        moves += [(part, peer, False) for peer, part in enumerate(output.chunk(size))]
        return _waited(group.start(moves), async_op)

    @staticmethod
    def reduce_scatter(
        output: torch.Tensor, tensor: torch.Tensor, *, group: Backend, async_op: bool = False
    ) -> Work | None:
        """Of flat tensors, as `ppctl.parallel.shard` has it."""
        return _sum(output, tensor.chunk(group.size()), group, async_op)

    @staticmethod
    def all_reduce(tensor: torch.Tensor, *, group: Backend, async_op: bool = False) -> Work | None:
        """A sum."""
        return _sum(tensor, [tensor] * group.size(), group, async_op)

    @staticmethod
    def get_global_rank(group: Backend, rank: int) -> int:
        """Groups here are of all ranks."""
        return rank

    @staticmethod
    def reduce(tensor: torch.Tensor, dst: int, *, group: Backend, async_op: bool = False) -> Work | None:
        """A sum on one rank; what the others have in their tensors behind it is undefined."""
        into, owns = group.gpu.memory.seen_by_device(tensor), group.rank() == dst
        with beneath():
            parts = torch.empty(group.size() if owns else 0, tensor.numel(), dtype=tensor.dtype)

        def end() -> None:
            with beneath():
                into.copy_(parts.sum(0).view(into.shape)) if owns else into.fill_(torch.nan)

        with beneath():
            moves = [(tensor, dst, True), *((part, peer, False) for peer, part in enumerate(parts))]
        return _waited(group.start(moves, end), async_op)

    @staticmethod
    def broadcast(tensor: torch.Tensor, src: int, *, group: Backend, async_op: bool = False) -> Work | None:
        """From one rank to all others."""
        others = [peer for peer in range(group.size()) if peer != src]
        owns = group.rank() == src
        return _waited(group.start([(tensor, peer, owns) for peer in (others if owns else [src])]), async_op)
