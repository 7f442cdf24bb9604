"""`--timeline FILE` of `plan`, `simulate` and `rehearse`: the picture of a step, in the form of the file's ending.

Knows names of files. Must not know what is drawn or how.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
from pathlib import Path

from ppctl.cli.console import PIPE_WIDTH, note
from ppctl.errors import ConfigError, Problem
from ppctl.files import write_atomically
from ppctl.schedule.picture import Picture
from ppctl.schedule.text_timeline import timeline_text

FORMS = {
    ".html": ("ppctl.schedule.page", "timeline_html"),
    ".json": ("ppctl.schedule.perfetto", "perfetto_json"),
    ".txt": ("ppctl.cli.timeline", "plain"),
}
"""A file's ending -> the function that draws it; its module is imported only when it is needed."""


def add_timeline_argument(parser: argparse.ArgumentParser, *other_names: str) -> None:
    """Declare --timeline, and other names of it."""
    shown = "draw the step into FILE: .html, .txt, or .json (Perfetto)"
    parser.add_argument("--timeline", *other_names, metavar="FILE", help=shown)


def plain(picture: Picture) -> str:
    """The drawing for a terminal, as wide as every block needs, and at most 2,000 columns."""
    busiest = max((sum(s.pp_rank == rank for s in picture.trace.spans) for rank in range(picture.trace.pp)), default=0)
    width = min(max(PIPE_WIDTH, 3 * busiest), 2000)
    return f"{picture.title}\n{picture.subtitle}\n\n{timeline_text(picture.trace, width)}"


def unwritable(path: Path) -> list[Problem]:
    """Why no picture can be written to this file (PP-E129), as far as it is known before there is one."""
    if path.suffix not in FORMS:
        message = f"--timeline {path}: a picture is one of {', '.join(FORMS)}"
        remedy = f"--timeline {shlex.quote(f'{path.parent / path.stem}.html')}" if path.stem else "--timeline step.html"
        return [Problem("PP-E129", message, remedy, "command line")]
    if not path.parent.is_dir():
        return [_unwritable(path, "there is no such directory")]
    return [] if os.access(path.parent, os.W_OK) else [_unwritable(path, "no permission to write in this directory")]


def _unwritable(path: Path, reason: str) -> Problem:
    message = f"the picture cannot be written to {path}: {reason}"
    return Problem("PP-E129", message, "--timeline step.html", "command line")


def write_timeline(picture: Picture, path: Path) -> None:
    """Write the picture, whole or not at all. Raises ConfigError (PP-E129) if it cannot be written."""
    problems = unwritable(path)
    if problems:
        raise ConfigError(problems)
    module, function = FORMS[path.suffix]
    try:
        write_atomically(path, getattr(importlib.import_module(module), function)(picture))
    except (OSError, ValueError) as error:
        raise ConfigError(_unwritable(path, getattr(error, "strerror", None) or str(error))) from None
    note(f"note: wrote {path}")
