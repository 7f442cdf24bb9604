"""Where a conversion writes: a place of its own, which becomes OUT when all is there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from one_save import save

from ppctl.checkpoint.run_state import lineage
from ppctl.checkpoint.shards import whole_shards
from ppctl.config.schema import ModelConfig
from ppctl.errors import ConfigError
from ppctl.families.directory import model_tensors
from ppctl.pretrained.command import main as command
from ppctl.pretrained.conversion import exit_code_of, new_directory

MODEL = ModelConfig(num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=2, vocab_size=16)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which all users of this machine may write, as one of them who is not root."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        before = os.geteuid()
        if before == 0:
            os.seteuid(65534)  # root may read everything
        try:
            yield Path(name)
        finally:
            os.seteuid(before)


def test_what_another_user_keeps_private_is_left_out_of_an_export_or_named(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, run = shared / "home", shared / "run"
    (home / "llama").mkdir(parents=True)
    (home / "llama" / "tokenizer.json").write_text("{}")
    held = {f"model.{name}": torch.zeros(shape) for name, shape in model_tensors(MODEL).items()}
    state = {"model": {**asdict(MODEL), "from_": str(home / "llama")}, "tokenizer_path": str(home / "llama")}
    path = save(run, 1, whole_shards(held), state, keep=0)
    home.chmod(0)
    assert command(["export", str(path), str(shared / "out")]) == 0
    said = capsys.readouterr().out
    assert f"no tokenizer, because that of {home}/llama is not there any more, or not readable" in said
    assert f"no settings of {home}/llama, because its config.json is not there any more, or not readable" in said
    assert list(lineage(state)) == [home / "llama"]
    (file,) = path.glob("*.safetensors")
    file.chmod(0)
    assert command(["export", str(path), str(shared / "again")]) == 3
    assert f"error PP-E505: {file} cannot be read: Permission denied" in capsys.readouterr().err
    home.chmod(0o700)
    file.chmod(0o600)
    path.parent.chmod(0o500)
    assert command(["export", str(path), str(path.parent / "deep" / "out")]) == 3
    assert f"{path.parent}/deep/out cannot be written: Permission denied" in capsys.readouterr().err
    path.parent.chmod(0o700)


def test_a_reader_that_has_ended_and_a_full_disk_are_no_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert exit_code_of(lambda: print("text")) == 141
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert exit_code_of(lambda: print("text")) == 1
    assert exit_code_of(Path("/not/there").read_text) == 1
    said = capsys.readouterr().err
    assert "error PP-E127: the output cannot be written: No space left on device" in said
    assert "error PP-E505: /not/there cannot be used: No such file or directory" in said


def write(out: Path, text: str = "all") -> None:
    with new_directory(out) as draft:
        (draft / "weights").write_text(text)


def test_a_draft_is_nobody_elses(tmp_path: Path) -> None:
    (tmp_path / "mine.tmp").mkdir()
    (tmp_path / "mine.tmp" / "notes").write_text("the user's")
    out = tmp_path / "mine"
    with new_directory(out) as draft:
        (draft / "weights").write_text("the first's")
        write(out, "the second's")
        (out / "weights").rename(draft / "taken")  # so that the first finds an empty directory in its place
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "weights": "the first's",
        "taken": "the second's",
    }
    with pytest.raises(OSError, match="not empty"), new_directory(tmp_path / "other") as draft:
        write(tmp_path / "other")
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "mine.tmp", "other"}
    assert [path.name for path in (tmp_path / "mine.tmp").iterdir()] == ["notes"]


@pytest.mark.parametrize("there", [True, False])
def test_what_a_link_leads_to_is_filled(tmp_path: Path, there: bool) -> None:
    out, disk = tmp_path / "out", tmp_path / "disk"
    disk.mkdir()
    if there:
        (disk / "empty").mkdir()
    out.symlink_to(disk / "empty")
    write(out)
    assert out.is_symlink() and [path.name for path in disk.iterdir()] == ["empty"]
    assert (disk / "empty" / "weights").read_text() == "all"
    with pytest.raises(ConfigError, match=r"PP-E525: .*/out exists already"):
        write(out)


def test_every_file_and_every_name_is_on_the_disk_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or sync(file))
    with new_directory(tmp_path / "out") as draft:
        (draft / "deep").mkdir()
        for name in ("config.json", "deep/state.json"):
            (draft / name).write_text("{}")
    assert {*synced[:-2]} == {str(draft / name) for name in ("config.json", "deep", "deep/state.json")}
    assert synced[-2:] == [str(draft), str(tmp_path)]


def test_a_mount_point_is_refused_before_any_work() -> None:
    with pytest.raises(ConfigError, match="PP-E525: /proc is a mount point: name a new directory in it"):
        write(Path("/proc"))
