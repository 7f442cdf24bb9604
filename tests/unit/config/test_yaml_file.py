"""YAML as configs need it: numbers are numbers, dates are text, every key has a line."""

import pytest

from ppctl.config.yaml_file import YamlFile
from ppctl.errors import ConfigError


@pytest.fixture
def read(tmp_path):
    def parse(text):
        path = tmp_path / "x.yaml"
        path.write_text(text)
        return YamlFile(path, "x.yaml")

    return parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("2.2E4", 22000.0),
        ("-1e3", -1000.0),
        ("12", 12),
        ("1.5", 1.5),
        ("2024-01-01", "2024-01-01"),
        ("1f1b", "1f1b"),
        ("e5", "e5"),
        ("null", None),
        ("true", True),
        ('"Et*3|(tt|)*29,m|L"', "Et*3|(tt|)*29,m|L"),
        ("Et*3|(tt|)*29,m|L", "Et*3|(tt|)*29,m|L"),
        ("[[E, t], [t, L]]", [["E", "t"], ["t", "L"]]),
        ("${train.steps}", "${train.steps}"),
        ("12:00:00", "12:00:00"),
        ("1:30.5", "1:30.5"),
    ],
)
def test_a_value_is_what_it_looks_like(read, text, value):
    assert read(f"key: {text}\n").values == {"key": value}


def test_every_key_has_its_line(read):
    lines = read("# a\na:\n  b: 1\n  c:\n    d: 2\n\ne: [1, 2]\n").lines
    assert lines == {"a": 2, "a.b": 3, "a.c": 4, "a.c.d": 5, "e": 7}


@pytest.mark.parametrize("text", ["", "# only this\n", "---\n"])
def test_an_empty_file_is_an_empty_mapping(read, text):
    assert (read(text).values, read(text).lines) == ({}, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [\n", "line 2"),
        ("- 1\n", "no mapping"),
        ("a: 1\na: 2\n", "occurs twice"),
        ("a: {b: 1, b: 2}\n", "occurs twice"),
        ("a: *b\n", "alias"),
        ("? [1]\n: 2\n", ""),
        ("a: 1\n---\nb: 2\n", "document"),
    ],
)
def test_what_is_no_config_is_told(read, text, said):
    with pytest.raises(ConfigError, match="PP-E115") as error:
        read(text).values  # noqa: B018 - reading is what fails
    assert said in str(error.value)


def test_a_file_that_is_not_text_is_told(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        YamlFile(tmp_path / "x.yaml", "x.yaml").values  # noqa: B018 - reading is what fails
