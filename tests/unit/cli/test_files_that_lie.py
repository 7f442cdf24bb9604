"""Whatever is in a run's or a checkpoint's place, a command that reads it ends with a code, and none with a traceback.

A file that has no end, or 200 MB of nesting, is refused without being read: the tests end because nothing waits.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from array_checkpoints import arrays, save
from lying_files import ODD, altered, clear, put_device, put_pipe, sealed, write_state

from ppctl.checkpoint.run_state import run_state
from ppctl.cli.main import main
from ppctl.errors import CheckpointError, ConfigError
from ppctl.launch.run_directory import Launch, go_on
from ppctl.plan.plan import _digest_of
from ppctl.records.rank_records import RankFailure
from ppctl.runs import fence
from ppctl.runs.run_starts import begin_start, hold
from ppctl.runs.rundir import RunDir, warn

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
    "parallel": {"pp": 2, "vpp": 1, "order": "tp-cp-ep-dp-pp"},
    "model": MODEL,
    "loss_scale": {"scale": 1.0, "good_steps": 3, "chances": 2},
    "weights_only": False,
    "source": "/nowhere",
    "averaged": ["/nowhere"],
}
CHECKPOINT = "checkpoints/step-2"
SEEDED = 20
"""Alterations of each file in `make test`; ten times as many in `make test-all`, and all of them in `make soak`."""


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
    ranks = [[0, 9, 9, 9, [[index, 1, 2]]] for index in (0, 1)]
    run.write_measured_step(1, {"version": 1, "step": 1, "unit": "us", "ranks": ranks})
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
            assert main(arguments) in range(5), f"{what}: ppctl {' '.join(arguments)}"
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


def altered_text(text: bytes, name: str, most: int | slice) -> Iterator[tuple[str, bytes]]:
    """The text of a file with one value changed, a text for each."""
    if name == "config.yaml":
        for what, tree in sample(altered(yaml.load(text, yaml.CSafeLoader)), most):
            with suppress(UnicodeEncodeError, yaml.YAMLError):  # what YAML cannot hold
                yield what, yaml.dump(tree, Dumper=yaml.CSafeDumper).encode()
        return
    lines = text.splitlines() if name == "metrics.jsonl" else [text]
    for what, other in sample(altered(json.loads(lines[-1])), most):
        yield what, b"\n".join([*lines[:-1], json.dumps(digested(name, other)).encode(), b""])


def digested(name: str, plan: Any) -> Any:
    """A plan with the digest of what it holds now."""
    if name == "plan.json" and isinstance(plan, dict) and isinstance(plan.get("schedule"), dict):
        with suppress(AttributeError, TypeError):  # one that has none
            return plan | {"digest": _digest_of({key: value for key, value in plan.items() if key != "digest"})}
    return plan


def sample(items: Iterator[Any], most: int | slice) -> list[Any]:
    """A seeded sample of at most so many, or a slice of all."""
    found = list(items)
    return found[most] if isinstance(most, slice) else random.Random(27).sample(found, min(most, len(found)))


IN_A_RUN = [name for name in FILES if not name.startswith("checkpoints/") and name != "command.txt"]
MOST = pytest.mark.parametrize(
    "most",
    [
        pytest.param(SEEDED, id="False"),
        pytest.param(10 * SEEDED, id="more", marks=[pytest.mark.whole, pytest.mark.timeout(480)]),
        *(
            pytest.param(
                slice(part, None, 4), id=f"True{part or ''}", marks=[pytest.mark.soak, pytest.mark.timeout(480)]
            )
            for part in range(4)
        ),
    ],
)


@MOST
@pytest.mark.parametrize("name", IN_A_RUN)
def test_an_altered_value_of_a_runs_file_is_refused_by_code(
    run: RunDir, ends: Callable[[str], str], name: str, most: int | slice
) -> None:
    for what, text in altered_text((run.path / name).read_bytes(), name, most):
        (run.path / name).write_bytes(text)
        ends(f"{name}: {what}")


def read_checkpoint(run: RunDir, more: bool = False) -> None:
    """The commands that read a checkpoint alone."""
    path = str(run.path / CHECKPOINT)
    other = str(run.checkpoints / "step-1")
    commands = [
        ["verify", path],
        ["inspect", path, "--tensors"],
        ["inspect", str(run.checkpoints)],
        ["diff", path, other],
    ]
    commands += [["prune", str(run.checkpoints), "--keep", "1", "--dry-run"]]
    commands += [["verify", path, "--for", "+recipe=quickstart"]] if more else []
    for command in commands:
        assert main(["ckpt", *command]) in (0, 1, 2, 3), command


@MOST
def test_an_altered_manifest_is_refused_by_code(run: RunDir, most: int | slice) -> None:
    """Its seal is right: that proves nothing about who wrote it."""
    file = run.path / CHECKPOINT / "manifest.json"
    manifest = json.loads(file.read_bytes())
    few = [*list(manifest["tensors"].items())[:2], *((k, v) for k, v in manifest["tensors"].items() if "step" in k)]
    for _, other in sample(altered(manifest | {"tensors": dict(few)}), most):
        with suppress(UnicodeEncodeError):
            file.write_bytes(sealed(other))
            read_checkpoint(run)


@MOST
def test_an_altered_state_is_refused_by_code(run: RunDir, most: int | slice) -> None:
    """Its digest is right."""
    state = json.loads((run.path / CHECKPOINT / "state.json").read_bytes())
    for _, other in sample(altered(state), most):
        write_state(run.path / CHECKPOINT, other)
        read_checkpoint(run, more=most != SEEDED)


def test_a_tensor_of_many_parts_is_checked_in_seconds(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """In pairs they would be compared for hours."""
    path = run.path / CHECKPOINT
    manifest = json.loads((path / "manifest.json").read_bytes())
    count, digest = 20_000, "0" * 32
    parts = [
        {"file": "x", "bytes": [4 * n + 8, 4 * n + 12], "offset": [0, n], "shape": [1, 1], "digests": [digest]}
        for n in range(count)
    ]
    manifest["files"]["x"] = {"bytes": 4 * count + 8, "header": 8, "digest": digest}
    for more, said in ([], "x is missing"), (parts[-1:], "overlap"):
        manifest["tensors"]["a"] = {"shape": [1, count], "dtype": "float32", "shards": parts + more}
        (path / "manifest.json").write_bytes(sealed(manifest))
        assert main(["ckpt", "verify", str(path)]) == 3
        assert said in capsys.readouterr().err


def test_of_many_missing_files_a_hundred_are_named(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.path / CHECKPOINT
    manifest = json.loads((path / "manifest.json").read_bytes())
    for count in (10_000, 2**17):
        more = {f"x{n}": {"bytes": 8, "header": 8, "digest": "0" * 32} for n in range(count)}
        (path / "manifest.json").write_bytes(sealed(manifest | {"files": manifest["files"] | more}))
        assert main(["ckpt", "verify", str(path)]) == 3
        assert capsys.readouterr().err.count("PP-E503") == (101 if count == 10_000 else 1)


@pytest.mark.parametrize("without", ["files", "tensors", "step"])
@pytest.mark.parametrize("other", [None, [], "x", float("inf")], ids=ascii)
def test_a_manifest_of_nothing_is_not_good(run: RunDir, without: str, other: object) -> None:
    file = run.path / CHECKPOINT / "manifest.json"
    file.write_bytes(sealed(json.loads(file.read_bytes()) | {without: other}))
    assert main(["ckpt", "verify", str(run.path / CHECKPOINT)]) == 3


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "rank-00000.safetensors"])
def test_what_is_no_file_of_a_checkpoint_is_damage(run: RunDir, capsys: pytest.CaptureFixture[str], name: str) -> None:
    file = run.path / CHECKPOINT / name
    keep = file.read_bytes()
    for odd in ODD:
        odd(file)
        assert main(["ckpt", "verify", str(run.path / CHECKPOINT)]) == 3, odd.__name__
        assert "PP-E503" in capsys.readouterr().err, odd.__name__
        read_checkpoint(run)
        clear(file)
        file.write_bytes(keep)


@pytest.mark.parametrize(
    "change",
    [
        {"step": 10**15},
        {"step": 1e18},
        {"step": 3},
        {"consumed_samples": -1},
        {"consumed_samples": "x"},
        {"sample_order": None, "seed": "x"},
        {"loss_scale": {"scale": "x", "good_steps": 1, "chances": 1}},
        {"model": MODEL | {"hidden_size": 10**12}},
        {"model": MODEL | {"hidden_size": {}}},
        {"tokenizer_path": "a\0b"},
    ],
    ids=str,
)
def test_a_state_that_no_run_saves_is_damage(run: RunDir, change: dict[str, Any]) -> None:
    """A step of 1e18 ended a resumed run at once, with nothing trained and exit code 0."""
    path = run.path / CHECKPOINT
    write_state(path, STATE | {"step": 2} | change)
    with pytest.raises(CheckpointError, match=r"PP-E503: .*state\.json"):
        run_state(path)


def test_a_link_in_place_of_latest_is_not_followed(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """What another file begins with would be shown."""
    latest = run.checkpoints / "latest"
    (elsewhere := run.path.with_name("secret")).write_text("a password\n")
    latest.unlink()
    latest.symlink_to(elsewhere)
    assert main(["ckpt", "verify", str(run.path)]) == 0
    said = capsys.readouterr().err
    assert "it is a link, not a file" in said and "password" not in said


def test_a_name_outside_of_the_checkpoint_is_not_opened(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.path / CHECKPOINT
    os.mkfifo(path.parent / "trap")  # whoever opens it waits for ever
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest["files"]["../trap"] = manifest["files"].pop("rank-00000.safetensors")
    (path / "manifest.json").write_bytes(sealed(manifest))
    assert main(["ckpt", "verify", str(path)]) == 3
    assert "../trap takes text as" in capsys.readouterr().err


def test_only_the_end_of_the_metrics_is_read(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """A terabyte before it, of which the disk has nothing."""
    last = run.metrics()[-1]
    with open(run.metrics_path, "r+b") as file:
        file.truncate(2**40)
    for step in range(2, 40):
        run.add_metrics(last | {"step": step})
    for command in (["status", "one"], ["runs", "show", "one"], ["runs"]):
        assert main([*command, "--dir", str(run.path.parent.parent)]) == 0
        assert "39" in capsys.readouterr().out


def test_one_that_cannot_be_written_is_not_resumed(run: RunDir) -> None:
    (run.path / "status.json").unlink()
    (run.path / "status.json" / "a").mkdir(parents=True)
    launch = Launch(run.read_config(), run.read_plan(), f"ppctl resume {run.path} steps=6 --allow")
    with pytest.raises(ConfigError, match="PP-E610: the run directory cannot be written") as refused:
        go_on(run, launch, None)
    (problem,) = refused.value.problems
    assert problem.remedy.startswith('to="$(mktemp -d)" && cp -r ')
    assert problem.remedy.endswith(' && ppctl resume "$to"/one steps=6 --allow')


@pytest.mark.parametrize("name", ["env.json", "metrics.jsonl", "command.txt", "life", "logs/rank-0000.log"])
def test_what_a_start_adds_to_or_copies_has_an_end(run: RunDir, name: str) -> None:
    """A copy of a link to a device fills the disk, and what opens a pipe waits for ever."""
    (run.path / "logs").mkdir()
    launch = Launch(run.read_config(), run.read_plan(), "ppctl resume one")
    for odd in (put_pipe, put_device):
        odd(run.path / name)
        with pytest.raises(ConfigError, match="PP-E559"):
            go_on(run, launch, None)
        with pytest.raises(ConfigError, match="PP-E559"):  # a submitted run, whose own starts write the rest
            begin_start(run, "7.1")
        clear(run.path / name)


def test_a_log_has_an_end(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """What opens a pipe waits for ever, and a device's text fills the memory."""
    (run.path / "logs").mkdir()
    for odd in (put_pipe, put_device):
        odd(run.log(0))
        assert main(["logs", str(run.path), "--rank", "0"]) == 2
        assert "PP-E559" in capsys.readouterr().err
        clear(run.log(0))


@pytest.mark.parametrize("put", [put_pipe, put_device, lambda file: file.write_bytes(b"\xff")])
def test_a_start_has_no_name_where_its_file_is_none(
    run: RunDir, put: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so no later start than this process's own."""
    put(run.path / "life")
    monkeypatch.setenv(fence.LIFE, fence.variables("7.1", run.path)[fence.LIFE])
    assert fence.older() is None


def test_a_config_has_no_aliases(run: RunDir) -> None:
    """Ten levels of them are a thousand million values."""
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    for text in ("a0: &a0 [1]\n" + "\n".join(levels), "train: &x {steps: *x}"):
        (run.path / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"PP-E611.*aliases"):
            run.read_config()
