"""`python -m ppctl` and the `ppctl` entry point."""

from ppctl.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
