"""No test is left out: not by a directory's name, not between two tiers, not by a shard or the end of its hour."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path

import pytest
from soak import MOST_S, START_FOR_S, UNFINISHED, parsed, shard_of
from tiers import LEFT, mark_left, mark_tiers

TESTS = Path(__file__).parents[1]


def test_pytest_looks_into_every_directory_of_tests(pytestconfig: pytest.Config) -> None:
    left_out = pytestconfig.getini("norecursedirs")
    directories = {part for file in TESTS.rglob("test_*.py") for part in file.relative_to(TESTS).parts[:-1]}
    assert {"unit", "torch", "dist"} <= directories
    assert not [name for name in directories for pattern in left_out if fnmatch(name, pattern)]


def test_a_test_lies_in_the_room_of_what_it_tests() -> None:
    """Tests of a module beside the packages, of all of ppctl, or of the tests themselves lie beside the directories."""
    package = TESTS.parent / "ppctl"
    packages = {path.parent.name for path in package.glob("*/__init__.py")}
    beside = {path.stem for path in package.glob("*.py")}
    beside |= {
        "benchmark_imports",
        "devices_are_named",
        "first_run",
        "frozen",
        "frozen_run",
        "imports",
        "packaging",
        "site",
        "public_names",
        "without_torch",
        "pairwise",
        "ranks",
        "stage_benchmark",
        "tiers",
        "unpickling",
    }
    files = [
        file.relative_to(TESTS) for tier in ("unit", "torch", "dist") for file in (TESTS / tier).rglob("test_*.py")
    ]
    assert {path.parts[1] for path in files if len(path.parts) == 3} <= packages
    assert {path.stem.removeprefix("test_") for path in files if len(path.parts) == 2} <= beside
    assert [path for path in files if len(path.parts) > 3] == []


def test_no_helper_hides_a_module_of_the_same_name() -> None:
    """Helpers come first on the path."""
    elsewhere = [path for path in sys.path if Path(path or ".").resolve() not in {TESTS, TESTS / "helpers"}]
    helpers = {path.stem for path in (TESTS / "helpers").glob("*.py")}
    assert {"ranks", "command"} <= helpers
    assert [name for name in helpers if PathFinder.find_spec(name, elsewhere)] == []


@pytest.mark.parametrize(
    ("mark", "targets"),
    [
        ("", {"test", "test-all"}),
        ("whole", {"test-all"}),
        ("soak", {"soak"}),
        ("gpu", {"test-gpu"}),
        ("slurm", {"test-slurm", "test-all"}),
    ],
)
def test_every_mark_has_a_target_and_test_all_runs_what_test_runs(mark: str, targets: set[str]) -> None:
    run = set()
    for target in ("test", "test-all", "soak", "test-gpu", "test-slurm"):
        command = ["make", "--dry-run", "--always-make", target, "SHARD=1/1"]
        shown = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True).stdout
        if target == "test-gpu":  # through a script, which runs this step alone on a machine without network as well
            shown = re.sub(r'"\$python" (-m pytest) -m (\w+)', r'\1 -m "\2"', (TESTS / "gpu/first_run.sh").read_text())
        (selected,) = re.findall(r'-m pytest .*?-m "([a-z ]+)"', shown.replace("\\\n", " "))
        names = {name: name == mark for name in ("whole", "soak", "gpu", "slurm")}
        if eval(selected, {}, names):
            run.add(target)
    assert run == targets


class Item:
    """A collected test, which is marked."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid
        self.marks: list[str] = []

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


@pytest.mark.parametrize("file", LEFT.values())
def test_what_is_left_to_a_later_tier_is_there(file: str) -> None:
    for line in (TESTS / file).read_text().splitlines():
        if not line.startswith("#"):
            name = re.sub(r"^(!|1/\d+ )", "", line)
            file, _, function = name.partition("[")[0].partition("::")
            assert re.search(rf"^def {function}\(", (TESTS.parent / file).read_text(), re.MULTILINE), line


def test_of_a_test_that_is_left_to_test_all_its_smoke_stays() -> None:
    lines = ["# why", "a.py::test_a", "!a.py::test_a[1]", "a.py::test_b[2]", "a.py::test_c"]
    names = ("a.py::test_a[1]", "a.py::test_a[2]", "a.py::test_b[1]", "a.py::test_b[2]", "a.py::test_c", "a.py::test_d")
    items = [Item(name) for name in names]
    mark_left(items, lines, "whole", complete=True)  # type: ignore[arg-type]
    assert [item.marks for item in items] == [[], ["whole"], [], ["whole"], ["whole"], []]
    for missing in (0, 3):
        others = [item for number, item in enumerate(items) if number != missing]
        with pytest.raises(pytest.UsageError, match=re.escape(names[missing])):
            mark_left(others, lines, "whole", complete=True)  # type: ignore[arg-type]
        mark_left(others, lines, "whole", complete=False)  # type: ignore[arg-type]


def test_of_a_sampled_test_every_fourth_case_stays() -> None:
    items = [Item(f"a.py::test_a[{n}]") for n in range(9)] + [Item("a.py::test_b")]
    mark_left(items, ["1/4 a.py::test_a", "!a.py::test_a[2]"], "whole", complete=True)  # type: ignore[arg-type]
    assert [number for number, item in enumerate(items) if not item.marks] == [0, 2, 4, 8, 9]


def test_what_make_test_runs_is_not_left_to_the_soak(tmp_path: Path) -> None:
    (tmp_path / LEFT["whole"]).write_text("1/3 a.py::test_a\n")
    (tmp_path / LEFT["soak"]).write_text("1/2 a.py::test_a\n")
    items = [Item(f"a.py::test_a[{n}]") for n in range(7)]
    mark_tiers(items, tmp_path, complete=True)  # type: ignore[arg-type]
    whole, soak = ["whole"], ["whole", "soak"]
    assert [item.marks for item in items] == [[], whole, soak, [], whole, soak, []]


def test_shards_share_all_tests_out_and_none_twice() -> None:
    names = [f"test_{n}" for n in range(23)]
    for count in (1, 4, 23, 30):
        shards = [shard_of(names, index, count) for index in range(1, count + 1)]
        assert sorted(chain(*shards)) == sorted(names)
        assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert shard_of(names, 2, 4) == shard_of(names[::-1], 2, 4)


@pytest.mark.parametrize("shard", ["0/4", "5/4", "1", "/4", "a/4", "1/4/2"])
def test_a_shard_that_is_none_is_refused(shard: str) -> None:
    with pytest.raises(pytest.UsageError, match="such as 1/4"):
        parsed(shard)


def test_a_call_of_the_soak_ends_within_an_hour() -> None:
    assert START_FOR_S + MOST_S <= 59 * 60


SOAKS = """
import pytest
pytestmark = pytest.mark.soak
@pytest.mark.parametrize("n", range(4))
def test_of_the_soak(n):
    import pathlib
    assert n != 1 or not pathlib.Path(__file__).with_name("broken").exists()
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with four tests of the soak, and a tool that ends a call at the first test's end."""
    for name in ("conftest.py", "helpers/soak.py", "helpers/tiers.py", *LEFT.values()):
        shutil.copy(TESTS / name, tmp_path)
    shutil.copy(TESTS.parent / ".gitignore", tmp_path)
    (tmp_path / "test_some.py").write_text(SOAKS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = soak: of the soak\n")
    (tmp_path / "benchmarks").mkdir()
    commit(tmp_path)
    return tmp_path


def commit(repository: Path) -> None:
    for command in ("init -q", "add -A", "-c user.name=a -c user.email=b commit -q -m tests"):
        subprocess.run(["git", *command.split()], cwd=repository, check=True)


def call(repository: Path, *, stops: bool = False) -> tuple[int, str]:
    """The exit code and the last line of a call; one that stops has its time over after its first test."""
    brief = f"import sys, soak, pytest; soak.START_FOR_S = {-1 if stops else 60}; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", brief, "-q", "-p", "no:xdist", "-m", "soak", "--shard", "1/1"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    return done.returncode, next(line for line in done.stdout.splitlines() if line.startswith("shard"))


def test_a_later_call_of_a_shard_goes_on_where_the_earlier_one_stopped(repository: Path) -> None:
    first = "shard 1/1: 0 passed before this call, 0 failed, 3 left: make soak SHARD=1/1 goes on"
    assert call(repository, stops=True) == (UNFINISHED, first)
    (repository / "benchmarks" / "soak.log").write_text("what the first call said")
    commit(repository)
    assert call(repository) == (0, "shard 1/1: 1 passed before this call, 0 failed, 0 left")
    assert call(repository) == (0, "shard 1/1: 4 passed before this call, 0 failed, 0 left")
    (repository / "test_some.py").write_text(SOAKS + "# changed")
    commit(repository)
    assert call(repository, stops=True) == (UNFINISHED, first)


def test_what_fails_runs_again_and_with_open_changes_everything_does(repository: Path) -> None:
    broken = repository / "broken"
    broken.touch()
    commit(repository)
    code, last = call(repository)
    assert (code, last) == (1, "shard 1/1: 0 passed before this call, 1 failed, 0 left")
    assert call(repository)[1] == "shard 1/1: 3 passed before this call, 1 failed, 0 left"
    broken.unlink()
    open_changes = "; nothing is kept: the tree has changes that are not committed"
    for _ in range(2):
        assert call(repository) == (0, f"shard 1/1: 0 passed before this call, 0 failed, 0 left{open_changes}")
