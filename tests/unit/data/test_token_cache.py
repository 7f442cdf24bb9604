"""Tokens that are kept: the same as without, made once, whatever happens to the process that makes them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from chats import CHATML, tokenizer_directory

from ppctl.config.schema import DataConfig
from ppctl.data import token_cache
from ppctl.data.corpus import load_corpus
from ppctl.data.load import load_data, load_tokenizer
from ppctl.data.token_cache import encoded_once
from ppctl.data.tokenizer import token_dtype
from ppctl.errors import DataError
from ppctl.host.files import lock

TEXTS = ["one document", "", "another one, with more in it", "three"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tokenizer_directory(tmp_path, CHATML)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": each, "body": each * 2}) + "\n" for each in TEXTS))
    return tmp_path


def load(home: Path, cache: Path | None, *, files: str = "text.jsonl", key: str = "text"):
    return load_corpus(str(home / files), load_tokenizer(str(home)), key, cache)


def test_kept_tokens_are_those_of_the_files_with_digest_description_and_places(home: Path) -> None:
    plain, kept = load(home, None), load(home, home / "cache")
    again = load(home, home / "cache")
    for one in (kept, again):
        assert one.tokens.tolist() == plain.tokens.tolist() and one.tokens.dtype == plain.tokens.dtype
        assert (one.digest, one.description) == (plain.digest, plain.description)
        assert [one.place_of(at) for at in range(len(plain.tokens))] == [
            plain.place_of(at) for at in range(len(plain.tokens))
        ]
    assert isinstance(kept.tokens, np.memmap)


def test_they_are_made_once_for_each_content_key_and_tokenizer(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = home / "cache"

    def made() -> bool:
        return "tokenizing" in capsys.readouterr().err

    load(home, cache)
    assert made()
    load(home, cache)
    assert not made()
    (home / "copy.jsonl").write_bytes((home / "text.jsonl").read_bytes())
    load(home, cache, files="copy.jsonl")
    assert not made()  # the content counts, not the name
    load(home, cache, key="body")
    assert made()
    changed = (home / "text.jsonl").read_text().replace("three", "eight")
    (home / "text.jsonl").write_text(changed)  # as long as before
    load(home, cache)
    assert made()
    settings = json.loads((home / "tokenizer_config.json").read_text())
    (home / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|im_end|>"}))
    assert load(home, cache).digest != load(home, cache, files="copy.jsonl").digest
    assert made()


def test_the_content_is_read_again_only_if_a_file_has_changed(home: Path) -> None:
    file, cache = home / "text.jsonl", home / "cache"
    os.utime(file, (1e9, 1e9))
    load(home, cache)
    assert len(list((cache / "seen").iterdir())) == 1
    text = file.read_text()
    file.write_text(text.replace("three", "eight"))
    os.utime(file, (1e9, 1e9))
    assert load(home, cache).digest == load_digest(home, text)  # as no clock and no size tells
    os.utime(file, (2e9, 1e9 + 1))
    assert load(home, cache).digest == load(home, None).digest


def test_the_same_bytes_as_text_as_lines_and_under_a_link_are_read_in_each_way(home: Path) -> None:
    lines, text, link = home / "text.jsonl", home / "text.txt", home / "link.txt"
    os.utime(lines, (1e9, 1e9))
    shutil.copy2(lines, text)
    link.symlink_to(lines)
    for name in ("link.txt", "text.jsonl", "text.txt"):
        assert load(home, home / "cache", files=name).description == load(home, None, files=name).description


def load_digest(home: Path, text: str) -> str:
    (home / "before.jsonl").write_text(text)
    return load(home, None, files="before.jsonl").digest


def test_what_is_being_tokenized_by_one_start_is_waited_for_by_another(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = load(home, home / "elsewhere").digest
    (key,) = (each.name for each in (home / "elsewhere").iterdir() if each.name != "seen")
    capsys.readouterr()
    (home / "cache" / key).mkdir(parents=True)
    held = lock(home / "cache" / key)
    assert held is not None and held >= 0
    digests: list[str] = []
    others = [Thread(target=lambda: digests.append(load(home, home / "cache").digest)) for _ in range(2)]
    for other in others:
        other.start()
    said = ""
    until = time.monotonic() + 20
    while said.count("waiting for it") < 2 and time.monotonic() < until:
        said += capsys.readouterr().err
        time.sleep(0.01)
    assert said.count("waiting for it") == 2 and digests == []
    os.close(held)
    for other in others:
        other.join(20)
    assert digests == [expected] * 2
    assert capsys.readouterr().err.count("tokenizing") == 1


KILLED = """
import sys
from ppctl.data.corpus import load_corpus
from ppctl.data.load import load_tokenizer
from pathlib import Path
home = Path(sys.argv[1])
load_corpus(str(home / "text.jsonl"), load_tokenizer(str(home)), "text", home / "cache")
"""


def test_a_process_that_is_killed_halfway_leaves_nothing_that_is_read_or_stays(home: Path) -> None:
    with open(home / "text.jsonl", "a") as file:
        for number in range(40_000):
            file.write(json.dumps({"text": f"{number} " * 20}) + "\n")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(home)], stderr=subprocess.PIPE)
    until = time.monotonic() + 60
    while not (drafts := list(home.glob("cache/*/*.tmp/.data.*.bin.tmp"))) or not drafts[0].stat().st_size:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(home.glob("cache/*/*.tmp")) and not list(home.glob("cache/*/tokens"))
    with open(home / "text.jsonl", "r+") as file:
        file.truncate(sum(len(json.dumps({"text": each, "body": each * 2})) + 1 for each in TEXTS))
    (killed,) = {draft.parent.parent for draft in drafts}
    corpus = load(home, home / "cache")
    assert corpus.digest == load(home, None).digest
    # Another content is another directory: the next start of the killed one's sweeps that.
    assert killed.is_dir() and list(killed.glob("*.tmp"))
    (again,) = (each for each in home.glob("cache/*/tokens"))
    (again.parent / "dead.tmp").mkdir()
    again.rename(again.parent / "aside.tmp")
    assert load(home, home / "cache").digest == corpus.digest
    assert [each.name for each in again.parent.iterdir()] == ["tokens"]


@pytest.mark.parametrize("left", ["", "0" * 63, None])
@pytest.mark.parametrize("locks", [True, False])
def test_what_a_loss_of_power_has_left_is_made_again(
    home: Path, left: str | None, locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load(home, home / "cache").digest
    (digest,) = home.glob("cache/*/tokens/digest")
    digest.unlink() if left is None else digest.write_text(left)
    if not locks:
        monkeypatch.setattr(token_cache, "lock", lambda *_: None)
    for _ in range(2):
        assert load(home, home / "cache").digest == whole == digest.read_text()


def test_files_that_change_meanwhile_and_a_directory_that_cannot_be_written_are_refused(home: Path) -> None:
    file = home / "text.jsonl"

    def make(progress):
        yield np.array([1, 2]), "here"
        file.write_text(file.read_text() + "\n\n")

    with pytest.raises(DataError, match="PP-E402: files changed while they were tokenized"):
        encoded_once(home / "cache", [file], {}, token_dtype(300), make)
    assert not list(home.glob("cache/*/*"))[1:]  # of one entry, an empty directory at most
    (home / "a_file").write_text("")
    with pytest.raises(DataError, match="PP-E425") as caught:
        load(home, home / "a_file")
    assert caught.value.problems[0].remedy == "data.cache=null"


def test_a_data_file_that_cannot_be_read_is_no_fault_of_the_cache(home: Path) -> None:
    (home / "gone.jsonl").symlink_to(home / "nowhere")
    (home / "loop.jsonl").symlink_to(home / "loop.jsonl")
    with pytest.raises(DataError) as caught:
        load(home, home / "cache", files="*.jsonl")
    gone, loop = caught.value.problems
    assert gone.code == loop.code == "PP-E402" and gone.message.endswith("gone.jsonl: No such file or directory")
    os.mkfifo(home / "pipe")
    with pytest.raises(DataError, match=r"PP-E402: cannot read .*/pipe: it is no regular file"):
        encoded_once(home / "cache", [home / "text.jsonl", home / "pipe"], {}, token_dtype(300), lambda _: iter([]))


def test_a_note_of_a_digest_that_cannot_be_written_stops_nobody(home: Path) -> None:
    os.utime(home / "text.jsonl", (1e9, 1e9))
    (home / "cache").mkdir()
    (home / "cache/seen").write_text("")
    assert load(home, home / "cache").digest == load(home, None).digest


def test_where_there_are_no_locks_the_first_who_is_ready_has_made_them(home: Path) -> None:
    load(home, home / "elsewhere")
    (made,) = home.glob("elsewhere/*/tokens")
    file = home / "text.jsonl"

    def make(progress):
        (place,) = (each.parent for each in home.glob("cache/*/*.tmp"))
        shutil.copytree(made, place / "tokens")  # another process, meanwhile
        yield np.array([1, 2], token_dtype(300)), "here"

    tokens, _, _ = encoded_once(home / "cache", [file], {}, token_dtype(300), make)
    assert tokens.tolist() == load(home, None).tokens.tolist()
    assert [each.name for each in home.glob("cache/*/*") if each.parent.name != "seen"] == ["tokens"]


# Conversations


@pytest.fixture
def chat(home: Path) -> DataConfig:
    talks = [[("user", "Hi"), ("assistant", f"A {n} b")] for n in range(5)]
    talks.append([("user", "long"), ("assistant", "x" * 200)])
    lines = [{"messages": [{"role": role, "content": said} for role, said in talk]} for talk in talks]
    (home / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return DataConfig(
        path=str(home / "chat.jsonl"),
        tokenizer=str(home),
        format="chat",
        seq_length=64,
        too_long="leave_out",
        cache=str(home / "cache"),
    )


@pytest.mark.parametrize("pack", [False, True])
def test_kept_conversations_make_the_same_rows(chat: DataConfig, pack: bool) -> None:
    chat.pack = pack
    kept = [load_data(chat).training for _ in range(2)]
    chat.cache = None
    plain = load_data(chat).training
    for each in kept:
        assert (each.digest, each.description) == (plain.digest, plain.description)
        ids = np.arange(plain.num_samples(64))
        assert each.samples(ids, 64).tolist() == plain.samples(ids, 64).tolist()
        assert each.details(ids, 64).counts.tolist() == plain.details(ids, 64).counts.tolist()


def test_what_is_wrong_with_kept_conversations_has_its_line(chat: DataConfig) -> None:
    chat.too_long = "refuse"
    for _ in range(2):
        with pytest.raises(DataError, match="PP-E421") as caught:
            load_data(chat)
        assert caught.value.problems[0].place == f"{chat.path}:6"


def test_another_template_is_another_entry(chat: DataConfig, home: Path) -> None:
    first = load_data(chat).training.digest
    (home / "chat_template.jinja").write_text(CHATML.replace("<|im_end|>", "<|im_end|>\n"))
    assert load_data(chat).training.digest != first
