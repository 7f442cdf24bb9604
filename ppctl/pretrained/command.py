"""`python -m ppctl.pretrained.command import|export|average FROM... TO`: what `ppctl ckpt` starts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ppctl.config.schema import ModelConfig
from ppctl.errors import CheckpointError, Problem, pasted, visible
from ppctl.pretrained.average import average
from ppctl.pretrained.conversion import Done, exit_code_of, printed_progress
from ppctl.pretrained.hugging_face import export_checkpoint, import_directory


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ppctl.pretrained.command")
    parser.add_argument("action", choices=("import", "export", "average"))
    parser.add_argument("--format", choices=("hf", "dcp", "torch_dist"), default="hf", help="of the other side")
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
