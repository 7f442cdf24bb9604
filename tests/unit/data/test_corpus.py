"""Reading text: which files, in which order, and every way in which they can be wrong."""

import json
import os
import shlex
import sysconfig

import numpy as np
import pytest

from ppctl.data.corpus import Corpus, load_corpus
from ppctl.data.tokenizer import ByteTokenizer
from ppctl.errors import DataError

EOS = ByteTokenizer.eos


def texts(corpus):
    """The documents of a corpus, as text."""
    ends = np.flatnonzero(corpus.tokens == EOS)
    starts = [0, *(ends[:-1] + 1)]
    return [ByteTokenizer().decode(corpus.tokens[a:b]) for a, b in zip(starts, ends, strict=True)]


def load(path):
    return load_corpus(path if path is None else str(path), ByteTokenizer())


def refused(path):
    with pytest.raises(DataError) as caught:
        load(path)
    assert caught.value.exit_code == 2
    return caught.value.problems


def write(folder, **files):
    for name, content in files.items():
        file = folder / name.replace("__", ".").replace("_in_", "/")
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)


def test_documents_follow_each_other_with_a_mark_after_each(tmp_path):
    write(tmp_path, b__txt=b"bb", a__txt="é".encode())
    corpus = load(tmp_path / "*.txt")
    assert corpus.tokens.tolist() == [0xC3, 0xA9, EOS, 98, 98, EOS]
    assert corpus.tokens.dtype == np.uint16 and corpus.tokens.flags.c_contiguous


def test_a_glob_finds_files_at_any_depth_in_the_order_of_their_names_once_each(tmp_path):
    write(tmp_path, z__txt=b"1", sub_in_a__txt=b"2", sub_in_b__jsonl=b'{"text": "3"}\n\n{"text": "4", "id": 7}')
    write(tmp_path, sub_in_c__csv=b"5", empty__txt=b"")
    (tmp_path / "sub" / "again.txt").symlink_to(tmp_path / "z.txt")
    corpus = load(tmp_path / "**")
    assert texts(corpus) == ["2", "1", "3", "4"]
    assert "left out, as none of .txt, .jsonl, .parquet, .arrow: 1 more" in corpus.description


def test_a_name_with_brackets_is_a_name_if_it_exists(tmp_path):
    write(tmp_path, **{"notes[1]__txt": b"mine", "notes1__txt": b"other"})
    assert texts(load(tmp_path / "notes[1].txt")) == ["mine"]


def test_the_digest_names_the_tokens(tmp_path):
    write(tmp_path, a__txt=b"one", b__jsonl=b'{"text": "one"}', c__txt=b"two")
    digests = [load(tmp_path / name).digest for name in ("a.txt", "b.jsonl", "c.txt")]
    assert digests[0] == digests[1] != digests[2] and len(digests[0]) == 64


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not a JSON object: Expecting property name"),
        (b'{"text": "caf\xe9"}', "not a JSON object: 'utf-8' codec can't decode"),
        (b"[" * 200_000, "not a JSON object: maximum recursion depth"),
        (b'["text"]', "the line is not an object but list"),
        (b'{"txt": 0, "id": 1}', 'not an object with a string under "text" but an object of txt, id'),
        (b'{"text": null}', "but an object of text"),
        (b"{}", "but an object of nothing"),
    ],
    ids=["syntax", "encoding", "depth", "list", "key", "null", "empty"],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, said):
    write(tmp_path, good__txt=b"text", bad__jsonl=b'{"text": "a"}\n\n' + line + b"\n")
    (problem,) = refused(tmp_path / "*")
    assert problem.code == "PP-E403" and said in problem.message
    assert problem.place == f"{tmp_path}/bad.jsonl:3"
    assert json.loads(problem.remedy) == {"text": "one document"}


def test_bad_lines_of_one_kind_are_one_problem_and_reading_ends_at_twenty(tmp_path):
    write(tmp_path, a__jsonl=b"{\n" * 3 + b"[]\n", b__jsonl=b"{\n" * 30)
    syntax, kind = refused(tmp_path / "*.jsonl")
    lines = [f"{tmp_path}/a.jsonl:{n}" for n in (1, 2, 3)] + [f"{tmp_path}/b.jsonl:{n}" for n in (1, 2)]
    assert syntax.place == "\n".join([*lines, "and 14 or more"])
    assert kind.place == f"{tmp_path}/a.jsonl:4" and "not an object but list" in kind.message


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ({"id": "1", "content": "a text"}, "data.text_key=content"),
        ({"messages": []}, "data.format=chat"),
        ({"prompt": "a", "completion": "b"}, "data.format=completion"),
    ],
)
def test_a_line_of_another_form_is_told_what_reads_it(tmp_path, line, remedy):
    write(tmp_path, a__jsonl=json.dumps(line).encode())
    (problem,) = refused(tmp_path / "a.jsonl")
    assert problem.remedy == remedy


def test_the_text_of_a_line_may_have_another_key(tmp_path):
    write(tmp_path, a__jsonl=b'{"content": "one", "text": "two"}')
    assert texts(load_corpus(str(tmp_path / "a.jsonl"), ByteTokenizer(), "content")) == ["one"]


@pytest.mark.parametrize(
    ("path", "said", "remedy"),
    [
        ("none.txt", "no such file, and no ", "data.path=null"),
        ("*.text", "no file matches", "data.path=null"),
        ("", "is a directory", "/**/*.txt'"),
        ("table.csv", "matches none of .txt, .jsonl, .parquet, .arrow", "data.path=null"),
        ("*.csv", "matches none of .txt, .jsonl, .parquet, .arrow", "data.path=null"),
    ],
)
def test_a_path_that_finds_nothing_says_why(tmp_path, path, said, remedy):
    write(tmp_path, table__csv=b"1,2")
    (problem,) = refused(tmp_path / path)
    assert problem.code == "PP-E401" and said in problem.message and remedy in problem.remedy


def test_the_remedy_for_a_directory_works(tmp_path):
    write(tmp_path, sub_in_a__txt=b"hello")
    (problem,) = refused(tmp_path)
    (word,) = shlex.split(problem.remedy)
    assert texts(load(word.removeprefix("data.path="))) == ["hello"]


def test_a_directory_of_mapped_files_is_told_their_prefix(tmp_path):
    write(tmp_path, web__bin=b"", web__idx=b"")
    (problem,) = refused(tmp_path)
    assert problem.remedy == f"data.path={tmp_path}/web"


def test_files_with_commas_between_them_are_told_how_a_blend_is_written(tmp_path):
    write(tmp_path, a__txt=b"a", b__txt=b"b")
    (problem,) = refused(f"{tmp_path}/a.txt,{tmp_path}/b.txt")
    assert problem.remedy == f"'data.path=[{tmp_path}/a.txt,{tmp_path}/b.txt]'"


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    write(tmp_path, good__txt=b"text")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (problem,) = refused(tmp_path / "*.txt")
    assert (
        problem.code == "PP-E402" and problem.message == f"cannot read {tmp_path}/gone.txt: No such file or directory"
    )


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (problem,) = refused(tmp_path / "*.txt")
    assert problem.code == "PP-E402" and "no file of data" in problem.message


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_no_text_at_all_is_an_error_that_names_the_file(tmp_path, name):
    (tmp_path / name).write_text("" if name.endswith("txt") else "\n\n")
    (problem,) = refused(tmp_path / name)
    assert problem.code == "PP-E404" and name in problem.message and problem.place == str(tmp_path / name)


@pytest.mark.parametrize(("seq_length", "number"), [(1, 9), (4, 2), (8, 1), (9, 1), (10, 0)])
def test_a_sample_is_its_inputs_and_one_label_more(seq_length, number):
    corpus = Corpus(np.arange(10, dtype=np.uint16), "", "ten tokens")
    if number:
        assert corpus.num_samples(seq_length) == number
        windows = corpus.samples(np.arange(number)[:, None], seq_length)
        assert windows.shape == (number, 1, seq_length + 1) and windows.dtype == np.int64
        assert windows[-1, 0].tolist() == list(range((number - 1) * seq_length, number * seq_length + 1))
        return
    with pytest.raises(DataError) as caught:
        corpus.num_samples(seq_length)
    (problem,) = caught.value.problems
    assert problem.code == "PP-E404" and "needs 11" in problem.message and problem.place == "ten tokens"
    assert corpus.num_samples(int(problem.remedy.split(",")[0].removeprefix("data.seq_length="))) == 1


def test_by_default_the_running_library_is_read_alike():
    first, second = load(None), load(None)
    assert first.digest == second.digest
    assert len(first.tokens) > 2_000_000 and "def " in ByteTokenizer().decode(first.tokens[:20_000])


def test_tests_and_installed_packages_are_not_the_library(tmp_path, monkeypatch):
    write(tmp_path, b__py=b"b", a_in_x__py=b"ax", test_in_y__py=b"no")
    write(tmp_path, **{"site-packages_in_z__py": b"no", "a__txt": b"no"})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: os.fspath(tmp_path))
    assert texts(load(None)) == ["ax", "b"]


def test_an_interpreter_without_sources_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: os.fspath(tmp_path / "python311.zip"))
    (problem,) = refused(None)
    assert problem.code == "PP-E405" and "data.path=" in problem.remedy
