"""Whatever is in a run's or a checkpoint's place, a command that reads it ends with a code, and none with a traceback.

A file that has no end, or 200 MB of nesting, is refused without being read: the tests end because nothing waits.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from array_checkpoints import arrays, save
from lying_files import ODD, altered, clear, sealed, write_state

from ppctl.cli.main import main
from ppctl.plan.plan import _digest_of
from ppctl.rank_records import RankFailure
from ppctl.run_starts import hold
from ppctl.rundir import RunDir, warn

GOLDEN = Path(__file__).parents[2] / "golden" / "run"
MODEL = {"num_layers": 2, "hidden_size": 4, "num_attention_heads": 1, "vocab_size": 8, "from_": None}
STATE = {
    "consumed_samples": 32,
    "sample_order": 2,
    "seed": 1,
    "seq_length": 8,
    "data_path": None,
    "tokenizer": "byte",
    "tokenizer_path": None,
    "optimizer": "adamw",
    "layout": "Et|tL",
    "parallel": {"pp": 2, "vpp": 1},
    "model": MODEL,
    "loss_scale": {"scale": 1.0, "good_steps": 3, "chances": 2},
    "weights_only": False,
    "source": "/nowhere",
    "averaged": ["/nowhere"],
}
CHECKPOINT = "checkpoints/step-2"
SEEDED = 20
"""Alterations of each file in `make test`; all of them in `make test-all`."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with every file that a run may have, and two checkpoints."""
    path = tmp_path / "runs" / "job" / "one"
    shutil.copytree(GOLDEN, path)
    run = RunDir(path)
    for folder in ("errors", "heartbeats"):
        (path / folder).mkdir()
    row = {"rank": 0, "state": "training", "step": 1, "index": 2, "since": 5.0, "exchanges": [0, 0, 0, 0]}
    run.write_heartbeats("node", {"host": "node", "time": 6.0, "ranks": [row]})
    run.write_edges({"hosts": ["a"], "contacts": [{"name": "0 -> 0", "ranks": [0, 0], "best_s": 0.1}]})
    run.write_error(RankFailure(0, "boom", "ValueError", "PP-E701", stage=1, others=("more",), ends=(0, 1)))
    run.write_result({"state": "finished", "step": 1, "loss": 5.0, "sample": None, "start_up": {"compose": 0.1}})
    run.write_environment({"variables": {"SLURM_JOB_ID": "7"}, "compose_s": 0.5})
    run.write_measured_step(1, {"version": 1, "step": 1, "unit": "us", "ranks": [[0, 9, 9, 9, [[0, 1, 2]]]] * 2})
    run.write_status("running", step=1, start_up={"compose": 0.1})
    with hold(run):
        pass
    for step in (1, 2):
        save(run.checkpoints, step, arrays(step), state=STATE)
    return run


@pytest.fixture
def ends(run: RunDir, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Calls all commands that read a run's files: each ends with an exit code of its own. Returns what they said."""
    other = shutil.copytree(run.path, run.path.with_name("two"))

    def call(what: str) -> str:
        warn.cache_clear()
        root = str(run.path.parent.parent)
        for command in (
            *(["runs"], ["runs", "--json"], ["runs", "show", "one"], ["status", "one"], ["status", "one", "--json"]),
            *(["logs", "one"], ["trace", "one"], ["runs", "--compare", "one", "two"], ["parity", "one", "two"]),
            *(["resume", "one"], ["ckpt", "inspect", str(run.checkpoints)], ["cancel", "one"]),
        ):
            arguments = command if command[0] == "ckpt" else [*command, "--dir", root]
            assert main(arguments) in (0, 1, 2, 3), f"{what}: ppctl {' '.join(arguments)}"
        said = capsys.readouterr()
        assert "two" in said.out, "one run of this kind does not hide the others"
        return said.err

    assert other.is_dir()
    return call


FILES = (
    *("config.yaml", "plan.json", "status.json", "metrics.jsonl", "holder.json", "env.json", "edges.json"),
    *("result.json", "command.txt", "errors/rank-0000.json", "heartbeats/node.json", "trace/step-1.json"),
    *("checkpoints/latest", f"{CHECKPOINT}/manifest.json", f"{CHECKPOINT}/state.json"),
)


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_of_a_run_is_refused_by_code(run: RunDir, ends: Callable[[str], str], name: str) -> None:
    keep = (run.path / name).read_bytes()
    for odd in ODD:
        odd(run.path / name)
        said = ends(f"{name}: {odd.__name__}")
        if name not in ("checkpoints/latest", "command.txt"):
            assert "PP-E" in said, odd.__name__
        clear(run.path / name)
        (run.path / name).write_bytes(keep)


def alterations(text: bytes, name: str) -> Iterator[tuple[str, bytes]]:
    """The text of a file with one value changed, a text for each."""
    if name == "config.yaml":
        tree = yaml.safe_load(text)
        yield from ((what, yaml.safe_dump(other).encode()) for what, other in altered(tree) if printable(other))
        return
    lines = text.splitlines() if name == "metrics.jsonl" else [text]
    for what, other in altered(json.loads(lines[-1])):
        yield what, b"\n".join([*lines[:-1], json.dumps(digested(name, other)).encode(), b""])


def digested(name: str, plan: Any) -> Any:
    """A plan with the digest of what it holds now."""
    if name == "plan.json" and isinstance(plan, dict) and isinstance(plan.get("schedule"), dict):
        with suppress(Exception):  # of what has none
            return plan | {"digest": _digest_of({key: value for key, value in plan.items() if key != "digest"})}
    return plan


def printable(tree: Any) -> bool:
    """Whether YAML can hold it."""
    try:
        yaml.safe_dump(tree).encode()
    except (UnicodeEncodeError, yaml.YAMLError):
        return False
    return True


def sample(items: Iterator[Any], whole: bool) -> list[Any]:
    """All, or a seeded sample."""
    found = list(items)
    return found if whole else random.Random(27).sample(found, min(SEEDED, len(found)))


IN_A_RUN = [name for name in FILES if not name.startswith("checkpoints/") and name != "command.txt"]
WHOLE = pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=[pytest.mark.whole, pytest.mark.timeout(900)])]
)


@WHOLE
@pytest.mark.parametrize("name", IN_A_RUN)
def test_an_altered_value_of_a_runs_file_is_refused_by_code(
    run: RunDir, ends: Callable[[str], str], name: str, whole: bool
) -> None:
    for what, text in sample(alterations((run.path / name).read_bytes(), name), whole):
        (run.path / name).write_bytes(text)
        ends(f"{name}: {what}")
