"""Finding runs and their checkpoints: all runs, the one that a person means, and the checkpoint to continue from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ppctl.errors import CheckpointError, ConfigError, Problem, pasted
from ppctl.runs import checkpoint_folder
from ppctl.runs.rundir import RunDir, warn


def list_runs(root: Path) -> list[RunDir]:
    """All runs under `root`, the one that was started (or resumed) last first."""
    files = [file for file in Path(root).absolute().glob("*/*/config.yaml") if not file.parent.name.startswith(".")]
    return [
        RunDir(file.parent) for file in sorted(files, key=lambda file: (-file.stat().st_mtime_ns, file.parent.name))
    ]


def find_run(reference: str | None, root: Path) -> RunDir:
    """The run that `reference` means: a directory, an id or a unique prefix, a SLURM job number; None is the newest.
    Raises ConfigError, listing the candidates, if there is none (PP-E611) or more than one (PP-E612)."""
    if reference is not None and (Path(reference) / "config.yaml").is_file():
        return RunDir(Path(reference).absolute())
    runs = list_runs(root)
    if not runs:
        message = f"there are no runs under {root}" + (f", and {reference} is not a run directory" if reference else "")
        raise ConfigError(Problem("PP-E611", message, "ppctl train +recipe=quickstart"))
    if reference is None:
        return runs[0]
    matching = _matching(reference, runs)
    if len(matching) == 1:
        return matching[0]
    listed = "\n".join(f"{run.id}  {run.path}" for run in (matching or runs)[:8])
    if not matching:
        message = f"no run under {root} is called {reference}; the newest are below"
        raise ConfigError(Problem("PP-E611", message, f"ppctl runs show {pasted(runs[0].id)}", listed))
    message = f"{reference} means {len(matching)} runs; type more of the id"
    raise ConfigError(Problem("PP-E612", message, f"ppctl runs show {pasted(matching[0].id)}", listed))


def _matching(reference: str, runs: Sequence[RunDir]) -> list[RunDir]:
    """The runs that fit by the first rule that any run fits: the id, the job's number, or the id's beginning."""
    rules: tuple[Callable[[RunDir], bool], ...] = (
        lambda run: run.id == reference,
        lambda run: run.id.startswith(f"{reference}.") and reference.isdigit(),
        lambda run: run.job().get("job") == reference,
        lambda run: run.environment().get("variables", {}).get("SLURM_JOB_ID") == reference,
        lambda run: run.id.startswith(reference),
    )
    for rule in rules:
        chosen = [run for run in runs if rule(run)]
        if chosen:
            return chosen
    return []


def last_checkpoint(run: RunDir) -> Path | None:
    """The checkpoint that a start of `run` continues from; warns if it is not the one that `latest` names. Raises
    CheckpointError (PP-E505) if the directory of checkpoints cannot be read."""
    checkpoint = checkpoint_folder.find(run.checkpoints)
    if checkpoint is None:
        return None
    if checkpoint.warning:
        warn(checkpoint.warning)
    return checkpoint.path


def find_checkpoint(text: str, root: Path, name: str = "checkpoint.resume") -> Path:
    """The checkpoint that `text` means: its directory, its run's directory, or a run under `root`; `name` is the key or
    argument that errors are about. Raises CheckpointError (PP-E615) if there is none."""
    path = Path(text).absolute()
    named = checkpoint_folder.at(path)
    if named is not None:
        return named
    run = RunDir(path.parent if path.name == "checkpoints" else path)
    last = last_checkpoint(run)
    if last is None:
        try:
            run = find_run(text, root)
        except ConfigError as error:
            message = f"{name}={text}: there is no such checkpoint and no such run"
            raise CheckpointError(Problem("PP-E615", message, "ppctl runs", name)) from error
        last = last_checkpoint(run)
    if last is None:
        again = next(iter(run.commands()), "ppctl train +recipe=quickstart")
        message = f"run {run.id} has no checkpoint to go on from"
        raise CheckpointError(Problem("PP-E615", message, again, str(run.checkpoints)))
    return last


def checkpoint_if_any(text: str, root: Path) -> Path | None:
    """The checkpoint that `checkpoint.load` means: what `find_checkpoint` finds, else the newest of a directory of
    runs; None if there is none yet. Raises CheckpointError (PP-E615) for one of Megatron's, which would be passed
    over."""
    path = Path(text).expanduser()
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
