"""A model whose code is transformers', described by a child process, once for each config and set of versions.

Knows how the child is started and where its answers are kept. Must not know torch, nor what a description says.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import ppctl
from ppctl.errors import ConfigError, Problem
from ppctl.families.directory import read_config_file
from ppctl.files import read_text, write_atomically
from ppctl.geometry.foreign_model import VERSION, Adapters, ForeignModel

_COMMAND = (sys.executable, "-m", "ppctl.foreign")


def describe(directory: Path, overrides: Mapping[str, str], adapters: Adapters | None = None) -> str:
    """The text of `model.transformers`: proved and measured before, or now, which takes some ten seconds.

    Raises ConfigError: PP-E520 without a config.json, PP-E526 where torch or transformers is not here, PP-E527 to
    PP-E529 for models that cannot be trained so, PP-E540 to PP-E542 for adapters that they cannot have.
    """
    config = read_config_file(directory)
    kept = _cache() / f"{_digest(config, overrides, adapters)}.json"
    with suppress(OSError, ValueError):
        text = read_text(kept)
        ForeignModel.from_text(text)  # a disk that was full may have left half of it
        return text
    missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
    if missing:
        message = f"{' and '.join(missing)} cannot be found: a model's own code needs both"
        raise ConfigError(Problem("PP-E526", message, "pip install 'ppctl[transformers]'", str(directory)))
    with tempfile.TemporaryDirectory() as temporary:
        answer = Path(temporary) / "answer.json"
        command = [*_COMMAND, str(directory), "--describe", str(answer), "--overrides", json.dumps(dict(overrides))]
        command += [] if adapters is None else ["--adapters", json.dumps(adapters)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
        try:
            found = json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            last = next(
                (line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit {done.returncode}"
            )
            message = f"the model at {directory} could not be looked at: {last}"
            raise ConfigError(
                Problem("PP-E528", message, f"ppctl doctor --model '{directory}'", str(directory))
            ) from None
    if "problems" in found:
        raise ConfigError([Problem(**problem) for problem in found["problems"]])
    text = str(found["model"])
    with suppress(OSError):  # a home that cannot be written to: the next start asks again
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, text)
    return text


def _digest(config: Mapping[str, object], overrides: Mapping[str, str], adapters: Adapters | None) -> str:
    """Of all that an answer depends on."""
    versions = [VERSION, ppctl.__version__]
    for package in ("torch", "transformers", *([] if adapters is None else ["peft"])):
        with suppress(metadata.PackageNotFoundError):
            versions.append(metadata.version(package))
    asked = [config, dict(overrides), versions, *([] if adapters is None else [adapters])]
    text = json.dumps(asked, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _cache() -> Path:
    """Where answers are kept: `ppctl/models` in the user's directory for caches."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "ppctl" / "models"
