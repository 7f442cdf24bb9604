"""A process that imports a rank's program, and becomes a rank once it is told its number: no start waits for imports.

python -m ppctl.rank.standby ppctl.rank.worker NICE

Its parent alone has the other end of the pipe on stdin and writes there once, as JSON: `variables`, the program's
`arguments`, the `log` for stderr and, unless it `prints`, stdout. If the pipe ends without JSON, the process ends.
Until then it uses no GPU and opens no socket. Variables that count at an interpreter's start are there from the start.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from threading import Thread


def main() -> None:
    """Import, wait, and run the program, which ends this process."""
    importing = Thread(target=_import, args=sys.argv[1:], daemon=True)
    importing.start()
    with open(0, "rb", closefd=False) as pipe:
        if not (text := pipe.read()):
            os._exit(0)
    told = json.loads(text)
    with open(os.devnull) as nothing, open(told["log"], "ab") as log:
        os.dup2(nothing.fileno(), 0)  # for what the rank starts
        for descriptor in (2,) if told["prints"] else (1, 2):
            os.dup2(log.fileno(), descriptor)
    importing.join()  # first: libraries in C read variables while they are loaded
    os.environ.update(told["variables"])
    importlib.import_module(sys.argv[1]).run(told["arguments"])  # raises the thread's exception


def _import(program: str, nice: str) -> None:
    if sys.platform == "linux":  # on Linux it counts for this thread alone: no user may raise a priority again
        os.nice(int(nice))
    importlib.import_module(program)


if __name__ == "__main__":
    main()
