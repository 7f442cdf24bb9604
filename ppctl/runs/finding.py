"""Finding runs and their checkpoints: all runs, the run that a user names, and the checkpoint to continue from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from ppctl.errors import CheckpointError, ConfigError, Problem, pasted
from ppctl.host.files import expanded
from ppctl.runs import checkpoint_folder
from ppctl.runs.rundir import RunDir, warn


def list_runs(root: Path) -> list[RunDir]:
    """All runs under `root`, the last started (or resumed) first."""
    began: dict[Path, tuple[int, str]] = {}
    for file in Path(root).absolute().glob("*/*/config.yaml"):
        with suppress(FileNotFoundError):  # the run may have been deleted meanwhile
            if not file.parent.name.startswith("."):
                began[file.parent] = (-file.stat().st_mtime_ns, file.parent.name)
    return [RunDir(path) for path in sorted(began, key=began.__getitem__)]


def find_run(reference: str | None, root: Path, typed: Sequence[str] = ("runs", "show")) -> RunDir:
    """The run that `reference` means: a directory, an id or NAME/ID, a job's number, `latest` or NAME/latest, a name
    that one run has, or the beginning of an id or a name; None is the newest.

    `typed` is the command line, which remedies repeat. Raises ConfigError, listing the candidates, if there is no such
    run (PP-E611) or more than one (PP-E612)."""
    matching, runs = _matching(reference, root)
    if len(matching) == 1:
        return matching[0]
    if not runs:
        message = f"there are no runs under {root}" + (f", and {reference} is not a run directory" if reference else "")
        raise ConfigError(Problem("PP-E611", message, "ppctl train +recipe=quickstart"))
    code, message = "PP-E611", f"no run under {root} is called {reference}; the newest are below"
    if matching:
        code, message = "PP-E612", f"{reference} means {len(matching)} runs; type more of the id"
    shown = (matching or runs)[:8]
    words = [shown[0].id if word == reference else word for word in typed]
    remedy = pasted("ppctl", *words, *[shown[0].id] * (reference not in typed))
    raise ConfigError(Problem(code, message, remedy, "\n".join(f"{run.id}  {run.path}" for run in shown)))


def find_runs(references: Sequence[str], root: Path, typed: Sequence[str] = ("runs", "show")) -> list[RunDir]:
    """The runs that `references` mean, each once, in their order; a name, and a pattern of ids, names or both as
    `sweep/2026*`, means all its runs, the oldest first. Raises as `find_run`."""
    found: dict[Path, RunDir] = {}
    names = {run: (run.id, run.name, f"{run.name}/{run.id}") for run in reversed(list_runs(root))}
    for reference in references:
        named = [run for run in names if any(fnmatchcase(name, reference) for name in names[run])]
        found |= {run.path: run for run in named or [find_run(reference, root, typed)]}
    return list(found.values())


LATEST = "latest"


def _matching(reference: str | None, root: Path) -> tuple[list[RunDir], list[RunDir]]:
    """(the runs by the first rule that any fits, all runs); for a run directory (that run, nothing)."""
    if reference is not None and (Path(reference) / "config.yaml").is_file():
        return [RunDir(Path(reference).absolute())], []
    runs = list_runs(root)
    if reference is None:
        return runs[:1], runs
    rules: tuple[Callable[[RunDir], bool], ...] = (
        lambda run: reference in (run.id, f"{run.name}/{run.id}"),
        lambda run: run.id.startswith(f"{reference}.") and reference.isdigit(),
        lambda run: run.job().get("job") == reference,
        lambda run: run.environment().get("variables", {}).get("SLURM_JOB_ID") == reference,
        lambda run: reference == LATEST and run == runs[0],
        lambda run: reference == f"{run.name}/{LATEST}" and run == next(each for each in runs if each.name == run.name),
        lambda run: run.name == reference,
        lambda run: run.id.startswith(reference) or f"{run.name}/{run.id}".startswith(reference),
    )
    fitting = ([run for run in runs if rule(run)] for rule in rules)
    return next(filter(None, fitting), []), runs


def last_checkpoint(run: RunDir) -> Path | None:
    """The checkpoint that a start of `run` continues from; warns if `latest` names another. Raises CheckpointError
    (PP-E505) if the directory of checkpoints cannot be read."""
    checkpoint = checkpoint_folder.find(run.checkpoints)
    if checkpoint is None:
        return None
    if checkpoint.warning:
        warn(checkpoint.warning)
    return checkpoint.path


def find_checkpoint(text: str, root: Path, name: str = "checkpoint.resume") -> Path:
    """The checkpoint that `text` means: its directory, its run's directory, or a run under `root`; `name` is the key or
    argument that errors are about. Raises CheckpointError (PP-E615) if there is none, ConfigError as `find_run`."""
    path = expanded(text).absolute()
    named = checkpoint_folder.at(path)
    if named is not None:
        return named
    run = RunDir(path.parent if path.name == "checkpoints" else path)
    last = last_checkpoint(run)
    if last is None:
        try:
            run = find_run(text, root)
        except ConfigError as error:
            if error.problems[0].code == "PP-E612":
                raise
            message = f"{name}={text}: there is no such checkpoint and no such run"
            raise CheckpointError(Problem("PP-E615", message, "ppctl runs", name)) from error
        last = last_checkpoint(run)
    if last is None:
        again = next(iter(run.commands()), "ppctl train +recipe=quickstart")
        message = f"run {run.id} has no checkpoint to go on from"
        raise CheckpointError(Problem("PP-E615", message, again, str(run.checkpoints)))
    return last


def checkpoint_if_any(text: str, root: Path) -> Path | None:
    """The checkpoint that `checkpoint.load` means: the result of `find_checkpoint`, else the newest in a directory of
    runs; None if there is none yet. Raises CheckpointError (PP-E615) for a checkpoint of Megatron's, which ppctl would
    not see."""
    path = expanded(text)
    if (path / _MEGATRONS).is_file():
        message = f"checkpoint.load={text} is a checkpoint of Megatron's, which ppctl does not read"
        remedy = "model.from=DIR takes weights that were converted to Hugging Face's format"
        raise CheckpointError(Problem("PP-E615", message, remedy, str(path / _MEGATRONS)))
    try:
        return find_checkpoint(str(path), root)
    except CheckpointError as error:
        if any(problem.code != "PP-E615" for problem in error.problems):
            raise
    return next(filter(None, map(last_checkpoint, list_runs(path))), None)


_MEGATRONS = "latest_checkpointed_iteration.txt"
