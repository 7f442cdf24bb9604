"""Whether TensorBoard and Weights & Biases can record a run, asked before its ranks start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ppctl.config.run_rules import not_installed
from ppctl.config.schema import RunConfig
from ppctl.errors import PpctlError, Problem, pasted
from ppctl.host.files import expanded, nearest_there
from ppctl.host.private_files import own_directory

_LOGIN = """
import wandb
try:
    print("" if wandb.login(verify=True) else "it has no API key")
except Exception as error:
    print(error)
"""
_PATIENCE_S = 30


def unusable(config: RunConfig) -> Iterator[Problem]:
    """The problems of enabled trackers: a missing package (PP-E704), the directory or the login (PP-E652)."""
    log = config.log
    for key, directory in (("log.tensorboard", log.tensorboard_dir), ("log.wandb", log.wandb_dir)):
        if not config[key]:
            continue
        if find_spec(key.partition(".")[2]) is None:
            yield not_installed(key)
        elif directory is not None and not _takes_files(place := nearest_there(expanded(directory))):
            message = f"{key}_dir={directory}: {place} is no directory that this user may write"
            yield Problem("PP-E652", message, f"{key}_dir=null", f"{key}_dir")
        elif key == "log.wandb" and (
            why := _login_refused(frozenset((os.environ | config.launch.env).items()), log.wandb_mode)
        ):
            remedy = f"{pasted(sys.executable)} -m wandb login\nlog.wandb_mode=offline"
            yield Problem("PP-E652", f"this user cannot log in to Weights & Biases: {why}", remedy, key)


def _takes_files(directory: Path) -> bool:
    """Whether files can be made in a directory, by making one: modes do not tell for root, nor in /proc."""
    with suppress(PpctlError), own_directory(directory):
        return True
    return False


@cache
def _login_refused(environ: frozenset[tuple[str, str]], mode: str | None) -> str:
    """Ask why Weights & Biases refuses this user's login; empty if it accepts the login, or the mode needs none."""
    variables = dict(environ)
    if (mode or variables.get("WANDB_MODE", "online")) != "online":
        return ""
    command = [sys.executable, "-P", "-c", _LOGIN]  # -P: the working directory may have a foreign wandb.py
    print("note: asking Weights & Biases whether this user may log in", file=sys.stderr, flush=True)
    variables |= {"WANDB_MODE": "online", "WANDB_SILENT": "true"}
    try:
        done = subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        return f"it has not answered within {_PATIENCE_S} s"
    output = f"{done.stdout}\n{done.stderr if done.returncode else ''}".strip().splitlines()
    return output[-1] if output else f"its package has ended with exit code {done.returncode}" * (done.returncode != 0)
