"""Shared test set-up: every process computes on one thread, and a test that fails leaves no process behind."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest
from tiers import mark_tiers

os.environ["OMP_NUM_THREADS"] = "1"
hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")
# pytest-xdist's workers are told of a terminal of 80 columns, which would be news to what they start.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
# A shell's background job ignores SIGINT and nohup's SIGHUP, and so would what is started here, as it should.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", help="i/n: of the tests that -m selects, the i-th of n parts; what passed is left out")


def pytest_configure(config: pytest.Config) -> None:
    if "DESCRIPTIONS_OF_TESTS" not in os.environ:  # else this is a worker of the session that made it
        os.environ["DESCRIPTIONS_OF_TESTS"] = made = tempfile.mkdtemp(prefix="descriptions-")
        config.add_cleanup(lambda: shutil.rmtree(made, ignore_errors=True))
    if config.getoption("shard"):
        from soak import Soak

        config.pluginmanager.register(Soak(config))


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The file that takes one worker longest in `make test-all` comes first; another runs the rest meanwhile."""
    mark_tiers(items, Path(__file__).parent, complete=not any("::" in argument for argument in config.args))
    items.sort(key=lambda item: item.path.name != "test_foreign_cuts.py")


def pytest_collection_finish() -> None:
    """A sixth of the time of unit tests went into searching 11,000 tests, which stay, for reference cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.fixture(autouse=True)
def nobody_stays():
    """A test that fails leaves nothing at work: what it started has no end of its own."""
    yield
    started = getattr(sys.modules.get("command"), "STARTED", [])
    while started:
        process = started.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()
