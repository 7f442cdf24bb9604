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
