"""Reading a layout: a string through the grammar, a list by its names; every problem at once, with a remedy.

    layout := item*                                   stages stand between the bars; a stage may be empty
    item   := ( 'E' | 't' | 'm' | 'L' | '|' ) count?  |  '(' item+ ')' count+
    count  := '*' digits                              ASCII digits; 0 removes the item

Blanks and commas may stand between any two of these and mean nothing, except that they end a number: `t*1,0` is a
mistake, not ten layers. Parsing never raises: it records a mistake, repairs the text there and reads on, so that one
pass finds all mistakes and makes a repaired text. `rules` judges what the letters mean for a pipeline.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from itertools import islice
from math import prod
from typing import Any, NamedTuple

from ppctl.errors import LayoutError, Problem
from ppctl.layout.letters import (
    LETTERS,
    MAX_ITEMS,
    TYPES,
    LayerType,
    LayoutSource,
    ascii_digits,
    canonical_text,
    describe_unknown,
    lookalike,
)
from ppctl.layout.rules import mend

_ATOMS = "EtmL|"
_SEPARATORS = ", \t\n\r\v\f"
_DIGITS = "0123456789"
_KNOWN = _ATOMS + _SEPARATORS + "()*"
_MAX_DEPTH = 50

_NUMBER = re.compile(r"[0-9]+")
_PREFIXED = re.compile(r"([0-9]+)\*?([EtmL])(?![*0-9])")
_COUNT = re.compile(r"[, \t\n\r\v\f]*\*[, \t\n\r\v\f]*[0-9]+")
_NAME = re.compile("embedding|decoder|mtp|loss", re.IGNORECASE)
_LETTER_OF_NAME = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


class Mistake(NamedTuple):
    """One syntax error; columns count from 0 in the text as typed."""

    code: str
    message: str
    column: int
    edit: tuple[int, int, str] | None = None
    """(begin, end, text): a repair, which puts `text` in the place of these columns."""


class Parsed(NamedTuple):
    """A parsed text: its stages, the columns of their layers (and of each stage's end), and its mistakes. If there are
    mistakes, `stages` is what was understood, and `repaired` is the text with each mistake repaired in its place."""

    stages: tuple[str, ...]
    columns: tuple[tuple[int, ...], ...]
    mistakes: tuple[Mistake, ...]
    repaired: str


_Pieces = list[tuple[str, int]]
"""Letters and bars, each with its column."""


def parse_text(text: str) -> Parsed:
    """Parse a layout string. Never raises and never expands to more than `MAX_ITEMS` items."""
    parser = _LayoutParser(text)
    pieces = parser.items()
    stages = "".join(letter for letter, _ in pieces).split("|")
    columns = iter([*(column for _, column in pieces), len(text)])  # after a stage the column of its bar, or of the end
    places = tuple(tuple(islice(columns, len(stage) + 1)) for stage in stages)
    return Parsed(tuple(stages), places, tuple(parser.mistakes), parser.repaired())


class _LayoutParser:
    """Recursive descent over one text. Each method starts at `position` and moves it past the text it has read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.last_count_end = -1
        self.mistakes: list[Mistake] = []

    def repaired(self) -> str:
        """The text with all edits applied, blanks collapsed to one line."""
        pieces, position = [], 0
        for start, end, text in sorted(each.edit for each in self.mistakes if each.edit is not None):
            pieces += [self.text[position:start], text]
            position = max(position, end)
        return " ".join(("".join(pieces) + self.text[position:]).split())

    def mistake(self, code: str, message: str, column: int, edit: tuple[int, int, str] | None = None) -> None:
        self.mistakes.append(Mistake(code, message, column, edit))

    def peek(self) -> str:
        """The next character that is not a separator; empty at the end."""
        while self.position < len(self.text) and self.text[self.position] in _SEPARATORS:
            self.position += 1
        return self.text[self.position : self.position + 1]

    def items(self) -> _Pieces:
        """Parse items up to the end of the text or of the group."""
        pieces: _Pieces = []
        while (char := self.peek()) and not (char == ")" and self.depth):
            start = self.position
            more = self.item(char)
            pieces += more if self.fits(len(pieces) + len(more), start, (start, self.position, "")) else []
        return pieces

    def item(self, char: str) -> _Pieces:
        if name := _NAME.match(self.text, self.position):
            word = name[0].lower()
            message = f"names belong in lists; in a string {word} is the letter {_LETTER_OF_NAME[word]}"
            self.mistake("PP-E001", message, name.start(), (*name.span(), _LETTER_OF_NAME[word]))
            return self.atom(_LETTER_OF_NAME[word], len(word))
        if char in _ATOMS:
            return self.atom(char)
        if char == "(":
            return self.group()
        if char in _DIGITS:
            return self.stray_number()
        if char == "*":
            return self.stray_star()
        if char == ")":
            return self.stray_parenthesis()
        return self.unknown()

    def fits(self, size: int, column: int, edit: tuple[int, int, str]) -> bool:
        if size <= MAX_ITEMS:
            return True
        if not any(mistake.code == "PP-E008" for mistake in self.mistakes):
            message = f"the layout expands to {_shown(size)} layers and bars; the most is {MAX_ITEMS:,}"
            self.mistake("PP-E008", message, column, edit)
        return False

    # what the grammar allows

    def atom(self, letter: str, width: int = 1) -> _Pieces:
        start = self.position
        self.position += width
        return self.repeat([(letter, start)], self.counts(letter))

    def group(self) -> _Pieces:
        opening = self.position
        if self.depth == _MAX_DEPTH:
            self.mistake("PP-E009", f"groups are nested more than {_MAX_DEPTH} deep", opening)
            self.position = len(self.text)  # the rest cannot be judged
            return []
        self.position += 1
        self.depth += 1
        pieces = self.items()
        self.depth -= 1
        if self.peek() != ")":
            if not any(mistake.code == "PP-E009" for mistake in self.mistakes):
                self.mistake("PP-E006", "this `(` is never closed", opening, (opening, opening + 1, ""))
            return pieces
        empty = not self.text[opening + 1 : self.position].strip(_SEPARATORS)
        self.position += 1
        closing = self.position
        counts = self.counts(")")
        if empty:
            self.mistake("PP-E007", "this group is empty", opening, (opening, self.position, ""))
        elif not counts:
            message = "a group needs a count: `(…)*2`"
            self.mistake("PP-E007", message, closing - 1, (closing, closing, "*1"))
        return self.repeat(pieces, counts)

    def counts(self, counted: str) -> list[int]:
        """The counts after an atom or a group: at most one for an atom, any number (multiplied) for a group."""
        counts: list[int] = []
        if counted in "tm)" and self.text[self.position : self.position + 1] in tuple(_DIGITS):
            message = "a number needs a `*` before it"
            self.mistake("PP-E002", message, self.position, (self.position, self.position, "*"))
            counts.append(self.number())
        first = self.position
        while self.peek() == "*":
            star = self.position
            count = self.count()
            if count is None:
                continue
            counts.append(count)
            if len(counts) == 2 and counted != ")":
                message = f"a single item takes one count, not two: `{counted}*{_shown(prod(counts))}`"
                self.mistake("PP-E005", message, star, (first, self.position, f"*{prod(counts)}"))
        return counts

    def count(self) -> int | None:
        """One `*n`; None for a `*` that is followed by another."""
        star = self.position
        self.position += 1
        char = self.peek()
        if char and char in _DIGITS:
            return self.number()
        if char == "*":
            message = "one `*` is enough"
            self.mistake("PP-E004", message, self.position, (star, self.position, ""))
            return None
        start = self.position
        run = self.junk() if char and char not in _KNOWN else ""
        digits = ascii_digits(run)
        message = "a count is written in the digits 0 to 9" if digits else "`*` needs a count, such as `*3`"
        edit = (star, self.position, f"*{digits or 1}") if run else (star, star + 1, "*1")
        self.mistake("PP-E004", message, start if run else star, edit)
        self.last_count_end = self.position
        return 1

    def number(self) -> int:
        match = _NUMBER.match(self.text, self.position)
        digits = match[0].lstrip("0") if match else ""
        self.position += len(match[0]) if match else 0
        self.last_count_end = self.position
        # Python refuses to convert thousands of digits; a number of ten digits is above MAX_ITEMS anyhow
        return int(digits or "0") if len(digits) < 10 else 10**9

    def repeat(self, pieces: _Pieces, counts: list[int]) -> _Pieces:
        count = prod(counts)
        end = self.last_count_end
        start = end - len(_trailing_digits(self.text[:end]))
        if counts and not self.fits(len(pieces) * count, start, (start, end, "1")):
            return pieces
        return pieces * count

    # what the grammar does not allow: record it, repair it, read on

    def stray_number(self) -> _Pieces:
        start = self.position
        between = self.text[self.last_count_end : start] if self.last_count_end >= 0 else ""
        split = bool(between) and not between.strip(_SEPARATORS)
        before = _trailing_digits(self.text[: self.last_count_end]) if split else ""
        prefixed = _PREFIXED.match(self.text, start)
        end_of_count = self.last_count_end
        self.number()
        digits = self.text[start : self.position]
        if split:
            what = "a comma" if "," in between else "a blank"
            message = f"{what} ends a number: `{before}` and `{digits}` are two numbers here"
            self.mistake("PP-E002", message, start, (end_of_count, start, ""))
        elif prefixed:
            message = f"the count comes after what it repeats: `{prefixed[2]}*{prefixed[1]}`"
            edit = (start, prefixed.end(), f"{prefixed[2]}*{prefixed[1]}")
            self.mistake("PP-E002", message, start, edit)
            self.position = prefixed.end() - 1
        else:
            self.position += self.text.startswith("*", self.position)
            message = "a number needs something to repeat and a `*` before it"
            self.mistake("PP-E002", message, start, (start, self.position, ""))
        return []

    def stray_star(self) -> _Pieces:
        """Record a `*` that follows no item (PP-E003), and skip it with its digits; it stands for no layers."""
        start = self.position
        match = _COUNT.match(self.text, start)
        self.position = match.end() if match else start + 1
        message = "`*` has nothing before it to repeat"
        self.mistake("PP-E003", message, start, (start, self.position, ""))
        return []

    def stray_parenthesis(self) -> _Pieces:
        message = "this `)` closes nothing"
        self.mistake("PP-E006", message, self.position, (self.position, self.position + 1, ""))
        self.position += 1
        self.skip_count()
        return []

    def unknown(self) -> _Pieces:
        start = self.position
        run = self.junk()
        end = self.position
        meant = lookalike(run)
        self.skip_count()
        self.mistake("PP-E001", describe_unknown(run), start, (start, end if meant else self.position, meant))
        return []

    def junk(self) -> str:
        """A run of characters that no layout has, with the digits in it: `.5`, `×3`."""
        start = self.position
        while self.position < len(self.text) and self.text[self.position] not in _KNOWN:
            self.position += 1
        return self.text[start : self.position]

    def skip_count(self) -> None:
        if match := _COUNT.match(self.text, self.position):
            self.position = match.end()


def _shown(number: int) -> str:
    return f"{number:,}" if number < 10**9 else "more than 999,999,999"


def _trailing_digits(text: str) -> str:
    return text[len(text.rstrip(_DIGITS)) :]


_MOST_SHOWN = 20


def read_layout(
    layout: Any, key: str, pp: int | None = None, num_layers: int | None = None, mtp_num_layers: int | None = None
) -> tuple[tuple[str, ...], LayoutSource]:
    """The stages that a string or a list spells, and where they were written. Raises LayoutError with every mistake;
    the layout that it suggests is sound for `pp` ranks (None: one chunk per rank) and a model of these layers."""

    def nearest(stages: Sequence[str]) -> tuple[str, ...]:
        kept = tuple(stages) or ("",)
        fitting = mend(kept, pp or len(kept), num_layers, mtp_num_layers)
        return fitting or mend(kept, pp or 1) or mend(kept, 1) or ("EtL",)

    if isinstance(layout, str):
        parsed = parse_text(layout)
        source = LayoutSource(key, layout, parsed.columns)
        if parsed.mistakes:
            again = parse_text(parsed.repaired)
            mended = nearest(parsed.stages if again.mistakes else again.stages)
            is_sound = not again.mistakes and mended == again.stages
            remedy = source.override(parsed.repaired if is_sound else canonical_text(mended))
            raise LayoutError(_problems(parsed.mistakes, remedy, source))
        return parsed.stages, source
    source = LayoutSource(key)
    problems: list[Problem] = []
    stages = _read_rows(layout, source, problems)
    if problems:
        remedy = source.override(canonical_text(nearest(stages)))
        raise LayoutError(Problem(p.code, p.message, remedy, p.place) for p in problems)
    return stages, source


def _problems(mistakes: Sequence[Mistake], remedy: str, source: LayoutSource) -> list[Problem]:
    """The mistakes as problems with carets; of very many, the first ones and how many more there are."""
    shown, rest = mistakes[:_MOST_SHOWN], mistakes[_MOST_SHOWN:]
    problems = [Problem(each.code, each.message, remedy, source.caret(each.column)) for each in shown]
    if rest:
        problems.append(
            Problem(rest[0].code, f"and {len(rest):,} more mistakes from here on", remedy, source.caret(rest[0].column))
        )
    return problems


def _read_rows(layout: Any, source: LayoutSource, problems: list[Problem]) -> tuple[str, ...]:
    """The letters of each stage of a list; adds to `problems` what is wrong with it."""
    if not isinstance(layout, (list, tuple)):
        message = f"a layout is a string or a list with one list per stage, not {type(layout).__name__}"
        problems.append(Problem("PP-E010", message, place=source.key))
        return ()
    if not layout:
        problems.append(Problem("PP-E010", "a layout needs at least one stage", place=source.key))
    stages = []
    for stage, row in enumerate(layout):
        if isinstance(row, list):
            stages.append("".join(_read_layer(item, source.place(stage, i), problems) for i, item in enumerate(row)))
            continue
        message = f"every stage of a layout list is a list of layers, not {type(row).__name__}"
        problems.append(Problem("PP-E010", message, place=f"{source.place(stage)}: {row!r}"))
        stages.append(parse_text(row).stages[0] if isinstance(row, str) else "")
    if sum(map(len, stages)) + len(stages) - 1 > MAX_ITEMS:
        message = (
            f"the layout has {sum(map(len, stages)):,} layers in {len(stages):,} stages; the most is {MAX_ITEMS:,}"
        )
        problems.append(Problem("PP-E008", message, place=source.key))
        return ()
    return tuple(stages)


def _read_layer(item: Any, place: str, problems: list[Problem]) -> str:
    """The letter of one list entry: a member, its name (in any case, with blanks, as in Megatron) or a letter. For
    another entry adds to `problems`, and returns the letter that was probably meant, or an empty string."""
    if isinstance(item, str):
        word = item.strip()
        if word in TYPES and word != "e":
            return word
        if word.lower() in LayerType.__members__:
            return LETTERS[LayerType(word.lower())]
    message = f"{item!r} is not a layer: names are embedding, decoder, mtp and loss, letters E, t, m and L"
    problems.append(Problem("PP-E010", message, place=place))
    word = str(item).strip()
    close = difflib.get_close_matches(word.lower(), [*LayerType], n=1)
    return LETTERS[LayerType(close[0])] if close else lookalike(word) if word in (*"eTMl",) else ""
