"""One value as Hydra's grammar needs it: text is quoted, so that it stays what was typed; sweeps are recognised.

Knows quotes, brackets and commas, and which keys take text. Must not know flags or aliases.
"""

from __future__ import annotations

import re

from ppctl.config.keys import keys, mapping_with

_SWEEP = re.compile(r"(?:choice|range|interval|glob|sort|shuffle|tag)\((.*)\)", re.DOTALL)
_RANGE = re.compile(r"range\(((?: *-?[0-9]{1,4} *,?){1,3})\)")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def _is_verbatim(key: str) -> bool:
    """Whether the value is taken letter by letter (layouts, paths, environment variables, any free value)."""
    info = keys().get(key)
    if info is None:
        return mapping_with(key) is not None
    return info.facts.verbatim or (info.is_container and not info.is_dtype)


def quote(key: str, value: str) -> str:
    """`value` as Hydra's grammar needs it: text is quoted, unless it is already, or null, or a list or mapping."""
    text, info = value.strip(), keys().get(key)
    is_text = "." in key and info is not None and info.is_text
    if not (is_text or _is_verbatim(key)) or text in ("", "null") or _is_quoted(text):
        return value
    has_lists = info is not None and info.is_container and not info.facts.verbatim
    if has_lists and (_is_literal(text) or text.lstrip("+-").isdigit()):
        return value
    body = re.sub(r"(\\*)'", lambda match: match[1] * 2 + "\\'", value)
    body += "\\" * (len(body) - len(body.rstrip("\\")))
    return f"'{body}'"


def unquoted(value: str) -> str:
    """The inverse of `quote`, for quoted text."""
    body = re.sub(r"(\\*)\\'", lambda match: match[1][::2] + "'", value[1:-1])
    ends = len(body) - len(body.rstrip("\\"))
    return body[: len(body) - ends // 2]


def _is_quoted(text: str) -> bool:
    return (
        len(text) > 1
        and text[0] == text[-1]
        and text[0] in "'\""
        and text[0] not in text[1:-1].replace("\\" + text[0], "")
    )


def _is_literal(text: str) -> bool:
    """Whether the brackets around `text` are one list or mapping (and not, say, `[0]*3+[1]`)."""
    if text[:1] + text[-1:] not in ("[]", "{}"):
        return False
    depth = 0
    for column, letter in enumerate(text):
        depth += _BRACKETS.get(letter, 0)
        if depth == 0:
            return column == len(text) - 1
    return False


def sweep_values(key: str, value: str) -> list[str] | None:
    """The values of a sweep (`1,2,3`, `choice(a,b)`, `range(1,4)`), or None where `value` is one value."""
    text = value.strip()
    if _is_verbatim(key) or _is_quoted(text):
        return None
    numbers = _RANGE.fullmatch(text)
    if numbers is not None:
        return _range(numbers[1])
    function = _SWEEP.fullmatch(text)
    if function is not None:
        return [item for item in _split(function[1]) if "=" not in item]
    values = _split(text)
    return values if len(values) > 1 else None


def _range(text: str) -> list[str]:
    """Hydra's `range(start, stop, step)` of whole numbers."""
    bounds = [int(part) for part in text.split(",") if part.strip()]
    if len(bounds) == 3 and bounds[2] == 0:
        bounds.pop()
    return list(map(str, range(*bounds)))


def _split(text: str) -> list[str]:
    """`text` cut at its outermost commas."""
    parts, depth, quote_mark = [""], 0, ""
    for letter in text:
        if quote_mark:
            quote_mark = "" if letter == quote_mark else quote_mark
        elif letter in "'\"":
            quote_mark = letter
        depth += _BRACKETS.get(letter, 0)
        if letter == "," and depth == 0 and not quote_mark:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
