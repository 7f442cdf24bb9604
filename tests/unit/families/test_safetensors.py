"""Headers of safetensors files that contradict their files, and indexes that lead elsewhere: all refused as PP-E523."""

import json
import os
import struct

import pytest

from ppctl.config.schema import ModelConfig
from ppctl.errors import CheckpointError, ConfigError
from ppctl.families.config_json import write_config
from ppctl.families.directory import open_directory, quantised_note
from ppctl.families.safetensors import INDEX, read_directory, read_header

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
NEXT = {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 16]}


def write(file, header, values=16):
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(values))
    return file


def refused(read, path):
    with pytest.raises(CheckpointError) as caught:
        read(path)
    (problem,) = caught.value.problems
    assert problem.code == "PP-E523" and problem.remedy.startswith("ls -l ")
    return problem


def test_a_whole_file_is_read(tmp_path):
    empty = {"dtype": "F6_E2M3", "shape": [0, 3], "data_offsets": [8, 8]}
    header = {"__metadata__": {"format": "pt"}, "b": NEXT, "none": empty, "a": F32}
    file = write(tmp_path / "a.safetensors", header)
    found = read_header(file)
    assert list(found) == ["b", "none", "a"]
    start = file.stat().st_size - 16
    assert [(each.offset - start, each.bytes) for each in found.values()] == [(8, 8), (8, 0), (0, 8)]


WRONG = {
    "another dtype": ({"a": F32 | {"dtype": "BF16"}, "b": NEXT}, "a: BF16[2] has 4 bytes, but data_offsets has 8"),
    "another shape": ({"a": F32 | {"shape": [2, 2]}, "b": NEXT}, "a: F32[2, 2] has 16 bytes, but data_offsets has 8"),
    "no such dtype": ({"a": F32 | {"dtype": "F99"}, "b": NEXT}, "a: F99 is no dtype of safetensors"),
    "a start behind the header": ({"b": NEXT}, "b: begins at byte"),
    "a gap": (
        {"a": F32, "b": {"dtype": "F16", "shape": [2], "data_offsets": [12, 16]}},
        "b: begins at byte",
    ),
    "an overlap": (
        {"a": F32, "b": {"dtype": "F16", "shape": [6], "data_offsets": [4, 16]}},
        "b: begins at byte",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_do_not_lie_as_they_must_are_named(tmp_path, name):
    header, line = WRONG[name]
    problem = refused(read_header, write(tmp_path / "a.safetensors", header))
    assert "contradicts itself" in problem.message
    assert problem.place.startswith(line) and len(problem.place.splitlines()) == 1


@pytest.mark.parametrize(
    "entry",
    [
        F32 | {"shape": [2.0]},
        F32 | {"shape": [-2]},
        F32 | {"shape": [True]},
        F32 | {"shape": "2"},
        F32 | {"data_offsets": [8, 0]},
        F32 | {"data_offsets": [-8, 0]},
        F32 | {"data_offsets": [0]},
        F32 | {"data_offsets": [0, 1e400]},
        [],
    ],
)
def test_entries_that_are_none_are_refused(tmp_path, entry):
    refused(read_header, write(tmp_path / "a.safetensors", {"a": entry}, 8))


def test_metadata_are_text(tmp_path):
    problem = refused(read_header, write(tmp_path / "a.safetensors", {"__metadata__": {"step": 3}}, 0))
    assert "__metadata__" in problem.message


def test_many_wrong_tensors_are_counted(tmp_path):
    header = {f"t{n}": {"dtype": "F32", "shape": [3], "data_offsets": [8 * n, 8 * n + 8]} for n in range(99)}
    place = refused(read_header, write(tmp_path / "a.safetensors", header, 8 * 99)).place.splitlines()
    assert len(place) == 21 and place[-1] == "and 79 more"


def test_a_pipe_is_no_file_of_weights(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    assert "a pipe" in refused(read_header, tmp_path / "a.safetensors").message


@pytest.mark.parametrize("place", ["../a.safetensors", "/etc/passwd", "deeper/../../a.safetensors"])
def test_an_index_leads_to_nothing_outside(tmp_path, place):
    write(tmp_path / "a.safetensors", {"a": F32}, 8)
    model = tmp_path / "model"
    model.mkdir()
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": place}}))
    problem = refused(read_directory, model)
    assert "outside" in problem.message and problem.place == f"a: {place}"


def test_an_index_may_name_a_directory_within(tmp_path):
    (tmp_path / "deeper").mkdir()
    write(tmp_path / "deeper" / "a.safetensors", {"a": F32}, 8)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "deeper/a.safetensors"}}))
    assert list(read_directory(tmp_path)) == ["a"]


def quantised(directory, said, dtype="F32"):
    (directory / "config.json").write_text(json.dumps({"quantization_config": said}))
    write(directory / "model.safetensors", {"a": F32 | {"dtype": dtype, "shape": [8 if dtype == "F8_E4M3" else 2]}}, 8)
    return quantised_note(directory)


def test_plain_weights_whose_config_says_quantised_are_told(tmp_path):
    assert "(fp8), but all tensors are plain F32" in quantised(tmp_path, {"quant_method": "fp8"})
    assert quantised(tmp_path, None) == ""
    assert quantised(tmp_path, {"quant_method": "fp8"}, "F8_E4M3") == ""


@pytest.mark.parametrize("said", [3, {"weight_block_size": 3}, {"weight_block_size": ["a", 0]}, [1]])
def test_a_block_that_is_none_is_refused(tmp_path, said):
    _, config = write_config(ModelConfig())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    write(tmp_path / "model.safetensors", {"a": F32}, 8)
    with pytest.raises(ConfigError, match="PP-E521: quantization_config must be a mapping"):
        open_directory(tmp_path)
