"""`ppctl ckpt`: look at checkpoints, verify, compare, average, prune and convert them.

Commands that make new weights start `python -m ppctl.pretrained.command`, which prints its own problems.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppctl.checkpoint.manifest import Manifest, read_manifest
from ppctl.checkpoint.run_state import run_state
from ppctl.checkpoint.verification import bytes_of_values, examine, misfits, misplaced, with_sizes
from ppctl.cli import ckpt_text
from ppctl.cli.console import UNFOLDED, byte_progress, print_problems, prose, width
from ppctl.cli.main import parse_overrides
from ppctl.cli.runs import DTYPES, above_0, add_runs_directory
from ppctl.errors import CheckpointError, ConfigError, Problem, pasted
from ppctl.families.directory import read_config_file
from ppctl.host.processes import python
from ppctl.runs import checkpoint_folder
from ppctl.runs.finding import find_checkpoint, find_run
from ppctl.runs.run_starts import at_rest
from ppctl.runs.rundir import RunDir

if TYPE_CHECKING:
    from ppctl.config.schema import ModelConfig, RunConfig

DIFFERENT, BROKEN = 1, 3
_SHOWN_TENSORS = 20
_IMPLEMENTATION, _OVERRIDES = "model.implementation", "model.hf_overrides."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    one = "a checkpoint, or a run: its last one"

    inspect = actions.add_parser("inspect", help="show what is in a checkpoint, or list those of a run")
    words = "a checkpoint, a run, or a directory of checkpoints (default: the newest run)"
    inspect.add_argument("path", nargs="?", metavar="PATH", help=words)
    inspect.add_argument("--tensors", action="store_true", help="list all tensors, too")

    verify = actions.add_parser("verify", help="check every byte; exit 3 if something is wrong")
    verify.add_argument("path", metavar="PATH", help=one)
    verify.add_argument("--quick", action="store_true", help="check only sizes, headers and the manifest's seal")

    diff = actions.add_parser("diff", help="compare two checkpoints of any cut; exit 1 if they differ")
    for name in ("A", "B"):
        diff.add_argument(name.lower(), metavar=name, help=one)
    words = f"show the first N tensors that differ (default: {_SHOWN_TENSORS}; 0: all)"
    diff.add_argument("--limit", type=int, default=_SHOWN_TENSORS, metavar="N", help=words)

    average = actions.add_parser("average", help="write the mean of the weights of checkpoints")
    average.add_argument("paths", nargs="+", metavar="PATH", help=one)
    average.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory")

    prune = actions.add_parser("prune", help="delete old checkpoints of a run that is not running")
    prune.add_argument("path", metavar="PATH", help="a run, or a directory of checkpoints")
    prune.add_argument("--keep", type=above_0(int, 10**9), required=True, metavar="N", help="keep the last N")
    words = "also keep those of every M-th step"
    prune.add_argument("--keep-every", type=above_0(int, 10**9), default=0, metavar="M", help=words)
    words = "also keep the K with the lowest eval_loss (default: 1)"
    prune.add_argument("--keep-best", type=int, default=1, metavar="K", help=words)
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")

    _add_converters(actions)

    for each in (inspect, verify, diff, average, prune):
        add_runs_directory(each)
    for each in (inspect, verify, diff, prune):
        each.add_argument("--json", action="store_true", help="print one JSON object")
    words = "comes last: check if a run with these KEY=VALUE would load it, by names, shapes, dtypes and optimizer"
    verify.add_argument("--for", dest="overrides", nargs=argparse.REMAINDER, metavar="KEY=VALUE", help=words)


def run(args: argparse.Namespace) -> int:
    """Do one action. Exit codes: 0 done; 1 for `diff` if something differs; 2 usage, a wrong family or output
    directory, a run that has not ended; 3 a checkpoint that is missing, damaged or does not fit."""
    try:
        return _ACTIONS[args.action](args)
    except OSError as error:
        if error.filename is None:  # an error of a stream, such as a closed standard output
            raise
        raise checkpoint_folder.unreadable(Path(error.filename), error) from error


# Looking


def _inspect(args: argparse.Namespace) -> int:
    folder = _folder(args.path, args.dir, args.typed)
    if folder is None:
        path = Path(args.path).absolute()
        shown = ckpt_text.contents(checkpoint_folder.at(path) or path)
        text = ckpt_text.described(shown, tensors=args.tensors)
        if not args.tensors:
            del shown["tensors"]
    else:
        shown = ckpt_text.listing(folder)
        text = ckpt_text.listed(shown)
    print(json.dumps(shown, indent=1) if args.json else text)
    return 0


def _folder(text: str | None, root: Path, typed: Sequence[str] = ("runs", "show")) -> Path | None:
    """The directory of checkpoints that `text` names, or without `text` the newest run's; None for one checkpoint.
    `typed` is as for `find_run`."""
    if text is None:
        return find_run(None, root).checkpoints
    path = Path(text).absolute()
    if checkpoint_folder.at(path) is not None:
        return None
    for each in (path, path / "checkpoints"):
        if checkpoint_folder.kept(each):
            return each
    if path.exists():
        return path if path.name == "checkpoints" else None
    return find_run(text, root, typed).checkpoints


def _verify(args: argparse.Namespace) -> int:
    """Print what is damaged in a checkpoint, or does not fit the overrides; returns the exit code."""
    wanted = None if args.overrides is None else _planned_config(args.overrides)
    path = find_checkpoint(args.path, args.dir, "ckpt verify")
    manifest = read_manifest(path)
    total = 0 if args.quick else bytes_of_values(manifest)
    try:
        with byte_progress("verifying", total) as progress:
            examined = examine(path, manifest, values=not args.quick, progress=progress)
    except OSError as error:
        raise checkpoint_folder.unreadable(path, error) from error
    problems, position = list(examined.problems), None
    if wanted is not None:
        unfit, position = _unfit(path, manifest, wanted)
        problems += unfit
    report = {
        "path": str(path),
        "step": manifest.step,
        "tensors": len(manifest.tensors),
        "files": len(manifest.files),
        "quick": args.quick,
        "bytes_read": examined.read,
        "loadable": None if wanted is None else not problems,
        "position": position,
        "problems": [problem.to_json() for problem in problems],
    }
    print(json.dumps(report, indent=1) if args.json else ckpt_text.verified(report))
    print_problems(problems)
    return BROKEN if problems else 0


def _unfit(path: Path, manifest: Manifest, config: RunConfig) -> tuple[list[Problem], int | None]:
    """(why a run with this config cannot load the checkpoint, after how many samples it would go on; None: not known).
    A checkpoint of weights alone is checked as a run's first weights. Whether data changed is not checked."""
    from ppctl.launch.weights import checkpoint_tensors

    try:
        state = run_state(path, manifest)
    except CheckpointError:
        return [], None  # the problem is among those of the files
    only = bool(state.get("weights_only"))
    kinds = {name: {kind} for name, kind in checkpoint_tensors(config, optimizer=not only).items()}
    for name in kinds.keys() & manifest.tensors.keys() if only else ():
        # values are cast to the saved dtype
        kinds[name] = {(shape, manifest.tensors[name].dtype) for shape, _ in kinds[name]}
    problems = with_sizes(misfits(path, manifest, kinds), state.get("model", {}), asdict(config.model))
    return problems + ([] if only else misplaced(path, state, config, None)), state.get("consumed_samples")


def _diff(args: argparse.Namespace) -> int:
    paths = [find_checkpoint(text, args.dir, "ckpt diff") for text in (args.a, args.b)]
    compared = ckpt_text.compared_on_screen(paths, "comparing")
    report = ckpt_text.comparison(paths, compared)
    print(
        json.dumps(report, indent=1) if args.json else prose(ckpt_text.differences(report, args.limit), width(UNFOLDED))
    )
    return 0 if compared.same else DIFFERENT


# Deleting


def _prune(args: argparse.Namespace) -> int:
    """Delete the checkpoints that are not to be kept, and print them; returns the exit code."""
    folder = _folder(args.path, args.dir)  # no remedy may offer to delete another run's checkpoints
    if folder is None:
        message = f"{args.path} is a single checkpoint, not a run or a directory of checkpoints"
        parent = Path(args.path).absolute().parent
        raise ConfigError(Problem("PP-E105", message, f"ppctl ckpt prune {pasted(parent)} --keep {args.keep}"))
    with at_rest(RunDir(folder.parent)):
        kept = checkpoint_folder.complete(folder)
        needed = _needed(folder, checkpoint_folder.usable(folder))
        last = max(map(checkpoint_folder.step_of, kept))
        old = checkpoint_folder.expired(folder, last, args.keep, args.keep_every, args.keep_best)
        doomed = [path for path in old if path not in needed]
        sizes = {path: ckpt_text.brief(path)["bytes"] for path in doomed}
        try:
            for path in [] if args.dry_run else doomed:
                checkpoint_folder.remove(path)
        except OSError as error:
            message = f"{folder} cannot be changed: {error.strerror}"
            raise CheckpointError(Problem("PP-E505", message, f"ls -ld {pasted(folder)}", str(folder))) from error
    report = {
        "path": str(folder),
        "dry_run": args.dry_run,
        "deleted": [path.name for path in doomed],
        "kept": [path.name for path in kept if path not in doomed],
        "bytes": sum(size or 0 for size in sizes.values()),
        "good": needed[0].name,
    }
    print(json.dumps(report, indent=1) if args.json else ckpt_text.pruned(report))
    return 0


def _needed(folder: Path, checkpoints: Sequence[Path]) -> list[Path]:
    """The checkpoints that no `--keep` deletes: the newest undamaged one of the usable `checkpoints`, and the one from
    which a start goes on. Raises CheckpointError (PP-E530) if none of them is good."""
    for path in reversed(checkpoints):
        try:
            if not examine(path, values=False).problems:
                named = checkpoint_folder.find(folder)
                return [path, *([] if named is None else [named.path])]
        except CheckpointError:
            continue
    message = f"none of the {len(checkpoints)} checkpoints in {folder} is good, so nothing is deleted"
    remedy = f"ppctl ckpt verify {pasted(checkpoints[-1])}" if checkpoints else f"ls -l {pasted(folder)}"
    raise CheckpointError(Problem("PP-E530", message, remedy, str(folder)))


# Converting, in a process with torch


def _add_converters(actions: Any) -> None:
    """Declare `import` and `export`."""
    importing = actions.add_parser("import", help="make a checkpoint from other programs' weights")
    exporting = actions.add_parser("export", help="write weights for other programs")
    _add_formats(importing, "DIR", "a Hugging Face directory: config.json and safetensors")
    _add_formats(exporting, "RUN", "for transformers; RUN is a run, or one of its checkpoints")
    importing.add_argument("out", type=Path, metavar="OUT", help="a new directory")
    exporting.add_argument("out", type=Path, metavar="DIR", help="a new directory")
    exporting.add_argument("--dtype", choices=DTYPES, help="the dtype of the new weights (default: as they were saved)")
    for each in (importing, exporting):
        each.add_argument("--no-mtp", action="store_true", help="leave out multi-token prediction")
    words = "comes last: with --dcp or --torch-dist the model, as for ppctl plan; with --hf whose code runs it ("
    words += f"{_IMPLEMENTATION}, {_OVERRIDES}FIELD)"
    importing.add_argument("--for", dest="overrides", nargs=argparse.REMAINDER, metavar="KEY=VALUE", help=words)
    add_runs_directory(exporting)


def _add_formats(parser: argparse.ArgumentParser, metavar: str, words: str) -> None:
    formats = parser.add_mutually_exclusive_group(required=True)
    formats.add_argument("--hf", metavar=metavar, help=words)
    formats.add_argument("--dcp", metavar=metavar, help="torchtitan's Llama: torch's distributed checkpoint")
    formats.add_argument("--torch-dist", metavar=metavar, help="a GPT model of Megatron-core: torch_dist")


def _average(args: argparse.Namespace) -> int:
    """Write the mean of the weights of checkpoints."""
    sources = [find_checkpoint(text, args.dir, "ckpt average") for text in args.paths]
    return _convert("average", *sources, args.out)


def _import(args: argparse.Namespace) -> int:
    """Make a checkpoint from other programs' weights."""
    name, source = _format(args)
    options = ["--format", name, *["--no-mtp"] * args.no_mtp]
    if name != "hf":
        model: ModelConfig | None = _planned_config(args.overrides or ()).model
        model = replace(model, mtp_num_layers=None) if args.no_mtp and model is not None else model
    else:
        model = _described(source, args.overrides or ())
    options += [] if model is None else ["--model", json.dumps(asdict(model))]
    return _convert("import", source, args.out, *options)


def _described(source: str, words: Sequence[str]) -> ModelConfig | None:
    """The model of a Hugging Face directory if transformers' code builds it; None if ppctl's own blocks do. `words` may
    choose the code and set fields of config.json. Raises ConfigError (PP-E105) for other words."""
    from ppctl.config.keys import keys
    from ppctl.config.schema import ModelConfig
    from ppctl.launch.weights import model_values

    read_config_file(Path(source))  # a checkpoint, which `model.from` may also be, is refused here
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


def _export(args: argparse.Namespace) -> int:
    """Write weights for other programs."""
    name, text = _format(args)
    source = find_checkpoint(text, args.dir, f"ckpt export --{name.replace('_', '-')}")
    options = ["--format", name, *["--no-mtp"] * args.no_mtp, *(["--dtype", args.dtype] if args.dtype else [])]
    return _convert("export", source, args.out, *options)


def _format(args: argparse.Namespace) -> tuple[str, str]:
    return next((name, value) for name in ("hf", "dcp", "torch_dist") if (value := getattr(args, name)) is not None)


def _convert(action: str, *words: object) -> int:
    """Run the process that converts, with its sources, the output and options, to its end; returns its exit code."""
    command = [*python("ppctl.pretrained.command"), action, *map(str, words)]
    return subprocess.run(command, check=False).returncode


def _planned_config(words: Sequence[str]) -> RunConfig:
    """The config that these overrides make. Raises ConfigError with all problems of its plan except memory problems."""
    from ppctl.launch.planning import planned, without_memory

    parser = argparse.ArgumentParser(prog="ppctl ckpt verify PATH --for", add_help=False, allow_abbrev=False)
    parser.add_argument("--recipes-dir", action="append")
    composed, _, problems = planned(parse_overrides(parser, "ckpt verify PATH --for", words).line)
    if problems := without_memory(problems):
        raise ConfigError(problems)
    return composed.config


_ACTIONS = {
    "inspect": _inspect,
    "verify": _verify,
    "diff": _diff,
    "average": _average,
    "prune": _prune,
    "import": _import,
    "export": _export,
}
