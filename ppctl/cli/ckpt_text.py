"""The output of `ppctl ckpt`: values, which `--json` prints, and their text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppctl.checkpoint.manifest import FORMAT, check_files, read_manifest
from ppctl.checkpoint.run_state import lineage, run_state
from ppctl.checkpoint.tensor_parts import DTYPES, in_order, ranges, text_of
from ppctl.cli.console import aligned, byte_progress
from ppctl.errors import CheckpointError
from ppctl.plan.memory_limit import size_text
from ppctl.records.json_reader import finite
from ppctl.runs import checkpoint_folder
from ppctl.runs.checkpoint_folder import STATE
from ppctl.runs.rundir import RunDir

if TYPE_CHECKING:
    from ppctl.checkpoint.arrays import CheckpointDifferences

_AXES = ("pp", "vpp", "tp", "cp", "ep", "etp", "dp")
_MODEL = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "num_moe_experts", "mtp_num_layers")


# One checkpoint


def contents(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint. Raises CheckpointError if its manifest or its state is damaged."""
    manifest = read_manifest(path)
    state = run_state(path, manifest)
    groups: dict[str, dict[str, Any]] = {}
    for name, record in manifest.tensors.items():
        group = "optimizer" if name.startswith("optim.") else "weights"
        entry = groups.setdefault(group, {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": []})
        entry["tensors"] += 1
        entry["elements"] += prod(record.shape)
        entry["bytes"] += prod(record.shape) * DTYPES[record.dtype][1]
        entry["dtypes"] = sorted({*entry["dtypes"], record.dtype})
    run = RunDir(path.parent.parent)
    sizes, model = state.get("parallel", {}), state.get("model", {})
    # Of a model from transformers its plan knows only three numbers.
    known = _MODEL if model.get("transformers") is None else ("num_layers", "hidden_size", "vocab_size")
    position = ("consumed_samples", "seq_length", "seed", "data_path", "tokenizer")
    return {
        "path": str(path),
        "format": FORMAT,
        "step": manifest.step,
        "eval_loss": state.get("eval_loss"),
        "bytes": sum(record.bytes for record in manifest.files.values()),
        "files": len(manifest.files),
        **{group: groups.get(group) for group in ("weights", "optimizer")},
        "layout": state.get("layout"),
        "parallel": {axis: sizes[axis] for axis in _AXES if axis in sizes} or None,
        "model": {key: model.get(key) if key in known else None for key in _MODEL},
        **{key: state.get(key) for key in position},
        "lineage": {
            "run": run.id if (run.path / "config.yaml").is_file() else None,
            "began_with": [str(place) for place in lineage(state)],
            "averaged": state.get("averaged", []),
        },
        "tensors": {
            name: {"shape": record.shape, "dtype": record.dtype, "parts": max(1, len(record.shards))}
            for name, record in sorted(manifest.tensors.items(), key=lambda each: in_order(each[0]))
        },
    }


def described(checkpoint: Mapping[str, Any], *, tensors: bool) -> str:
    """The `contents` of a checkpoint as lines, with `tensors` followed by a table of them."""
    rows = [
        ("step", f"{checkpoint['step']}"),
        ("size", f"{size_text(checkpoint['bytes'])} in {checkpoint['files']} files"),
    ]
    rows += [(group, _group(checkpoint[group])) for group in ("weights", "optimizer")]
    rows += [] if checkpoint["eval_loss"] is None else [("eval loss", f"{checkpoint['eval_loss']:.4f}")]
    rows.append(("cut", _cut(checkpoint)))
    rows.append(
        ("model", ", ".join(f"{key} {value}" for key, value in checkpoint["model"].items() if value is not None))
    )
    if checkpoint["consumed_samples"]:
        rows.append(("data", _data(checkpoint)))
    origin = checkpoint["lineage"]
    rows += [("run", origin["run"])] if origin["run"] else []
    rows += [("began with", place) for place in origin["began_with"]]
    rows += [("mean of", place) for place in origin["averaged"]]
    text = (
        f"{checkpoint['path']}, format {checkpoint['format']}\n{aligned([(f'  {key}', value) for key, value in rows])}"
    )
    return f"{text}\n\n{_tensors(checkpoint['tensors'])}" if tensors else text


def _group(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "none"
    dtypes = ", ".join(entry["dtypes"])
    return f"{entry['tensors']} tensors, {entry['elements']:,} elements, {dtypes}, {size_text(entry['bytes'])}"


def _cut(checkpoint: Mapping[str, Any]) -> str:
    sizes = " ".join(f"{axis} {number}" for axis, number in (checkpoint["parallel"] or {}).items())
    layout = f"layout {checkpoint['layout']}" if checkpoint["layout"] else ""
    return ", ".join(filter(None, (layout, sizes))) or "none: it was written whole"


def _data(checkpoint: Mapping[str, Any]) -> str:
    parts = [f"{checkpoint['consumed_samples']:,} samples"]
    words = {"seq_length": "of {} tokens", "data_path": "from {}", "seed": "by seed {}"}
    return " ".join(
        parts + [text.format(checkpoint[key]) for key, text in words.items() if checkpoint[key] is not None]
    )


def _tensors(tensors: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [("tensor", "parts", "of")]
    rows += [(name, str(each["parts"]), text_of(each["shape"], each["dtype"])) for name, each in tensors.items()]
    return aligned(rows, 2)


# A directory


def brief(path: Path) -> dict[str, Any]:
    """A checkpoint's entry in a list: its size, when it was written, and problems that show without reading values."""
    entry: dict[str, Any] = {"name": path.name, "step": checkpoint_folder.step_of(path)}
    entry |= {"bytes": None, "written": None, "fault": None, "eval_loss": checkpoint_folder.eval_loss(path)}
    try:
        manifest = read_manifest(path)
        entry["bytes"] = sum(record.bytes for record in manifest.files.values())
        check_files(path, manifest, [STATE])
        entry["written"] = (path / STATE).stat().st_mtime
    except CheckpointError as error:
        problem = error.problems[0]
        entry["fault"] = (problem.place or problem.message).replace(f"{path}/", "").replace(str(path), path.name)
    return entry


def listing(folder: Path) -> dict[str, Any]:
    """A directory's checkpoints, by step, and the checkpoint from which a start goes on."""
    last, best = checkpoint_folder.find(folder), checkpoint_folder.best(checkpoint_folder.usable(folder))
    checkpoints = sorted(checkpoint_folder.kept(folder), key=lambda path: (checkpoint_folder.step_of(path), path.name))
    return {
        "path": str(folder),
        "next_start": None if last is None else last.path.name,
        "best": best[0].name if best else None,
        "warning": "" if last is None else last.warning,
        "checkpoints": [brief(path) for path in checkpoints],
    }


def listed(listing: Mapping[str, Any]) -> str:
    """The `listing` of a directory as a table."""
    if not listing["checkpoints"]:
        return f"no checkpoints in {listing['path']}"
    rows = [("checkpoint", "size", "written", "eval loss", "")]
    for entry in listing["checkpoints"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["written"])) if entry["written"] else ""
        much = "" if entry["bytes"] is None else size_text(entry["bytes"])
        notes = ["the next start goes on here"] if entry["name"] == listing["next_start"] else []
        notes += ["the best by its evaluation"] if entry["name"] == listing["best"] else []
        loss = "" if entry["eval_loss"] is None else f"{entry['eval_loss']:.4f}"
        rows.append((entry["name"], much, when, loss, entry["fault"] or ", ".join(notes)))
    return f"{listing['path']}\n{aligned(rows, 2)}" + (f"\nwarning: {listing['warning']}" if listing["warning"] else "")


# Verified, compared, pruned


def verified(report: Mapping[str, Any]) -> str:
    """The text of `verify`: how much was read, and the verdict."""
    looked = "sizes, headers and seal" if report["quick"] else f"{size_text(report['bytes_read'])} of values read"
    count = len(report["problems"])
    end = "good" if not count else f"{count} problem{'s' if count > 1 else ''}, on stderr"
    lines = [f"{report['path']}: {end}", f"  {report['tensors']} tensors in {report['files']} files; {looked}"]
    if report["loadable"] is not None:
        lines.append(f"  {'every' if report['loadable'] else 'not every'} name, shape and dtype fits that run")
    if report["position"] is not None and report["loadable"]:
        lines.append(f"  training would go on after {report['position']:,} samples")
    return "\n".join(lines)


def compared_on_screen(paths: Sequence[Path], what: str) -> CheckpointDifferences:
    """Compare the values of two checkpoints, with a bar called `what` on a terminal."""
    from ppctl.checkpoint.arrays import ArrayReader, bytes_to_compare, compare  # numpy

    manifests = list(map(read_manifest, paths))
    first, second = map(ArrayReader, paths, manifests)
    with byte_progress(what, bytes_to_compare(*manifests)) as progress:
        return compare(first, second, progress)


def comparison(paths: Sequence[Path], compared: CheckpointDifferences) -> dict[str, Any]:
    """The comparison of two checkpoints, as `--json` prints it: numbers that are not finite are null."""
    return {
        "paths": [str(path) for path in paths],
        "same": compared.same,
        "equal": compared.equal,
        "only_in_a": compared.missing,
        "only_in_b": compared.new,
        "different": [finite(asdict(each)) for each in compared.different],
    }


def differences(report: Mapping[str, Any], limit: int) -> list[str]:
    """Lines about the tensors that differ: the type of each, how much it differs, and where first."""
    lines = [f"{name}  {path}" for name, path in zip("AB", report["paths"], strict=True)]
    for name, key in (("A", "only_in_a"), ("B", "only_in_b")):
        lines += [f"only in {name}: {line}" for line in _ranges(report[key], limit)]
    different = report["different"]
    for each in different[: limit or None]:
        kinds = list(dict.fromkeys(each["kinds"]))
        lines.append(f"{each['name']}  {' in A, '.join(kinds)}{' in B' if len(kinds) > 1 else ''}")
        if each["elements"]:
            lines += _how(each)
    if limit and len(different) > limit:
        lines.append(f"and {len(different) - limit} more tensors that differ (--limit 0 shows all)")
    only = len(report["only_in_a"]) + len(report["only_in_b"])
    return [*lines, f"{report['equal']} tensors are equal to the bit, {len(different)} differ, {only} are only in one"]


def _how(each: Mapping[str, Any]) -> list[str]:
    relative = "" if each["relative"] is None else f" ({each['relative']:.3g} of A's)"
    norm, largest = (_number(each[key]) for key in ("norm", "largest"))
    much = (
        f"  {each['different']:,} of {each['elements']:,} elements; norm of B - A {norm}{relative}, largest {largest}"
    )
    first, second = map(_number, each["values"])
    return [much, f"  first at {list(each['at'])}: {first} in A, {second} in B"] if each["different"] else [much]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.9g}"


def _ranges(names: Sequence[str], limit: int) -> list[str]:
    lines = ranges(names)
    return [*lines[:limit], f"and {len(lines) - limit} more lines"] if limit and len(lines) > limit else lines


def pruned(report: Mapping[str, Any]) -> str:
    """The text of `prune`: the checkpoints deleted and kept."""
    verb = "would delete" if report["dry_run"] else "deleted"
    lines = [f"{verb} {name}" for name in report["deleted"]] or ["nothing to delete"]
    kept = ", ".join(report["kept"])
    return "\n".join([*lines, f"{size_text(report['bytes'])} of {report['path']}", f"what stays: {kept}"])
