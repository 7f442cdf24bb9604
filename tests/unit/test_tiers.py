"""No test file is left out: a runner that skips a directory by its name looks green."""

from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_pytest_looks_into_every_directory_of_tests(pytestconfig: pytest.Config) -> None:
    left_out = pytestconfig.getini("norecursedirs")
    directories = {part for file in TESTS.rglob("test_*.py") for part in file.relative_to(TESTS).parts[:-1]}
    assert {"unit", "torch", "dist"} <= directories
    assert not [name for name in directories for pattern in left_out if fnmatch(name, pattern)]


def test_no_two_test_files_have_one_name() -> None:
    """Pytest takes two files of one name for one module, and runs neither."""
    names = Counter(file.name for file in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
