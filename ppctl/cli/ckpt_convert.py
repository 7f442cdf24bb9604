"""`ppctl ckpt import | export | average`: checkpoints made from other checkpoints, in a process with torch."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppctl.cli.main import parse_overrides
from ppctl.cli.runs import add_runs_directory
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.families.directory import read_config_file
from ppctl.host.processes import python
from ppctl.runs.finding import find_checkpoint

if TYPE_CHECKING:
    from ppctl.config.schema import ModelConfig, RunConfig

DTYPES = ("float64", "float32", "bfloat16", "float16")
_IMPLEMENTATION, _OVERRIDES = "model.implementation", "model.hf_overrides."


def add_parsers(actions: Any) -> None:
    """Declare `import` and `export`."""
    importing = actions.add_parser("import", help="make a checkpoint of other programs' weights")
    exporting = actions.add_parser("export", help="write weights for other programs")
    _add_formats(importing, "DIR", "a Hugging Face directory: config.json and safetensors")
    _add_formats(exporting, "RUN", "for transformers; RUN is a run, or one of its checkpoints")
    importing.add_argument("out", type=Path, metavar="OUT", help="a new directory")
    exporting.add_argument("out", type=Path, metavar="DIR", help="a new directory")
    exporting.add_argument("--dtype", choices=DTYPES, help="of the new weights (default: as they were saved)")
    for each in (importing, exporting):
        each.add_argument("--no-mtp", action="store_true", help="leave out multi-token prediction")
    words = "the last option: the model as ppctl plan takes it (--dcp, --torch-dist); whose code runs it (--hf: "
    words += f"{_IMPLEMENTATION}, {_OVERRIDES}FIELD)"
    importing.add_argument("--for", dest="overrides", nargs=argparse.REMAINDER, metavar="KEY=VALUE", help=words)
    add_runs_directory(exporting)


def _add_formats(parser: argparse.ArgumentParser, metavar: str, words: str) -> None:
    formats = parser.add_mutually_exclusive_group(required=True)
    formats.add_argument("--hf", metavar=metavar, help=words)
    formats.add_argument("--dcp", metavar=metavar, help="torchtitan's Llama: torch's distributed checkpoint")
    formats.add_argument("--torch-dist", metavar=metavar, help="a GPT model of Megatron-core: torch_dist")


def average(args: argparse.Namespace) -> int:
    """Write the mean of the weights of checkpoints."""
    sources = [find_checkpoint(text, args.dir, "ckpt average") for text in args.paths]
    return _convert("average", *sources, args.out)


def import_(args: argparse.Namespace) -> int:
    """Make a checkpoint of other programs' weights."""
    name, source = _format(args)
    options = ["--format", name, *["--no-mtp"] * args.no_mtp]
    if name != "hf":
        model: ModelConfig | None = planned_config(args.overrides or ()).model
        model = replace(model, mtp_num_layers=None) if args.no_mtp and model is not None else model
    else:
        model = _described(source, args.overrides or ())
    options += [] if model is None else ["--model", json.dumps(asdict(model))]
    return _convert("import", source, args.out, *options)


def _described(source: str, words: Sequence[str]) -> ModelConfig | None:
    """The model of a Hugging Face directory whose code is transformers'; None of one that ppctl's own blocks build.
    `words` may say whose code it is and set fields of its config.json; others are refused (PP-E105)."""
    from ppctl.config.keys import keys
    from ppctl.config.schema import ModelConfig
    from ppctl.launch.weights import model_values

    read_config_file(Path(source))  # `model.from` may be a checkpoint, which is no model directory
    implementation, overrides = "auto", dict[str, str]()
    for word in words:
        key, equals, value = word.partition("=")
        if key == _IMPLEMENTATION and keys()[key].allows(value):
            implementation = value
        elif key.startswith(_OVERRIDES) and equals and len(key) > len(_OVERRIDES):
            overrides[key.removeprefix(_OVERRIDES)] = value
        else:
            message = f"--for {word}: the config.json of a Hugging Face directory describes the model"
            remedy = f"ppctl ckpt import --hf {pasted(source)} OUT --for {_IMPLEMENTATION}=transformers"
            raise ConfigError(Problem("PP-E105", message, remedy, "command line"))
    values = dict(model_values(source, implementation, overrides))
    given = {"implementation": implementation, "hf_overrides": overrides}
    return None if values.get("transformers") is None else ModelConfig(**values | given)


def export(args: argparse.Namespace) -> int:
    """Write weights for other programs."""
    name, text = _format(args)
    source = find_checkpoint(text, args.dir, f"ckpt export --{name.replace('_', '-')}")
    options = ["--format", name, *["--no-mtp"] * args.no_mtp, *(["--dtype", args.dtype] if args.dtype else [])]
    return _convert("export", source, args.out, *options)


def _format(args: argparse.Namespace) -> tuple[str, str]:
    return next((name, value) for name in ("hf", "dcp", "torch_dist") if (value := getattr(args, name)) is not None)


def _convert(action: str, *words: object) -> int:
    """Start what converts: its sources, the output, then options."""
    command = [*python("ppctl.pretrained.command"), action, *map(str, words)]
    return subprocess.run(command, check=False).returncode


def planned_config(words: Sequence[str]) -> RunConfig:
    """The config that these overrides make. Raises ConfigError with all problems of its plan but those of memory."""
    from ppctl.launch.planning import planned, without_memory

    parser = argparse.ArgumentParser(prog="ppctl ckpt verify PATH --for", add_help=False, allow_abbrev=False)
    parser.add_argument("--recipes-dir", action="append")
    composed, _, problems = planned(parse_overrides(parser, "ckpt verify PATH --for", words).line)
    if problems := without_memory(problems):
        raise ConfigError(problems)
    return composed.config
