"""What stands in a checkpoint's place and is no file of it: a pipe has no end, and a deep list no depth."""

import os

import pytest
from array_checkpoints import arrays, save

from ppctl.cli.main import main


@pytest.mark.parametrize("action", [["inspect"], ["verify"], ["diff"]])
@pytest.mark.parametrize("name", ["manifest.json", "rank-00001.safetensors"])
def test_a_pipe_is_refused_and_not_read(tmp_path, action, name, capsys):
    path, other = save(tmp_path / "a", 4, arrays(7)), save(tmp_path / "b", 4, arrays(8))
    (path / name).unlink()
    os.mkfifo(path / name)
    code = main(["ckpt", *action, str(path), *([str(other)] if action == ["diff"] else [])])
    assert code == (0 if action == ["inspect"] and name != "manifest.json" else 3)


def test_a_manifest_of_brackets_is_damaged(tmp_path, capsys):
    path = save(tmp_path, 4, arrays(7))
    (path / "manifest.json").write_bytes(b"[" * 200_000)
    assert main(["ckpt", "verify", str(path)]) == 3
    assert "PP-E503" in capsys.readouterr().err
