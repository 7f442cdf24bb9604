"""Shared test set-up: `tests/` is importable (ranks.py, oracle), and every process computes on one thread."""

import os
import signal
import sys
from pathlib import Path

import hypothesis

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")
# A shell's background job ignores SIGINT and nohup's SIGHUP, and so would what is started here, as it should.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
