"""Shared test set-up: `tests/` is importable (ranks.py, oracle), and every process computes on one thread."""

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
