"""The rules on how a run is submitted: time limits, lines of the batch script, options that it sets by itself.

Knows `launch` and the names of sbatch's and srun's options. Must not know how the script is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields

from ppctl.config.durations import seconds, slurm_seconds
from ppctl.config.keys import Finding
from ppctl.config.schema import LaunchConfig, RunConfig

_LIMITS = ("start_limit", "edge_limit", "first_step_limit", "step_limit")
_ANYWHERE = frozenset({"target", "device", "nodes", "gpus_per_node", "device_memory", "env", *_LIMITS})
"""Fields of `launch` that mean something for ranks on this machine, too."""

TEXTS = (
    *("account", "qos", "partition", "time", "constraint", "container_image", "container_workdir"),
    *("health_check", "after", "python"),
)
LISTS = ("container_mounts", "setup", "sbatch_args", "srun_args")

_SET_HERE = {
    "launch.nodes": "-N --nodes",
    "launch.gpus_per_node": "-n --ntasks --ntasks-per-node --gpus-per-node",
    "launch.cpus_per_task": "-c --cpus-per-task",
    "launch.signal_lead": "--signal",
    "launch.max_requeues": "--requeue --no-requeue --open-mode",
    "launch.after": "-d --dependency --kill-on-invalid-dep",
    "log.dir": "-o --output -e --error",
    "launch.account": "-A --account",
    "launch.qos": "-q --qos",
    "launch.partition": "-p --partition",
    "launch.time": "-t --time",
    "launch.constraint": "-C --constraint",
    "launch.exclusive": "--exclusive",
    "launch.container_image": "--container-image",
    "launch.container_mounts": "--container-mounts",
    "launch.container_workdir": "--container-workdir",
}
"""Key -> options of sbatch and srun that follow from it."""
_NEVER = frozenset(
    {
        "--parsable",
        "--wrap",
        "-a",
        "--array",
        "--test-only",
        "-W",
        "--wait",
        "--kill-on-bad-exit",
        "-K",
        "-l",
        "--label",
    }
)
"""Options without which, or with which, nobody could say any more how the job goes."""


def only_for_slurm(launch: LaunchConfig) -> list[str]:
    """The fields of `launch` that are set and that take effect in a submitted job alone."""
    found = []
    for field in fields(launch):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name not in _ANYWHERE and getattr(launch, field.name) != default:
            found.append(f"launch.{field.name}")
    return found


def broken_rules(config: RunConfig) -> Iterator[Finding]:
    """Every rule that is broken."""
    launch = config.launch
    if config.train.exit_after is not None:
        try:
            seconds(config.train.exit_after)
        except ValueError as error:
            yield ("train.exit_after",), str(error), "train.exit_after=11h50m"
    for name in _LIMITS:
        if (limit := getattr(launch, name)) is not None:
            try:
                seconds(limit)
            except ValueError as error:
                yield (f"launch.{name}",), str(error), f"launch.{name}=30m"
    yield from _time(launch)
    yield from _lines(launch)
    if launch.container_image is None:
        for name in ("container_mounts", "container_workdir"):
            if getattr(launch, name):
                message = f"launch.{name} belongs to a container, and launch.container_image names none"
                yield (f"launch.{name}", "launch.container_image"), message, f"launch.{name}=null"
    for name in ("sbatch_args", "srun_args"):
        yield from _arguments(f"launch.{name}", getattr(launch, name) or ())


def _lines(launch: LaunchConfig) -> Iterator[Finding]:
    """What goes into the batch script must stay on its line."""
    for name in TEXTS:
        text = getattr(launch, name)
        if text is not None and (not text.strip() or re.search(r"[\x00-\x1f]", text)):
            yield (f"launch.{name}",), f"launch.{name} is one line of text, and not empty", f"launch.{name}=null"
    for name in LISTS:
        if any("\n" in line or "\0" in line for line in getattr(launch, name) or ()):
            yield (f"launch.{name}",), f"each entry of launch.{name} is one line", f"launch.{name}=null"


def _time(launch: LaunchConfig) -> Iterator[Finding]:
    if launch.time is None:
        return
    try:
        limit = slurm_seconds(launch.time)
    except ValueError as error:
        yield ("launch.time",), str(error), "launch.time=12:00:00"
        return
    if limit is not None and limit <= launch.signal_lead:
        message = f"the ranks would be told to stop {launch.signal_lead} s before a limit of {limit} s: at the start"
        yield ("launch.time", "launch.signal_lead"), message, f"launch.signal_lead={max(limit // 2, 1)}"


def _arguments(key: str, arguments: Sequence[str]) -> Iterator[Finding]:
    owners = {option: owner for owner, options in _SET_HERE.items() for option in options.split()}
    for argument in arguments:
        option = argument.partition("=")[0] if argument.startswith("--") else argument[:2]
        if not re.match(r"-[A-Za-z]|--[a-z]", argument):
            yield (key,), f"{key}: {argument!r} is no option; write each as one word, as --mail-type=END", f"{key}=null"
        elif option in owners:
            yield (key,), f"{key}: {option} follows from {owners[option]}", f"{key}=null"
        elif option in _NEVER:
            yield (key,), f"{key}: {option} would hide from ppctl how the job goes", f"{key}=null"
