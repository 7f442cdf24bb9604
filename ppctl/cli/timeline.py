"""`--timeline FILE` of `plan`, `simulate` and `rehearse`: the picture of a step, in the form of the file's ending."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

from ppctl.cli.console import PIPE_WIDTH, note
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.host.files import write_atomically
from ppctl.schedule.picture import Picture
from ppctl.schedule.text_timeline import timeline_text
from ppctl.schedule.trace import step_time

FORMS = {
    ".html": ("ppctl.schedule.drawings", "timeline_html"),
    ".json": ("ppctl.schedule.drawings", "perfetto_json"),
    ".txt": ("ppctl.cli.timeline", "plain"),
}
"""A file's ending -> the function that draws a picture; its module is imported only when it is needed."""


def add_timeline_argument(parser: argparse.ArgumentParser, *other_names: str) -> None:
    """Declare --timeline, and other names of it."""
    shown = "draw the step into FILE: .html, .txt, or .json (Perfetto)"
    parser.add_argument("--timeline", *other_names, metavar="FILE", help=shown)


def plain(picture: Picture) -> str:
    """The drawing for a terminal, as wide as every block needs, and at most 2,000 columns."""
    busiest = max((sum(s.pp_rank == rank for s in picture.trace.spans) for rank in range(picture.trace.pp)), default=0)
    width = min(max(PIPE_WIDTH, 3 * busiest), 2000)
    head = f"{picture.title}\n{picture.subtitle}\n\n"
    if picture.planned is None:
        return head + timeline_text(picture.trace, width)
    longest = max(map(step_time, (picture.trace, picture.planned)))
    return f"{head}measured\n{timeline_text(picture.trace, width, longest)}\nplanned\n" + timeline_text(
        picture.planned, width, longest
    )


def unwritable(path: Path) -> list[Problem]:
    """The problem (PP-E129) of a file to which no picture can be written, as far as this is known before writing."""
    if path.suffix not in FORMS:
        message = f"--timeline {path}: its name must end in one of {', '.join(FORMS)}"
        name = pasted(f"{path.parent / path.stem}.html") if path.stem else "step.html"
        return [Problem("PP-E129", message, f"--timeline {name}", "command line")]
    reason = obstacle(path)
    return [_unwritable(path, reason)] if reason else []


def obstacle(path: Path) -> str:
    """Why this file cannot be written, as far as this is known before writing; else an empty text."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return "it is no regular file, but would be replaced by one"
    if not path.parent.is_dir():
        return "there is no such directory"
    return "" if os.access(path.parent, os.W_OK) else "no permission to write in this directory"


def _unwritable(path: Path, reason: str) -> Problem:
    message = f"the picture cannot be written to {path}: {reason}"
    remedy_path = f"step{path.suffix}" if os.access(".", os.W_OK) else f'"$(mktemp -d)/step{path.suffix}"'
    return Problem("PP-E129", message, f"--timeline {remedy_path}", "command line")


def write_timeline(drawn: Picture, path: Path) -> None:
    """Write a picture, whole or not at all. Raises ConfigError (PP-E129) if it cannot be written."""
    problems = unwritable(path)
    if problems:
        raise ConfigError(problems)
    module, function = FORMS[path.suffix]
    try:
        write_atomically(path, getattr(importlib.import_module(module), function)(drawn))
    except (OSError, ValueError) as error:
        raise ConfigError(_unwritable(path, getattr(error, "strerror", None) or str(error))) from None
    note(f"note: wrote {path}")
