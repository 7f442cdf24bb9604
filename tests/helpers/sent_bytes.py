"""What a rank sends in collectives and messages, counted from outside, where they meet torch's dispatcher."""

from collections import Counter

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SentBytes(TorchDispatchMode):
    """Bytes that this rank sends, by operation, each collective in its ring or direct form: to every other rank once.

    `of` maps an operation's name to bytes, `calls` to how often it was called.
    """

    def __init__(self):
        super().__init__()
        self.of = Counter()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self._count(func.__name__.partition(".")[0].strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name, args):
        sizes = [each.numel() * each.element_size() for each in tree_leaves(args) if hasattr(each, "element_size")]
        if name == "send":
            sent = sizes[0]
        elif name.startswith(("allgather", "reduce_scatter")):  # the larger one is all ranks'
            sent = max(sizes) - min(sizes)
        elif name.startswith("alltoall"):
            boxed = next(each for each in args if isinstance(each, torch.ScriptObject))
            ranks = ProcessGroup.unbox(boxed).size()
            sent = sizes[0] * (ranks - 1) // ranks
        else:
            assert name.startswith("recv"), name
            return
        self.calls[name] += 1
        self.of[name] += sent

    @property
    def total(self):
        return sum(self.of.values())


_KINDS = {
    "allgather_base": "all_gather", "allgather": "all_gather", "reduce_scatter_base": "reduce_scatter",
    "allreduce": "all_reduce", "alltoall_base": "all_to_all", "send": "send", "broadcast": "broadcast",
    "reduce": "reduce",
}  # fmt: skip


class SentByAxis(TorchDispatchMode):
    """(axis, kind) -> [number, bytes as rings send them] of a session's collectives, while it `counts`."""

    def __init__(self):
        super().__init__()
        self.axes = {}
        self.of = {}
        self.counts = False

    def watch(self, session):
        names = {"cp-inner": "cp", "cp-outer": "cp"}
        self.axes = {group.group_name: names.get(axis, axis) for axis, group in session.groups.items()}
        if session.replica.ties.group is not None:
            self.axes[session.replica.ties.group.group_name] = "ties"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.counts and func.namespace == "c10d":
            self._count(func.__name__.partition(".")[0].strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name, args):
        if name.startswith("recv"):
            return
        boxed = next(
            each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())
        )
        group = ProcessGroup.unbox(boxed)
        sizes = [each.numel() * each.element_size() for each in tree_leaves(args) if hasattr(each, "element_size")]
        kind, ranks = _KINDS[name], group.size()
        if name == "allgather":  # one tensor for each rank
            sizes = [ranks * max(sizes)]
        part = {"all_gather": max(sizes), "reduce_scatter": max(sizes), "all_reduce": 2 * sizes[0]}
        whole = part.get(kind, sizes[0])  # of an exchange of rows what arrives
        sent = whole if kind == "send" else whole * (ranks - 1) / ranks
        entry = self.of.setdefault((self.axes[group.group_name], kind), [0, 0.0])
        entry[0] += 1
        entry[1] += sent
