"""The written side of a layout: its letters, carets under what was typed, remedies to paste, the canonical string.

Inside the layout modules a stage is a string of letters (`Ettt`), a layout a tuple of them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from ppctl.errors import pasted

MAX_ITEMS = 100_000
"""The most letters and bars that a layout may expand to: far above any model, far below what hurts memory."""

_WINDOW = 100  # columns of a long layout that are shown around a caret
_LONGEST_PERIOD = 8  # the canonical string looks for repeated groups of up to this many stages


_GRAMMAR = "EtmL|()*,0123456789 "
_LOOKALIKES = {
    **dict.fromkeys("e", "E"),
    **dict.fromkeys("TdD", "t"),
    **dict.fromkeys("M", "m"),
    **dict.fromkeys("l", "L"),
    **dict.fromkeys("[{", "("),
    **dict.fromkeys("]}", ")"),
    **dict.fromkeys(";/¦│", "|"),
    **dict.fromkeys("xX×", "*"),
}


class LayerType(StrEnum):
    """The kinds of layer that a layout places. Encoders exist in lists only, and validation refuses them."""

    embedding = "embedding"
    encoder = "encoder"
    decoder = "decoder"
    mtp = "mtp"
    loss = "loss"


LETTERS = {
    LayerType.embedding: "E",
    LayerType.encoder: "e",  # inside ppctl only: the grammar has no letter for it
    LayerType.decoder: "t",
    LayerType.mtp: "m",
    LayerType.loss: "L",
}
TYPES = {letter: layer_type for layer_type, letter in LETTERS.items()}


@dataclass(frozen=True, slots=True)
class LayoutSource:
    """The source of a layout: the key that the user typed and, for a string, the column of every layer.
    `columns[stage]` has one entry per layer and one more for the bar (or the end) that closes the stage. A list has no
    text; its places are paths such as `layout[2][0]`."""

    key: str
    text: str | None = None
    columns: tuple[tuple[int, ...], ...] = ()

    def place(self, stage: int, index: int | None = None) -> str:
        """The place of one layer, or of the end of a stage when `index` is None."""
        if self.text is None:
            return f"{self.key}[{stage}]" if index is None else f"{self.key}[{stage}][{index}]"
        return self.caret(self.columns[stage][-1 if index is None else index])

    def caret(self, column: int) -> str:
        """Two lines: the text as typed after its key, and a caret under `column`, counted from 0."""
        text = "".join(char if char.isprintable() else " " for char in self.text or "")
        first = max(0, column - _WINDOW // 2) if len(text) > _WINDOW else 0
        shown = text[first : first + _WINDOW]
        before = f"{self.key}: " + ("…" if first else "")
        after = "…" if first + _WINDOW < len(text) else ""
        return f"{before}{shown}{after}\n{' ' * (_width(before) + _width(text[first:column]))}^"

    def override(self, text: str) -> str:
        """`text` as this source's value, quoted so that it can be pasted into a shell."""
        if self.key.startswith("--"):
            return f"{self.key} {pasted(text)}"
        if self.key.isupper():  # a positional argument of the command line
            return pasted(text)
        return pasted(f"{self.key}={text}")

    def setting(self, name: str, value: int) -> str:
        """Another value of the same command: `pp=3`, or `--pp 3` if the layout is a positional argument."""
        if self.key.isupper():
            return f"--{name.rpartition('.')[2].replace('_', '-')} {value}"
        return f"{name}={value}"


def _width(text: str) -> int:
    """Columns that a terminal uses for `text`."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def stage_text(letters: str) -> str:
    """One stage, runs of three and more folded: `Ettt` is `Et*3`."""
    runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
    return "".join(letter * count if count < 3 else f"{letter}*{count}" for letter, count in runs)


def canonical_text(stages: Sequence[str]) -> str:
    """The one string that ppctl prints for these stages: short, without nesting, and read alike by Megatron."""
    words = [stage_text(stage) + "|" for stage in stages]
    words[-1] = words[-1][:-1]
    pieces, position = [], 0
    while position < len(words):
        text, used = _best_fold(words, position)
        pieces.append(text)
        position += used
    return "".join(pieces)


def _best_fold(words: Sequence[str], start: int) -> tuple[str, int]:
    """(text, number of `words` it covers): the repeated group at `start` that saves most letters, else one word."""
    best, used, saved = words[start], 1, 0
    for period in range(1, min(_LONGEST_PERIOD, (len(words) - start) // 2) + 1):
        body = words[start : start + period]
        end = start + period
        while words[end : end + period] == body:
            end += period
        plain = "".join(body)
        count = (end - start) // period
        folded = f"({plain})*{count}"
        if len(plain) * count - len(folded) > saved:
            best, used, saved = folded, end - start, len(plain) * count - len(folded)
    return best, used


def ascii_digits(run: str) -> str:
    """The ASCII digits of a number in other digits (full width, Arabic-Indic, ...); empty if `run` is no number."""
    values = [unicodedata.decimal(char, None) for char in run]
    return "" if None in values else "".join(map(str, values))


def lookalike(run: str) -> str:
    """The letter that a run of unknown characters was probably meant to be; empty if there is no guess."""
    meant = []
    for char in run:
        plain = unicodedata.normalize("NFKC", char)
        meant.append(plain if plain in _GRAMMAR else _LOOKALIKES.get(plain, ""))
    return "".join(meant) if meant[0].strip() else ""


def describe_unknown(run: str) -> str:
    """The message for a run of characters that no layout has."""
    char = run[0]
    shown = f"`{char}`" if "!" <= char <= "~" else f"U+{ord(char):04X} {unicodedata.name(char, '')}".rstrip()
    if char in "eTMl":
        return f"{shown} is no letter of a layout, but `{_LOOKALIKES[char]}` is: upper and lower case differ"
    return f"{shown} is not part of a layout; its letters are E (embedding), t (layer), m (MTP) and L (loss)"
