"""The mean of the weights of several checkpoints of one model, which may be written by different cuts.

One tensor of each is in memory at a time. Source: Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and
Better Generalization".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ppctl.checkpoint.manifest import Manifest, read_manifest
from ppctl.checkpoint.reading import CheckpointReader
from ppctl.checkpoint.run_state import run_state
from ppctl.checkpoint.tensor_parts import ranges, text_of
from ppctl.errors import CheckpointError, Problem, pasted
from ppctl.pretrained.conversion import Done, Progress, write_weights


def average(sources: Sequence[Path], out: Path, progress: Progress) -> Done:
    """Write the mean of the sources' weights as the checkpoint `out`/checkpoints/step-0, in their own dtypes.

    Sums are made in float64, in the order of the sources, and rounded once. Optimizer states are left out. Raises
    ConfigError (PP-E525 if `out` is taken) and CheckpointError: PP-E531, naming every tensor that is not in all
    sources with one shape and dtype, or whose values are no floats and not equal; and as reading does.
    """
    manifests = [read_manifest(path) for path in sources]
    names = _weights(sources, manifests)
    readers = [CheckpointReader(path, manifest) for path, manifest in zip(sources, manifests, strict=True)]
    specs = {
        name.removeprefix("model."): torch.empty(record.shape, dtype=getattr(torch, record.dtype), device="meta")
        for name, record in manifests[0].tensors.items()
        if name in names
    }
    first = run_state(sources[0])
    state = {"model": first.get("model", {}), "averaged": [str(path.absolute()) for path in sources]}
    state |= {key: first[key] for key in ("source", "tokenizer", "tokenizer_path") if key in first}
    return write_weights(out, specs, lambda name: _mean(f"model.{name}", readers), state, progress)


def _weights(sources: Sequence[Path], manifests: Sequence[Manifest]) -> set[str]:
    """Return the names of the weights. Raises CheckpointError (PP-E531) unless all sources have the same."""
    first, *others = manifests
    names = {name for name in first.tensors if name.startswith("model.")}
    problems = []
    for path, other in zip(sources[1:], others, strict=True):
        if lines := list(_differences(first, other)):
            message = f"the weights of {path} are not those of the model of {sources[0]}, and have no mean with them"
            remedy = f"ppctl ckpt diff {pasted(sources[0], path)}"
            problems.append(Problem("PP-E531", message, remedy, "\n".join(lines)))
    if problems:
        raise CheckpointError(problems)
    return names


def _differences(first: Manifest, other: Manifest) -> Iterator[str]:
    ours, theirs = ({n: r for n, r in each.tensors.items() if n.startswith("model.")} for each in (first, other))
    yield from (f"missing: {line}" for line in ranges(ours.keys() - theirs.keys()))
    yield from (f"not in the first: {line}" for line in ranges(theirs.keys() - ours.keys()))
    for name, record in ours.items():
        kinds = [text_of(each.shape, each.dtype) for each in (record, theirs.get(name, record))]
        if kinds[0] != kinds[1]:
            yield f"{name}: {kinds[1]}, not {kinds[0]}"


def _mean(name: str, readers: Sequence[CheckpointReader]) -> Tensor:
    """The mean of a tensor, computed in float64 and rounded once. Raises CheckpointError (PP-E531) if integers
    differ."""
    first = readers[0].tensor(name)
    floating = first.is_floating_point()
    total = first.to(torch.float64, copy=True) if floating else first
    for reader in readers[1:]:
        value = reader.tensor(name)
        if floating:
            total += value
        elif not torch.equal(value, first):
            message = (
                f"{name} holds {str(first.dtype).removeprefix('torch.')}, which have no mean, and is not equal in all"
            )
            remedy = f"ppctl ckpt diff {pasted(readers[0].path, reader.path)}"
            raise CheckpointError(Problem("PP-E531", message, remedy, str(reader.path)))
    return (total / len(readers)).to(first.dtype) if floating else first
