"""Adapters as rows of the table of parameters: those of `model.lora`, beside frozen weights.

`foreign/peft_adapters` makes them, and knows the modules of a model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from math import isfinite
from typing import Any

from ppctl.config.keys import value_text
from ppctl.config.metadata import MOST_STAGES
from ppctl.errors import pasted
from ppctl.geometry.foreign_model import Adapters
from ppctl.geometry.rows import Parameter

_OURS = {"r": "rank", "target_modules": "targets", "lora_alpha": "alpha", "layers_to_transform": "layers"}
_OURS |= {"lora_dropout": "dropout"}
"""peft's names -> ours."""
_OTHERS = {name: f"its name here is {ours}" for name, ours in _OURS.items()} | {
    "target_parameters": "only weights of modules have adapters here",
    "use_dora": "adapters have no magnitudes here",
    "use_rslora": "adapters are scaled by alpha / rank here",
    "rank_pattern": "all adapters have one rank here",
    "alpha_pattern": "all adapters have one alpha here",
    "exclude_modules": "targets are named one by one here",
    "init_lora_weights": "adapters start as peft's gaussian",
}
"""peft's other settings -> why they are fixed here."""
_FIRST, _SECOND = ".lora_A.weight", ".lora_B.weight"
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)

MOST_RANK = 2**16
"""More columns than any model has."""
_EXAMPLES = {"rank": "16", "targets": "[q_proj,v_proj]", "alpha": "16", "layers": "[0]", "dropout": "0.1"}
_EXAMPLES |= {"modules_to_save": "[lm_head]", "bias": "none"}
"""Every key of `model.lora`, with an example of its value."""


class WrongAdapters(ValueError):
    """Refuses a value of `model.lora`; `remedy` has the words to type instead."""

    def __init__(self, message: str, **values: str) -> None:
        super().__init__(message)
        self.remedy = pasted(*(f"model.lora.{name}={value}" for name, value in values.items()))


def read_adapters(given: Mapping[str, Any]) -> Adapters:
    """The adapters that `model.lora` asks for; a null key counts as absent. Raises WrongAdapters."""
    lora = {name: value_text(value) for name, value in given.items() if value_text(value) != "null"}
    if (bias := lora.get("bias", "none")) != "none":
        raise _wrong("bias", f"bias={bias} is refused, because biases are frozen: model.lora.bias=none")
    unknown = [name for name in lora if name not in _EXAMPLES]
    if unknown:
        known = [f"peft's {name} ({_OTHERS[name]})" if name in _OTHERS else name for name in unknown]
        ours = {_OURS[name]: lora[name] for name in unknown if name in _OURS and _OURS[name] not in lora}
        message = f"it has {', '.join(_EXAMPLES)}, but nothing called {', '.join(known)}"
        raise WrongAdapters(message, **dict.fromkeys(unknown, "null"), **ours)
    missing = [name for name in ("rank", "targets") if not lora.get(name)]
    if missing:
        raise WrongAdapters(f"it needs {' and '.join(missing)}", **{name: _EXAMPLES[name] for name in missing})
    rank = _number("rank", lora["rank"])
    if not 1 <= rank <= MOST_RANK or not rank.is_integer():
        raise _wrong("rank", f"rank={lora['rank']} is no whole number from 1 to {MOST_RANK}")
    dropout = _number("dropout", lora.get("dropout", "0"))
    if dropout >= 1:
        raise _wrong("dropout", f"dropout={lora['dropout']} is no number from 0 to below 1")
    targets, layers = _modules("targets", lora), _layers(lora["layers"]) if "layers" in lora else ()
    saved = _modules("modules_to_save", lora) if "modules_to_save" in lora else ()
    return Adapters(int(rank), _number("alpha", lora.get("alpha", lora["rank"])), targets, layers, dropout, saved)


def _modules(name: str, lora: Mapping[str, str]) -> tuple[str, ...]:
    words = _words(lora[name])
    if not all(words):
        raise _wrong(name, f"{name}={lora[name]} {'has an empty name' if any(words) else 'names no module'}")
    return tuple(dict.fromkeys(words))


def _wrong(name: str, message: str) -> WrongAdapters:
    return WrongAdapters(message, **{name: _EXAMPLES[name]})


def _words(text: str) -> list[str]:
    return [word.strip(" '\"") for word in text.strip("[] ").split(",")]


def _layers(text: str) -> tuple[int, ...]:
    """The indexes of layers in a text such as `[0,4-7]`, where a range includes both ends. Raises WrongAdapters."""
    chosen: set[int] = set()
    for word in _words(text):
        match = _RANGE.fullmatch(word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < MOST_STAGES:
            what = f"{word} is no layer" if word else "one entry is empty" if text.strip("[] ") else "none is named"
            raise _wrong("layers", f"layers={text}: decoder layers are named from 0 on, as [0,4-7], but {what}")
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value < 0:
        raise _wrong(name, f"{name}={text} is no number of 0 or more")
    return value


def is_adapter(name: str) -> bool:
    """Whether a canonical name is that of a part of an adapter."""
    return name.endswith((_FIRST, _SECOND))


def trained_whole(name: str, adapters: Adapters) -> bool:
    """Whether the parameter or buffer with this canonical name is in a module whose path ends with one of
    `modules_to_save`, letter by letter as in peft."""
    around = [name[: dot.start()] for dot in re.finditer(r"\.", name)]
    return any(path.endswith(adapters.modules_to_save) for path in around)


def with_adapters(
    rows: Iterable[Parameter], made: Mapping[str, tuple[int, ...]], whole: Collection[str] = ()
) -> tuple[Parameter, ...]:
    """The rows of a layer: every weight, frozen unless it is in `whole`, followed by the two parts of its adapter, if
    any. `made` are the shapes of all parts of adapters in the layer, by name."""
    parameters = []
    for row in rows:
        parameters.append(row if row.name in whole else frozen(row))
        for part, start in ((_FIRST, "adapter"), (_SECOND, "zeros")):
            name = row.name.removesuffix(".weight") + part
            if row.name.endswith(".weight") and name in made:
                parameters.append(Parameter(name, made[name], "matrix", start=start))  # type: ignore[arg-type]
    return tuple(parameters)


def frozen(row: Parameter) -> Parameter:
    """The row of a parameter that is not trained."""
    return row._replace(gradient="none")
