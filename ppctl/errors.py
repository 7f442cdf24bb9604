"""The error tree. An error is one or more problems, each with a code, a message, a remedy and a place.

    PpctlError                      exit code 1
    ├── ConfigError                 2   the config, the command line or the environment contradict the rules
    │   ├── LayoutError             2   a layout string or list (also a ValueError)
    │   ├── ScheduleError           2   a schedule that is malformed or would hang (also a ValueError)
    │   └── DataError               2   data that cannot be read
    ├── CheckpointError             3   a checkpoint is missing or does not fit
    ├── MemoryPlanError             4   the memory plan does not fit the device
    └── TrainingError               1   a rank raised, died or met a non-finite number

Knows nothing of what the problems are about. `ppctl explain CODE` prints a code's page from `ppctl/pages/`.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass


def listed(names: Sequence[str], most: int = 20) -> str:
    """The text of a problem's many places: the first ones, and how many more there are."""
    return "\n".join([*names[:most], f"and {len(names) - most} more"] if len(names) > most else names)


def some(things: Iterable[object], most: int = 6, joint: str = ", ") -> str:
    """The first things in one line, and how many more there are."""
    texts = [str(thing) for thing in things]
    return joint.join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that end a line, move a terminal's cursor or turn the order of letters, and halves of surrogate pairs."""


_LONGEST = 2**13
"""The most characters of a message: it may repeat a file's value of megabytes."""


def visible(text: str, keep: str = "\n\t") -> str:
    """`text` with its control characters, except those in `keep`, as escapes such as \\x1b."""
    # From DEL on as JSON escapes: JSON leaves DEL as it is, and a printed object must stay JSON.
    return CONTROL.sub(lambda found: found[0] if found[0] in keep else _escape(ord(found[0])), text)


def _escape(number: int) -> str:
    return f"\\x{number:02x}" if number < 0x7F else f"\\u{number:04x}"


def pasted(*words: object) -> str:
    """Words of a remedy quoted for a shell, also with blanks, quotes and control characters, in one line."""
    return " ".join(map(_quoted, map(str, words)))


def pip_install(package: str) -> str:
    """The remedy for a package, or an extra such as `ppctl[lora]`, that this Python lacks."""
    return f"{pasted(sys.executable)} -m pip install {pasted(package)}"


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)  # noqa: TID251  here alone: all else calls `pasted`
    body = "".join(f"\\{each}" if each in "\\'" else each if each.isprintable() else _octal(each) for each in word)
    return f"$'{body}'"


def _octal(letter: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in letter.encode(errors="surrogateescape"))


def remedy_lines(remedy: str) -> list[str]:
    """The lines of a remedy in a problem's text: one alternative per line, the best first."""
    return [f"  {'or' if number else 'try':>3}: {way}" for number, way in enumerate(remedy.splitlines())]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem, described so that the reader can solve it.

    `code` is `PP-Exxx`; `message` has the rule and the values that break it; `remedy` is something to type that works;
    `place` is a key and its source, a file and line, or a string with a caret under it, in several lines.
    """

    code: str
    message: str
    remedy: str = ""
    place: str = ""

    def __str__(self) -> str:
        message = visible(self.message, "")  # no line of a message can pose as a remedy
        lines = [f"{self.code}: {message if len(message) <= _LONGEST else f'{message[:_LONGEST]}...'}"]
        lines += ["  " + line for line in visible(self.place).splitlines()]
        return "\n".join(lines + remedy_lines(visible(self.remedy)))

    def to_json(self) -> dict[str, str]:
        """The problem as `ppctl plan --json` prints it."""
        return asdict(self)


class PpctlError(Exception):
    """Base of all errors that ppctl raises on purpose: problems, and the exit code of the process."""

    exit_code = 1

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[PpctlError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)  # pickled by its problems, not by its text


class ConfigError(PpctlError):
    """The configuration, the command line or the environment contradict the rules."""

    exit_code = 2


class LayoutError(ConfigError, ValueError):
    """A pipeline layout that cannot be parsed or does not fit the model or the pipeline."""


class ScheduleError(ConfigError, ValueError):
    """A schedule that is malformed, incomplete or would hang."""


class DataError(ConfigError):
    """Training data that is missing, empty or unreadable."""


class CheckpointError(PpctlError):
    """A checkpoint that is missing, damaged or does not fit the model."""

    exit_code = 3


class MemoryPlanError(PpctlError):
    """The planned peak memory is more than the device has."""

    exit_code = 4


class TrainingError(PpctlError):
    """Training failed: a rank raised, died of a signal, or met a non-finite loss or gradient norm."""
