"""The rules on how a run is submitted: time limits, lines of the batch script, options that ppctl sets itself.

Knows `launch` and the names of sbatch's and srun's options. Must not know how the script is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ppctl.config.keys import Finding, keys_with, names_of_keys, value_of
from ppctl.config.quantities import slurm_seconds
from ppctl.config.schema import LaunchConfig, RunConfig

_NEVER = (
    *("--parsable", "--wrap", "-a", "--array", "--test-only"),
    *("-W", "--wait", "--kill-on-bad-exit", "-K", "-l", "--label"),
)
"""Options with which ppctl could not tell how the job goes."""


def broken_rules(config: RunConfig) -> Iterator[Finding]:
    """Every rule that is broken."""
    launch = config.launch
    if launch.share_gpu and launch.device == "cpu":
        message = "launch.share_gpu has no effect for ranks on the CPU"
        yield ("launch.share_gpu", "launch.device"), message, "launch.share_gpu=false"
    yield from _time(launch)
    for name, key in keys_with("slurm").items():
        if key.is_list and any("\n" in line or "\0" in line for line in value_of(config, name) or ()):
            yield (name,), f"each entry of {name} is one line", f"{name}=null"
    if launch.container_image is None:
        for name in ("container_mounts", "container_workdir"):
            if getattr(launch, name):
                message = f"launch.{name} needs launch.container_image"
                yield (f"launch.{name}", "launch.container_image"), message, f"launch.{name}=null"
    for name in ("sbatch_args", "srun_args"):
        yield from _arguments(f"launch.{name}", getattr(launch, name) or ())


def _time(launch: LaunchConfig) -> Iterator[Finding]:
    limit = None if launch.time is None else slurm_seconds(launch.time)
    if limit is not None and limit <= launch.signal_lead:
        message = f"the ranks would have to stop {launch.signal_lead} s before a limit of {limit} s: at the start"
        yield ("launch.time", "launch.signal_lead"), message, f"launch.signal_lead={max(limit // 2, 1)}"


def _arguments(key: str, arguments: Sequence[str]) -> Iterator[Finding]:
    owners = names_of_keys("options")
    for argument in arguments:
        option = argument.partition("=")[0] if argument.startswith("--") else argument[:2]
        if not re.match(r"-[A-Za-z]|--[a-z]", argument):
            yield (key,), f"{key}: {argument!r} is no option; write each as one word, as --mail-type=END", f"{key}=null"
        elif option in owners:
            yield (key,), f"{key}: ppctl sets {option} by {owners[option]}", f"{key}=null"
        elif option in _NEVER:
            yield (key,), f"{key}: with {option} ppctl could not tell how the job goes", f"{key}=null"
