"""Context parallelism: attention over sequences of which each rank of a group has its halves (`sequence_halves.py`).

How a block of queries attends to a block of keys (`model/block_attention.py`), and how whole sequences attend, are
parameters. Megatron's `cp_comm_type` names the ways, each an `Attend` of `model/attention.py` to a rank's part of rows:

* `p2p` (`RingAttention`): keys and values travel round; each hop runs while the blocks at hand are computed.
* `all_gather` (`GatherAttention`): keys and values are gathered once, while the rank's own blocks are computed.
* `a2a` (`HeadExchange`): an all-to-all gives each rank whole sequences of some heads.
* `a2a+p2p`: a HeadExchange within groups of neighbours, around a RingAttention between these groups.

For the first two, blocks' results are merged by their log-sums, and a block's backward uses the merged ones (decision
42). A rank saves for the backward its own queries, keys, values, result and log-sums; other ranks' keys and values are
sent again. Gradients of keys and values are summed and sent in the dtype of keys and values.

Every rank of a group makes the same exchanges in the same order, whatever its documents are; the group has no others.
On CUDA, NCCL runs them on its stream of the group: `wait` makes the current stream wait, never the host, and each
buffer is held until then. This has not been run on CUDA yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppctl.comm.groups import send_round
from ppctl.comm.turns import hand_over
from ppctl.model.attention import Attend
from ppctl.model.block_attention import BlockAttention
from ppctl.model.dropped_attention import Dropped, DroppedBlock
from ppctl.model.packing import Documents
from ppctl.parallel.all_to_all import all_to_all
from ppctl.parallel.exchange_counts import starting
from ppctl.parallel.shard import all_gather, reduce_scatter
from ppctl.sequence_halves import (
    Halves,
    Lengths,
    VisibleBlock,
    gathered_blocks,
    own_blocks,
    own_lengths,
    ring_blocks,
)
from ppctl.tensors.tensor_halves import own_positions, to_ranks, to_whole
from ppctl.tensors.wide_dtype import wide_dtype


class BlockGroup(NamedTuple):
    """Blocks that are computed together, and the keys and values that they see."""

    blocks: Sequence[VisibleBlock]
    keys_values: Tensor
    """[b, groups, tokens, width + values' width]."""
    documents: Lengths | None = None
    """All documents of the single block, for a kernel that takes several documents in one call."""
    halves: Halves | None = None
    """The rank whose halves `keys_values` have; None for whole sequences."""


Gradients = list[tuple[VisibleBlock, Tensor, Tensor]]
"""Gradients of the keys and of the values that a part used, by block. The function that adds them empties the list."""


def _start_hop(sent: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Send a tensor to the next rank of the group; returns a function that waits for the previous rank's tensor."""
    starting(group)
    works, arriving = send_round(sent, group)

    def arrived(_: Tensor = sent) -> Tensor:  # held until then, whatever the backend holds
        for work in works:
            work.wait()
        return arriving

    return arrived


class _Blockwise:
    """Attention by blocks; subclasses define how keys and values arrive, and how their gradients leave."""

    def __init__(self, group: dist.ProcessGroup, kernel: BlockAttention) -> None:
        self.group, self.kernel = group, kernel

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None = None,
        scale: float | None = None,
        drops: Dropped | None = None,
    ) -> Tensor:
        """An `Attend`. Under autocast, heads are cast as torch's own attention casts them."""
        kind = q.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and q.dtype != torch.float64:
            q, k, v = (heads.to(torch.get_autocast_dtype(kind)) for heads in (q, k, v))
        lengths = None if documents is None else documents.lengths
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out: Tensor = _BlockwiseAttention.apply(q, k, v, self, lengths, scale, drops)  # type: ignore[no-untyped-call]  # torch's own
        return out

    def parts(self, keys_values: Tensor, lengths: Lengths | None, drops: Dropped | None) -> Iterator[BlockGroup]:
        """Yield all that this rank's queries see, its own keys first. Starts each part's exchange before it yields the
        previous part. Every rank of the group must take all parts."""
        raise NotImplementedError

    def summed(self, own: Tensor, parts: Iterator[Gradients]) -> Tensor:
        """Sum all ranks' gradients of this rank's own keys and values, in the memory of `own` (zeros). `parts` are the
        gradients that this rank computes, for each of `self.parts` in order."""
        raise NotImplementedError

    def _own(self, keys_values: Tensor, lengths: Lengths | None, drops: Dropped | None, *, apart: bool) -> BlockGroup:
        """The group of a rank's own tokens; with `apart` its halves count as separate rows."""
        halves = self._halves(keys_values)
        own = own_lengths(self._lengths(keys_values, lengths), halves, apart=apart)
        if lengths is not None and drops is None and self.kernel.joins_documents:
            every = slice(0, keys_values.shape[2])
            return BlockGroup([VisibleBlock(slice(0, len(own)), every, every, causal=True)], keys_values, own)
        return BlockGroup(own_blocks(own), keys_values, halves=halves)

    def kernels(
        self, q: Tensor, part: BlockGroup, drops: Dropped | None
    ) -> Callable[[VisibleBlock], BlockAttention | DroppedBlock]:
        """A function from a part's block to its kernel: one kernel for all, unless probabilities are dropped."""
        if drops is None:
            return lambda _: self.kernel
        queries, whole = own_positions(self._halves(q), q.device), part.keys_values.shape[2]
        seen = torch.arange(whole, device=q.device) if part.halves is None else own_positions(part.halves, q.device)
        return lambda block: drops.at(block.rows, queries[block.queries], seen[block.keys])

    def _lengths(self, keys_values: Tensor, lengths: Lengths | None) -> Lengths:
        """The lengths of documents; a row without documents counts as one."""
        return ((self._halves(keys_values).length,),) * keys_values.shape[0] if lengths is None else lengths

    def _halves(self, keys_values: Tensor) -> Halves:
        return Halves(self.group.rank(), self.group.size(), keys_values.shape[2] * self.group.size())


class RingAttention(_Blockwise):
    """Keys and values travel round the ring in forward and backward, each hop beside the previous part's blocks; their
    gradients follow, to the owner, beside the next part's blocks."""

    def parts(self, keys_values: Tensor, lengths: Lengths | None, drops: Dropped | None) -> Iterator[BlockGroup]:
        """Yield this rank's keys and values, then those of each other rank, going backwards through the ring."""
        rank, size = self.group.rank(), self.group.size()
        rows, halves = self._lengths(keys_values, lengths), self._halves(keys_values)
        part = self._own(keys_values, lengths, drops, apart=False)
        del keys_values  # drop this reference: the memory must be freed as soon as the hop has ended
        for number in range(1, size):
            hop = _start_hop(part.keys_values, self.group)
            yield part
            source = (rank - number) % size
            part = BlockGroup(ring_blocks(rows, halves, source), hop(), halves=replace(halves, rank=source))
            del hop
        yield part

    def summed(self, own: Tensor, parts: Iterator[Gradients]) -> Tensor:
        """Send sums of gradients round, one hop behind their keys and values; each rank adds its share on the way."""
        hop = None
        _add(own, next(parts))
        for part in parts:
            sums = torch.zeros_like(own) if hop is None else hop()
            hop = None
            _add(sums, part)
            hop = _start_hop(sums, self.group)
        if hop is not None:
            hand_over()
            own += hop()
        return own


class GatherAttention(_Blockwise):
    """Keys and values of all ranks are gathered while the blocks within the rank's own halves are computed, and again
    in the backward; their gradients are summed and scattered."""

    def parts(self, keys_values: Tensor, lengths: Lengths | None, drops: Dropped | None) -> Iterator[BlockGroup]:
        """Yield this rank's own keys and values, half by half, then all that come before each half."""
        gathered = [keys_values.new_empty(self.group.size(), *keys_values.shape)]
        starting(self.group)
        work = all_gather(gathered[0].view(-1), keys_values.view(-1), group=self.group, async_op=True)
        yield self._own(keys_values, lengths, drops, apart=True)
        work.wait()
        blocks = gathered_blocks(self._lengths(keys_values, lengths), self._halves(keys_values))
        del keys_values, work  # from here on only the part's computation holds these
        yield BlockGroup(blocks, to_whole(gathered.pop(), 2))

    def summed(self, own: Tensor, parts: Iterator[Gradients]) -> Tensor:
        """Add the first of `parts`, this rank's own, to `own`, then by a reduce_scatter the other, over all ranks."""
        b, groups, s, width = own.shape
        _add(own, next(parts))
        for part in parts:
            whole = own.new_zeros(b, groups, s * self.group.size(), width)
            _add(whole, part)
            sent, scattered = to_ranks(whole, self.group.size(), 2), torch.empty_like(own)
            del whole
            starting(self.group)
            work = reduce_scatter(scattered.view(-1), sent.view(-1), group=self.group, async_op=True)
            hand_over()
            work.wait()
            own += scattered
        return own


class HeadExchange:
    """Each rank gets whole sequences of some heads, `attend`s to them, and sends each rank its halves back. If the
    number of groups is no multiple of the ranks, groups are repeated until it is."""

    def __init__(self, group: dist.ProcessGroup, attend: Attend) -> None:
        self.group, self.attend = group, attend

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None = None,
        scale: float | None = None,
        drops: Dropped | None = None,
    ) -> Tensor:
        """An `Attend`; the number of heads must be a multiple of the ranks."""
        size, widths = self.group.size(), (q.shape[-1], k.shape[-1], v.shape[-1])
        repeats = size // gcd(k.shape[1], size)
        if repeats > 1:
            k, v = (heads.repeat_interleave(repeats, 1) for heads in (k, v))
        shares = [heads.unflatten(1, (size, -1)).permute(1, 0, 3, 2, 4).flatten(3) for heads in (q, k, v)]
        whole = to_whole(all_to_all(self.group, None, None, torch.cat(shares, -1))[0], 1)
        del shares
        parts = whole.split([heads.shape[1] // size * heads.shape[-1] for heads in (q, k, v)], -1)
        del q, k, v
        q, k, v = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part, width in zip(parts, widths, strict=True))
        drops = None if drops is None else drops.of_heads(self.group.rank(), q.shape[1])
        mixed = self.attend(q, k, v, documents, scale, drops).transpose(1, 2).flatten(2)
        (back,) = all_to_all(self.group, None, None, to_ranks(mixed, size, 1))  # [heads' rank, b, own tokens, values]
        out: Tensor = back.permute(1, 2, 0, 3).flatten(2).unflatten(-1, (-1, widths[2])).transpose(1, 2)
        return out


def context_attention(
    kind: str,
    group: dist.ProcessGroup,
    kernel: BlockAttention,
    attend: Attend,
    levels: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
) -> Attend:
    """The attention of this `cp_comm_type`. `attend` is for whole sequences; `levels` of `a2a+p2p` are the groups of
    the exchange of heads and of the ring that hold this rank (`topology.levels`). Raises KeyError for another kind."""
    if kind == "a2a+p2p":
        assert levels is not None
        return HeadExchange(levels[0], RingAttention(levels[1], kernel))
    ways: dict[str, Callable[[], Attend]] = {
        "p2p": lambda: RingAttention(group, kernel),
        "all_gather": lambda: GatherAttention(group, kernel),
        "a2a": lambda: HeadExchange(group, attend),
    }
    return ways[kind]()


class _BlockwiseAttention(torch.autograd.Function):
    """Blockwise attention as one node of the graph, because the backward of a block needs the result of all."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        way: _Blockwise,
        lengths: Lengths | None,
        scale: float,
        drops: Dropped | None,
    ) -> Tensor:
        sums_dtype = wide_dtype(q.dtype)
        b, heads, s, _ = q.shape
        # Strides of [b, s, heads, width], so that heads lie side by side without a copy.
        merged = q.new_empty(b, s, heads, v.shape[-1], dtype=sums_dtype).transpose(1, 2)
        log_sums = q.new_empty(b, heads, s, dtype=sums_dtype)
        for part in way.parts(torch.cat((k, v), -1), lengths, drops):
            keys, values = part.keys_values.split((k.shape[-1], v.shape[-1]), -1)
            kernel = way.kernels(q, part, drops)
            for block in part.blocks:
                seen = keys[block.rows, :, block.keys], values[block.rows, :, block.keys]
                asking = (block.rows, slice(None), block.queries)
                of_block = kernel(block).forward((q[asking], *seen, scale, block.causal, part.documents))
                _merge(merged[asking], log_sums[asking], *of_block, first=block.causal)
                del seen, of_block
            del part, keys, values, kernel
        out = merged.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.way, ctx.lengths, ctx.scale, ctx.drops = way, lengths, scale, drops
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: each access unpacks tensors that recomputation or offloading have packed.
        saved = q, k, v, _, log_sums = ctx.saved_tensors
        of_queries, widths = torch.zeros_like(q, dtype=log_sums.dtype), (k.shape[-1], v.shape[-1])
        own = k.new_zeros(*k.shape[:-1], sum(widths))
        of_keys, of_values = ctx.way.summed(own, _gradients(ctx, saved, gradient, of_queries)).split(widths, -1)
        return of_queries.to(q.dtype), of_keys, of_values, None, None, None, None


def _gradients(ctx: Any, saved: Sequence[Tensor], gradient: Tensor, of_queries: Tensor) -> Iterator[Gradients]:
    """Yield for each part its blocks' gradients of keys and values; add queries' gradients to `of_queries`."""
    q, k, v, out, log_sums = saved
    for part in ctx.way.parts(torch.cat((k, v), -1), ctx.lengths, ctx.drops):
        keys, values = part.keys_values.split((k.shape[-1], v.shape[-1]), -1)
        of_blocks: Gradients = []
        kernel = ctx.way.kernels(q, part, ctx.drops)
        for block in part.blocks:
            asking = (block.rows, slice(None), block.queries)
            seen = keys[block.rows, :, block.keys], values[block.rows, :, block.keys]
            asked = (q[asking], *seen, ctx.scale, block.causal, part.documents)
            of_q, of_k, of_v = kernel(block).backward(gradient[asking], asked, out[asking], log_sums[asking])
            of_queries[asking] += of_q
            of_blocks.append((block, of_k, of_v))
            del seen, asked, of_q, of_k, of_v
        del part, keys, values, kernel
        yield of_blocks


def _add(sums: Tensor, gradients: Gradients) -> None:
    while gradients:
        block, of_keys, of_values = gradients.pop()
        of_both = sums[block.rows, :, block.keys]
        of_both[..., : of_keys.shape[-1]] += of_keys
        of_both[..., of_keys.shape[-1] :] += of_values


def _merge(merged: Tensor, log_sums: Tensor, out: Tensor, log_sum: Tensor, *, first: bool) -> None:
    """Merge a block's result into the previous blocks' result, in place. A rank's own keys come `first`, for all its
    queries, so that no log-sum is ever empty."""
    if first:
        merged.copy_(out)
        log_sums.copy_(log_sum)
        return
    merged.lerp_(out.to(merged.dtype), (log_sum - log_sums).sigmoid_()[..., None])
    log_sums.copy_(torch.logaddexp(log_sums, log_sum))
