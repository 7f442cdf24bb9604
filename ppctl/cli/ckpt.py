"""`ppctl ckpt`: look at checkpoints, verify, compare, average, prune and convert them.

Knows the arguments, where a checkpoint is found, and in which order its parts are asked. Must not know torch: what
makes new weights is `python -m ppctl.pretrained`, which is started here and prints its own problems.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ppctl import checkpoint_folder
from ppctl.checkpoint.manifest import Manifest, read_manifest, read_state
from ppctl.checkpoint.verification import bytes_of_values, examine, misfits, misplaced, with_sizes
from ppctl.cli import ckpt_text
from ppctl.cli.console import UNFOLDED, byte_progress, print_problems, width
from ppctl.cli.table import prose
from ppctl.errors import CheckpointError, ConfigError, Problem, pasted
from ppctl.families.directory import read_config_file
from ppctl.run_starts import at_rest
from ppctl.rundir import RunDir
from ppctl.runs import find_checkpoint, find_run

if TYPE_CHECKING:
    from ppctl.config.schema import ModelConfig, RunConfig

DTYPES = ("float64", "float32", "bfloat16", "float16")
DIFFERENT, BROKEN = 1, 3
_IMPLEMENTATION, _OVERRIDES = "model.implementation", "model.hf_overrides."
_SHOWN = 20
"""Tensors that `diff` shows by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    one = "a checkpoint, or a run: its last one"

    inspect = actions.add_parser("inspect", help="show what is in a checkpoint, or list those of a run")
    words = "a checkpoint, a run, or a directory of checkpoints (default: the newest run)"
    inspect.add_argument("path", nargs="?", metavar="PATH", help=words)
    inspect.add_argument("--tensors", action="store_true", help="list all tensors, too")

    verify = actions.add_parser("verify", help="check every byte; exit 3 where something is wrong")
    verify.add_argument("path", metavar="PATH", help=one)
    verify.add_argument("--quick", action="store_true", help="check only sizes, headers and the manifest's seal")

    diff = actions.add_parser("diff", help="compare two checkpoints of any cut; exit 1 if they differ")
    for name in ("A", "B"):
        diff.add_argument(name.lower(), metavar=name, help=one)
    words = f"show the first N tensors that differ (default: {_SHOWN}; 0: all)"
    diff.add_argument("--limit", type=int, default=_SHOWN, metavar="N", help=words)

    average = actions.add_parser("average", help="write the mean of the weights of checkpoints")
    average.add_argument("paths", nargs="+", metavar="PATH", help=one)
    average.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory")

    prune = actions.add_parser("prune", help="delete old checkpoints of a run that is not running")
    prune.add_argument("path", metavar="PATH", help="a run, or a directory of checkpoints")
    prune.add_argument("--keep", type=_at_least_one, required=True, metavar="N", help="keep the last N")
    words = "also keep those of every M-th step"
    prune.add_argument("--keep-every", type=_at_least_one, default=0, metavar="M", help=words)
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")

    importing = actions.add_parser("import", help="make a checkpoint of other programs' weights")
    exporting = actions.add_parser("export", help="write weights for other programs")
    _add_formats(importing, "DIR", "a Hugging Face directory: config.json and safetensors")
    _add_formats(exporting, "RUN", "for transformers; RUN is a run, or one of its checkpoints")
    importing.add_argument("out", type=Path, metavar="OUT", help="a new directory")
    exporting.add_argument("out", type=Path, metavar="DIR", help="a new directory")
    exporting.add_argument("--dtype", choices=DTYPES, help="of the new weights (default: as they were saved)")
    for each in (importing, exporting):
        each.add_argument("--no-mtp", action="store_true", help="leave out multi-token prediction")

    words = "the directory with all runs (default: runs)"
    for each in (inspect, verify, diff, average, prune, exporting):
        each.add_argument("--dir", type=Path, default=Path("runs"), metavar="DIR", help=words)
    for each in (inspect, verify, diff, prune):
        each.add_argument("--json", action="store_true", help="print one JSON object")
    words = "the last option: would a run with these KEY=VALUE load it? Compares names, shapes, dtypes and optimizer"
    _add_for(verify, words)
    words = "the last option: the model as ppctl plan takes it (--dcp, --torch-dist); whose code runs it (--hf: "
    _add_for(importing, words + f"{_IMPLEMENTATION}, {_OVERRIDES}FIELD)")


def _add_for(parser: argparse.ArgumentParser, words: str) -> None:
    parser.add_argument("--for", dest="overrides", nargs=argparse.REMAINDER, metavar="KEY=VALUE", help=words)


def _add_formats(parser: argparse.ArgumentParser, metavar: str, words: str) -> None:
    """The formats of other programs, of which one is given."""
    formats = parser.add_mutually_exclusive_group(required=True)
    formats.add_argument("--hf", metavar=metavar, help=words)
    formats.add_argument("--dcp", metavar=metavar, help="torchtitan's Llama: torch's distributed checkpoint")
    formats.add_argument("--torch-dist", metavar=metavar, help="a GPT model of Megatron-core: torch_dist")


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Do one action. Exit codes: 0 done; 1 for `diff` if something differs; 2 usage, a wrong family or output
    directory, a run that is going on; 3 a checkpoint that is missing, damaged or does not fit.
    """
    try:
        return _ACTIONS[args.action](args)
    except OSError as error:
        if error.filename is None:  # of a stream, such as a closed standard output
            raise
        raise _unreadable(Path(error.filename), error) from error


# Looking


def _inspect(args: argparse.Namespace) -> int:
    folder = _folder(args.path, args.dir)
    if folder is None:
        path = Path(args.path).absolute()
        found = ckpt_text.contents(checkpoint_folder.at(path) or path)
        text = ckpt_text.described(found, tensors=args.tensors)
        if not args.tensors:
            del found["tensors"]
    else:
        found = ckpt_text.listing(folder)
        text = ckpt_text.listed(found)
    print(json.dumps(found, indent=1) if args.json else text)
    return 0


def _folder(text: str | None, root: Path) -> Path | None:
    """The directory of checkpoints that `text` means, None of the newest run; None for a single checkpoint."""
    if text is None:
        return find_run(None, root).checkpoints
    path = Path(text).absolute()
    if checkpoint_folder.at(path) is not None:
        return None
    try:
        for each in (path, path / "checkpoints"):
            if checkpoint_folder.kept(each):
                return each
    except OSError as error:
        raise _unreadable(path, error) from error
    if path.exists():
        return path if path.name == "checkpoints" else None
    return find_run(text, root).checkpoints


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    message = f"{path} cannot be read: {error.strerror}"
    return CheckpointError(Problem("PP-E505", message, f"ls -ld {pasted(path)}", str(error.filename or path)))


def _verify(args: argparse.Namespace) -> int:
    wanted = None if args.overrides is None else _planned(args.overrides)
    path = find_checkpoint(args.path, args.dir, "ckpt verify")
    manifest = read_manifest(path)
    total = 0 if args.quick else bytes_of_values(manifest)
    try:
        with byte_progress("verifying", total) as progress:
            found = examine(path, values=not args.quick, progress=progress)
    except OSError as error:
        raise _unreadable(path, error) from error
    problems, position = list(found.problems), None
    if wanted is not None:
        unfit, position = _unfit(path, manifest, wanted)
        problems += unfit
    report = {
        "path": str(path),
        "step": manifest.step,
        "tensors": len(manifest.tensors),
        "files": len(manifest.files),
        "quick": args.quick,
        "bytes_read": found.read,
        "loadable": None if wanted is None else not problems,
        "position": position,
        "problems": [problem.to_json() for problem in problems],
    }
    print(json.dumps(report, indent=1) if args.json else ckpt_text.verified(report))
    print_problems(problems)
    return BROKEN if problems else 0


def _planned(words: Sequence[str]) -> RunConfig:
    """The config of a run with these overrides, which has a plan. Raises ConfigError with all of its problems."""
    from ppctl.cli import overrides
    from ppctl.cli.plan import OVER_MEMORY, planned

    parser = argparse.ArgumentParser(prog="ppctl ckpt verify PATH --for", add_help=False, allow_abbrev=False)
    parser.add_argument("--recipes-dir", action="append")
    typed = overrides.parse(parser, "ckpt verify PATH --for", words)
    composed, _, problems = planned(typed.overrides, typed.problems)
    problems = [problem for problem in problems if problem.code != OVER_MEMORY]  # memory is no matter of a checkpoint's
    if problems or composed is None:
        raise ConfigError(problems)
    return composed.config


def _unfit(path: Path, manifest: Manifest, config: RunConfig) -> tuple[list[Problem], int | None]:
    """Why a run with this config cannot load the checkpoint; of weights alone, take them as its first ones. And behind
    how many samples of its data it would go on; None where that is not known.

    Whether the data are those of the checkpoint is seen when the run reads them.
    """
    from ppctl.launch.weights import checkpoint_tensors

    try:
        state = read_state(path)
    except CheckpointError:
        return [], None  # it is among what is wrong with the files
    only = bool(state.get("weights_only"))
    kinds = {name: {kind} for name, kind in checkpoint_tensors(config, optimizer=not only).items()}
    for name in kinds.keys() & manifest.tensors.keys() if only else ():
        kinds[name] = {(shape, manifest.tensors[name].dtype) for shape, _ in kinds[name]}  # to which values are cast
    problems = with_sizes(misfits(path, manifest, kinds), state.get("model", {}), asdict(config.model))
    return problems + ([] if only else misplaced(path, state, config, None)), state.get("consumed_samples")


def _diff(args: argparse.Namespace) -> int:
    from ppctl.checkpoint.arrays import ArrayReader, Compared, Difference, bytes_to_compare, compare

    paths = [find_checkpoint(text, args.dir, "ckpt diff") for text in (args.a, args.b)]
    manifests = [read_manifest(path) for path in paths]
    if any(manifest.format == 1 for manifest in manifests):  # whose values torch alone reads
        done = _pretrained("compare", *paths, stdout=subprocess.PIPE)
        if done.returncode:
            return done.returncode
        told = json.loads(done.stdout)
        found = Compared(**told | {"different": [Difference(**each) for each in told["different"]]})
    else:
        first, second = (ArrayReader(path, manifest) for path, manifest in zip(paths, manifests, strict=True))
        with byte_progress("comparing", bytes_to_compare(*manifests)) as progress:
            found = compare(first, second, progress)
    report = ckpt_text.comparison(paths, found)
    print(
        json.dumps(report, indent=1) if args.json else prose(ckpt_text.differences(report, args.limit), width(UNFOLDED))
    )
    return 0 if found.same else DIFFERENT


# Making and deleting


def _average(args: argparse.Namespace) -> int:
    sources = [find_checkpoint(text, args.dir, "ckpt average") for text in args.paths]
    return _convert("average", *sources, args.out)


def _prune(args: argparse.Namespace) -> int:
    folder = _folder(args.path, args.dir)
    if folder is None:
        message = f"{args.path} is a single checkpoint, not a run or a directory of checkpoints"
        parent = Path(args.path).absolute().parent
        raise ConfigError(Problem("PP-E105", message, f"ppctl ckpt prune {pasted(parent)} --keep {args.keep}"))
    with at_rest(RunDir(folder.parent)):
        kept = checkpoint_folder.complete(folder)
        needed = _needed(folder, kept)
        last = max(map(checkpoint_folder.step_of, kept))
        old = checkpoint_folder.expired(folder, last, args.keep, args.keep_every)
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


def _needed(folder: Path, kept: Sequence[Path]) -> list[Path]:
    """What stays whatever `--keep` says: the newest good checkpoint, and the one that a start goes on from.

    Raises CheckpointError (PP-E530) where none is good.
    """
    for path in reversed(kept):
        try:
            if not examine(path, values=False).problems:
                named = checkpoint_folder.find(folder)
                return [path, *([] if named is None else [named.path])]
        except CheckpointError:
            continue
    message = f"none of the {len(kept)} checkpoints in {folder} is good, and nothing is deleted"
    remedy = f"ppctl ckpt verify {pasted(kept[-1])}" if kept else f"ls -l {pasted(folder)}"
    raise CheckpointError(Problem("PP-E530", message, remedy, str(folder)))


def _import(args: argparse.Namespace) -> int:
    name, source = _format(args)
    options = ["--format", name, *["--no-mtp"] * args.no_mtp]
    if name != "hf":
        model: ModelConfig | None = _planned(args.overrides or ()).model
        model = replace(model, mtp_num_layers=None) if args.no_mtp and model is not None else model
    else:
        model = _described(source, args.overrides or ())
    options += [] if model is None else ["--model", json.dumps(asdict(model))]
    return _convert("import", source, args.out, *options)


def _described(source: str, words: Sequence[str]) -> ModelConfig | None:
    """The model of a Hugging Face directory whose code is transformers'; None of one that ppctl's own blocks build.

    `words` are the keys that say whose code it is, and which fields of its config.json are others. Raises ConfigError:
    PP-E105 for other keys, else as `model.from=DIR` does.
    """
    from ppctl.config.keys import keys
    from ppctl.config.schema import ModelConfig
    from ppctl.launch.weights import model_values

    read_config_file(Path(source))  # a checkpoint, which model.from may be, is none
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
    name, text = _format(args)
    source = find_checkpoint(text, args.dir, f"ckpt export --{name.replace('_', '-')}")
    options = ["--format", name, *["--no-mtp"] * args.no_mtp, *(["--dtype", args.dtype] if args.dtype else [])]
    return _convert("export", source, args.out, *options)


def _format(args: argparse.Namespace) -> tuple[str, str]:
    """The format of the other program, and what was given for it."""
    return next((name, value) for name in ("hf", "dcp", "torch_dist") if (value := getattr(args, name)) is not None)


def _convert(action: str, *words: object) -> int:
    """Start what converts: its sources, the output, then options."""
    return _pretrained(action, *words).returncode


def _pretrained(action: str, *words: object, stdout: int | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "ppctl.pretrained", action, *map(str, words)]
    return subprocess.run(command, stdout=stdout, check=False)


_ACTIONS = {
    "inspect": _inspect,
    "verify": _verify,
    "diff": _diff,
    "average": _average,
    "prune": _prune,
    "import": _import,
    "export": _export,
}
