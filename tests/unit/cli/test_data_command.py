"""`ppctl data`: what it writes, what it says, and that nothing half-written stays."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import environment, ppctl, start

from ppctl.cli.main import main
from ppctl.data.indexed import open_indexed


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("hi")
    Path("b.jsonl").write_text('{"text": "yes"}\n\n{"text": ""}\n{"text": "\\u00e9"}\n')


def names() -> set[str]:
    return {str(path) for path in Path().rglob("*")} - {"a.txt", "b.jsonl"}


def test_files_become_documents_in_the_order_of_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "tokenize", "b.jsonl", "a.txt", "out/x", "--append-eod"]) == 0
    assert names() == {"out", "out/x.bin", "out/x.idx"}
    assert Path("out/x.bin").read_bytes() == struct.pack("<10H", *b"yes", 257, *"é".encode(), 257, *b"hi", 257)
    assert open_indexed("out/x").boundaries.tolist() == [
        0,
        1,
        1,
        2,
        3,
    ]  # the empty one is a document without a sequence
    out, err = capsys.readouterr()
    assert out == "out/x.bin and .idx: 4 documents, 10 tokens of uint16\n"
    assert err == "train on it with:\n  data.path=out/x data.tokenizer=byte model.vocab_size=320\n"


def test_json_is_all_there_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "tokenize", "*.*", "x.bin", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"prefix": "x", "documents": 4, "tokens": 7, "dtype": "uint16"}
    assert main(["data", "show", "x", "--document", "1", "--tokens", "2", "--tokenizer", "byte", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "documents": 4, "sequences": 3, "tokens": 7, "dtype": "uint16", "largest_token": 195,
        "document": 1, "first_tokens": [121, 101], "text": "ye",
    }  # fmt: skip


def test_show_counts_and_shows_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "tokenize", "a.txt", "x"])
    capsys.readouterr()
    assert main(["data", "show", "x.idx", "--tokens", "1", "--tokenizer", "byte"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:3]] == [["documents", "1"], ["sequences", "1"], ["tokens", "2"]]
    assert lines[-2:] == ["document 0     104 and 1 more", "as text        h …"]


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        (["tokenize", "none.txt", "x"], "PP-E401", "none.txt: no such file"),
        (["tokenize", "none.txt", "also.txt", "x"], "PP-E401", "also.txt: no such file"),
        (["tokenize", ".", "x"], "PP-E401", "is a directory"),
        (["tokenize", "a.txt", "a.txt/x"], "PP-E413", "cannot be written"),
        (["tokenize", "a.txt", "x", "--tokenizer", "nowhere"], "PP-E410", "--tokenizer nowhere: No such file"),
        (["tokenize", "b.jsonl", "a.txt"], "PP-E413", "but a.txt is an existing file"),
        (["show", "nothing"], "PP-E412", "nothing.idx is missing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_told_and_nothing_is_written(
    typed: list[str], code: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *typed]) == 2
    out, err = capsys.readouterr()
    assert f"error {code}: " in err and said in err and not out and not names()


def test_all_bad_lines_are_told_at_once_and_what_was_there_stays(capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "tokenize", "a.txt", "x"])
    before = {name: Path(name).read_bytes() for name in names()}
    Path("bad.jsonl").write_text('{"text": "a"}\n{\n{"txt": 1}\n')
    assert main(["data", "tokenize", "a.txt", "bad.jsonl", "x", "--overwrite"]) == 2
    err = capsys.readouterr().err
    assert "bad.jsonl:2" in err and "bad.jsonl:3" in err
    assert {name: Path(name).read_bytes() for name in names() - {"bad.jsonl"}} == before


@pytest.mark.parametrize("name", ["byte", "model"])
def test_what_trains_on_the_tokens_is_the_model_beside_the_tokenizer(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models

    Path("model").mkdir()
    Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")).save("model/tokenizer.json")
    Path("model/config.json").write_text("{}")
    assert main(["data", "tokenize", "a.txt", "x", "--tokenizer", name]) == 0
    said = {"byte": "data.tokenizer=byte model.vocab_size=320", "model": "model.from=model"}[name]
    assert capsys.readouterr().err == f"train on it with:\n  data.path=x {said}\n"


def test_no_text_is_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.txt").write_text("")
    assert main(["data", "tokenize", "a.txt", "x"]) == 2
    assert "PP-E404" in capsys.readouterr().err and not names()


def test_a_document_beyond_the_last_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "tokenize", "*.*", "x"])
    assert main(["data", "show", "x", "--document", "4"]) == 2
    assert "has documents 0 to 3, but 4 is not one of them" in capsys.readouterr().err


def test_a_full_disk_is_told_and_leaves_nothing() -> None:
    Path("large.txt").write_text("word " * 20_000)
    limited = f"ulimit -f 16; exec {shlex.quote(sys.executable)} -m ppctl data tokenize large.txt new/x"
    plain = environment(PYTHONDONTWRITEBYTECODE="1")  # else a cut .pyc stays behind for everybody
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=60, env=plain)
    assert done.returncode == 2 and "PP-E413: new/x cannot be written: File too large" in done.stderr
    assert names() == {"large.txt"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    with open("large.jsonl", "w") as file:
        file.writelines('{"text": "' + "word " * 2000 + '"}\n' for _ in range(20_000))
    process = start("data", "tokenize", "large.jsonl", "x", cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not any(".tmp" in name for name in names()):
        assert time.monotonic() < deadline and process.poll() is None, "it never began to write"
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == code
    assert names() == {"large.jsonl"}


def test_a_bar_is_drawn_where_somebody_watches(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ppctl", "data", "tokenize", "a.txt", "x"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(TERM="xterm"), stderr=theirs, stdout=theirs)
    assert process.wait(30) == 0
    os.close(theirs)
    seen = os.read(ours, 65536).decode()
    os.close(ours)
    assert "tokenizing" in seen and "documents" in seen


def test_it_works_without_the_bar_in_a_pipe(tmp_path: Path) -> None:
    done = ppctl("data", "tokenize", "a.txt", "x", cwd=tmp_path)
    assert done.returncode == 0 and "tokenizing" not in done.stderr
