"""`ppctl generate`: continues a prompt with the weights of a run, a checkpoint or a Hugging Face directory, in one
process with torch (`python -m ppctl.pretrained.generate`)."""

from __future__ import annotations

import argparse
import json
import subprocess

from ppctl.cli.console import note, prose, width
from ppctl.cli.runs import DTYPES, above_0, add_runs_directory
from ppctl.errors import ConfigError, Problem
from ppctl.families.directory import CONFIG
from ppctl.host.files import expanded
from ppctl.host.processes import python
from ppctl.launch.weights import tokenizer_of
from ppctl.runs.finding import find_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    whole, share, scale = above_0(int, 10**9), above_0(float, 1), above_0(float, 1e6)
    words = "a run (its last checkpoint), a checkpoint of any cut, or a Hugging Face directory"
    parser.add_argument("source", metavar="RUN|DIR", help=words)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; with --chat the user's message")
    parser.add_argument("--tokens", type=whole, default=128, metavar="N", help="at most N new tokens (default: 128)")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the chat template, as a user's turn")
    parser.add_argument("--template", metavar="FILE", help="with --chat: the chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system message before the prompt")
    words = "draw each token by its probability, the logits divided by T (default: take the likeliest token)"
    parser.add_argument("--temperature", type=scale, metavar="T", help=words)
    parser.add_argument("--top-k", type=whole, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument("--top-p", type=share, metavar="P", help="draw from the likeliest, up to a total probability P")
    parser.add_argument("--seed", type=int, metavar="N", help="the seed of the draws (default: 0)")
    words = "a tokenizer.json or its directory, or byte (default: the one that the weights came with)"
    parser.add_argument("--tokenizer", metavar="DIR", help=words)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="the dtype of the weights (default: as they were saved)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, with the tokens")
    words = (
        "One process holds the whole model. It keeps the keys and values of earlier tokens; a few models that run with "
        "transformers' code cannot, and compute the whole text again for every token. With any of --temperature, "
        "--top-k, --top-p and --seed, tokens are drawn; without them, the likeliest is taken."
    )
    parser.epilog = prose([words], width())
    add_runs_directory(parser)


def run(args: argparse.Namespace) -> int:
    """Start the process that generates. Exit codes: 0 done; 2 usage, or a prompt that the model cannot continue; 3 a
    checkpoint that is missing or damaged; 130 interrupted."""
    source = expanded(args.source).absolute()
    if not (source / CONFIG).is_file():
        source = find_checkpoint(args.source, args.dir, "generate")
    tokenizer = args.tokenizer or tokenizer_of(source)
    if tokenizer is None or (tokenizer != "byte" and not expanded(tokenizer).exists()):
        message = f"{source} comes with no tokenizer" if tokenizer is None else f"there is no tokenizer at {tokenizer}"
        raise ConfigError(Problem("PP-E560", message, "--tokenizer DIR, the one that the model was trained with"))
    note(f"note: loading {source}")
    asked = json.dumps(vars(args) | {"source": str(source), "tokenizer": tokenizer, "dir": None})
    return subprocess.run(python("ppctl.pretrained.generate"), input=asked, text=True, check=False).returncode
