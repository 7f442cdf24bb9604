"""`ppctl ckpt`: convert weights between Hugging Face directories and checkpoints.

Knows the arguments and where a checkpoint is found. Must not know torch: it starts `python -m ppctl.pretrained`, which
converts and prints its own problems.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from ppctl.runs import find_checkpoint

DTYPES = ("float64", "float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    importing = actions.add_parser("import", help="Hugging Face directory -> checkpoint")
    importing.add_argument("--hf", type=Path, required=True, metavar="DIR", help="with config.json and safetensors")
    importing.add_argument("out", type=Path, metavar="OUT", help="a new directory")
    exporting = actions.add_parser("export", help="checkpoint -> directory that transformers loads")
    exporting.add_argument("--hf", required=True, metavar="RUN", help="a run, or one of its checkpoints")
    exporting.add_argument("out", type=Path, metavar="DIR", help="a new directory")
    exporting.add_argument("--dtype", choices=DTYPES, help="of the new weights (default: as they were saved)")
    words = "the directory with all runs (default: runs)"
    exporting.add_argument("--dir", type=Path, default=Path("runs"), metavar="DIR", help=words)
    for each in (importing, exporting):
        each.add_argument("--no-mtp", action="store_true", help="leave out multi-token prediction")


def run(args: argparse.Namespace) -> int:
    """Convert. Exit codes: 0 done, 2 wrong family or output directory, 3 damaged weights or weights that do not fit."""
    source = find_checkpoint(args.hf, args.dir, "ckpt export --hf") if args.action == "export" else args.hf
    arguments = [args.action, str(source), str(args.out), *["--no-mtp"] * args.no_mtp]
    if args.action == "export" and args.dtype:
        arguments += ["--dtype", args.dtype]
    return subprocess.run([sys.executable, "-m", "ppctl.pretrained", *arguments], check=False).returncode
