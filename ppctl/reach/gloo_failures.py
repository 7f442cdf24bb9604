"""What gloo's failures mean: its exceptions in words for people."""

from __future__ import annotations

import re

_LIKELY = (
    (r"closed by peer|reset by peer|broken pipe", "the other end closed the connection"),
    (r"refused", "the connection was refused"),
    (r"no route|unreachable", "there is no route to it"),
    (r"timed? ?out", "nothing answered in time"),
)


def in_words(error: BaseException) -> str:
    """What a failure of gloo's means, with the address that it names; its own text where it is an unusual one."""
    text = next(iter(str(error).splitlines()), type(error).__name__)
    why = next((why for pattern, why in _LIKELY if re.search(pattern, text, re.IGNORECASE)), None)
    if why is None:
        return text
    remote = re.search(r"\[([0-9a-fA-F.:]+)\]:(\d+)", text)
    return why + (f" ({remote[1]} port {remote[2]})" if remote else "")
