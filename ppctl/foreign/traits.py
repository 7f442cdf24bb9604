"""What tells layers of one model apart: the classes of their modules, and the plain values that these hold.

Knows modules. Must not know what any value means: a window, a type of attention and a switch for rotations are all
found, because layers differ in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ppctl.geometry.foreign_model import Anatomy
from ppctl.geometry.rows import Parameter

Traits = tuple[tuple[str, str], ...]
"""(Where in a layer, what is there), of that in which layers differ."""

_SHOWN = 3
"""Values in the name of a kind."""


def traits_of(model: nn.Module, anatomy: Anatomy) -> list[Traits]:
    """By layer, in what it differs from others. What numbers the layers tells nothing: it differs in all of them."""
    found = [_values(model.get_submodule(anatomy.layer(index))) for index in range(anatomy.count)]
    places = dict.fromkeys(place for values in found for place in values)
    telling = [place for place in places if _tells([values[place] for values in found if place in values], len(found))]
    return [tuple((place, str(values[place])) for place in telling if place in values) for values in found]


def _values(layer: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, module in layer.named_modules():
        found[path or "layer"] = type(module).__name__
        for name, value in vars(module).items():
            if not name.startswith("_") and (value is None or isinstance(value, bool | int | float | str)):
                found[f"{path}.{name}" if path else name] = value
    return found


def _tells(values: Sequence[Any], layers: int) -> bool:
    """Whether layers differ in this place, which so many of them have, and not as layers that are counted do."""
    different = len(set(values))
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    numbered = numbers and different == len(values) > 1
    return not numbered and (different > 1 or len(values) < layers)


def training_of(layers: Sequence[Sequence[Parameter]]) -> list[Traits]:
    """By layer, what its backward is, where weights are frozen: none before the first layer that has something to
    train, in that one no gradient of its input, and behind it that alone in layers with nothing to train."""
    trained = [any(row.gradient != "none" for row in rows) for rows in layers]
    first = trained.index(True)
    found: list[Traits] = []
    for index, own in enumerate(trained):
        backward = "none" if index < first else "of its weights" if index == first else "" if own else "of its input"
        found.append((("backward", backward),) if backward else ())
    return found


def names_of(kinds: Sequence[Traits]) -> list[str]:
    """A name for each kind: what it has that another one has not. Empty where there is one kind."""
    if len(kinds) < 2:
        return [""] * len(kinds)
    shared = set.intersection(*map(set, kinds))
    return [_name({place: value for place, value in kind if (place, value) not in shared}) for kind in kinds]


def _name(values: Mapping[str, str]) -> str:
    """The few that say most: names of types before switches before numbers, and nothing within what differs itself."""
    order = sorted(values, key=lambda place: (not _is_word(values[place]), place.count("."), len(place)))
    outer = [place for place in order if not any(place.startswith(f"{other}.") for other in values)]
    return ", ".join(f"{place}={values[place]}" for place in outer[:_SHOWN])


def _is_word(value: str) -> bool:
    return value not in ("True", "False", "None") and not value.replace(".", "").replace("-", "").isdigit()
