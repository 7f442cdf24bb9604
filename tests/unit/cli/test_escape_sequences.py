"""No text of a file reaches the terminal as a control character, whatever file, field and command."""

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import array_checkpoints
import numpy as np
import pytest
import yaml

from ppctl.cli.console import note, overwrite
from ppctl.cli.main import main
from ppctl.errors import CONTROL, visible

GOLDEN = Path(__file__).parents[2] / "golden"
SPOILT = "\x1b]0;x\x07\x9b31m\x7f\u202e\r\u2028"
BAD = re.compile(CONTROL.pattern.replace(r"\x00-\x1f", r"\x00-\x08\x0b-\x1f"))
RUN = "20261122-084400-0000"
READERS = [
    ["runs"], ["runs", "show", RUN], ["status", RUN], ["status"], ["logs", RUN], ["logs", RUN, "--rank", "0"],
    ["trace", RUN], ["resume", RUN, "steps=1"], ["parity", RUN, RUN], ["runs", "--compare", RUN, RUN],
    ["runs", "delete", RUN],
    ["cancel", RUN], ["requeue", RUN], ["ckpt", "inspect", "runs/q/" + RUN],
    ["ckpt", "prune", "runs/q/" + RUN, "--keep", "1", "--dry-run"],
]  # fmt: skip
CHECKPOINT = "runs/q/" + RUN + "/checkpoints/step-3"
READERS += [["ckpt", *words, CHECKPOINT] for words in (["inspect"], ["inspect", "--tensors"], ["verify"])]
READERS += [
    ["ckpt", "diff", CHECKPOINT, "old/step-3"],
    ["ckpt", "verify", "old/step-3"],
    ["ckpt", "inspect", "old/step-3"],
]


def spoilt(value: Any, path: str = "") -> Iterator[Any]:
    """`value` with one of its texts spoilt, for each of them; of names in mappings the first few."""
    if isinstance(value, str):
        yield value + SPOILT
    elif isinstance(value, dict):
        for name in list(value)[:40]:
            yield {(each + SPOILT if each == name else each): inner for each, inner in value.items()}
            yield from ({**value, name: inner} for inner in spoilt(value[name]))
    elif isinstance(value, list):
        for at, each in list(enumerate(value))[:2]:
            yield from ([*value[:at], inner, *value[at + 1 :]] for inner in spoilt(each))


def all_spoilt(value: Any) -> Any:
    """`value` with all of its texts spoilt, but for names in mappings."""
    if isinstance(value, dict):
        return {name: all_spoilt(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [all_spoilt(each) for each in value]
    return value + SPOILT if isinstance(value, str) else value


def printed(words: list[str]) -> str:
    """What a command prints; a traceback is another test's matter."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        main(words)
    assert "usage:" not in out.getvalue(), words
    return out.getvalue()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "q" / RUN
    shutil.copytree(GOLDEN / "run", run)
    weights = {**array_checkpoints.arrays(), f"model.{SPOILT}.weight": np.zeros(3, np.float32)}
    array_checkpoints.save(run / "checkpoints", 3, weights)
    array_checkpoints.save(tmp_path / "old", 3, array_checkpoints.arrays(1))
    (run / "logs").mkdir()
    (run / "logs" / "rank-0000.log").write_text(f"a{SPOILT}b\n")
    (run / "result.json").write_text(json.dumps({"sample": {"prompt": "a", "text": "b"}}))
    return run


def test_names_of_tensors_and_lines_of_logs_are_shown_as_escapes(run: Path) -> None:
    told = {" ".join(words): printed(words) for words in READERS}
    assert {words: BAD.findall(text) for words, text in told.items() if BAD.search(text)} == {}
    assert sum("\\x1b]0;x\\x07" in text for text in told.values()) >= 3, "logs, inspect and diff print it"


@pytest.mark.parametrize("file", ["status.json", "config.yaml", "plan.json", "result.json", "command.txt", "manifest"])
def test_no_field_of_a_file_reaches_the_terminal(run: Path, file: str) -> None:
    path = run / file if file != "manifest" else run / "checkpoints" / "step-3" / "manifest.json"
    text = path.read_text()
    value = yaml.safe_load(text) if file != "command.txt" else text
    few = {"config.yaml": 5, "plan.json": 20}.get(file, 7)
    states = (
        [value | {"message": SPOILT, "state": state} for state in ("failed", "running")] if "status" in file else []
    )
    for each in [all_spoilt(value), *states, *list(spoilt(value))[::few]]:
        path.write_text(json.dumps(each) if file != "command.txt" else each)
        for words in READERS[:4] if file != "manifest" else READERS[-5:]:
            told = ""
            try:
                told = printed(words)
            except Exception as error:  # a field of a wrong form: the readers' own tests are about it
                assert file != "command.txt", error
            assert not BAD.search(told), (words, told)


def test_a_terminal_gets_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", out)
    overwrite(f"step{SPOILT}")
    assert out.getvalue() == f"\r\033[Kstep{visible(SPOILT, '')}\r"


def test_json_stays_json_with_every_character(capsys: pytest.CaptureFixture[str]) -> None:
    every = "".join(map(chr, range(0x300))) + "\u2028\u202e\udce9"
    assert main(["plan", f"log.name={every}", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["problems"][0]["place"].count("\\x1b") == 1


def test_a_line_of_a_message_cannot_pose_as_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "+a\n  try: rm -rf x=1"])
    assert not re.search(r"^ *try: rm", capsys.readouterr().err, re.MULTILINE)
    note("a\x1bb")
    assert capsys.readouterr().err == "a\\x1bb\n"
