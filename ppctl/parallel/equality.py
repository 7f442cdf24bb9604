"""Proof that copies are copies: replicas and tied uses are compared bit by bit before they are saved as one.

Knows tensors by name and a process group. Must not know why two ranks hold the same tensor, nor how to mend it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ppctl.errors import Problem, TrainingError


def digest(tensor: Tensor) -> int:
    """64 bits of BLAKE2b over a tensor's bytes, as a signed integer: equal for bit-equal tensors, on every device."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return int.from_bytes(hashlib.blake2b(raw.numpy().data, digest_size=8).digest(), "little", signed=True)


def unequal_replicas(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> tuple[str, ...]:
    """Names of the tensors that are not bit-equal on all ranks of `group`, which must bring the same names in order."""
    if group is None or not tensors:
        return ()
    device = next(iter(tensors.values())).device
    own = torch.tensor([digest(tensor) for tensor in tensors.values()], dtype=torch.int64, device=device)
    different = (torch.stack(_gather(own, group)) != own).any(dim=0).tolist()
    return tuple(name for name, differs in zip(tensors, different, strict=True) if differs)


def unequal_uses(uses: Iterable[Tensor], group: dist.ProcessGroup | None) -> bool:
    """Whether the uses of one shared parameter differ, among those held here or between the ranks of `group`."""
    held = list(uses)
    digests = [digest(tensor) for tensor in held]
    if group is None or not held:
        return len(set(digests)) > 1
    # Least and greatest say whether a rank's own uses agree, in a message of one size for every rank.
    own = torch.tensor([min(digests), max(digests)], dtype=torch.int64, device=held[0].device)
    return len(set(torch.cat(_gather(own, group)).tolist())) > 1


def _gather(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    rows = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(rows, own, group=group)
    return rows


def refuse_unequal(names: Iterable[str], what: str) -> None:
    """Raise TrainingError (PP-E721) if any name is given: a checkpoint would silently keep one of the copies."""
    names = tuple(names)
    if not names:
        return
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise TrainingError(
        Problem(
            "PP-E721",
            f"{what} have drifted apart: {names[0]}{more} is not bit-equal on all ranks that hold it",
            remedy="resume from the last checkpoint: `ppctl resume`",
        )
    )
