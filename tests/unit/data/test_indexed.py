"""Megatron's .bin and .idx: the bytes that we write, what we read, and every damage by file and document."""

import signal
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppctl.data.corpus import load_corpus
from ppctl.data.indexed import IndexedWriter, as_prefix, open_indexed
from ppctl.data.tokenizer import ByteTokenizer, token_dtype
from ppctl.errors import DataError

DOCUMENTS = ([1, 2, 257], [], [3, 65_000])
EXPECTED_BIN = bytes.fromhex("0100 0200 0101  0300 e8fd")
EXPECTED_IDX = b"".join(
    (
        b"MMIDIDX\x00\x00",
        bytes.fromhex("0100000000000000"),  # version 1
        bytes.fromhex("08"),  # uint16
        bytes.fromhex("0200000000000000"),  # two sequences: an empty document has none
        bytes.fromhex("0400000000000000"),  # three documents have four boundaries
        bytes.fromhex("03000000 02000000"),  # lengths
        bytes.fromhex("0000000000000000 0600000000000000"),  # first bytes
        bytes.fromhex("0000000000000000 0100000000000000 0100000000000000 0200000000000000"),
    )
)


def write(prefix, documents=DOCUMENTS, dtype="<u2", **how):
    with IndexedWriter(prefix, np.dtype(dtype), **how) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype=dtype))
    return str(prefix)


def test_the_bytes_are_megatrons(tmp_path):
    write(tmp_path / "a")
    assert (tmp_path / "a.bin").read_bytes() == EXPECTED_BIN
    assert (tmp_path / "a.idx").read_bytes() == EXPECTED_IDX
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_a_large_vocabulary_is_written_as_int32(tmp_path):
    assert [token_dtype(size).str for size in (259, 65_499, 65_500, 128_256)] == ["<u2", "<u2", "<i4", "<i4"]
    write(tmp_path / "a", [[128_000, 7]], token_dtype(128_256))
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<2i", 128_000, 7)
    assert (tmp_path / "a.idx").read_bytes()[17] == 4


@given(st.lists(st.lists(st.integers(0, 65_535), max_size=5), min_size=1, max_size=8))
def test_what_is_written_is_read(tmp_path_factory, documents):
    indexed = open_indexed(write(tmp_path_factory.mktemp("x") / "a", documents))
    assert indexed.tokens.tolist() == [token for document in documents for token in document]
    assert indexed.num_documents == len(documents)
    full = [number for number, document in enumerate(documents) for _ in document]
    assert [int(indexed.document_at(i).rpartition(" ")[2]) for i in range(len(full))] == full


def test_a_document_of_several_sequences_is_one_document(tmp_path):
    """As Megatron writes with --split-sentences."""
    (tmp_path / "a.bin").write_bytes(struct.pack("<4B", 7, 8, 9, 5))
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 1, 3, 3)
    (tmp_path / "a.idx").write_bytes(head + struct.pack("<3i3q3q", 1, 2, 1, 0, 1, 3, 0, 2, 3))
    indexed = open_indexed(str(tmp_path / "a"))
    assert indexed.tokens.tolist() == [7, 8, 9, 5] and indexed.num_documents == 2
    assert [indexed.document_at(i)[-1] for i in range(4)] == ["0", "0", "0", "1"]


@pytest.mark.parametrize("name", ["a", "a.bin", "a.idx"])
def test_a_prefix_is_recognised_by_its_files(tmp_path, name):
    write(tmp_path / "a")
    assert as_prefix(str(tmp_path / name)) == str(tmp_path / "a")
    assert as_prefix(str(tmp_path / "b")) is None


def cut(file, size):
    file.write_bytes(file.read_bytes()[:size])


def poke(file, offset, data):
    content = bytearray(file.read_bytes())
    content[offset : offset + len(data)] = data
    file.write_bytes(content)


DAMAGE = {
    "no index": (lambda bin_, idx: idx.unlink(), "a.idx is missing"),
    "no tokens": (lambda bin_, idx: bin_.unlink(), "a.bin is missing"),
    "an empty index": (lambda bin_, idx: cut(idx, 0), "a.idx is damaged: it does not begin with MMIDIDX"),
    "a header cut short": (lambda bin_, idx: cut(idx, 20), "a.idx is damaged: it does not begin with MMIDIDX"),
    "another format": (lambda bin_, idx: poke(idx, 0, b"TNTIDX"), "a.idx is damaged: it does not begin"),
    "another version": (lambda bin_, idx: poke(idx, 9, b"\x02"), "it has version 2"),
    "floats": (lambda bin_, idx: poke(idx, 17, b"\x07"), "its type code 7 is not a token type"),
    "an index cut short": (lambda bin_, idx: cut(idx, 80), "it has 80 bytes, but 2 sequences and 4 boundaries make 90"),
    "a mode for each": (lambda bin_, idx: cut(idx, 0) or idx.write_bytes(EXPECTED_IDX + b"\0\0"), "multimodal"),
    "a huge count": (lambda bin_, idx: poke(idx, 18, b"\xff" * 8), "sequences"),
    "a negative length": (lambda bin_, idx: poke(idx, 38, b"\xff" * 4), "sequence 1 has -1 tokens"),
    "a wrong length": (lambda bin_, idx: poke(idx, 34, b"\x04"), "sequence 1 does not begin where"),
    "a wrong pointer": (lambda bin_, idx: poke(idx, 50, b"\x08"), "sequence 1 does not begin where"),
    "boundaries that fall": (
        lambda bin_, idx: poke(idx, 66, b"\x02"),
        "a.idx is damaged: its documents do not lead from sequence 0 to",
    ),
    "a boundary too far": (
        lambda bin_, idx: poke(idx, 82, b"\x09"),
        "its documents do not lead from sequence 0 to the end of its 2 sequences",
    ),
    "tokens cut short": (lambda bin_, idx: cut(bin_, 9), "a.bin is damaged: it has 9 bytes, but a.idx says 10"),
    "tokens gone": (lambda bin_, idx: cut(bin_, 0), "it has 0 bytes, but a.idx says 10"),
    "tokens of another": (
        lambda bin_, idx: bin_.write_bytes(EXPECTED_BIN + b"\0\0"),
        "it has 12 bytes, but a.idx says 10",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_with_the_file(tmp_path, kind):
    prefix = write(tmp_path / "a")
    damage, said = DAMAGE[kind]
    damage(tmp_path / "a.bin", tmp_path / "a.idx")
    with pytest.raises(DataError) as caught:
        load_corpus(prefix, ByteTokenizer())
    (problem,) = caught.value.problems
    assert (problem.code, caught.value.exit_code) == ("PP-E412", 2)
    assert said in problem.message and f"{prefix}." in problem.message and problem.place == f"data.path={prefix}"


def test_any_single_wrong_byte_of_an_index_is_noticed_or_harmless(tmp_path):
    """No byte of the index can be changed so that other tokens are read."""
    prefix = write(tmp_path / "a")
    right = open_indexed(prefix).tokens.tolist()
    for offset in range(len(EXPECTED_IDX)):
        (tmp_path / "a.idx").write_bytes(EXPECTED_IDX)
        poke(tmp_path / "a.idx", offset, bytes([EXPECTED_IDX[offset] ^ 1]))
        try:
            assert open_indexed(prefix).tokens.tolist() == right
        except DataError:
            continue


def test_a_file_without_a_token_is_refused(tmp_path):
    with pytest.raises(DataError) as caught:
        load_corpus(write(tmp_path / "a", [[], []]), ByteTokenizer())
    assert "PP-E404: there is no text in" in str(caught.value) and "2 documents" in str(caught.value)


def test_a_token_beyond_the_vocabulary_is_named_by_file_and_document(tmp_path):
    corpus = load_corpus(write(tmp_path / "a"), ByteTokenizer())
    with pytest.raises(DataError) as caught:
        corpus.check_vocabulary(258)
    (problem,) = caught.value.problems
    assert problem.place == f"{tmp_path}/a.bin: document 2 (token 4 of its data)" and "token 65000" in problem.message
    corpus.check_vocabulary(int(problem.remedy.removeprefix("model.vocab_size=")))


def test_tokens_have_one_digest_in_memory_and_mapped(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"ab")
    text = load_corpus(str(tmp_path / "t.txt"), ByteTokenizer())
    mapped = load_corpus(write(tmp_path / "t", [[97, 98, 257]]), ByteTokenizer())
    assert text.digest == mapped.digest and text.tokens.tolist() == mapped.tokens.tolist()


def test_a_large_file_is_named_by_its_index_its_size_and_pages(tmp_path, monkeypatch):
    prefix = write(tmp_path / "a", [range(5000)])
    monkeypatch.setattr("ppctl.data.corpus.WHOLE", 64)
    first = load_corpus(prefix, ByteTokenizer())
    assert first.digest == load_corpus(prefix, ByteTokenizer()).digest
    first.check_vocabulary(100)  # the first 64 bytes are 32 tokens
    poke(tmp_path / "a.bin", 9_998, b"\1")
    assert load_corpus(prefix, ByteTokenizer()).digest != first.digest


def test_what_is_there_is_not_written_over_unless_asked(tmp_path):
    write(tmp_path / "a")
    with pytest.raises(DataError, match="PP-E413"):
        write(tmp_path / "a", [[1]])
    assert (tmp_path / "a.bin").read_bytes() == EXPECTED_BIN
    write(tmp_path / "a", [[1]], overwrite=True)
    assert open_indexed(str(tmp_path / "a")).tokens.tolist() == [1]


def test_a_signal_that_strikes_when_the_file_has_just_been_made_leaves_nothing(tmp_path, monkeypatch):
    def open_and_be_interrupted(path, mode):
        open(path, mode).close()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("ppctl.data.indexed.open", open_and_be_interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "new" / "a", np.dtype("<u2")):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError])
def test_an_exception_leaves_nothing_and_what_was_there(tmp_path, error):
    write(tmp_path / "old")
    for name in ("old", "new"):
        with pytest.raises(error), IndexedWriter(tmp_path / name, np.dtype("<u2"), overwrite=True) as writer:
            writer.add_document(np.arange(3))
            raise error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.bin", "old.idx"]
    assert (tmp_path / "old.bin").read_bytes() == EXPECTED_BIN
