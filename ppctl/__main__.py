"""`python -m ppctl` and the `ppctl` entry point."""

import gc

from ppctl.cli.main import main as command_line


def main() -> int:
    """Run the process's own command line; returns its exit code."""
    code = command_line()
    gc.freeze()  # nothing is left to do: without it Python looks through a whole plan for cycles before it ends
    return code


if __name__ == "__main__":
    raise SystemExit(main())
