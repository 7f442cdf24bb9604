"""Rows of Parquet and Arrow files, as objects like the lines of a .jsonl file: the only importer of pyarrow.

A directory that `datasets` has saved (`save_to_disk`) is a list of Arrow files in its state.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from ppctl.errors import ConfigError, DataError, Problem, pasted
from ppctl.host.files import read_text

TABLES = (".parquet", ".arrow")
_MANY = 1024
"""Rows that are read together."""
_DATASET, _SPLITS = "state.json", "dataset_dict.json"


def saved_files(directory: Path, form: str) -> list[Path]:
    """The files of a directory that `datasets` has saved, in order; none for another directory. Raises DataError
    (PP-E401) for one of several splits, of which `form`, as `data.path={}`, can name one."""
    splits = _listed(directory / _SPLITS, "splits")
    if splits:
        message = f"{form.format(directory)} has the splits {', '.join(map(str, splits))}: name one"
        raise DataError(Problem("PP-E401", message, pasted(form.format(directory / str(splits[0])))))
    names = [each.get("filename") for each in _listed(directory / _DATASET, "_data_files") if isinstance(each, dict)]
    return [directory / Path(name).name for name in names if isinstance(name, str)]


def _listed(file: Path, key: str) -> list[Any]:
    try:
        value = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError):
        return []
    listed = value.get(key) if isinstance(value, dict) else None
    return listed if isinstance(listed, list) else []


def require_pyarrow(named: str) -> None:
    """Raise ConfigError (PP-E424) if pyarrow is missing, which reads what `named` means."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as missing:
        message = f"{named} needs pyarrow, which is not installed: it is in pip install 'ppctl[datasets]'"
        remedy = f"{pasted(sys.executable)} -m pip install pyarrow"
        raise ConfigError(Problem("PP-E424", message, remedy, "data.path")) from missing


def rows(file: Path, columns: Collection[str], progress: Callable[[int], None]) -> Iterator[dict[str, Any]]:
    """The rows of a file in order, with those of `columns` that it has, or with all if it has none of them, and without
    values that are null. Raises OSError, and ValueError for a damaged file."""
    import pyarrow

    try:
        for batch, size in _parquet(file, columns) if file.suffix == ".parquet" else _arrow(file, columns):
            yield from map(_without_nulls, batch.to_pylist())
            progress(size)
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error


def _parquet(file: Path, columns: Collection[str]) -> Iterator[tuple[Any, int]]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as table:
        total, share = max(table.metadata.num_rows, 1), file.stat().st_size
        for batch in table.iter_batches(_MANY, columns=_wanted(table.schema_arrow.names, columns)):
            yield batch, share * batch.num_rows // total


def _arrow(file: Path, columns: Collection[str]) -> Iterator[tuple[Any, int]]:
    import pyarrow.ipc

    with pyarrow.memory_map(str(file)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
        wanted, before = _wanted(stream.schema.names, columns), 0
        for batch in stream:
            yield batch.select(wanted), mapped.tell() - before
            before = mapped.tell()


def _wanted(there: list[str], columns: Collection[str]) -> list[str]:
    return [name for name in there if name in columns] or there


def _without_nulls(value: Any) -> Any:
    """In a table every row has all keys of all rows: those that a line of .jsonl would not have are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value
