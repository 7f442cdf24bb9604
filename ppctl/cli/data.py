"""`ppctl data tokenize | show`: write Megatron's .bin and .idx from text, and look into them.

Knows what a person sees of it. Must not know the format. Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ppctl.cli.console import console, note
from ppctl.errors import DataError, Problem

_SHOWN = 20
"""Tokens that `show` prints of a document, unless asked for more."""
_TERMINATED = 128 + signal.SIGTERM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    tokenize = actions.add_parser("tokenize", help="write OUT.bin and OUT.idx from .txt and .jsonl files")
    tokenize.add_argument("inputs", nargs="+", metavar="IN", help="a file or a quoted glob; files go in by name")
    tokenize.add_argument("output", metavar="OUT", help="what data.path=OUT will name")
    tokenize.add_argument(
        "--tokenizer", default="byte", metavar="DIR", help="byte (the default), or a directory with a tokenizer.json"
    )
    tokenize.add_argument(
        "--append-eod", action="store_true", help="end every document with the mark that training on text puts there"
    )
    tokenize.add_argument("--overwrite", action="store_true", help="replace OUT.bin and OUT.idx")
    tokenize.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")
    show = actions.add_parser("show", help="count and check what PREFIX.bin and PREFIX.idx hold")
    show.add_argument("prefix", metavar="PREFIX")
    show.add_argument("--document", type=int, default=0, metavar="N", help="the document to show (default: 0)")
    show.add_argument("--tokens", type=int, default=_SHOWN, metavar="N", help=f"how much of it (default: {_SHOWN})")
    show.add_argument("--tokenizer", metavar="DIR", help="byte, or a directory: show the document as text, too")
    show.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Do one action. Exit codes: 0 done, 2 where something is wrong with the data, 130 and 143 interrupted."""
    return tokenize(args) if args.action == "tokenize" else show(args)


def tokenize(args: argparse.Namespace) -> int:
    """Write both files, or nothing."""
    from ppctl.data.indexed_writer import IndexedWriter
    from ppctl.data.load import load_tokenizer
    from ppctl.data.text import encode_files, matching
    from ppctl.data.tokenizer import end_mark, token_dtype

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))  # unwinds, and what is half-written goes
    try:
        tokenizer = load_tokenizer(args.tokenizer)
        end = [end_mark(tokenizer, "--append-eod")] if args.append_eod else []
        files = _input_files(args.inputs, lambda pattern: matching(pattern, "{}")[0])
        prefix = Path(args.output.removesuffix(".bin").removesuffix(".idx")).expanduser()
        dtype = token_dtype(tokenizer.vocab_size)
        with IndexedWriter(prefix, dtype, overwrite=args.overwrite) as writer, _progress(files) as progress:
            for encoded in encode_files(files, tokenizer, progress):
                writer.add_document(encoded.tokens, end if len(encoded.tokens) else [], encoded.place)
            if not writer.tokens:
                raise DataError(Problem("PP-E404", "there is no text to tokenize", place="\n".join(map(str, files))))
    except OSError as error:
        message = f"{error.filename or args.output} cannot be written: {error.strerror}"
        raise DataError(Problem("PP-E413", message, place="command line")) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    found = {"prefix": str(prefix), "documents": writer.documents, "tokens": writer.tokens, "dtype": dtype.name}
    if args.json:
        print(json.dumps(found))
    else:
        print(f"{prefix}.bin and .idx: {writer.documents:,} documents, {writer.tokens:,} tokens of {dtype.name}")
        note(
            f"train on it with: data.path={prefix} data.tokenizer={args.tokenizer} model.vocab_size={_rows(tokenizer)}"
        )
    return 0


def show(args: argparse.Namespace) -> int:
    """Print the counts and the beginning of a document."""
    from ppctl.data.indexed import as_prefix, bin_path, open_indexed
    from ppctl.data.load import load_tokenizer

    indexed = open_indexed(as_prefix(args.prefix) or args.prefix)
    if not 0 <= args.document < max(indexed.num_documents, 1):
        message = (
            f"{bin_path(indexed.prefix)} has documents 0 to {indexed.num_documents - 1}, and {args.document} is none"
        )
        raise DataError(Problem("PP-E415", message, f"ppctl data show {args.prefix}", "command line"))
    tokens = indexed.document(args.document) if indexed.num_documents else indexed.tokens
    shown = tokens[: max(args.tokens, 0)].tolist()
    largest = int(indexed.tokens.max(initial=0))
    counts = {
        "documents": indexed.num_documents,
        "sequences": len(indexed.lengths),
        "tokens": len(indexed.tokens),
        "dtype": indexed.tokens.dtype.name,
        "largest_token": largest,
    }
    text = load_tokenizer(args.tokenizer).decode(shown) if args.tokenizer else None
    if args.json:
        print(json.dumps(counts | {"document": args.document, "first_tokens": shown, "text": text}))
        return 0
    for key, value in counts.items():
        print(f"{key.replace('_', ' '):<14} {value:,}" if isinstance(value, int) else f"{key:<14} {value}")
    more = f" and {len(tokens) - len(shown):,} more" if len(tokens) > len(shown) else ""
    print(f"{f'document {args.document}':<14} {' '.join(map(str, shown))}{more}")
    if text is not None:
        print(text)
    return 0


def _input_files(patterns: list[str], matching: Callable[[str], list[Path]]) -> list[Path]:
    """All files, in the order of the patterns; a DataError with what is wrong with each pattern."""
    files: list[Path] = []
    problems: list[Problem] = []
    for pattern in patterns:
        try:
            files += matching(pattern)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return list(dict.fromkeys(files))


def _rows(tokenizer: object) -> int:
    """A vocabulary that holds all of the tokenizer's ids and divides evenly."""
    size = int(getattr(tokenizer, "vocab_size", 0))
    return -(-size // 64) * 64


@contextmanager
def _progress(files: list[Path]) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, by bytes read; nothing where nobody watches."""
    if not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    total = sum(file.stat().st_size for file in files if file.exists())
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokenizing", total=total)
        yield lambda size: bar.advance(task, size)
