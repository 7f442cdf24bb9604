"""Loading: strict in both directions, verified before and after, in whatever cut the ranks are now.

Knows torch's distributed checkpoint (DCP) and what must fit. Must not know models, optimizers or the cut that
the checkpoint was saved in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp

from ppctl.checkpoint.agreement import AgreeingRanks
from ppctl.checkpoint.manifest import Manifest, check_files, ranges, read_manifest, read_state
from ppctl.checkpoint.replicas import Tensors, copies, record_tensor
from ppctl.checkpoint.writing import without_warning
from ppctl.checkpoint_folder import STATE
from ppctl.errors import CheckpointError, Problem

_Spec = tuple[tuple[int, ...], str]


def load(path: Path, tensors: Tensors, *, process_group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Fill `tensors` in place from the checkpoint at `path`; called by all ranks together; returns the saved state.

    Names are as in `save`; each rank brings what it owns now, and every copy is filled. Raises CheckpointError on every
    rank if the checkpoint is missing or damaged, if the ranks together lack a tensor of it or want one that it lacks,
    or if a shape or dtype differs. All of that is found before the first tensor is filled.
    """
    ranks = AgreeingRanks(process_group)
    what = f"read the checkpoint {path}"

    def fit(specs: list[dict[str, set[_Spec]]]) -> tuple[Manifest, dict[str, Any]]:
        manifest = read_manifest(path)
        _check_fit(path, manifest, specs)
        return manifest, read_state(path)

    manifest, state = ranks.agree(what, lambda: _specs(tensors), fit)
    share = sorted(manifest.files)[ranks.rank :: ranks.size]
    ranks.agree(what, lambda: check_files(path, manifest, share), lambda _: None)
    ranks.agree(what, lambda: _fill(path, manifest, tensors), lambda _: None)
    return state


def _specs(tensors: Tensors) -> dict[str, set[_Spec]]:
    return {
        name: {(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in copies(value)}
        for name, value in tensors.items()
    }


def _check_fit(path: Path, manifest: Manifest, specs: Sequence[Mapping[str, set[_Spec]]]) -> None:
    """Compare the checkpoint with all ranks' tensors together."""
    wanted: dict[str, set[_Spec]] = {}
    for each in specs:
        for name, found in each.items():
            wanted.setdefault(name, set()).update(found)
    problems = []
    if missing := wanted.keys() - manifest.tensors.keys():
        problems.append(_misfit(path, "lacks tensors of this model", ranges(missing)))
    if unexpected := manifest.tensors.keys() - wanted.keys():
        problems.append(_misfit(path, "has tensors that this model lacks", ranges(unexpected)))
    different = [
        f"{name}: {_text((record.shape, record.dtype))} saved, {' and '.join(map(_text, sorted(others)))} here"
        for name, record in manifest.tensors.items()
        if (others := wanted.get(name, set()) - {(record.shape, record.dtype)})
    ]
    if different:
        problems.append(_misfit(path, "has tensors of another shape or dtype", different))
    if problems:
        raise CheckpointError(problems)


def _misfit(path: Path, fault: str, lines: list[str]) -> Problem:
    remedy = f"give the model the sizes that it was saved with: they are in '{path / STATE}'"
    return Problem("PP-E502", f"the checkpoint at {path} {fault}", remedy, place="\n".join(lines))


def _text(spec: _Spec) -> str:
    shape, dtype = spec
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _fill(path: Path, manifest: Manifest, tensors: Tensors) -> None:
    """Read this rank's tensors, without a word to other ranks, and compare their digests with the manifest's."""
    firsts: dict[str, Tensor] = {name: copies(value)[0].detach() for name, value in tensors.items()}
    try:
        without_warning(lambda: load_with_dcp(dict(firsts), storage_reader=FileSystemReader(path), no_dist=True))
    except CheckpointException as failed:
        _, (error, _) = next(iter(failed.failures.items()))
        raise error from failed
    wrong = [name for name, tensor in firsts.items() if record_tensor(tensor) != manifest.tensors[name]]
    if wrong:
        message = f"the checkpoint at {path} is damaged: tensors differ from what was saved"
        raise CheckpointError(Problem("PP-E503", message, f"ls '{path.parent}'", place="\n".join(ranges(wrong))))
    with torch.no_grad():
        for name, value in tensors.items():
            for other in copies(value)[1:]:
                other.copy_(firsts[name])
