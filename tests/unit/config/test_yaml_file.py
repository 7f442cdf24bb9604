"""YAML as configs need it: numbers are numbers, dates are text, every key has a line."""

import subprocess

import pytest

from ppctl.config.compose import compose
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


def tenfold(first, form):
    """Ten levels of aliases, each of which repeats the one before it ten times."""
    names = [form.format(", ".join([f"*x{level}"] * 10)) for level in range(9)]
    return "".join(f"x{level}: &x{level} {value}\n" for level, value in enumerate([first, *names]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [\n", "line 2"),
        ("- 1\n", "no mapping"),
        ("a: 1\na: 2\n", "a occurs twice (line 2)"),
        ("a: {b: 1, b: 2}\n", "b occurs twice"),
        ("a: *b\n", "alias"),
        ("? [1]\n: 2\n", "a key is no text"),
        ("a: 1\n---\nb: 2\n", "document"),
        ("a: 1\nb: \x07\n", "control characters are not allowed (line 2)"),
        ("a: !!bool x\n", "x is no bool"),
        ("a: !!int ''\n", "is no int"),
        ("a: !!timestamp x\n", "x is no timestamp"),
        ("a: !!python/name:os.system x\n", "could not determine a constructor"),
        ("a: 1\nb: 0x" + "f" * 5000, "is no int (line 2)"),
        ("a: " + "9" * 5000, "is no int"),
        ("<<: 3\n", "expected a mapping"),
        ("train: &x {steps: *x}\n", "64 levels"),
        ("train: &x [*x]\n", "64 levels"),
        ("train: &x\n  <<: *x\n", "64 levels"),
        ("[" * 10**6, "64 levels"),
        ("- " * 10**6, "64 levels"),
        ("? " * 10**6, "64 levels"),
        ("- a\n" * 10**6, "100000 values"),
        (tenfold("1", "[{}]"), "100000 values"),
        (tenfold("{a: 1}", "{{<<: [{}]}}"), "100000 values"),
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_what_is_no_config_is_refused_at_its_line_with_a_command_that_shows_it(read, text, said):
    file = read(text)
    with pytest.raises(ConfigError, match="PP-E115") as error:
        file.values  # noqa: B018 - reading is what fails
    (problem,) = error.value.problems
    assert said in problem.message
    line = int(problem.place.removeprefix(f"{file.path}:"))
    shown = subprocess.run(problem.remedy, shell=True, capture_output=True, check=True)
    assert shown.stdout.startswith(text.encode().splitlines(keepends=True)[max(line - 2, 0)])


def test_a_file_that_is_not_text_is_told(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "x.yaml", tmp_path / "none.yaml"):
        with pytest.raises(ConfigError, match="cannot be read") as error:
            YamlFile(path, "x.yaml").values  # noqa: B018 - reading is what fails
        subprocess.run(error.value.problems[0].remedy, shell=True, check=True, capture_output=True)


def test_an_alias_brings_its_values_and_their_lines_and_a_merged_key_gives_way(read):
    file = read("a:\n  b: &b\n    <<: {c: 1, d: 2}\n    c: 3\ne:\n  <<: *b\n  d: 4\n")
    assert file.values == {"a": {"b": {"c": 3, "d": 2}}, "e": {"c": 3, "d": 4}}
    assert file.lines == {"a": 1, "a.b": 2, "a.b.c": 4, "a.b.d": 3, "e": 5, "e.c": 4, "e.d": 7}


def test_a_layout_is_read_by_the_same_reader(tmp_path):
    (tmp_path / "layout").write_text("- [E, t]\n- &x [*x]\n")
    with pytest.raises(ConfigError, match="64 levels"):
        compose([f"layout=@{tmp_path}/layout"])
