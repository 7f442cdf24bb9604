"""`python -m ppctl.pretrained.command import|export|average FROM... TO`: what `ppctl ckpt` starts."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ppctl.checkpoint.manifest import Manifest, read_manifest
from ppctl.checkpoint.reading import CheckpointReader
from ppctl.checkpoint.run_state import run_state
from ppctl.checkpoint.tensor_parts import ranges, text_of
from ppctl.config.schema import ModelConfig
from ppctl.errors import CheckpointError, Problem, pasted, visible
from ppctl.pretrained.conversion import Done, Progress, exit_code_of, printed_progress, write_weights
from ppctl.pretrained.hugging_face import export_checkpoint, import_directory
from ppctl.runs.checkpoint_folder import unreadable


def average(sources: Sequence[Path], out: Path, progress: Progress) -> Done:
    """Write the mean of the sources' weights as the checkpoint `out`/checkpoints/step-0, in their own dtypes.

    One tensor of each source is in memory at a time. Sums are made in float64, in the order of the sources, and rounded
    once. Optimizer states are left out. Source: Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima". Raises
    ConfigError (PP-E525 if `out` is taken) and CheckpointError: PP-E531 naming all tensors that not every source has
    with one shape and dtype, PP-E531 for integers that are not equal in all sources, and as reading a checkpoint does.
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
            message = f"the weights of {path} are not those of the model of {sources[0]}, so they have no mean"
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
    """A tensor's mean, computed in float64, rounded once. Raises CheckpointError (PP-E531) if integers differ."""
    first = readers[0].tensor(name)
    floating = first.is_floating_point()
    total = first.to(torch.float64, copy=True) if floating else first
    for reader in readers[1:]:
        value = reader.tensor(name)
        if floating:
            total += value
        elif not torch.equal(value, first):
            message = (
                f"{name} holds {str(first.dtype).removeprefix('torch.')}, which have no mean: all values must be equal"
            )
            remedy = f"ppctl ckpt diff {pasted(readers[0].path, reader.path)}"
            raise CheckpointError(Problem("PP-E531", message, remedy, str(reader.path)))
    return (total / len(readers)).to(first.dtype) if floating else first


def main(argv: Sequence[str] | None = None) -> int:
    """Run the action that `argv` names; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ppctl.pretrained.command")
    parser.add_argument("action", choices=("import", "export", "average"))
    parser.add_argument("--format", choices=("hf", "dcp", "torch_dist"), default="hf", help="the other side's format")
    parser.add_argument("--model", type=json.loads, help="ModelConfig as JSON, where the source does not tell it")
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype")
    parser.add_argument("--no-mtp", action="store_true")
    args = parser.parse_args(argv)
    return exit_code_of(lambda: print(visible(_summary(_convert(args)))))


def _convert(args: argparse.Namespace) -> Done:
    progress, out, (source, *_) = printed_progress(), args.out.absolute(), args.sources
    try:
        if args.action == "average":
            return average(args.sources, out, progress)
        megatron, dtype = args.format == "torch_dist", getattr(torch, args.dtype) if args.dtype else None
        if args.format != "hf":
            from ppctl.pretrained.from_dcp import import_dcp  # with torch's checkpoint library
            from ppctl.pretrained.to_dcp import export_dcp

            if args.action == "import":
                return import_dcp(source, out, ModelConfig(**args.model), progress, megatron=megatron)
            return export_dcp(source, out, progress, dtype=dtype, mtp=not args.no_mtp, megatron=megatron)
        if args.action == "import":
            described = None if args.model is None else ModelConfig(**args.model)
            return import_directory(source, out, progress, mtp=not args.no_mtp, described=described)
        return export_checkpoint(source, out, progress, dtype=dtype, mtp=not args.no_mtp)
    except OSError as error:
        place = os.path.realpath(out)
        named = Path(error.filename or place)
        if not str(named).startswith(place) and named not in Path(place).parents:
            raise unreadable(named, error) from error
        message = f"{args.out} cannot be written: {error.strerror}"
        raise CheckpointError(Problem("PP-E505", message, f"df -h {pasted(args.out.absolute().parent)}")) from error


def _summary(done: Done) -> str:
    family = f" of a {done.family} model" if done.family else ""
    # Adapters are of no family: peft loads them beside the model that they were trained on.
    what = f"{done.parameters:,} parameters{family}, {done.tensors} tensors, {done.bytes:,} bytes"
    beside = [f"with {line}" for line in (done.tokenizer, done.settings) if line]
    return "\n".join([f"wrote {what}", *beside, *filter(None, (done.left, done.quantised)), str(done.path)])


if __name__ == "__main__":
    sys.exit(main())
