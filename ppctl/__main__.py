"""`python -m ppctl` and the `ppctl` entry point."""

import gc
from collections.abc import Sequence

from ppctl.cli.main import main as command_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own) and return its exit code."""
    code = command_line(argv)
    gc.freeze()  # without it Python searches a whole plan for reference cycles before it exits
    return code


if __name__ == "__main__":
    raise SystemExit(main())
