"""`ppctl runs delete`: asks, takes whole runs that nothing continues, and leaves no half of one to be seen."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from ppctl.cli.main import main
from ppctl.config.schema import RunConfig
from ppctl.runs.run_starts import hold
from ppctl.runs.rundir import RunDir


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, RunDir]:
    monkeypatch.chdir(tmp_path)
    made = {}
    for number, name in enumerate(("one", "two", "other")):

        def fill(draft: RunDir) -> None:
            draft.write_config(RunConfig())
            draft.add_command("ppctl train")
            (draft.path / "plan.json").write_text("{}")
            draft.write_status("finished", step=3)

        run = RunDir.create(Path("runs"), "job" if name != "other" else "rest", fill, name)
        (run.checkpoints / "weights").write_bytes(bytes(1000))
        os.link(run.checkpoints / "weights", run.checkpoints / "again")
        os.utime(run.path / "config.yaml", (1000.0 + number, 1000.0 + number))
        made[name] = run
    return made


def there() -> list[str]:
    return sorted(path.name for path in Path("runs").glob("*/*"))


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    typed = io.StringIO(text)
    typed.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", typed)


@pytest.mark.parametrize(
    ("text", "code", "left"), [("y\n", 0, ["other"]), ("\n", 1, None), ("no\n", 1, None), ("", 1, None)]
)
def test_it_shows_the_bytes_and_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, code: int, left: list[str] | None
) -> None:
    paths = [Path("runs/job/one"), Path("runs/job/two")]
    sizes = [sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) - 1000 for path in paths]
    answer(monkeypatch, text)
    assert main(["runs", "delete", "job"]) == code
    said = capsys.readouterr()
    lines = [f"{path}: finished, {size:,} bytes" for path, size in zip(paths, sizes, strict=True)]
    assert said.err.splitlines() == lines, "a file with two names counts once"
    assert f"delete 2 runs, {sum(sizes):,} bytes? [y/N] " in said.out
    assert there() == (left or ["one", "other", "two"])


def test_without_a_terminal_it_takes_yes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["runs", "delete", "one", "--dir", "runs"]) == 2
    assert "PP-E651: nobody is there" in (said := capsys.readouterr().err)
    assert "try: ppctl runs delete one --dir runs --yes\n" in said
    assert main(["runs", "delete", "one", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deleted"] == [str(Path("runs/job/one").absolute())]
    assert there() == ["other", "two"]


def test_a_run_that_goes_on_is_never_deleted_and_with_it_no_other(
    runs: dict[str, RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    runs["two"].write_status("running", step=1)
    with hold(runs["two"]):
        assert main(["runs", "delete", "job", "rest", "--yes"]) == 2
        assert "PP-E613: run two is running" in capsys.readouterr().err
    runs["two"].write_status("finished")
    with hold(runs["two"]):
        assert main(["runs", "delete", "two", "--yes"]) == 2
        assert "PP-E613: run two is still going on" in capsys.readouterr().err, "held, whatever its status says"
    assert there() == ["one", "other", "two"]


def test_what_is_no_whole_run_of_this_user_is_not_deleted(
    runs: dict[str, RunDir], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs["one"].path / "plan.json").unlink()
    project = Path("project")
    project.mkdir()
    (project / "config.yaml").write_text("a: 1\n")
    Path("runs/job/link").symlink_to(runs["other"].path)
    for name in ("one", "project", "link"):
        assert main(["runs", "delete", name, "--yes"]) == 2
        assert "PP-E651" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert main(["runs", "delete", "two", "--yes"]) == 2
    assert "another user's" in capsys.readouterr().err
    assert there() == ["link", "one", "other", "two"] and (project / "config.yaml").exists()


def test_no_reader_sees_half_a_run_and_the_next_delete_removes_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def interrupted(path: Path) -> None:
        (path / "plan.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    assert main(["runs", "delete", "job", "--yes"]) == 130
    assert "`ppctl runs delete` removes what is left" in capsys.readouterr().err
    assert main(["runs", "--json"]) == 0
    assert [run["id"] for run in json.loads(capsys.readouterr().out)] == ["other"]
    monkeypatch.setattr(shutil, "rmtree", remove)
    assert len(there()) == 3
    assert main(["runs", "delete"]) == 0
    assert there() == ["other"]
    assert main(["runs", "delete"]) == 2
    assert "PP-E105: `ppctl runs delete` takes runs, but none is named" in capsys.readouterr().err
