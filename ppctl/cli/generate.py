"""`ppctl generate`: continues a prompt with the weights of a run, a checkpoint or a Hugging Face directory.

The model is whole in one process with torch (`python -m ppctl.pretrained.generate`), which is started here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from ppctl.cli.ckpt_convert import DTYPES
from ppctl.cli.console import note, prose, width
from ppctl.cli.runs import add_runs_directory
from ppctl.errors import ConfigError, Problem
from ppctl.families.directory import CONFIG
from ppctl.host.processes import python
from ppctl.launch.weights import tokenizer_of
from ppctl.runs.finding import find_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    words = "a run (its last checkpoint), a checkpoint of any cut, or a Hugging Face directory"
    parser.add_argument("source", metavar="RUN|DIR", help=words)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; with --chat the user's message")
    parser.add_argument("--tokens", type=_positive, default=128, metavar="N", help="at most so many (default: 128)")
    parser.add_argument("--chat", action="store_true", help="a turn of a conversation, by the chat template")
    parser.add_argument("--system", metavar="TEXT", help="the system's message before it; means --chat")
    parser.add_argument("--template", metavar="FILE", help="another chat template; means --chat")
    words = "draw each token by its probability, the logits divided by T (default: take the likeliest token)"
    parser.add_argument("--temperature", type=_above_zero, metavar="T", help=words)
    parser.add_argument("--top-k", type=_positive, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument("--top-p", type=_share, metavar="P", help="draw from the likeliest that add up to P")
    parser.add_argument("--seed", type=int, metavar="N", help="of the draws (default: 0)")
    words = "a tokenizer.json or its directory, or byte (default: the one that the weights came with)"
    parser.add_argument("--tokenizer", metavar="DIR", help=words)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they were saved)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, with the tokens")
    words = (
        "One process holds the whole model. Keys and values of the tokens before are kept; a few models of transformers' "
        "own code keep none, and compute the whole text for every token. Any of --temperature, --top-k, --top-p and "
        "--seed draws; without them the likeliest token comes."
    )
    parser.epilog = prose([words], width())
    add_runs_directory(parser)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 10**9:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return int(text)


def _above_zero(text: str) -> float:
    if not 0 < float(text) < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not above 0; without it the likeliest token comes")
    return float(text)


def _share(text: str) -> float:
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return float(text)


def run(args: argparse.Namespace) -> int:
    """Start what generates. Exit codes: 0 done; 2 usage, or a prompt that the model cannot continue; 3 a checkpoint
    that is missing or damaged; 130 interrupted."""
    source = Path(args.source).expanduser().absolute()
    if not (source / CONFIG).is_file():
        source = find_checkpoint(args.source, args.dir, "generate")
    tokenizer = args.tokenizer or tokenizer_of(source)
    if tokenizer is None or (tokenizer != "byte" and not Path(tokenizer).expanduser().exists()):
        message = f"{source} comes with no tokenizer" if tokenizer is None else f"there is no tokenizer at {tokenizer}"
        raise ConfigError(Problem("PP-E560", message, "--tokenizer DIR, the one that the model was trained with"))
    asked = {
        name: getattr(args, name) for name in ("prompt", "system", "template", "tokens", "device", "dtype", "json")
    }
    draws = any(each is not None for each in (args.temperature, args.top_k, args.top_p, args.seed))
    asked |= {
        "source": str(source),
        "tokenizer": tokenizer,
        "chat": args.chat or args.system is not None or args.template is not None,
        "sampling": (args.temperature or 1.0, args.top_k, args.top_p or 1.0) if draws else None,
        "seed": args.seed or 0,
    }
    note(f"note: loading {source}")
    command = python("ppctl.pretrained.generate")
    return subprocess.run(command, input=json.dumps(asked), text=True, check=False).returncode
