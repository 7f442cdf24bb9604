"""Adapters as rows of the table of parameters: what `model.lora` asks for, beside frozen weights.

Knows which modules get adapters and of which shapes. Must not know peft, which makes them on the ranks
(`foreign/adapters`), torch or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from ppctl.config.keys import value_text
from ppctl.geometry.foreign_model import Adapters, ForeignModel
from ppctl.geometry.rows import Parameter

_SETTINGS = {"dropout": ("0", "its draws would depend on the cut"), "bias": ("none", "biases are frozen")}
"""Settings of peft that have one value here: the value, and why."""
_WEIGHT = ".weight"
_FIRST, _SECOND = ".lora_A.weight", ".lora_B.weight"


MOST_RANK = 2**16
"""More than any model has columns."""


def read_adapters(given: Mapping[str, Any]) -> Adapters:
    """What `model.lora` says. Raises ValueError saying what is wrong."""
    lora = {name: value_text(value) for name, value in given.items()}
    for name, (only, why) in _SETTINGS.items():
        value = lora.get(name, only)
        if value != only and not (only == "0" and _number(name, value) == 0):
            raise ValueError(f"{name}={value} is refused, because {why}: model.lora.{name}={only}")
    unknown = [name for name in lora if name not in ("rank", "targets", "alpha", *_SETTINGS)]
    if unknown:
        raise ValueError(f"it has rank, targets and alpha, and nothing called {', '.join(unknown)}")
    missing = [name for name in ("rank", "targets") if not lora.get(name)]
    if missing:
        raise ValueError(f"it needs {' and '.join(missing)}")
    rank = _number("rank", lora["rank"])
    if not 1 <= rank <= MOST_RANK or not rank.is_integer():
        raise ValueError(f"rank={lora['rank']} is no whole number from 1 to {MOST_RANK}")
    targets = [word.strip(" '\"") for word in lora["targets"].strip("[] ").split(",")]
    if not all(targets):
        raise ValueError(f"targets={lora['targets']} names modules, and one of them is empty")
    return Adapters(int(rank), _number("alpha", lora.get("alpha", lora["rank"])), tuple(dict.fromkeys(targets)))


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value < 0:
        raise ValueError(f"{name}={text} is no number of 0 or more")
    return value


def with_adapters(foreign: ForeignModel, adapters: Adapters) -> ForeignModel:
    """The same model with its weights frozen and adapters in its decoder layers.

    Raises ValueError for a target that no layer has as a module with a matrix, or that stands outside the layers.
    """
    outside = [row.name for row in (*foreign.first, *foreign.last)]
    known = sorted({_module(row) for kind in foreign.kinds for row in kind.rows if len(row.shape) == 2} - {""})
    for target in adapters.targets:
        if target not in known or any(f".{name}".endswith(f".{target}{_WEIGHT}") for name in outside):
            raise ValueError(f"{target} is no module in the decoder layers; they have {', '.join(known)}")
    kinds = tuple(kind._replace(rows=tuple(_beside(kind.rows, adapters))) for kind in foreign.kinds)
    first, last = (tuple(map(_frozen, rows)) for rows in (foreign.first, foreign.last))
    trained = sum(row.size for number in foreign.layers for row in kinds[number].rows if row.gradient != "none")
    note = f"{trained:,} parameters of adapters of rank {adapters.rank} on {', '.join(adapters.targets)} are trained"
    notes = (*foreign.notes, f"{note}, all others are frozen")
    return foreign._replace(
        kinds=kinds, first=first, last=last, active=foreign.active + trained, notes=notes, adapters=adapters
    )


def is_adapter(name: str) -> bool:
    """Whether a canonical name is that of a part of an adapter."""
    return name.endswith((_FIRST, _SECOND))


def _beside(rows: tuple[Parameter, ...], adapters: Adapters) -> list[Parameter]:
    """The rows of a layer: every weight, frozen, with the two parts of its adapter behind it."""
    found = []
    for row in rows:
        found.append(_frozen(row))
        if len(row.shape) == 2 and _module(row) in adapters.targets:
            outputs, inputs = row.shape
            base = row.name.removesuffix(_WEIGHT)
            found.append(Parameter(base + _FIRST, (adapters.rank, inputs), "matrix", start="adapter"))
            found.append(Parameter(base + _SECOND, (outputs, adapters.rank), "matrix", start="zeros"))
    return found


def _frozen(row: Parameter) -> Parameter:
    return row._replace(gradient="none")


def _module(row: Parameter) -> str:
    """The last part of the name of the module whose weight it is; empty for other parameters."""
    return row.name.removesuffix(_WEIGHT).rpartition(".")[2] if row.name.endswith(_WEIGHT) else ""
