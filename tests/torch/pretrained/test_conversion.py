"""Where a conversion writes: a place of its own, which becomes OUT when all is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppctl.errors import ConfigError
from ppctl.pretrained.conversion import new_directory


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


def test_a_mount_point_is_refused_before_any_work() -> None:
    with pytest.raises(ConfigError, match="PP-E525: /proc is a mount point: name a new directory in it"):
        write(Path("/proc"))
