"""Amounts as people write them: times such as `11h50m`, SLURM's `2-12:00:00`, memory as `80GiB`, `10T tokens`."""

from __future__ import annotations

import re

_WORDS = re.compile(r"(?=[0-9])(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?", re.ASCII)
_SLURM = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", re.ASCII)
_MEMORY = re.compile(r"([0-9]{1,18}(?:\.[0-9]+)?) ?(KiB|MiB|GiB|TiB|KB|MB|GB|TB|B)?", re.ASCII)
_TOKENS = re.compile(r"([0-9]{1,18}(?:\.[0-9]+)?(?:e[0-9]{1,2})?) ?([KMBT]?) ?tokens", re.ASCII)
_STEPS = re.compile(r"([1-9][0-9]{0,11}):([1-9][0-9]{0,11})", re.ASCII)
_ROLLBACK = re.compile(r"rollback:([1-9][0-9]{0,8})", re.ASCII)
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def seconds(text: str) -> int:
    """Seconds of `11h50m`, `90s`, `1d`. Raises ValueError for anything else, zero included."""
    match = _WORDS.fullmatch(text.strip())
    total = _sum(match.groups()) if match else 0
    if total <= 0:
        raise ValueError(f"{text!r} is not a length of time: days, hours, minutes and seconds, as 11h50m")
    return total


def slurm_seconds(text: str) -> int | None:
    """Seconds of `30` or `30:00` (minutes), `12:00:00`, `2-12` or `2-12:00:00` (days); None for UNLIMITED. Raises
    ValueError."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _SLURM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a time limit of SLURM's: minutes, 12:00:00 or 2-12:00:00")
    days, first, second, third = match.groups()
    if days is not None:  # D-HH[:MM[:SS]]
        return _sum((days, first, second, third))
    if third is not None:  # HH:MM:SS
        return _sum((None, first, second, third))
    return _sum((None, None, first, second))  # MM[:SS]


def _sum(parts: tuple[str | None, ...]) -> int:
    return sum(int(part or 0) * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=True))


def memory_bytes(text: str) -> int:
    """Bytes of `80GiB`, `141 GB`, `1024`. Raises ValueError for anything else."""
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not an amount of memory: a number and a unit, as 80GiB")
    return int(float(match[1]) * _UNITS[match[2] or "B"])


def activations(limit: float | str, unit: float = 1.0) -> float:
    """Bytes of `60GiB`, or of a multiple of `unit` bytes. Raises ValueError if not above 0, or a multiple above 8."""
    size = memory_bytes(limit) if isinstance(limit, str) else limit * unit
    if not 0 < size < float("inf") or (not isinstance(limit, str) and limit > 8):
        raise ValueError(f"{limit} is not above 0, or is a multiple above 8")
    return size


def tokens(text: str) -> float:
    """The number of `10T tokens`, `500B tokens`, `1e9 tokens`. Raises ValueError for anything else."""
    match = _TOKENS.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is not a number of tokens, as 10T tokens")
    return float(match[1]) * {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]]


MOST_STEPS = 100
"""The most steps of a range: every action of every rank in them is kept."""


def steps_of(text: str) -> range:
    """The steps of `10:12`, 10 and 11. Raises ValueError for any other text, an empty range or too many steps."""
    match = _STEPS.fullmatch(text)
    steps = range(0) if match is None else range(int(match[1]), int(match[2]))
    if not 0 < len(steps) <= MOST_STEPS:
        raise ValueError(f"{text!r} is not a range of 1 to {MOST_STEPS} steps, as 3:5 for steps 3 and 4")
    return steps


def rollback_of(text: str) -> int:
    """The steps of `rollback:100`; 0 for `stop` and `skip`. Raises ValueError for anything else."""
    match = _ROLLBACK.fullmatch(text)
    if match is None and text not in ("stop", "skip"):
        raise ValueError(f"{text!r} is not stop, skip or a number of steps to go back, as rollback:100")
    return 0 if match is None else int(match[1])
