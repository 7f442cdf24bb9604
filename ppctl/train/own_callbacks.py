"""A person's own callbacks: classes in modules that `train.callbacks` names and every rank imports (docs/callbacks.md).

Nothing else imports them: only the process that trains, and only names of the run's config.
"""

from __future__ import annotations

import importlib.util
import os
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ppctl.engine.stage import StageProgram
from ppctl.errors import ConfigError, Problem, TrainingError, pasted
from ppctl.train.callback import ASKED, WITHOUT_RESULT, Callback


class OwnCallback(Callback):
    """Calls a person's callback. An error in it is raised as TrainingError (PP-E735) with its class, method and frames;
    while another error ends the run, it is printed."""

    def __init__(self, name: str, callback: Callback) -> None:
        self.name, self._callback = name, callback
        for method in {*WITHOUT_RESULT} - {"log_metrics"}:
            setattr(self, method, partial(self._call, method))

    def stage_program(self, program: StageProgram, first: int) -> StageProgram:
        """The program that the callback returns."""
        returned: StageProgram = self._call("stage_program", program, first)
        return returned

    def stop_requested(self) -> int:
        """ASKED if the callback returns something that is true."""
        return ASKED if self._call("stop_requested") else 0

    def log_metrics(self, record: dict[str, Any]) -> None:
        """Let the callback add figures, and refuse those that metrics.jsonl cannot hold."""
        before = set(record)
        self._call("log_metrics", record)
        for key in record.keys() - before:
            if not isinstance(record[key], int | float | str | None):
                kind = type(record[key]).__name__
                raise self._failed("log_metrics", f"record[{key!r}] is no number or text, but {kind}")

    def close(self, error: BaseException | None) -> None:
        """Let the callback end."""
        try:
            self._call("close", error)
        except TrainingError:
            if error is None:
                raise
            traceback.print_exc()

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._callback, method)(*arguments)
        except (Exception, SystemExit) as error:
            raise self._failed(method, f"{type(error).__name__}: {error}", _frames(error)) from error

    def _failed(self, method: str, why: str, frames: str = "") -> TrainingError:
        message = f"{self.name} of train.callbacks failed in {method}: {why}"
        return TrainingError(Problem("PP-E735", message, "train.callbacks=null", frames))


def load_callbacks(names: Sequence[str]) -> list[OwnCallback]:
    """A callback of each class that `names` has, as `module:Class`, made without arguments. Raises ConfigError
    (PP-E778) with every name that leads to none."""
    loaded: list[OwnCallback] = []
    problems: list[Problem] = []
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            callback = getattr(importlib.import_module(module), attribute)()
            if not isinstance(callback, Callback):
                raise TypeError(f"it makes no ppctl.Callback, but {type(callback).__name__}")
            loaded.append(OwnCallback(name, callback))
        except (Exception, SystemExit) as error:
            message = f"{name} of train.callbacks cannot be used: {type(error).__name__}: {error}"
            problems.append(
                Problem("PP-E778", message, _way_out(module, [each for each in names if each != name]), _frames(error))
            )
    if problems:
        raise ConfigError(problems)
    return loaded


def _way_out(module: str, without: Sequence[str]) -> str:
    """Where the module is, if it lies in the working directory, which ranks do not search; and the list without it."""
    here, top = Path.cwd(), module.partition(".")[0]
    ways = [pasted(f"train.callbacks={'[' + ','.join(without) + ']' if without else 'null'}")]
    if importlib.util.find_spec(top) is None and ((here / top).exists() or (here / f"{top}.py").exists()):
        path = os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH"))))
        ways.insert(0, pasted(f"launch.env.PYTHONPATH={path}"))
    return "\n".join(ways)


def _frames(error: BaseException) -> str:
    """The last frames of the traceback below this file, as Python writes them."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in frame.filename]
    return "".join(traceback.format_list(frames[-8:])).rstrip()
