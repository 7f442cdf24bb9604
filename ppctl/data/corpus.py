"""The corpus: all documents as one contiguous array of tokens, with the digest that names it.

Knows files, documents and how a sample is cut from the array. Must not know steps, ranks, batches or torch.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ppctl.data.tokenizer import ByteTokenizer, Tokens
from ppctl.errors import DataError, Problem

READABLE = (".txt", ".jsonl")
LEFT_OUT = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"})
"""Directories of the standard library that are tests, a GUI that some systems leave out, or not the library at all."""
MOST_PROBLEMS = 20
_OWN_DATA = "data.path='texts/**/*.txt'"
_LIBRARY = "data.path=null"
"""Reads the running interpreter's own library."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of all documents in order, an eos after each.

    `digest` is the SHA-256 of the ids as little-endian 16-bit integers; `description` is one line for people.
    """

    tokens: Tokens
    digest: str
    description: str

    def num_samples(self, seq_length: int) -> int:
        """How many samples of seq_length tokens and their labels there are; DataError if there is none.

        Sample i is tokens[i * seq_length : (i + 1) * seq_length + 1]: neighbours share one token, the label of one
        and the first input of the other. A tail shorter than a sample is never read.
        """
        number = (len(self.tokens) - 1) // seq_length
        if number < 1:
            raise DataError(_too_short(self, seq_length))
        return number

    def samples(self, ids: npt.NDArray[np.int64], seq_length: int) -> npt.NDArray[np.int64]:
        """The windows of samples `ids` (any shape), shape [*ids.shape, seq_length + 1], int64."""
        window = np.arange(seq_length + 1, dtype=np.int64)
        windows: npt.NDArray[np.int64] = self.tokens[ids[..., None] * seq_length + window].astype(np.int64)
        return windows


def load_corpus(path: str | None, tokenizer: ByteTokenizer) -> Corpus:
    """Read the text that `data.path` names, or the interpreter's own library where it is None.

    `path` is a glob (`**` recurses) of .txt files, each a document, and .jsonl files, each line an object whose "text"
    is a document. Files are read in the order of their names. Raises DataError naming each file that is at fault.
    """
    if path is None:
        files, description = _standard_library()
    else:
        files, description = _matching(path)
    documents = _documents(files, tokenizer)
    if not documents:
        raise DataError(Problem("PP-E404", f"there is no text in {description}", remedy=_LIBRARY, place=_names(files)))
    return _join(documents, tokenizer, description)


def _too_short(corpus: Corpus, seq_length: int) -> Problem:
    tokens = len(corpus.tokens)
    return Problem(
        "PP-E404",
        f"the data is too short: {tokens} tokens, and one sample of data.seq_length={seq_length} needs "
        f"{seq_length + 1} (its inputs and the label of the last)",
        remedy=f"data.seq_length={tokens - 1}" if tokens > 1 else _LIBRARY,
        place=corpus.description,
    )


def _join(documents: list[Tokens], tokenizer: ByteTokenizer, description: str) -> Corpus:
    end = np.array([tokenizer.eos], dtype=np.uint16)
    tokens = np.concatenate([piece for document in documents for piece in (document, end)])
    digest = hashlib.sha256(np.ascontiguousarray(tokens, dtype="<u2").data).hexdigest()
    return Corpus(tokens, digest, f"{description}: {len(documents):,} documents, {len(tokens):,} tokens")


def _standard_library() -> tuple[list[Path], str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(
            Problem(
                "PP-E405",
                "the running Python has no library sources to train on (they are zipped or were left out)",
                remedy=_OWN_DATA,
                place=str(root),
            )
        )
    files.sort(key=lambda file: file.relative_to(root).as_posix())
    return files, f"the standard library of Python {sysconfig.get_python_version()} ({len(files)} files)"


def _matching(pattern: str) -> tuple[list[Path], str]:
    expanded = os.path.expanduser(pattern)
    # A file may be called notes[1].txt: a path that exists is never read as a pattern.
    found = [expanded] if os.path.isfile(expanded) else sorted(glob.glob(expanded, recursive=True))
    once = {os.path.realpath(name): Path(name) for name in reversed(found) if not os.path.isdir(name)}
    everything = sorted(once.values())
    files = [file for file in everything if file.suffix in READABLE]
    if not files:
        raise DataError(_no_match(pattern, expanded, everything))
    left_out = len(everything) - len(files)
    also = f"; {left_out} more matching that are neither .txt nor .jsonl were left out" if left_out else ""
    return files, f"data.path={pattern} ({len(files)} files{also})"


def _no_match(pattern: str, expanded: str, others: list[Path]) -> Problem:
    if os.path.isdir(expanded):
        inside = f"data.path='{pattern.rstrip('/')}/**/*.txt'"
        return Problem("PP-E401", f"data.path={pattern} is a directory; it takes files, by name or glob", remedy=inside)
    if others:
        message = f"data.path={pattern} matches no .txt or .jsonl file; only these are read"
        return Problem("PP-E401", message, remedy=_LIBRARY, place=_names(others))
    missing = "no such file" if not glob.has_magic(pattern) else "no file matches"
    where = f"looked in {Path(expanded).absolute().parent}"
    return Problem("PP-E401", f"data.path={pattern}: {missing}", remedy=_LIBRARY, place=where)


def _names(files: list[Path]) -> str:
    more = [f"and {len(files) - 5} more"] if len(files) > 5 else []
    return "\n".join([*map(str, files[:5]), *more])


def _documents(files: list[Path], tokenizer: ByteTokenizer) -> list[Tokens]:
    """All documents that have text, in order; a DataError with every problem found (the first twenty)."""
    documents: list[Tokens] = []
    problems: list[Problem] = []
    for file in files:
        for document in _read(file):
            if isinstance(document, Problem):
                problems.append(document)
            elif document:
                documents.append(tokenizer.encode_bytes(document))
        if len(problems) >= MOST_PROBLEMS:
            break
    if problems:
        raise DataError(problems[:MOST_PROBLEMS])
    return documents


def _read(file: Path) -> Iterator[bytes | Problem]:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            yield Problem("PP-E402", f"cannot read {file}: it is no file of data", remedy=f"ls -l '{file}'")
            return
        data = file.read_bytes()
    except OSError as error:
        yield Problem("PP-E402", f"cannot read {file}: {error.strerror or error}", remedy=f"ls -l '{file}'")
        return
    if file.suffix != ".jsonl":
        yield data
        return
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield _text_of(line, f"{file}:{number}")


def _text_of(line: bytes, place: str) -> bytes | Problem:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Problem("PP-E403", f"not a JSON object: {error}", place=place, remedy='{"text": "one document"}')
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return str(value["text"]).encode("utf-8", "surrogatepass")
    got = f"an object of {', '.join(map(str, value)) or 'nothing'}" if isinstance(value, dict) else type(value).__name__
    message = f'the line is not an object with a string under "text" but {got}'
    return Problem("PP-E403", message, place=place, remedy='{"text": "one document"}')
