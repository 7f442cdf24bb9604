"""Trackers of runs beside metrics.jsonl, as launcher and ranks speak of them."""

from __future__ import annotations

import sys

from ppctl.errors import Problem, pasted


def not_installed(key: str) -> Problem:
    """The problem (PP-E704) of a tracker that the switch `key` turns on, without its package."""
    package = key.partition(".")[2]
    remedy = f"{pasted(sys.executable)} -m pip install {package}"
    return Problem("PP-E704", f"{key} is on and {package} is not installed", remedy, key)
