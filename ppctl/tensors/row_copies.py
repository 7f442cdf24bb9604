"""Several copies of each row, and sums of the copies: each is the other's gradient. Permuted rows, too.

Autograd's own gradient of a gather is a sum into zeros: it takes twice the memory, and on a GPU atomic additions,
although every row of a permutation is read once.

Every copy of a row has a different number. Sums are made in order of the numbers, and first within equal runs of
numbers, so that a rank with all copies of a run can add these up for all ranks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def _counted(*bounds: int, device: torch.device) -> Tensor:
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return torch.arange(*bounds, device=device) if fake else _kept(bounds, device)  # a fake has no numbers for others


@lru_cache(8)  # all layers and microbatches of a shape need the same numbers
@torch.inference_mode(False)  # numbers first made during generation must serve training too
def _kept(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.arange(*bounds, device=device)


def copied(rows: Tensor, copies: Any) -> Tensor:
    """The copies of rows, whose gradients are summed; `copies` is a named tuple with `RowCopies`' `down` and `up`."""
    out: Tensor = _Moved.apply(rows, copies, False)  # type: ignore[no-untyped-call]  # torch's own
    return out


def summed(rows: Tensor, copies: Any) -> Tensor:
    """The sums of copies, whose gradients are copied. Keeps nothing of the rows."""
    out: Tensor = _Moved.apply(rows, copies, True)  # type: ignore[no-untyped-call]  # torch's own
    return out


def sums(rows: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    """Sums [n, h] of `rows[places]`: the i-th is from `starts[i]` to the next start, in order; 16-bit rows are summed
    in float32; a sum of no rows is zero. `places` and `starts` are int64."""
    if not len(places):
        return rows.new_zeros(len(starts), rows.shape[1])
    return F.embedding_bag(places, rows.detach(), starts, mode="sum")


def set_places(mask: Tensor, count: int) -> Tensor:
    """The indexes, in order, of a flattened mask's `count` true elements; the host does not wait: it knows `count`."""
    return torch.searchsorted(mask.flatten().cumsum(0), torch.arange(1, count + 1, device=mask.device))


class RowCopies(NamedTuple):
    """All copies at hand, in order of their numbers; copies with one number in order of the rows."""

    rows: Tensor
    """[n] the row of each copy."""
    places: Tensor
    """[n] the place of each copy in the order in which copies of one row are neighbours."""
    runs: Tensor | None
    """Where each row's sums of runs start in `places`; None if sums of runs are the whole sums, or single copies."""
    times: int
    """Copies of each row."""

    @classmethod
    def of(cls, numbers: Tensor, run: int, most: int) -> tuple[RowCopies, Tensor]:
        """(the copies, the inverse of `places`) for `numbers` [t, K], each row ascending: runs have `run` numbers, and
        a row's copies are in at most `most` runs."""
        rows, times = numbers.shape
        every = _counted(rows * times + 1, device=numbers.device)
        order = numbers.flatten().argsort(stable=True)
        runs = None
        if run > 1 and most > 1:
            of, here = numbers // run, every[:-1].view(rows, times)
            # A row in fewer runs has empty ones last, which start at its end.
            others = torch.where(of[:, 1:] != of[:, :-1], here[:, 1:], every[times::times, None]).sort(1).values
            runs = torch.cat((here[:, :1], others[:, : most - 1]), 1).flatten()
        return cls(order // times, torch.empty_like(order).scatter_(0, order, every[:-1]), runs, times), order

    def down(self, rows: Tensor) -> Tensor:
        """The copies of rows, by number."""
        return rows.index_select(0, self.rows)

    def up(self, copies: Tensor) -> Tensor:
        """The sums of copies that are in order of their numbers."""
        places = self.places
        if self.runs is not None:
            copies = sums(copies, places, self.runs)
            places = _counted(len(copies), device=copies.device)
        rows = len(self.places) // self.times
        starts = _counted(0, len(places), len(places) // max(1, rows), device=copies.device)
        return sums(copies, places, starts)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Any, up: bool) -> Tensor:
        # Tensors are kept where hooks on what autograd saves see them.
        ctx.names = [name for name, value in copies._asdict().items() if isinstance(value, Tensor)]
        ctx.save_for_backward(*(getattr(copies, name) for name in ctx.names))
        ctx.rest, ctx.up = copies._replace(**dict.fromkeys(ctx.names)), up
        moved: Tensor = copies.up(rows) if up else copies.down(rows)
        return moved

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        copies = ctx.rest._replace(**dict(zip(ctx.names, ctx.saved_tensors, strict=True)))
        return copies.down(gradients[0]) if ctx.up else copies.up(gradients[0].contiguous()), None, None


def reorder(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """`rows[order]` for rows [n, ...], where `order` [n] (int64) is a permutation and `inverse` its inverse."""
    out: Tensor = _Reorder.apply(rows, order, inverse)  # type: ignore[no-untyped-call]  # torch's own
    return out


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None


def inverse_of(order: Tensor) -> Tensor:
    """The inverse of a permutation [n] (int64)."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
