"""`python -m ppctl.foreign DIR`: whether a model directory can be cut into stages; what `ppctl doctor --model` starts.

With `--describe OUT` the value that plans and stages read goes to that file, or what is wrong with the directory: what
`model.from=DIR` starts (`ppctl/launch/described.py`).

Knows the command line and what it prints. Must not know how a proof is made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppctl.errors import PpctlError
from ppctl.foreign.describe import describe, proved
from ppctl.foreign.library import read_own_config
from ppctl.foreign.proof import drops_of
from ppctl.geometry.foreign_model import Adapters


def main(argv: Sequence[str] | None = None) -> int:
    """Prove and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ppctl.foreign")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--describe", type=Path, metavar="OUT")
    parser.add_argument("--overrides", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--adapters", type=json.loads, metavar="JSON")
    args = parser.parse_args(argv)
    if args.describe is not None:
        args.describe.write_text(_described(args.directory, args.overrides, args.adapters), encoding="utf-8")
        return 0
    try:
        found = _examine(args.directory)
    except PpctlError as error:
        for problem in error.problems:
            print(f"error {problem}", file=sys.stderr)
        if args.json:
            print(json.dumps({"wrong": [problem.message for problem in error.problems]}))
        return error.exit_code
    print(json.dumps(found, indent=1) if args.json else "\n".join(_lines(found)))
    return 0


def _described(directory: Path, overrides: Mapping[str, str], adapters: Sequence[Any] | None) -> str:
    """JSON: the description as text, or the problems."""
    try:
        asked = None if adapters is None else Adapters.from_list(adapters)
        return json.dumps({"model": describe(directory, overrides, asked).to_text()})
    except PpctlError as error:
        return json.dumps({"problems": [problem.to_json() for problem in error.problems]})


def _examine(directory: Path) -> dict[str, Any]:
    """What the proof found. Raises ConfigError (PP-E528) for a model that cannot be cut, and as `read_own_config`."""
    config = read_own_config(directory)
    proof = proved(config, directory)
    anatomy = proof.anatomy
    return {
        "model_type": config.model_type,
        "layers": {"name": anatomy.layers, "number": anatomy.count},
        "before_layers": list(anatomy.first),
        "behind_layers": list(anatomy.last),
        "tied": anatomy.tied,
        "stages": list(proof.stages),
        "gradients": proof.gradients,
        "dropout": drops_of(config),
        "wrong": [],
    }


def _lines(found: dict[str, Any]) -> list[str]:
    layers, tied = found["layers"], ", whose weights are tied" if found["tied"] else ""
    lines = [
        f"{found['model_type']} can be cut into stages",
        "",
        f"layers   {layers['name']}, {layers['number']}",
        f"before   {', '.join(found['before_layers'])}",
        f"behind   {', '.join(found['behind_layers'])}{tied}",
        f"tried    {' | '.join(found['stages'])}",
        f"equal    to the bit: all hidden states, the loss and {found['gradients']} gradients, in float32",
    ]
    if found["dropout"]:
        values = ", ".join(f"{name}={value}" for name, value in found["dropout"].items())
        lines.append(f"dropout  tried with 0 in place of {values}: its draws would depend on the cut")
    return lines


if __name__ == "__main__":
    sys.exit(main())
