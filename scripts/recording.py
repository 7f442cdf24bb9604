"""A person's session in a terminal as an animated SVG: `python scripts/recording.py` writes docs/pictures/run.svg anew.

The commands are really run on a pseudo-terminal, which a terminal emulator (pyte) reads; what it shows is drawn row by
row, each different row once. A frame is shown for as long as it stood, but at most `LONGEST` seconds.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

import pyte

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "run.svg"
COLUMNS, ROWS = 96, 26
LONGEST = 1.2
"""Seconds for which a frame is shown at most."""
SHORTEST = 0.1
"""Seconds between frames: what changes sooner is one frame."""
LAST = 5.0
"""Seconds for which the last frame is shown."""
WIDE, HIGH = 8.4, 18
"""A character's size in the picture, in pixels, at a font size of 14."""

Row = tuple[tuple[str, str, bool], ...]
"""Runs of text of one colour and weight."""
COLOURS = {
    "default": "#d4d4d4",
    "black": "#666666",
    "red": "#f14c4c",
    "green": "#23d18b",
    "brown": "#e5e510",
    "blue": "#3b8eea",
    "magenta": "#d670d6",
    "cyan": "#29b8db",
    "white": "#e5e5e5",
}


@dataclass(frozen=True)
class Typed:
    """A command, and the text on the screen upon which Ctrl-C is pressed (never, by default)."""

    command: str
    interrupt_at: str | None = None


SESSION = (
    Typed("ppctl train +recipe=quickstart steps=60", interrupt_at=r"step +2[0-9] of 60"),
    Typed("ppctl resume pp=4 vpp=1 steps=30"),
    Typed("ppctl status"),
)


class Recorder:
    """A terminal, and the frames that it has shown, each with the moment at which it appeared."""

    def __init__(self) -> None:
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self.frames: list[tuple[float, tuple[Row, ...]]] = []

    def show(self, data: bytes) -> None:
        """Let the terminal read `data`."""
        self._stream.feed(data)
        now = time.monotonic()
        if self.frames and now - self.frames[-1][0] < SHORTEST:
            now = self.frames.pop()[0]
        self.frames.append((now, tuple(map(self._row, range(ROWS)))))

    def text(self) -> str:
        """What stands on the screen."""
        return "\n".join(self._screen.display)

    def _row(self, number: int) -> Row:
        cells = [self._screen.buffer[number][column] for column in range(COLUMNS)]
        runs = groupby(cells, key=lambda cell: (cell.fg, cell.bold))
        row = [("".join(cell.data for cell in run), fg, bold) for (fg, bold), run in runs]
        return tuple(row) if any(text.strip() for text, _, _ in row) else ()


def play(session: tuple[Typed, ...], directory: Path) -> Recorder:
    """Type and run the commands of `session` in `directory`."""
    recorder = Recorder()
    for typed in session:
        recorder.show(b"\x1b[32m$\x1b[0m ")
        for letter in typed.command:
            recorder.show(letter.encode())
            time.sleep(0.03)
        time.sleep(0.5)
        recorder.show(b"\r\n")
        _run(typed, recorder, directory)
    recorder.show(b"\x1b[32m$\x1b[0m ")
    return recorder


def _run(typed: Typed, recorder: Recorder, directory: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
    own_path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    with subprocess.Popen(
        typed.command.split(),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "PATH": own_path},
        cwd=directory,
        preexec_fn=own_terminal,
    ):
        os.close(theirs)
        interrupted = typed.interrupt_at is None
        while data := _read(ours):
            recorder.show(data)
            if not interrupted and re.search(typed.interrupt_at or "", recorder.text()):
                os.write(ours, b"\x03")
                interrupted = True
    os.close(ours)


def _read(terminal: int) -> bytes:
    select.select([terminal], [], [])
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux's way to say that the other end is closed
        return b""


def svg(frames: list[tuple[float, tuple[Row, ...]]]) -> str:
    """`frames`, one below another behind a window that moves from one to the next."""
    numbers: dict[Row, int] = {}
    for _, frame in frames:
        for row in frame:
            numbers.setdefault(row, len(numbers))
    ends = [moment for moment, _ in frames[1:]]
    shown = [min(LONGEST, end - start) for (start, _), end in zip(frames, ends, strict=False)] + [LAST]
    width, height = round(COLUMNS * WIDE) + 24, ROWS * HIGH + 24
    whole, at, steps = sum(shown), 0.0, []
    for number, seconds in enumerate(shown):
        steps.append(f"{at / whole:.3%}{{transform:translateY({-number * height}px)}}")
        at += seconds
    style = (
        "text{font:14px ui-monospace,Menlo,Consolas,monospace;white-space:pre}.b{font-weight:bold}"
        + f"#film{{animation:film {whole:.1f}s steps(1,end) infinite}}@keyframes film{{{''.join(steps)}}}"
    )
    rows = "".join(f'<g id="r{number}">{_drawn(row)}</g>' for row, number in numbers.items() if row)
    film = "".join(
        f'<use href="#r{numbers[row]}" y="{number * height + 12 + line * HIGH}"/>'
        for number, (_, frame) in enumerate(frames)
        for line, row in enumerate(frame)
        if row
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<title>ppctl in a terminal</title><style>{style}</style><defs>{rows}</defs>"
        f'<rect width="100%" height="100%" rx="6" fill="#1e1e1e"/><g id="film">{film}</g></svg>\n'
    )


def _drawn(row: Row) -> str:
    parts, column = [], 0
    for text, fg, bold in row:
        if text.strip():
            colour = COLOURS.get(fg.removeprefix("bright"), f"#{fg}")
            kind = ' class="b"' if bold else ""
            x = f"{12 + column * WIDE:.1f}"
            parts.append(f'<text{kind} fill="{colour}" x="{x}" y="14">{escape(text.rstrip())}</text>')
        column += len(text)
    return "".join(parts)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ppctl-") as directory:
        PICTURE.write_text(svg(play(SESSION, Path(directory)).frames), encoding="utf-8")
    print(PICTURE.relative_to(ROOT), f"{PICTURE.stat().st_size / 1024:.0f} KiB")
