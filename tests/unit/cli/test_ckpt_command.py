"""`ppctl ckpt`: what it prints, what it deletes, and its exit codes; without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from array_checkpoints import arrays, save

from ppctl.cli.main import main
from ppctl.config.compose import compose
from ppctl.host.files import lock, release
from ppctl.launch.weights import checkpoint_tensors

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint" / "step-3"
TINY = ("model.num_layers=2", "model.hidden_size=8", "model.num_attention_heads=2", "model.vocab_size=16")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with four checkpoints."""
    path = tmp_path / "runs" / "mine" / "20300101-aaaa"
    for step in (2, 4, 6, 8):
        save(path / "checkpoints", step, arrays(step), state={"layout": "Et|tL", "parallel": {"pp": 2, "tp": 1}})
    (path / "config.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    return path


def output(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["ckpt", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_checkpoint_is_described_by_size_cut_and_lineage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "checkpoints" / "step-4"
    source = save(run.parent / "source", 2, arrays(), state={"source": "/weights/llama"})
    save(run / "checkpoints", 4, arrays(4), state={"model": {"num_layers": 2, "from_": str(source)}, "layout": "EttL"})
    code, out, err = output(capsys, "inspect", path, "--tensors")
    assert (code, err) == (0, "")
    for said in (
        "format 2",
        "weights     3 tensors, 65 elements, bfloat16, float32, 250 bytes",
        "optimizer   4 tensors, 62 elements, float32, 248 bytes",
        "cut         layout EttL",
        "run         20300101-aaaa",
        f"began with  {source}",
        "began with  /weights/llama",
        "model.layers.2.attention.wq.weight               2  float32[6, 5]",
    ):
        assert said in out, out
    assert all(len(line) <= 80 or str(run) in line or "/" in line for line in out.splitlines())
    found = json.loads(output(capsys, "inspect", path, "--json")[1])
    assert found["lineage"]["began_with"] == [str(source), "/weights/llama"] and "tensors" not in found
    assert json.loads(output(capsys, "inspect", GOLDEN, "--json")[1])["format"] == 2


@pytest.mark.parametrize("how", ["run", "id", "directory", "newest"])
def test_the_checkpoints_of_a_run_are_listed(run: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    (run / "checkpoints" / "step-6" / "manifest.json").unlink()
    named = {"run": [run], "id": [run.name], "directory": [run / "checkpoints"], "newest": []}[how]
    code, out, _ = output(capsys, "inspect", *named)
    lines = out.splitlines()
    assert code == 0 and [line.split()[0] for line in lines[2:]] == ["step-2", "step-4", "step-6", "step-8"]
    assert lines[4].endswith("manifest.json is missing") and lines[5].endswith("the next start goes on here")
    found = json.loads(output(capsys, "inspect", *named, "--json")[1])
    assert found["next_start"] == "step-8" and found["checkpoints"][2]["fault"] == "manifest.json is missing"


def test_a_damaged_checkpoint_ends_with_3_and_a_good_one_with_0(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = output(capsys, "verify", run.name)
    assert (code, err) == (0, "") and "step-8: good" in out and "498 bytes of values read" in out
    file = run / "checkpoints" / "step-8" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert output(capsys, "verify", run, "--quick")[0] == 0
    code, out, err = output(capsys, "verify", run, "--json")
    found = json.loads(out)
    assert code == 3 and [problem["code"] for problem in found["problems"]] == ["PP-E503"]
    assert "of model.norm.weight (their xxh3-128 differs)" in err and "checkpoint.resume=" in err
    assert output(capsys, "verify", run / "checkpoints" / "step-9")[0] == 3


def test_a_checkpoint_is_compared_with_the_plan_of_another_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose([*TINY, "pp=2"]).config
    tensors = {name: np.zeros(shape, dtype) for name, (shape, dtype) in checkpoint_tensors(config).items()}
    path = save(tmp_path / "made", 2, tensors)
    code, out, err = output(capsys, "verify", path, "--for", *TINY, "pp=1")
    assert (code, err) == (0, "") and "every name, shape and dtype fits that run" in out
    state = {"consumed_samples": 1200, "seq_length": config.data.seq_length, "seed": 7}
    placed = save(tmp_path / "placed", 2, tensors, state=state)
    code, out, _ = output(capsys, "verify", placed, "--for", *TINY, "train.seed=7")
    assert code == 0 and "training would go on after 1,200 samples" in out
    code, out, err = output(capsys, "verify", placed, "--for", *TINY)
    assert code == 3 and "PP-E741" in err and "try: train.seed=7" in err and "1,200" not in out
    code, out, err = output(capsys, "verify", path, "--for", *TINY[1:], "model.num_layers=3")
    assert code == 3 and "lacks tensors of this model\n  model.layers.2." in err and "not every name" in out
    code, _, err = output(
        capsys, "verify", path, "--for", *TINY, "parallel.params_dtype=float64", "pipeline.dtype=float64"
    )
    assert code == 3 and "float32[16, 8] saved, float64[16, 8] here" in err
    code, _, err = output(capsys, "verify", path, "--for", "model.nothing=3")
    assert code == 2 and "model.nothing" in err
    weights = {name: value for name, value in tensors.items() if name.startswith("model.")}
    only = save(tmp_path / "weights", 0, weights, state={"weights_only": True})
    assert output(capsys, "verify", only, "--for", *TINY)[0] == 0
    assert output(capsys, "verify", path, "--for")[0] == 3  # another model's


def test_two_checkpoints_are_compared(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints"
    code, out, _ = output(capsys, "diff", folder / "step-2", folder / "step-2")
    assert code == 0 and "7 tensors are equal to the bit, 0 differ" in out
    code, out, err = output(capsys, "diff", folder / "step-2", folder / "step-8", "--limit", "2")
    assert (code, err) == (1, "") and "and 5 more tensors that differ (--limit 0 shows all)" in out
    assert "model.layers.2.attention.wq.weight  float32[6, 5]\n  30 of 30 elements; norm of B - A" in out
    found = json.loads(output(capsys, "diff", folder / "step-2", folder / "step-8", "--json")[1])
    assert len(found["different"]) == 7 and not found["same"]
    assert output(capsys, "diff", folder / "step-2", folder / "step-1")[0] == 3


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def test_old_checkpoints_are_deleted_by_the_rule_of_retention(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("prune", run, "--keep", "1", "--keep-every", "4")
    code, out, _ = output(capsys, *command, "--dry-run")
    assert code == 0 and "would delete step-2\nwould delete step-6\n" in out and len(names(run)) == 4
    found = json.loads(output(capsys, *command, "--json")[1])
    assert found["deleted"] == ["step-2", "step-6"] and found["kept"] == ["step-4", "step-8"] == names(run)
    assert "nothing to delete" in output(capsys, *command)[1]


def test_the_newest_good_checkpoint_stays_though_newer_ones_are_damaged(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (6, 8):
        os.truncate(run / "checkpoints" / f"step-{step}" / "rank-00000.safetensors", 10)
    found = json.loads(output(capsys, "prune", run, "--keep", "1", "--json")[1])
    assert (found["good"], found["kept"]) == ("step-4", ["step-4", "step-8"]) and names(run) == ["step-4", "step-8"]
    shutil.rmtree(run / "checkpoints" / "step-4")
    code, _, err = output(capsys, "prune", run, "--keep", "1")
    assert code == 3 and "PP-E530" in err and names(run) == ["step-8"]


def test_nothing_is_deleted_while_a_run_holds_the_directory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = lock(run)
    try:
        code, _, err = output(capsys, "prune", run, "--keep", "1")
        assert code == 2 and "PP-E613" in err and len(names(run)) == 4
    finally:
        release(held)
    assert output(capsys, "prune", run, "--keep", "1")[0] == 0 and not (run / "holder.json").exists()


def test_words_that_mean_nothing_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "prune", run, "--keep", "0")[0] == 2
    assert output(capsys, "prune", run / "checkpoints" / "step-2", "--keep", "1")[0] == 2
    assert output(capsys, "inspect", "nothing")[0] == 2
    assert output(capsys, "inspect", run / "config.yaml")[0] == 3
    assert len(names(run)) == 4


def test_a_person_reads_the_help_in_80_columns() -> None:
    words = [[], *([action] for action in ("inspect", "verify", "diff", "average", "prune", "import", "export"))]
    for action in words:
        command = [sys.executable, "-m", "ppctl", "ckpt", *action, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"})
        assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) <= 80, done.stdout


@pytest.mark.parametrize("name", ["none", "no'ne/x y"])
def test_the_remedy_for_a_directory_that_is_not_there_works(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["ckpt", "import", "--hf", name, "out"]) == 2
    remedy = capsys.readouterr().err.partition("try: ")[2]
    assert subprocess.run(["bash", "-c", remedy], capture_output=True, check=False).returncode == 0
