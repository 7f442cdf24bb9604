"""`pytest -m soak --shard i/n`: every n-th test by its node id, within an hour; a later call leaves out what passed.

What passed is kept in pytest's cache for this state of the tree (without `benchmarks/`, which has the logs). Nothing is
kept while there are changes that are not committed.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection
from hashlib import sha256

import pytest

START_FOR_S = 48 * 60
MOST_S = 600
"""A test of the soak ends within this, so that a call ends within an hour."""
UNFINISHED = 75
"""The exit code where nothing failed and tests of the shard are left."""


def shard_of(names: Collection[str], index: int, count: int) -> set[str]:
    """Every `count`-th of the sorted names, so that each shard gets its part of each test."""
    return set(sorted(names)[index - 1 :: count])


def parsed(shard: str) -> tuple[int, int]:
    """`i/n` as two numbers. Raises pytest.UsageError."""
    index, slash, count = shard.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise pytest.UsageError(f"--shard takes i/n with 1 <= i <= n, such as 1/4, not {shard!r}")
    return int(index), int(count)


def git(config: pytest.Config, *command: str) -> str:
    return subprocess.run(["git", *command], cwd=config.rootpath, capture_output=True, text=True, check=True).stdout


class Soak:
    """Chooses the tests of a shard that have not passed yet, and stops in time."""

    def __init__(self, config: pytest.Config) -> None:
        self.shard = config.getoption("shard")
        self.index, self.count = parsed(self.shard)
        self.began = time.monotonic()
        tree = [line for line in git(config, "ls-tree", "HEAD").splitlines() if not line.endswith("\tbenchmarks")]
        changed = git(config, "status", "--porcelain", "--", ".", ":!benchmarks")
        state = sha256("\n".join(tree).encode()).hexdigest()[:12]
        self.record = None if changed else config.cache.mkdir("soak") / state
        self.passed = set(self.record.read_text().splitlines()) if self.record and self.record.exists() else set()
        self.left: set[str] = set()
        self.failed: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            limit = item.get_closest_marker("timeout")
            if limit is not None and limit.args[0] > MOST_S:
                raise pytest.UsageError(f"{item.nodeid}: a test of the soak has a limit of at most {MOST_S} s")
        mine = shard_of([item.nodeid for item in items], self.index, self.count)
        self.passed &= mine
        self.left = mine - self.passed
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self.left])
        items[:] = [item for item in items if item.nodeid in self.left]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        if report.when == "teardown":
            self.left.discard(report.nodeid)
            if report.nodeid not in self.failed and self.record is not None:
                with self.record.open("a") as file:
                    file.write(f"{report.nodeid}\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        done = yield
        if self.left and time.monotonic() - self.began > START_FOR_S:
            item.session.shouldstop = "the hour of this call is nearly over"
        return done

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not session.testsfailed and session.exitstatus in (
            pytest.ExitCode.INTERRUPTED,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = UNFINISHED if self.left else pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        kept = "" if self.record else "; nothing is kept: the tree has changes that are not committed"
        terminalreporter.write_line(
            f"shard {self.shard}: {len(self.passed)} passed before this call, {len(self.failed)} failed, "
            f"{len(self.left)} left{f': make soak SHARD={self.shard} goes on' if self.left else ''}{kept}"
        )
