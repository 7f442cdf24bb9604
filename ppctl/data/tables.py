"""Rows of Parquet and Arrow files, as objects like the lines of a .jsonl file: the only importer of pyarrow."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from ppctl.errors import ConfigError, DataError, Problem, pasted, pip_install
from ppctl.host.files import read_text

TABLES = (".parquet", ".arrow")


def saved_files(directory: Path, form: str) -> list[Path]:
    """The files of a directory that `datasets` has saved (`save_to_disk`), in order; none for another directory. Raises
    DataError (PP-E401) for a directory of several splits; the remedy names one in `form`, as `data.path={}`."""
    for split in _listed(directory / "dataset_dict.json", "splits"):
        message = f"{form.format(directory)} has several splits: name one"
        raise DataError(Problem("PP-E401", message, pasted(form.format(directory / str(split)))))
    files = _listed(directory / "state.json", "_data_files")
    return [directory / Path(str(each["filename"])).name for each in files if isinstance(each, dict)]


def _listed(file: Path, key: str) -> list[Any]:
    try:
        return list(json.loads(read_text(file))[key])
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return []


def rows(file: Path, progress: Callable[[int], None], keys: Collection[str]) -> Iterator[dict[str, Any]]:
    """The rows of a file in order, without null values, which stand for missing keys. Only the columns `keys` are read,
    or all if the file has none of these. Raises ConfigError (PP-E424) without pyarrow, OSError, ValueError for
    damage."""
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as missing:
        message = f"{file.name} needs pyarrow, which is not installed"
        raise ConfigError(Problem("PP-E424", message, pip_install("ppctl[datasets]"), str(file))) from missing
    try:
        if file.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(file) as table:
                share = file.stat().st_size / max(table.metadata.num_rows, 1)
                wanted = [name for name in table.schema_arrow.names if name in keys] or None
                for batch in table.iter_batches(1024, columns=wanted):
                    yield from map(_without_nulls, batch.to_pylist())
                    progress(int(share * batch.num_rows))
        else:
            with pyarrow.memory_map(str(file)) as mapped:
                for batch in _batches(pyarrow.ipc, mapped):
                    names = batch.schema.names
                    own = batch.select([name for name in names if name in keys] or names)
                    yield from map(_without_nulls, own.to_pylist())
                    progress(batch.nbytes)
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error


def _batches(ipc: Any, mapped: Any) -> Iterator[Any]:
    """The batches of a file in one of Arrow's two forms: a file with an index at its end, or a stream."""
    if mapped.read(6) == b"ARROW1":
        with ipc.open_file(mapped) as table:
            yield from map(table.get_batch, range(table.num_record_batches))
    else:
        mapped.seek(0)
        with ipc.open_stream(mapped) as stream:
            yield from stream


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value
