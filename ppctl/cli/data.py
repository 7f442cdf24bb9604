"""`ppctl data tokenize | show`: write Megatron's .bin and .idx files from text; show such files, or conversations."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from ppctl.cli.console import UNFOLDED, aligned, byte_progress, folded, note, width
from ppctl.errors import DataError, Problem, pasted
from ppctl.host.files import expanded
from ppctl.host.processes import unwinding_on_term

_SHOWN_TOKENS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    tokenize = actions.add_parser("tokenize", help="write OUT.bin and OUT.idx from files of text and tables")
    inputs = ".txt, .jsonl, .parquet or .arrow: a file, a quoted glob (in order of names), or what `datasets` has saved"
    tokenize.add_argument("inputs", nargs="+", metavar="IN", help=inputs)
    tokenize.add_argument("output", metavar="OUT", help="the prefix of both files, for data.path=OUT")
    words = "byte (the default), or a directory with a tokenizer.json"
    tokenize.add_argument("--tokenizer", default="byte", metavar="DIR", help=words)
    words = "end every document with the end-of-document token, as training on text does"
    tokenize.add_argument("--append-eod", action="store_true", help=words)
    tokenize.add_argument("--overwrite", action="store_true", help="replace OUT.bin and OUT.idx")
    tokenize.add_argument("--json", action="store_true", help="print only one JSON object, at the end")
    words = "the field of a line, or the column of a table, that is its text (default: text)"
    tokenize.add_argument("--text-key", default="text", metavar="KEY", help=words)
    show = actions.add_parser(
        "show", help="count the tokens of a .bin and .idx, or of conversations, and show one document"
    )
    words = "the path of .bin and .idx without these endings; with --format, files as `tokenize` takes them"
    show.add_argument("prefix", metavar="PREFIX", help=words)
    show.add_argument("--document", type=int, default=0, metavar="N", help="the document to show (default: 0)")
    words = f"how many tokens of the document to show (default: {_SHOWN_TOKENS})"
    show.add_argument("--tokens", type=int, default=_SHOWN_TOKENS, metavar="N", help=words)
    show.add_argument("--tokenizer", metavar="DIR", help="byte, or a directory: also show the document as text")
    words = "read conversations (chat), or prompts with completions; + marks tokens that are trained on"
    show.add_argument("--format", choices=("chat", "completion"), help=words)
    show.add_argument("--chat-template", metavar="FILE", help="a Jinja file (default: the tokenizer's own template)")
    show.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Do one action. Exit codes: 0 done, 2 problems with the data, 130 and 143 interrupted."""
    if args.action == "tokenize":
        return tokenize(args)
    return show(args) if args.format is None else show_conversation(args)


def tokenize(args: argparse.Namespace) -> int:
    """Tokenize the inputs and write both files, or nothing. Raises DataError."""
    from ppctl.data.indexed import IndexedWriter
    from ppctl.data.load import load_all, load_tokenizer
    from ppctl.data.text import encode_files, matching
    from ppctl.data.tokenizer import end_mark, token_dtype

    try:
        with unwinding_on_term():  # removes unfinished files
            tokenizer = load_tokenizer(args.tokenizer)
            end = [end_mark(tokenizer, "--append-eod")] if args.append_eod else []
            matched = load_all(args.inputs, lambda pattern: matching(pattern, "{}")[0])
            files = list(dict.fromkeys(file for of_pattern in matched for file in of_pattern))
            prefix = expanded(args.output.removesuffix(".bin").removesuffix(".idx"))
            dtype = token_dtype(tokenizer.vocab_size)
            with (
                IndexedWriter(prefix, dtype, overwrite=args.overwrite) as writer,
                byte_progress("tokenizing", sum(file.stat().st_size for file in files if file.exists())) as progress,
            ):
                for tokens, place in encode_files(files, tokenizer, progress, args.text_key):
                    writer.add_document(tokens, end if len(tokens) else [], place)
                if not writer.tokens:
                    raise DataError(
                        Problem("PP-E404", "there is no text to tokenize", place="\n".join(map(str, files)))
                    )
    except DataError as error:  # the remedies name keys of a config
        raise DataError([_typed_as_flag(problem) for problem in error.problems]) from None
    except OSError as error:
        message = f"{error.filename or args.output} cannot be written: {error.strerror}"
        raise DataError(Problem("PP-E413", message, place="command line")) from None
    counts = {"documents": writer.documents, "tokens": writer.tokens, "dtype": dtype.name}
    if args.json:
        print(json.dumps({"prefix": str(prefix), **counts}))
    else:
        print(f"{prefix}.bin and .idx: {writer.documents:,} documents, {writer.tokens:,} tokens of {dtype.name}")
        note(f"train on it with:\n  {pasted(f'data.path={prefix}')} {_reading(args.tokenizer, tokenizer.vocab_size)}")
    return 0


def _typed_as_flag(problem: Problem) -> Problem:
    key = "data.tokenizer"
    message, remedy = (text.replace(f"{key}=", "--tokenizer ") for text in (problem.message, problem.remedy))
    return replace(problem, message=message, remedy=remedy, place=problem.place.replace(key, "--tokenizer"))


def _reading(name: str, vocabulary: int) -> str:
    """The overrides for a model that reads these tokens: the model in the tokenizer's directory, or sizes."""
    if name != "byte" and expanded(name).joinpath("config.json").is_file():
        return pasted(f"model.from={name}")
    rows = -(-vocabulary // 64) * 64  # rows of the embedding: at least one for every id, and a multiple of 64
    return pasted(f"data.tokenizer={name}", f"model.vocab_size={rows}")


def show(args: argparse.Namespace) -> int:
    """Print the counts and the beginning of a document."""
    from ppctl.data.indexed import as_prefix, bin_path, open_indexed
    from ppctl.data.load import load_tokenizer

    indexed = open_indexed(as_prefix(args.prefix) or args.prefix)
    _check_document(args, f"{bin_path(indexed.prefix)} has documents", max(indexed.num_documents, 1))
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
    rows = [(f"document {args.document}", f"{' '.join(map(str, shown))}{more}")]
    if text is not None:
        lines = f"{text} …" if more else text
        rows += [("" if number else "as text", line) for number, line in enumerate(lines.splitlines())]
    print(aligned(folded([(f"{name:<13}", cell) for name, cell in rows], width(UNFOLDED), " ")))
    return 0


def _check_document(args: argparse.Namespace, documents: str, number: int) -> None:
    if not 0 <= args.document < number:
        message = f"{documents} 0 to {number - 1}, but {args.document} is not one of them"
        raise DataError(Problem("PP-E415", message, "--document 0", "command line"))


def show_conversation(args: argparse.Namespace) -> int:
    """Print the counts of conversations, and one conversation: lines that are learned begin with +."""
    from ppctl.data.chat_template import open_template
    from ppctl.data.conversations import encode_conversations
    from ppctl.data.load import load_tokenizer
    from ppctl.data.text import matching

    name = args.tokenizer or "byte"
    template = open_template(name, args.chat_template) if args.format == "chat" else None
    conversations = list(encode_conversations(matching(args.prefix, "{}")[0], load_tokenizer(name), template))
    if not conversations:
        raise DataError(
            Problem("PP-E422", "there is no conversation in the data", f"wc {pasted(args.prefix)}", args.prefix)
        )
    _check_document(args, f"{args.prefix} has conversations", len(conversations))
    one = conversations[args.document]
    counts = {
        "conversations": len(conversations),
        "tokens": sum(len(each.tokens) for each in conversations),
        "learned": sum(int(each.learned.sum()) for each in conversations),
        "longest": max(len(each.tokens) for each in conversations),
    }
    if any(each.early for each in conversations):
        counts["early"] = sum(each.early for each in conversations)
    if args.json:
        shown = {"tokens": one.tokens.tolist(), "learned": one.learned.tolist(), "runs": one.runs()}
        print(json.dumps(counts | {"document": args.document, "place": one.place, "shown": shown}))
        return 0
    for key, value in counts.items():
        why = " of the learned ones begin before the answer and end in it" if key == "early" else ""
        print(f"{key:<14} {value:,}{why}")
    print(f"{'shown':<14} {one.place}: {len(one.tokens):,} tokens, {int(one.learned.sum()):,} learned (+)")
    for learned, text in one.runs():
        for line in text.splitlines(keepends=True):
            for _, part in folded(
                [("+", line.replace("\n", "\\n"))], width(UNFOLDED) + 1, " "
            ):  # one blank between, not two
                print("+" if learned else " ", part)
    return 0
