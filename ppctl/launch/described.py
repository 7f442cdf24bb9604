"""A model whose code is transformers', described by a child process, once for each config and set of versions."""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ppctl
from ppctl.config.schema import ModelConfig
from ppctl.errors import ConfigError, Problem, pip_install, visible
from ppctl.families.directory import read_config_file
from ppctl.geometry.foreign_model import VERSION, Adapters, ForeignModel, foreign_of
from ppctl.host.files import cache_directory, read_text, write_atomically
from ppctl.host.private_files import own_directory
from ppctl.host.processes import python
from ppctl.launch.enter import package_digest

_EXTRAS = {
    "transformers": ("PP-E526", ("torch", "transformers"), "torch and transformers run a model's own code"),
    "lora": ("PP-E541", ("peft",), "adapters are its code"),
}
"""Optional group of packages -> the code of its problem, its packages, and their purpose."""
_CODE = ("foreign", "geometry", "model", "weight_gradients")
"""Packages of ppctl's on which an answer depends."""


def describe(directory: Path, overrides: Mapping[str, str], adapters: Adapters | None = None) -> str:
    """The text of `model.transformers` for the model in `directory`, with its proof and its costs. It comes from a
    cache by config and versions; if it is not there, a child process makes it in 10 to 60 seconds.

    Raises ConfigError: PP-E520 without a config.json, PP-E526 without torch or transformers, PP-E527 to PP-E529,
    PP-E550 and PP-E552 for models that cannot be trained like this, PP-E540 to PP-E542 for adapters that do not fit.
    """
    config = read_config_file(directory)
    kept = cache_directory() / "models" / f"{_digest(config, overrides, adapters)}.json"
    with suppress(OSError, ValueError):
        text = read_text(kept)
        ForeignModel.from_text(text)  # a full disk may have left half of it
        return text
    if problem := absent("transformers", str(directory)):
        raise ConfigError(problem)
    answer = _ask(directory, overrides, adapters)
    if "problems" in answer:
        raise ConfigError([Problem(**problem) for problem in answer["problems"]])
    text = str(answer["model"])
    with suppress(OSError):  # a read-only home: the next start asks again
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, text)
    return text


def absent(extra: str, place: str = "") -> list[Problem]:
    """A problem if this machine lacks libraries of `extra` (`transformers`, `lora`), which a model's own code needs."""
    code, packages, why = _EXTRAS[extra]
    missing = [package for package in packages if find_spec(package) is None]
    if not missing:
        return []
    message = f"{' and '.join(missing)} cannot be found: {why}"
    return [Problem(code, message, pip_install(f"ppctl[{extra}]"), place)]


def absent_for(model: ModelConfig) -> list[Problem]:
    """The problems of all libraries that the code of a model needs and this machine lacks."""
    foreign = foreign_of(model)
    if foreign is None:
        return []
    adapters = [] if foreign.adapters is None else absent("lora", "model.lora")
    return [*absent("transformers", f"model.from = {model.from_}"), *adapters]


def other_version(model: ModelConfig) -> str | None:
    """A note if a model was proved with another version of transformers than this machine has."""
    foreign = foreign_of(model)
    with suppress(metadata.PackageNotFoundError):
        ours = metadata.version("transformers")
        if foreign is not None and ours != foreign.transformers:
            return (
                f"the model was proved with transformers {foreign.transformers}, but {ours} is installed: its code may "
                "compute something else, which nothing has checked. `ppctl plan model.from=DIR "
                "model.implementation=transformers` proves a directory with this version (`ppctl ckpt export --hf RUN "
                "DIR` makes one of a run)"
            )
    return None


def _ask(directory: Path, overrides: Mapping[str, str], adapters: Adapters | None) -> dict[str, Any]:
    """Have a child process examine the model; returns its answer. Raises ConfigError (PP-E528) if there is none."""
    with own_directory() as temporary:
        answer = temporary / "answer.json"
        command = [*python("ppctl.foreign.describe"), str(directory), str(answer)]
        command += ["--overrides", json.dumps(dict(overrides))]
        command += [] if adapters is None else ["--adapters", json.dumps(adapters)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        lines, code = _watched(command, environment, directory)
        try:
            reply: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            last = lines[-1] if lines else f"exit {code}"
            message = f"the model at {directory} could not be examined: {last}"
            raise ConfigError(Problem("PP-E528", message, place=str(directory))) from None
    return reply


def _watched(command: Sequence[str], environment: Mapping[str, str], directory: Path) -> tuple[list[str], int]:
    """Run a child; returns (the lines of its stderr, its exit code). Each line is shown; a terminal's time goes on."""
    screen, began, lines = getattr(sys.stderr, "below", sys.stderr), time.monotonic(), ["starting torch"]
    begin, end = ("\r\033[K", "") if screen.isatty() else ("", "\n")
    room = shutil.get_terminal_size().columns - 1 if begin else None
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdout=nowhere, stderr=pipe, env=dict(environment), bufsize=0) as child:
        assert child.stderr is not None  # it is a pipe
        told, readable = [b"\n"], select.poll()  # select() takes no descriptor above 1,023
        readable.register(child.stderr, select.POLLIN)
        try:
            while told != [b""]:
                if told or begin:
                    text = visible(f"note: {time.monotonic() - began:.0f} s, examining {directory}: {lines[-1]}")[:room]
                    print(f"{begin}{text}", end=end, file=screen, flush=True)
                told = [child.stderr.readline() for _ in readable.poll(1000)]
                lines += [text for each in told if (text := each.decode(errors="replace").strip())]
        finally:
            print(begin, end="", file=screen, flush=True)
    return lines[1:], child.returncode


def _digest(config: Mapping[str, object], overrides: Mapping[str, str], adapters: Adapters | None) -> str:
    """A digest of all that an answer depends on; not on dtype or loss, since an answer has the costs of both dtypes."""
    # Different commits of one version may make different answers.
    code = [package_digest(Path(ppctl.__file__).parent / name) for name in _CODE]
    versions = [VERSION, ppctl.__version__, *code]
    for package in ("torch", "transformers", *([] if adapters is None else ["peft"])):
        with suppress(metadata.PackageNotFoundError):
            versions.append(metadata.version(package))
    asked = [config, dict(overrides), versions, *([] if adapters is None else [adapters])]
    text = json.dumps(asked, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
