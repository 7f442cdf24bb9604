"""What `ppctl doctor --model DIR` says: how a model's own code was proved to run in stages.

Knows what is shown of a description. Must not know how it is made or kept.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppctl.cli.console import print_problems
from ppctl.errors import PpctlError
from ppctl.families.directory import read_config_file
from ppctl.geometry.foreign_model import ForeignModel
from ppctl.launch.described import Description, describe
from ppctl.launch.weights import unread_weights

_WIDTH, _INDENT = 80, " " * 9


def prove(directory: Path, *, anew: bool, as_json: bool) -> int:
    """Prove it, or find that it was proved, and print. 0 proved, else the exit code of what stands against it."""
    try:
        overrides = dict[str, str]()
        try:
            found = describe(directory, overrides, anew=anew)
        except PpctlError as error:
            overrides = _without_dropout(error)
            found = describe(directory, overrides, anew=anew)
    except PpctlError as error:
        print_problems(error.problems)
        if as_json:
            print(json.dumps({"wrong": [problem.message for problem in error.problems]}))
        return error.exit_code
    told = _told(found, directory, overrides)
    print(json.dumps(told, indent=1) if as_json else "\n".join(_lines(told)))
    return 0


def _without_dropout(error: PpctlError) -> dict[str, str]:
    """The fields that the problem of a model with dropout sets to 0. Raises `error` if it is another one."""
    problem, *others = error.problems
    if others or problem.code != "PP-E529":
        raise error
    return {word.partition("=")[0].rpartition(".")[2]: "0" for word in problem.remedy.split()}


def _told(found: Description, directory: Path, overrides: Mapping[str, str]) -> dict[str, Any]:
    model = ForeignModel.from_text(found.text)
    anatomy = model.anatomy
    return {
        "model_type": json.loads(model.config)["model_type"],
        "transformers": model.transformers,
        "layers": {"name": anatomy.layers, "number": anatomy.count},
        "before_layers": list(anatomy.first),
        "behind_layers": list(anatomy.last),
        "tied": anatomy.tied,
        "stages": list(model.stages),
        "gradients": model.gradients,
        "dropout": {name: read_config_file(directory).get(name) for name in overrides},
        "notes": [*model.notes, *unread_weights(directory)],
        "kept": None if found.kept is None else str(found.kept),
        "wrong": [],
    }


def _lines(told: Mapping[str, Any]) -> list[str]:
    layers, tied = told["layers"], ", whose weights are tied" if told["tied"] else ""
    rows = [
        ("layers", f"{layers['name']}, {layers['number']}"),
        ("before", ", ".join(told["before_layers"])),
        ("behind", f"{', '.join(told['behind_layers'])}{tied}"),
        ("tried", " | ".join(told["stages"])),
        ("equal", f"to the bit: all hidden states, the loss and {told['gradients']} gradients, in float32"),
        *(("note", note) for note in told["notes"]),
    ]
    if told["dropout"]:
        keys = " ".join(f"model.hf_overrides.{name}=0" for name in told["dropout"])
        rows.append(("dropout", f"its draws would depend on the cut; tried, and to be trained, with {keys}"))
    if told["kept"]:
        rows.append(("cached", f"{told['kept']}; ppctl doctor --model DIR --anew proves it again"))
    head = f"{told['model_type']} can be cut into stages, by transformers {told['transformers']}"
    lines = [
        textwrap.wrap(
            f"{name:<9}{text}", _WIDTH, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
        )
        for name, text in rows
    ]
    return [head, "", *(line for each in lines for line in each)]
