"""Files of text: which files a pattern matches, the documents in the files, and the documents' tokens."""

from __future__ import annotations

import errno
import glob
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ppctl.data.tables import TABLES, rows, saved_files
from ppctl.data.tokenizer import Document, Tokenizer, Tokens
from ppctl.errors import DataError, Problem, listed, pasted

READABLE = (".txt", ".jsonl", *TABLES)
LEFT_OUT = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"})
"""Directories of the standard library with tests, a GUI that some systems leave out, or other packages."""
MOST_PROBLEMS = 20
READ_LIBRARY = "data.path=null"
"""Reads the running interpreter's own library."""
_MANY = 1024
_MUCH = 4 * 1024 * 1024
"""The most documents and bytes that are encoded together, so that a library may use several cores."""


def standard_library() -> tuple[list[Path], str]:
    """(the source files of Python's own library, in order; a line that describes them). Raises DataError (PP-E405)."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        message = "the running Python has no library sources to train on (they are zipped or were left out)"
        raise DataError(Problem("PP-E405", message, "data.path='texts/**/*.txt'", str(root)))
    files.sort(key=lambda file: file.relative_to(root).as_posix())
    return files, f"the standard library of Python {sysconfig.get_python_version()} ({len(files)} files)"


def matching(pattern: str, form: str = "data.path={}") -> tuple[list[Path], str]:
    """(the readable files that `pattern` means, sorted by name or as `datasets` has saved them; a line that describes
    them). Messages write the pattern in `form`. Raises DataError if there are no files."""
    expanded = os.path.expanduser(pattern)
    # A file may be called notes[1].txt: a path that exists is never read as a pattern.
    paths = [expanded] if os.path.isfile(expanded) else sorted(glob.glob(expanded, recursive=True))
    once = {os.path.realpath(name): Path(name) for name in reversed(paths) if not os.path.isdir(name)}
    everything = saved_files(Path(expanded), form) or sorted(once.values())
    files = [file for file in everything if file.suffix in READABLE]
    if not files:
        raise DataError(_no_match(pattern, expanded, everything, form))
    left_out = len(everything) - len(files)
    also = f"; left out, as none of {', '.join(READABLE)}: {left_out} more" if left_out else ""
    return files, f"{form.format(pattern)} ({len(files)} files{also})"


def _no_match(pattern: str, expanded: str, not_readable: list[Path], form: str) -> Problem:
    named = form.format(pattern)
    if os.path.isdir(expanded):
        prefixes = sorted(glob.glob(os.path.join(glob.escape(expanded), "*.idx")))
        inside = pasted(form.format(prefixes[0][:-4] if prefixes else f"{pattern.rstrip('/')}/**/*.txt"))
        return Problem("PP-E401", f"{named} is a directory; name a file in it, or files by a glob", remedy=inside)
    remedy = READ_LIBRARY if form.startswith("data.") else f"ls {pasted(Path(expanded).absolute().parent)}"
    if not_readable:
        message = f"{named} matches none of {', '.join(READABLE)}; only these are read"
        return Problem("PP-E401", message, remedy=remedy, place=names(not_readable))
    missing = "no file matches"
    if not glob.has_magic(pattern):
        missing = f"no such file, and no {pattern}.bin with an .idx"
    if "," in pattern and all(map(os.path.exists, pattern.split(","))):
        remedy = pasted(form.format(f"[{pattern}]"))
    where = f"looked in {Path(expanded).absolute().parent}"
    return Problem("PP-E401", f"{named}: {missing}", remedy=remedy, place=where)


def names(files: list[Path]) -> str:
    """The first five of `files`, one a line, and how many more there are."""
    return listed(list(map(str, files)), 5)


def documents(
    files: list[Path], progress: Callable[[int], None] = lambda size: None, text_key: str = "text"
) -> Iterator[Document | Problem]:
    """All documents in order, empty ones too: each .txt file, and the `text_key` of each row and of each line that is
    not blank; a problem for each that cannot be read. `progress` takes the bytes read since its last call."""
    for item in _read_all(files, progress, (text_key,)):
        yield _document(item, text_key) if isinstance(item, Line) else item


class Line(NamedTuple):
    """An object in a .jsonl file, or a row of a table."""

    value: Mapping[str, Any]
    place: str

    @property
    def described(self) -> str:
        """The keys of the object, for messages."""
        return f"an object of {', '.join(map(str, self.value)) or 'nothing'}"


def lines(files: list[Path], progress: Callable[[int], None], keys: Sequence[str]) -> Iterator[Line | Problem]:
    """The objects in .jsonl files and tables in order, and a problem for each line or file that cannot be read. Of a
    table only the columns `keys` are read, or all if it has none of these."""
    for item in _read_all(files, progress, keys):
        if isinstance(item, Document):
            message = f"{item.place} is text, but conversations are read from .jsonl files and tables"
            yield Problem("PP-E418", message, "data.format=text", item.place)
        else:
            yield item


def _read_all(
    files: list[Path], progress: Callable[[int], None], keys: Sequence[str]
) -> Iterator[Document | Line | Problem]:
    for file in files:
        try:
            yield from _read(file, progress, keys)
        except ValueError as error:  # pyarrow's, of a table: bad lines and texts are yielded as problems
            yield Problem("PP-E402", f"{file} is damaged: {error}", remedy=f"ls -l {pasted(file)}")
        except OSError as error:
            yield unreadable(file, error)


def unreadable(file: Path | str, error: OSError) -> Problem:
    """The problem (PP-E402) of a data file that the system does not let read."""
    return Problem("PP-E402", f"cannot read {file}: {error.strerror or error}", remedy=f"ls -l {pasted(file)}")


def _read(file: Path, progress: Callable[[int], None], keys: Sequence[str]) -> Iterator[Document | Line | Problem]:
    """Yield what a file has: its text, its lines or rows, or problems of these. Raises OSError."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no file of data")
    if file.suffix in TABLES:
        yield from (Line(row, f"{file}: row {number}") for number, row in enumerate(rows(file, progress, keys)))
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
                yield _object(line, f"{file}:{number}")


def _object(line: bytes, place: str) -> Line | Problem:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Problem("PP-E403", f"not a JSON object: {error}", place=place, remedy='{"text": "one document"}')
    if isinstance(value, dict):
        return Line(value, place)
    message = f"the line is not an object but {type(value).__name__}"
    return Problem("PP-E403", message, place=place, remedy='{"text": "one document"}')


def _document(line: Line, text_key: str) -> Document | Problem:
    text = line.value.get(text_key)
    if isinstance(text, str):
        return Document(text.encode("utf-8", "surrogatepass"), line.place)
    message = f'the line is not an object with a string under "{text_key}" but {line.described}'
    return Problem("PP-E403", message, place=line.place, remedy=_meant(line.value, text_key))


def _meant(value: Mapping[str, Any], text_key: str) -> str:
    if "messages" in value or "conversations" in value:
        return "data.format=chat"
    if isinstance(value.get("prompt"), str) and isinstance(value.get("completion"), str):
        return "data.format=completion"
    texts = {key: len(text) for key, text in value.items() if isinstance(text, str)}
    longest = max(texts, key=lambda key: texts[key], default=None)
    return json.dumps({text_key: "one document"}) if longest is None else pasted(f"data.text_key={longest}")


def _merged(problems: Sequence[Problem], *, complete: bool) -> list[Problem]:
    """Each kind of problem once, with its first five places. `complete`: whether everything has been read."""
    kinds: dict[Problem, list[str]] = {}
    for problem in problems:
        kinds.setdefault(replace(problem, place=""), []).append(problem.place or "")
    merged = []
    for problem, places in kinds.items():
        more = [f"and {len(places) - 5}{'' if complete else ' or'} more"] if len(places) > 5 else []
        merged.append(replace(problem, place="\n".join(dict.fromkeys([*places[:5], *more]))))
    return merged


def encode_files(
    files: list[Path],
    tokenizer: Tokenizer,
    progress: Callable[[int], None] = lambda size: None,
    text_key: str = "text",
) -> Iterator[tuple[Tokens, str]]:
    """The tokens of every document of `files` in order, also of empty ones, and its place for messages. There is no
    mark at a document's end. Raises DataError as `encoded` does."""

    def encode(batch: Sequence[Document]) -> Iterator[tuple[Tokens, str]]:
        for ids, document in zip(tokenizer.encode_documents(batch), batch, strict=True):
            yield ids, document.place

    return encoded(documents(files, progress, text_key), encode)


Item = TypeVar("Item", bound=tuple[Any, ...])
"""A named tuple, the first entry of which is its text."""
Made = TypeVar("Made")


def encoded(items: Iterable[Item | Problem], encode: Callable[[Sequence[Item]], Iterable[Made]]) -> Iterator[Made]:
    """The results of `encode`, called with batches of the items. Raises DataError with the first twenty problems of all
    items; results yielded before must be discarded."""
    problems: list[Problem] = []
    for batch in _batches(items, problems):
        if not problems:
            try:
                yield from list(encode(batch))
            except DataError as error:
                problems += error.problems
    if problems:
        raise DataError(_merged(problems[:MOST_PROBLEMS], complete=len(problems) < MOST_PROBLEMS))


def _batches(items: Iterable[Item | Problem], problems: list[Problem]) -> Iterator[Sequence[Item]]:
    """Yield the items in batches; add problems to `problems`, and stop after twenty."""
    batch: list[Item] = []
    size = 0
    for item in items:
        if isinstance(item, Problem):
            problems.append(item)
        else:
            batch.append(item)
            size += len(item[0])
        if len(problems) >= MOST_PROBLEMS:
            return
        if len(batch) == _MANY or size >= _MUCH:
            yield batch
            batch, size = [], 0
    yield batch


def each_read(files: Sequence[Path], read: Callable[[Path], Made]) -> list[Made]:
    """The results of `read` for every file. Raises DataError with the first twenty files that cannot be read."""
    made, problems = [], []
    for file in files:
        try:
            made.append(read(file))
        except OSError as error:
            problems.append(unreadable(file, error))
    if problems:
        raise DataError(problems[:MOST_PROBLEMS])
    return made
