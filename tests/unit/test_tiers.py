"""No test file is left out: a runner that skips a directory by its name looks green."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_pytest_looks_into_every_directory_of_tests(pytestconfig: pytest.Config) -> None:
    left_out = pytestconfig.getini("norecursedirs")
    directories = {part for file in TESTS.rglob("test_*.py") for part in file.relative_to(TESTS).parts[:-1]}
    assert {"unit", "torch", "dist"} <= directories
    assert not [name for name in directories for pattern in left_out if fnmatch(name, pattern)]
