"""Parquet files, and directories that `datasets` has saved: the same documents and conversations as a .jsonl file."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from chats import CHATML, tokenizer_directory

from ppctl.config.schema import DataConfig
from ppctl.data.corpus import load_corpus
from ppctl.data.load import load_data
from ppctl.data.tokenizer import ByteTokenizer
from ppctl.errors import ConfigError, DataError, PpctlError

TEXTS = [f"document {n}" * (n % 5) for n in range(2500)]


def saved(home: Path, name: str, columns: dict[str, list[object]], files: int = 2) -> Path:
    """A directory in the form of datasets 5.2's save_to_disk: Arrow streams, and their names in state.json."""
    pa = pytest.importorskip("pyarrow")
    (directory := home / name).mkdir()
    table, named = pa.table(columns), []
    size = -(-table.num_rows // files)
    for number in range(files):
        named.append(f"data-{number:05}-of-{files:05}.arrow")
        with pa.OSFile(str(directory / named[-1]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table.slice(number * size, size), max_chunksize=100)
    (directory / "dataset_info.json").write_text("{}")
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": each} for each in named]}))
    return directory


def parquet(home: Path, name: str, columns: dict[str, list[object]]) -> Path:
    """A file of several row groups."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), home / name, row_group_size=300)
    return home / name


def indexed(home: Path, name: str, columns: dict[str, list[object]]) -> Path:
    """A file in Arrow's file format (Feather 2), which `datasets` does not write, of several batches."""
    pa = pytest.importorskip("pyarrow")
    table = pa.table(columns)
    with pa.OSFile(str(home / name), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table, max_chunksize=100)
    return home / name


@pytest.mark.parametrize("make", [parquet, saved, indexed])
def test_the_documents_of_a_table_are_those_of_lines(tmp_path: Path, make) -> None:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"body": each}) + "\n" for each in TEXTS))
    table = make(
        tmp_path, {parquet: "t.parquet", saved: "t", indexed: "t.arrow"}[make], {"n": list(range(2500)), "body": TEXTS}
    )
    plain = load_corpus(str(tmp_path / "text.jsonl"), ByteTokenizer(), "body")
    corpus = load_corpus(str(table), ByteTokenizer(), "body")
    assert corpus.digest == plain.digest
    last = corpus.place_of(len(corpus.tokens) - 1)
    assert last.endswith(("t.parquet: row 2499", "t.arrow: row 2499", "data-00001-of-00002.arrow: row 1249"))


def test_other_columns_are_not_read(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    table = parquet(tmp_path, "t.parquet", {"text": TEXTS, "picture": [f"{n:0900}" for n in range(2500)]})
    read = load_corpus(str(table), ByteTokenizer())
    place = pq.ParquetFile(table).metadata.row_group(0).column(1)
    with open(table, "r+b") as file:  # a picture that nobody could read
        file.seek(place.dictionary_page_offset or place.data_page_offset)
        file.write(b"\xff" * 64)
    assert load_corpus(str(table), ByteTokenizer()).digest == read.digest
    with pytest.raises(DataError, match="cannot read"):
        load_corpus(str(table), ByteTokenizer(), "picture")


def test_wrong_columns_and_damaged_files_are_named_with_what_is_there(tmp_path: Path) -> None:
    table = parquet(tmp_path, "t.parquet", {"body": ["a", "b"], "n": [1, 2]})
    with pytest.raises(DataError, match='string under "text" but an object of body, n') as caught:
        load_corpus(str(table), ByteTokenizer())
    assert caught.value.problems[0].remedy == "data.text_key=body"
    table.write_bytes(table.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"PP-E402: .*t.parquet is damaged"):
        load_corpus(str(table), ByteTokenizer(), "body")
    arrow = indexed(tmp_path, "t.arrow", {"body": ["a", "b"]})
    arrow.write_bytes(arrow.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"PP-E402: .*t.arrow is damaged"):
        load_corpus(str(arrow), ByteTokenizer(), "body")


def test_of_a_dataset_of_several_splits_one_is_asked_for(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved(tmp_path, split, {"text": ["some text in it", "more"]}, files=1)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="has several splits") as caught:
        load_corpus(str(tmp_path), ByteTokenizer())
    remedy = caught.value.problems[0].remedy
    assert len(load_corpus(remedy.removeprefix("data.path="), ByteTokenizer()).tokens)


def test_conversations_of_a_table_are_those_of_lines_although_its_rows_have_all_keys(tmp_path: Path) -> None:
    tokenizer_directory(tmp_path, CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.name }}"))
    talks = [
        [{"role": "user", "content": "Hi", "name": "X"}, {"role": "assistant", "content": "A"}],
        [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}],
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    tables = parquet(tmp_path, "chat.parquet", {"messages": talks}), saved(tmp_path, "chat", {"messages": talks})
    data = DataConfig(tokenizer=str(tmp_path), format="chat", seq_length=64, cache=None)
    digests = []
    for data.path in map(str, (tmp_path / "chat.jsonl", *tables)):
        blend = load_data(data).training
        digests.append(blend.digest)
        assert "None" not in load_tokens(blend, tmp_path)
    assert len(set(digests)) == 1


def test_a_date_in_a_message_is_written_as_jinja_writes_it(tmp_path: Path) -> None:
    tokenizer_directory(tmp_path, CHATML.replace("{{ m.content }}", "{{ m.content }} {{ m.at }}"))
    at = datetime(2026, 11, 27, 20, 50, 1, 5)
    talk = [{"role": role, "content": "Hi", "at": at, "picture": b"\xff"} for role in ("user", "assistant")]
    table = parquet(tmp_path, "chat.parquet", {"messages": [talk]})
    data = DataConfig(path=str(table), tokenizer=str(tmp_path), format="chat", seq_length=200, cache=None)
    assert load_tokens(load_data(data).training, tmp_path, 1, 200).count("Hi 2026-11-27 20:50:01.000005") == 2


def load_tokens(blend, home: Path, rows: int = 2, length: int = 64) -> str:
    from ppctl.data.load import load_tokenizer

    return load_tokenizer(str(home)).decode(blend.samples(np.arange(rows), length).ravel())


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_without_pyarrow_a_table_is_refused_by_name_with_the_line_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "t.parquet" if kind == "parquet" else tmp_path
    (tmp_path / "t.parquet").touch()
    if kind == "saved":
        (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "t.parquet"}]}')
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(ConfigError, match=r"PP-E424.*needs pyarrow, which is not installed") as caught:
        load_corpus(str(path), ByteTokenizer())
    assert not isinstance(caught.value, DataError) and isinstance(caught.value, PpctlError)
    assert caught.value.problems[0].remedy.endswith("-m pip install 'ppctl[datasets]'")
