"""This machine's GPUs and cores, found without torch; whether they suffice for a job, and the ranks' device."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from ppctl.config.argv import retyped, typed_again
from ppctl.errors import Problem
from ppctl.host.devices import device_type, gpus_needed

_FEW_PROCESSES = 64
_SMALL_JOB = 8


def count_gpus(environ: Mapping[str, str]) -> int:
    """The number of NVIDIA GPUs that a process with this environment would see."""
    present = _gpus_by_driver()
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    # CUDA stops at the first unknown entry; -1 and an empty string hide all later ones.
    names = map(str.strip, chosen.split(","))
    usable = takewhile(lambda name: name[:1] not in ("", "-") and not (name.isdigit() and int(name) >= present), names)
    return min(len(list(usable)), present)


def gpu_devices() -> int:
    """The number of NVIDIA devices that the kernel knows, whatever CUDA or torch sees."""
    return sum(bool(re.fullmatch(r"nvidia[0-9]+", path.name)) for path in Path("/dev").glob("nvidia*"))


def _gpus_by_driver() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return 0
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return gpu_devices()


def choose_device(asked: str, ranks: int, environ: Mapping[str, str], *, share: bool) -> str:
    """`cuda` or `cpu` for the `launch.device` that was `asked`. GPUs are counted only for `any`."""
    return device_type(asked, count_gpus(environ) if asked == "any" else 0, ranks, share=share)


def shortage(
    device: str,
    ranks: int,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    share: bool,
    command: str = "train",
) -> list[Problem]:
    """Problems if this machine lacks devices for all `ranks`. `command` and `arguments` are the command line's, for
    remedies. A command that names a run (`resume RUN`) has its config from the run: its arguments alone give no
    plan."""
    begins = " " not in command
    elsewhere = typed_again("plan", arguments) if begins else "ppctl doctor"
    if device == "cuda":
        present, needed = count_gpus(environ), gpus_needed(ranks, share=share)
        if present < needed:
            ways = [elsewhere] * begins
            if present > 0 and ranks <= _SMALL_JOB:
                ways.append(typed_again(command, with_overrides(arguments, "launch.share_gpu=true")))
            if ranks <= _SMALL_JOB:
                on_cpu = ["launch.device=cpu", *["launch.share_gpu=false"] * share]
                ways.append(typed_again(command, with_overrides(arguments, *on_cpu)))
            ways += [f"ppctl {command} {_small(arguments)}"] * begins
            message = f"needs {_many(needed, 'GPU')}, this machine has {present}"
            return [Problem("PP-E601", message, "\n".join(ways or [elsewhere]), "launch.device = cuda")]
        return []
    cores = os.cpu_count() or 1
    if ranks > max(_FEW_PROCESSES, 4 * cores):
        message = f"needs {_many(ranks, 'process')}, this machine has {_many(cores, 'core')}"
        return [Problem("PP-E602", message, elsewhere, "launch.device = cpu")]
    return []


def _small(arguments: Sequence[str]) -> str:
    """The recipe of `arguments` at its smoke scale, else a small recipe."""
    recipe = next((text for text in arguments if text.lstrip("+").startswith("recipe=")), None)
    if recipe is None or any(text.lstrip("+").startswith("scale=") for text in arguments):
        return "+recipe=quickstart"
    return retyped([recipe.lstrip("+"), "scale=smoke"])


def with_overrides(arguments: Sequence[str], *new: str) -> list[str]:
    """The overrides `arguments`, in which `new` replaces overrides of the same keys."""
    keys = {override.partition("=")[0] for override in new}
    return [*(old for old in arguments if old.partition("=")[0] not in keys), *new]


def _many(count: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"
