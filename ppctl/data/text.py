"""Text files: which files a pattern means, the documents in them, and the tokens of these.

Knows .txt and .jsonl files and every way in which they can be wrong. Must not know what the tokens are for.
"""

from __future__ import annotations

import glob
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ppctl.data.tokenizer import Document, Tokenizer, Tokens
from ppctl.errors import DataError, Problem

READABLE = (".txt", ".jsonl")
LEFT_OUT = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"})
"""Directories of the standard library that are tests, a GUI that some systems leave out, or not the library at all."""
MOST_PROBLEMS = 20
_OWN_DATA = "data.path='texts/**/*.txt'"
READ_LIBRARY = "data.path=null"
"""Reads the running interpreter's own library."""
_MANY = 1024
_MUCH = 4 * 1024 * 1024
"""Documents and bytes that are encoded together: a library may spread them over the processor's cores."""


def standard_library() -> tuple[list[Path], str]:
    """The source files of the running interpreter's library, in order, and a line that describes them."""
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


def matching(pattern: str, said: str = "data.path={}") -> tuple[list[Path], str]:
    """The .txt and .jsonl files that `pattern` means, in the order of their names, and a line that describes them.

    `said` is how the pattern was given. Raises DataError where there are none.
    """
    expanded = os.path.expanduser(pattern)
    # A file may be called notes[1].txt: a path that exists is never read as a pattern.
    found = [expanded] if os.path.isfile(expanded) else sorted(glob.glob(expanded, recursive=True))
    once = {os.path.realpath(name): Path(name) for name in reversed(found) if not os.path.isdir(name)}
    everything = sorted(once.values())
    files = [file for file in everything if file.suffix in READABLE]
    if not files:
        raise DataError(_no_match(pattern, expanded, everything, said))
    left_out = len(everything) - len(files)
    also = f"; {left_out} more matching that are neither .txt nor .jsonl were left out" if left_out else ""
    return files, f"{said.format(pattern)} ({len(files)} files{also})"


def _no_match(pattern: str, expanded: str, others: list[Path], said: str) -> Problem:
    named = said.format(pattern)
    if os.path.isdir(expanded):
        prefixes = sorted(glob.glob(os.path.join(glob.escape(expanded), "*.idx")))
        inside = said.format(prefixes[0][:-4] if prefixes else f"'{pattern.rstrip('/')}/**/*.txt'")
        return Problem("PP-E401", f"{named} is a directory; it takes files, by name or glob", remedy=inside)
    remedy = READ_LIBRARY if said.startswith("data.") else f"ls {Path(expanded).absolute().parent}"
    if others:
        message = f"{named} matches no .txt or .jsonl file; only these are read"
        return Problem("PP-E401", message, remedy=remedy, place=names(others))
    missing = "no file matches"
    if not glob.has_magic(pattern):
        missing = f"no such file, and no {pattern}.bin with an .idx"
    if "," in pattern and all(map(os.path.exists, pattern.split(","))):
        remedy = f"'{said.format(f'[{pattern}]')}'"
    where = f"looked in {Path(expanded).absolute().parent}"
    return Problem("PP-E401", f"{named}: {missing}", remedy=remedy, place=where)


def names(files: list[Path]) -> str:
    """The first five of `files`, one a line, and how many more there are."""
    more = [f"and {len(files) - 5} more"] if len(files) > 5 else []
    return "\n".join([*map(str, files[:5]), *more])


def documents(files: list[Path], progress: Callable[[int], None] = lambda size: None) -> Iterator[Document | Problem]:
    """All documents in order, empty ones too, and what is wrong where one cannot be read.

    A .txt file is a document; of a .jsonl file every line that is not blank, an object whose "text" it is. `progress`
    is told how many bytes were read since it was last told.
    """
    for file in files:
        try:
            yield from _read(file, progress)
        except OSError as error:
            yield Problem("PP-E402", f"cannot read {file}: {error.strerror or error}", remedy=f"ls -l '{file}'")


def _read(file: Path, progress: Callable[[int], None]) -> Iterator[Document | Problem]:
    if not stat.S_ISREG(file.stat().st_mode):
        yield Problem("PP-E402", f"cannot read {file}: it is no file of data", remedy=f"ls -l '{file}'")
        return
    if file.suffix != ".jsonl":
        data = file.read_bytes()
        progress(len(data))
        yield Document(data, str(file))
        return
    with open(file, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            progress(len(line))
            if line.strip():
                yield _text_of(line, f"{file}:{number}")


def _text_of(line: bytes, place: str) -> Document | Problem:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Problem("PP-E403", f"not a JSON object: {error}", place=place, remedy='{"text": "one document"}')
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return Document(str(value["text"]).encode("utf-8", "surrogatepass"), place)
    got = f"an object of {', '.join(map(str, value)) or 'nothing'}" if isinstance(value, dict) else type(value).__name__
    message = f'the line is not an object with a string under "text" but {got}'
    return Problem("PP-E403", message, place=place, remedy='{"text": "one document"}')


class Encoded(NamedTuple):
    """A document's tokens, without a mark at its end, and where it stands."""

    tokens: Tokens
    place: str


def encode_files(
    files: list[Path], tokenizer: Tokenizer, progress: Callable[[int], None] = lambda size: None
) -> Iterator[Encoded]:
    """Every document of `files` in order, those without a token too.

    Raises DataError with the problems of all files, the first twenty; what was yielded before is to be thrown away.
    """
    problems: list[Problem] = []
    for batch in _batches(files, problems, progress):
        if not problems:
            try:
                tokens = tokenizer.encode_documents(batch)
            except DataError as error:
                problems += error.problems
                continue
            yield from (Encoded(ids, document.place) for ids, document in zip(tokens, batch, strict=True))
    if problems:
        raise DataError(problems[:MOST_PROBLEMS])


def _batches(
    files: list[Path], problems: list[Problem], progress: Callable[[int], None]
) -> Iterator[Sequence[Document]]:
    """The documents in handy numbers; problems go into `problems`, and twenty of them end it."""
    batch: list[Document] = []
    size = 0
    for document in documents(files, progress):
        if isinstance(document, Problem):
            problems.append(document)
        else:
            batch.append(document)
            size += len(document.text)
        if len(problems) >= MOST_PROBLEMS:
            return
        if len(batch) == _MANY or size >= _MUCH:
            yield batch
            batch, size = [], 0
    yield batch
