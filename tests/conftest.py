"""Shared test set-up: `tests/` is importable (ranks.py, oracle), and every process computes on one thread."""

import os
import signal
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
# A shell's background job is started with SIGINT ignored, and what it starts would ignore it, too, as it should.
signal.signal(signal.SIGINT, signal.default_int_handler)
