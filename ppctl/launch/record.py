"""env.json: where and with what a run was started.

Knows versions, devices, the commit, and the few variables that may be recorded. Must not record any other: environments
hold secrets.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import ppctl
from ppctl.heartbeat import host_name
from ppctl.launch.machine import count_gpus

_RECORDED = re.compile(r"(TORCH_)?NCCL_.*|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|SLURM_JOB_ID")
_PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "safetensors")


def environment_record(device: str, launch_env: Mapping[str, str]) -> dict[str, Any]:
    """What env.json says. `launch_env` counts like the environment itself, and is filtered like it."""
    variables = os.environ | dict(launch_env)
    return {
        "time": time.time(),
        "host": host_name(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "ppctl": ppctl.__version__,
        "commit": _commit(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "device": device,
        "gpus": count_gpus(os.environ) if device == "cuda" else 0,
        "cpus": os.cpu_count(),
        "variables": {name: value for name, value in sorted(variables.items()) if _RECORDED.fullmatch(name)},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit that ppctl's own source is at, `+` behind it where files differ; None outside a checkout."""
    source = Path(ppctl.__file__).resolve().parent.parent
    if not (source / ".git").exists():
        return None
    try:
        head = _git(source, "rev-parse", "HEAD")
        return head + ("+" if _git(source, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(source: Path, *arguments: str) -> str:
    # Else `status` locks the index to refresh it, and a run that is killed just then leaves the lock to its user.
    command = ["git", "--no-optional-locks", "-C", str(source), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
    return done.stdout.strip()
