"""A tokenizer of one's own, .bin and .idx made with it, and a blend of two: the losses of the text itself."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from evaluated_runs import config_of, records_of
from oracle.data import microbatches
from oracle.reference import train_reference
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ppctl.cli.main import main
from ppctl.config.schema import RunConfig

WORDS = ["the", "of", "stage", "rank", "bubble", "and", "a", "layer"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts a.jsonl and b.txt, a tokenizer trained on them, and what it makes of them: a.bin, b.bin."""
    home, words = tmp_path_factory.mktemp("own"), random.Random(3)
    lines = [" ".join(words.choices(WORDS, k=words.randrange(0, 40))) for _ in range(60)]
    (home / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (home / "b.txt").write_text(" ".join(words.choices(WORDS, k=900)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator([*lines, (home / "b.txt").read_text()], trainer)
    (home / "tokenizer").mkdir()
    tokenizer.save(str(home / "tokenizer" / "tokenizer.json"))
    for name in ("a.jsonl", "b.txt"):
        out = str(home / name.partition(".")[0])
        given = ["data", "tokenize", str(home / name), out, "--tokenizer", str(home / "tokenizer"), "--append-eod"]
        assert main(given) == 0
    return home


def blended(home: Path, *names: str) -> RunConfig:
    config = config_of(home, pp=2, vpp=2, eval_interval=2, eval_steps=2)
    first, second = (str(home / name) for name in names)
    config.data.path = f"[0.3,{first},0.7,{second}]"
    config.data.tokenizer = str(home / "tokenizer")
    config.model.vocab_size = 96
    return config


def test_a_blend_of_files_gives_the_losses_of_the_text_they_were_made_from(home: Path, tmp_path: Path) -> None:
    files, _ = records_of(blended(home, "a", "b"), tmp_path / "files")
    text, _ = records_of(blended(home, "a.jsonl", "b.txt"), tmp_path / "text")
    for key in ("loss", "grad_norm", "eval_loss", "eval_samples"):
        assert [r.get(key) for r in files] == [r.get(key) for r in text]
    assert len({r["loss"] for r in files}) == len(files)


@pytest.mark.shows("data.eod_mask_loss")
def test_what_follows_a_documents_end_does_not_count(home: Path, tmp_path: Path) -> None:
    config = blended(home, "a", "b")
    config.data.eod_mask_loss = True
    masked, _ = records_of(config, tmp_path / "masked")
    every, _ = records_of(blended(home, "a", "b"), tmp_path / "every")
    whole = config.train.global_batch_size * config.data.seq_length
    assert {(record["tokens"], record["loss_tokens"]) for record in every} == {(whole, whole)}
    assert {record["tokens"] for record in masked} == {whole}
    assert all(0 < record["loss_tokens"] < whole for record in masked)
    steps = config.train.steps
    losses = train_reference(config.model, config.optim, config.train.seed, microbatches(config, steps), steps)[0]
    assert [record["loss"] for record in masked] == losses


def damage(home: Path, tmp_path: Path, *, cut: str = "", poke: tuple[str, int, bytes] | None = None) -> Path:
    """Copies of a.bin and a.idx, one of them cut by a byte or with other bytes in it."""
    for ending in ("bin", "idx"):
        content = bytearray((home / f"a.{ending}").read_bytes())
        if poke is not None and poke[0] == ending:
            content[poke[1] : poke[1] + len(poke[2])] = poke[2]
        (tmp_path / f"bad.{ending}").write_bytes(content[:-1] if cut == ending else content)
    return tmp_path / "bad"


BAD = {
    "a damaged index": ({"poke": ("idx", 40, b"\xff")}, "PP-E412", "bad.idx is damaged: sequence 2 does not"),
    "an index cut short": ({"cut": "idx"}, "PP-E412", "bad.idx is damaged: it has"),
    "tokens cut short": ({"cut": "bin"}, "PP-E412", "bad.bin is damaged: it has"),
    "a token beyond the vocabulary": ({"poke": ("bin", 2, b"\xff\xff")}, "PP-E406", "bad.bin: document 0 (token 1 of"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused_before_any_rank_starts_and_nothing_is_written(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    how, code, said = BAD[kind]
    prefix = damage(home, tmp_path, **how)
    monkeypatch.chdir(tmp_path)
    assert refusal(f"data.path=[1,{home}/b,1,{prefix}]") == 2
    err = capsys.readouterr().err
    assert f"error {code}: " in err and said in err and not Path("runs").exists()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("data.path=empty.txt", "PP-E404: there is no text in"),
        ("data.path=[1,empty.txt]", "PP-E404: there is no text in"),
        ("data.path=[0,empty.txt]", "PP-E103: a weight is a number greater than 0, not 0"),
        ("data.path=[1,empty.txt,1,nothing]", "PP-E401: data.path=nothing: no such file"),
        ("data.path=short.txt", "PP-E404: the data is too short"),
        ("data.path=nothing", "PP-E401: data.path=nothing: no such file"),
        ("data.tokenizer=nothing", "PP-E410: data.tokenizer=nothing"),
        ("data.path=lines.jsonl model.vocab_size=240", "lines.jsonl:1 (token 22 of its data)"),
    ],
)
def test_what_is_no_data_is_refused_likewise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_text("four")
    Path("lines.jsonl").write_text('{"text": "the first of the lines"}\n')
    assert refusal(*typed.split()) == 2
    assert said in capsys.readouterr().err and not Path("runs").exists()


def test_ends_of_documents_that_nothing_marks_are_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("of the rank " * 40)
    assert main(["data", "tokenize", "a.txt", "bare"]) == 0
    assert refusal("data.path=bare", "--reset-position-ids", "--eod-mask-loss") == 2
    err = capsys.readouterr().err
    assert "PP-E416" in err and "data.eod_mask_loss=false data.reset_position_ids=false" in err
    Path("unnamed").mkdir()
    tokenizer = json.loads((home / "tokenizer" / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = []
    Path("unnamed/tokenizer.json").write_text(json.dumps(tokenizer))
    assert refusal("data.path=bare", "data.tokenizer=unnamed", "--reset-attention-mask") == 2
    err = capsys.readouterr().err
    assert "PP-E410: data.reset_attention_mask needs a token that ends a document" in err and "special_tokens=" in err
    assert not Path("runs").exists()


def refusal(*typed: str) -> int:
    return main(["train", "+recipe=quickstart", "launch.device=cpu", "seq=16", *typed])
