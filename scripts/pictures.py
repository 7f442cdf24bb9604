"""Records ppctl in a terminal: `python scripts/pictures.py` writes docs/pictures/terminal.svg anew.

The commands are really run, on a pseudo-terminal of 100 columns, so that colours and widths are those of a person's.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "terminal.svg"
COLUMNS = 100
COMMANDS = ("ppctl plan +recipe=quickstart pp=4 vpp=1", "ppctl train +recipe=quickstart pp=4 optim.lrr=1e-3")


def recorded(command: str) -> str:
    """What `command` writes on a terminal, stdout and stderr together."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, COLUMNS))
    words = [sys.executable, "-m", *command.split()]
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=ROOT):
        os.close(theirs)
        parts = []
        while part := _read(ours):
            parts.append(part)
    os.close(ours)
    return b"".join(parts).decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux's way to say that the other end is closed
        return b""


def svg(commands: tuple[str, ...] = COMMANDS) -> str:
    """A picture of a terminal in which `commands` were typed; it refers to nothing outside."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    for command in commands:
        console.print(Text("$ ", "green").append(command, "bold"))
        console.print(Text.from_ansi(recorded(command)))
    drawn = console.export_svg(title="ppctl", unique_id="ppctl")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL).replace("Fira Code, ", "")


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))
