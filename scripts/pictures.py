"""Pictures for the guides: `python scripts/pictures.py` writes docs/pictures/terminal.svg and trace-*.png anew.

The commands are really run: those of a terminal on a pseudo-terminal of 100 columns, so that colours and widths are
those of a person's; of a traced step headless Chromium takes the page at the widths of a screen and of a telephone.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "terminal.svg"
COLUMNS = 100
SCREENS = {1280: 600, 400: 900}
"""Pixels, width and height."""
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


def traced_pages() -> list[Path]:
    """The page of a measured step of the quickstart, above the step as it was planned, at the widths of `SCREENS`."""
    browser = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
    if browser is None:
        print("no Chromium: the pages of a traced step stay as they are")
        return []
    pictures = []
    with tempfile.TemporaryDirectory() as directory:
        _run(["train", "+recipe=quickstart", "steps=8", "log.trace=7:9"], directory)
        _run(["trace", "--step", "8", "--timeline", "step.html"], directory)
        for width, height in SCREENS.items():
            pictures.append(PICTURE.with_name(f"trace-{width}.png"))
            # Chromium's narrowest window is wider than a telephone: a frame of that width stands in it.
            frame = Path(directory, "frame.html")
            sizes = f"style='border:0;width:{width}px;height:{height}px'"
            frame.write_text(f"<body style='margin:0'><iframe src=step.html {sizes}></iframe>", encoding="utf-8")
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]
            shot = [f"--window-size={max(width, 500)},{height}", f"--screenshot={pictures[-1]}", frame.as_uri()]
            subprocess.run([browser, *flags, *shot], check=True, capture_output=True)
    return pictures


def _run(words: list[str], directory: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "ppctl", *words], cwd=directory, env=environment, check=True)


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
    for picture in (PICTURE, *traced_pages()):
        print(picture.relative_to(ROOT))
