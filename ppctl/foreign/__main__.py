"""`python -m ppctl.foreign DIR OUT`: what plans and stages read of a model directory, or what is wrong with it: JSON.

What `model.from=DIR` and `ppctl doctor --model DIR` start (`ppctl/launch/described.py`). Knows the command line and the
form of the answer. Must not know how a model is described.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppctl.errors import PpctlError
from ppctl.foreign.describe import describe
from ppctl.geometry.foreign_model import Adapters


def main(argv: Sequence[str] | None = None) -> int:
    """Write the answer into a file; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m ppctl.foreign")
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--overrides", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--adapters", type=json.loads, metavar="JSON")
    args = parser.parse_args(argv)
    args.out.write_text(_described(args.directory, args.overrides, args.adapters), encoding="utf-8")
    return 0


def _described(directory: Path, overrides: Mapping[str, str], adapters: Sequence[Any] | None) -> str:
    """JSON: the description as text, or the problems."""
    try:
        asked = None if adapters is None else Adapters.from_list(adapters)
        return json.dumps({"model": describe(directory, overrides, asked).to_text()})
    except PpctlError as error:
        return json.dumps({"problems": [problem.to_json() for problem in error.problems]})


if __name__ == "__main__":
    sys.exit(main())
