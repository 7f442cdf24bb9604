"""Tokenizers of a Hugging Face directory, trained on the spot."""

import json
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ppctl.data.corpus import load_corpus
from ppctl.data.load import load_tokenizer
from ppctl.data.tokenizer import Document
from ppctl.errors import ConfigError, DataError

TEXTS = ["a stage and a rank and a layer", "the bubble of a pipeline", "naïve 🦊"]


@pytest.fixture
def directory(tmp_path):
    def make(special=("<|endoftext|>",), bos=None, truncate=False, **files):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(TEXTS * 3, trainer)
        if bos:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
            )
        if truncate:
            tokenizer.enable_truncation(3)
            tokenizer.enable_padding(length=9)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return make


def encode(tokenizer, *texts):
    return [ids.tolist() for ids in tokenizer.encode_documents([Document(t.encode(), "here") for t in texts])]


def test_text_survives_the_round_trip_and_marks_vanish(directory):
    tokenizer = load_tokenizer(str(directory()))
    (ids,) = encode(tokenizer, "naïve 🦊 and a rank")
    assert tokenizer.decode([*ids, tokenizer.eos]).strip() == "naïve 🦊 and a rank"
    assert max(ids) < tokenizer.vocab_size <= 300


def test_the_file_itself_may_be_named(directory):
    assert load_tokenizer(str(directory() / "tokenizer.json")).eos == 0


def test_what_the_tokenizer_puts_around_a_text_stays_and_nothing_is_cut_off(directory):
    tokenizer = load_tokenizer(str(directory(("<s>", "</s>"), bos="<s>", truncate=True)))
    (ids,) = encode(tokenizer, "a stage and a rank and a layer and a rank and a layer")
    assert ids[0] == 0 and len(ids) > 9 and tokenizer.eos == 1


@pytest.mark.parametrize(
    ("special", "files", "eos"),
    [
        (["<x>", "<end>"], {"tokenizer_config": {"eos_token": "<end>"}}, 1),
        (["<x>", "<end>"], {"tokenizer_config": {"eos_token": {"content": "<end>", "lstrip": False}}}, 1),
        (["<x>", "<end>"], {"special_tokens_map": {"eos_token": "<end>"}}, 1),
        (["<x>", "</s>"], {"tokenizer_config": {"eos_token": None}}, 1),
        (["<x>", "</s>"], {"tokenizer_config": {"eos_token": "<x>"}}, 0),
        (["<x>", "</s>", "<|endoftext|>"], {}, None),
        (["<x>"], {}, None),
        (["<x>", "</s>"], {"tokenizer_config": {"eos_token": "<missing>"}}, None),
    ],
    ids=str,
)
def test_the_end_of_a_document_is_what_the_directory_says(directory, special, files, eos):
    assert load_tokenizer(str(directory(special, **files))).eos == eos


def test_text_without_a_mark_for_its_end_is_refused(directory, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"PP-E410: text needs a token that ends a document") as caught:
        load_corpus(str(tmp_path / "a.txt"), load_tokenizer(str(directory(["<x>"]))))
    assert caught.value.problems[0].remedy.endswith('as "eos_token": "<x>"')
    with pytest.raises(DataError, match="and has no special token") as caught:
        load_corpus(str(tmp_path / "a.txt"), load_tokenizer(str(directory([]))))
    assert "special_tokens=" in caught.value.problems[0].remedy


def test_documents_are_joined_as_bytes_are(directory, tmp_path):
    tokenizer = load_tokenizer(str(directory()))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, ""]))
    corpus = load_corpus(str(tmp_path / "a.jsonl"), tokenizer)
    assert corpus.tokens.tolist() == [token for ids in encode(tokenizer, *TEXTS) for token in [*ids, tokenizer.eos]]
    assert corpus.tokens.dtype == np.uint16
    assert corpus.place_of(len(corpus.tokens) - 1) == f"{tmp_path}/a.jsonl:3"


def test_a_file_that_is_not_utf8_is_named(directory, tmp_path):
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError) as caught:
        load_corpus(str(tmp_path / "*.txt"), load_tokenizer(str(directory())))
    (problem,) = caught.value.problems
    assert problem.code == "PP-E411" and problem.place == f"{tmp_path}/latin.txt" and "at byte 3" in problem.message


@pytest.mark.parametrize(
    ("content", "said"), [(None, "No such file"), ("{", "it is no tokenizer.json"), ("{}", "it is no tokenizer.json")]
)
def test_what_is_no_tokenizer_is_told(tmp_path, content, said):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(tmp_path))
    (problem,) = caught.value.problems
    assert problem.code == "PP-E410" and said in problem.message and problem.place == f"{tmp_path}/tokenizer.json"


def test_a_missing_library_is_told_with_what_installs_it(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(str(directory()))
    (problem,) = caught.value.problems
    assert caught.value.exit_code == 2 and problem.code == "PP-E410"
    assert problem.remedy.endswith("-m pip install tokenizers")
