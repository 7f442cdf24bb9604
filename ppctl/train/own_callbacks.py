"""The user's own callbacks: classes that `train.callbacks` names, imported only by ranks (docs/callbacks.md)."""

from __future__ import annotations

import importlib.util
import json
import os
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ppctl.errors import ConfigError, Problem, TrainingError, pasted
from ppctl.records.metrics_file import line_of
from ppctl.train.callback import ASKED, WITHOUT_RESULT, Callback


class OwnCallback(Callback):
    """Calls a user's callback. Its errors are raised as TrainingError (PP-E735) with class, method and frames, or
    printed if another error is already ending the run."""

    def __init__(self, name: str, callback: Callback) -> None:
        self.name, self._callback = name, callback
        for method in ("stage_program", *WITHOUT_RESULT, "state_dict", "load_state_dict"):
            setattr(self, method, partial(self._call, method))

    def stop_requested(self) -> int:
        """ASKED if the callback returns a true value."""
        return ASKED if self._call("stop_requested") else 0

    def close(self, error: BaseException | None) -> None:
        """Let the callback end."""
        try:
            self._call("close", error)
        except TrainingError:
            if error is None:
                raise
            traceback.print_exc()

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method; returns its result. Raises TrainingError if the method raises, if metrics.jsonl cannot hold
        the record, or if JSON cannot hold the state."""
        try:
            result = getattr(self._callback, method)(*arguments)
            for key, value in arguments[0].items() if method == "log_metrics" else ():
                if not isinstance(value, int | float | str | list | None):
                    raise TypeError(f"record[{key!r}] is no number or text, but {type(value).__name__}")
            if method == "log_metrics":
                line_of(*arguments)
            if method == "state_dict":
                _check_state(result)
            return result
        except (Exception, SystemExit) as error:
            message = f"{self.name} of train.callbacks failed in {method}: {type(error).__name__}: {error}"
            raise TrainingError(Problem("PP-E735", message, "train.callbacks=null", _frames(error))) from error


def load_callbacks(names: Sequence[str]) -> list[OwnCallback]:
    """A callback of each class in `names` (`module:Class`), made without arguments. Raises ConfigError (PP-E778) with
    every name that does not lead to one."""
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
            rest = ",".join(other for other in names if other != name)
            ways = [pasted(f"train.callbacks={f'[{rest}]' if rest else 'null'}")]
            directory, top = Path.cwd(), module.partition(".")[0]
            # ranks do not search this directory
            if importlib.util.find_spec(top) is None and list(directory.glob(f"{top}*")):
                path = os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))
                ways.insert(0, pasted(f"launch.env.PYTHONPATH={path}"))
            problems.append(Problem("PP-E778", message, "\n".join(ways), _frames(error)))
    if problems:
        raise ConfigError(problems)
    return loaded


def _check_state(state: dict[str, Any]) -> None:
    """Raise TypeError for a value that JSON would change, ValueError for a state that is too long."""
    for key, value in state.items():
        if repr(json.loads(json.dumps({key: value}, default=str))) != repr({key: value}):
            raise TypeError(f"state[{key!r}] is not made of numbers, text, lists and dicts: {value!r:.80}")
    if len(json.dumps(state)) > 2**18:
        raise ValueError("the state has more than 256 KiB as JSON")


def _frames(error: BaseException) -> str:
    """The last frames of the traceback below this file, as Python prints them."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in frame.filename]
    return "".join(traceback.format_list(frames[-8:])).rstrip()
