"""`python -m ppctl` and the `ppctl` entry point."""

import gc
from collections.abc import Sequence

from ppctl.cli.main import main as command_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, the process's own if none is given; returns its exit code."""
    code = command_line(argv)
    gc.freeze()  # nothing is left to do: without it Python looks through a whole plan for cycles before it ends
    return code


if __name__ == "__main__":
    raise SystemExit(main())
