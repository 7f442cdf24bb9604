"""A directory of checkpoints after a kill at every line of a save, and after what hands and disks do to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_states import LATEST, MANIFEST, MARK, SAVES, STRANGE, content, killed_states, mark_of, save, write

from ppctl.checkpoint.manifest import damaged
from ppctl.errors import CheckpointError
from ppctl.runs.checkpoint_folder import PASSED, at, complete, expired, find, is_complete, step_of, steps_back, usable


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope="module", params=SAVES)
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Path]]:
    """The name of a save, and the directories that it leaves when it is killed."""
    return request.param, killed_states(request.param, tmp_path_factory.mktemp("killed"))


def read(directory: Path) -> str | None:
    found = find(directory)
    return None if found is None else mark_of(found.path)


def test_a_kill_at_any_line_leaves_the_last_checkpoint_or_the_new_one(killed: tuple[str, list[Path]]) -> None:
    name, states = killed
    marks = [read(state) for state in states]
    changed = marks.index(MARK)
    assert marks == [SAVES[name].before] * changed + [MARK] * (len(marks) - changed), "and never goes back"
    assert changed > 0, "at first the save has done nothing"
    assert len(states) >= 8, "the kills met the save in its middle"


def test_after_a_kill_at_any_line_no_start_reads_a_part_of_a_checkpoint(killed: tuple[str, list[Path]]) -> None:
    for state in killed[1]:
        for path in state.glob("step-*"):
            if path.suffix != ".tmp" and is_complete(path):
                mark_of(path)


def test_after_a_kill_at_any_line_the_next_save_works_and_cleans_up(killed: tuple[str, list[Path]]) -> None:
    name, states = killed
    for state in states:
        directory = shutil.copytree(state, state.with_name(f"{state.name}-next"), symlinks=True)
        reached = step_of(find(directory).path) if find(directory) else 0  # type: ignore[union-attr]
        save(directory, reached + 2, "next", keep=2)
        there = [path for path in names(directory) if not path.startswith(LATEST)]
        assert [each for each in there if not each.startswith("step-") or "." in each] == []
        assert read(directory) == "next" and find(directory).warning == ""  # type: ignore[union-attr]
        assert there == sorted(path.name for path in complete(directory)), "nothing half deleted stays"
        past = [path for path in complete(directory) if step_of(path) <= reached + 2]
        assert [step_of(path) for path in past] == ([reached] if reached else []) + [reached + 2], (name, there)
        assert mark_of(past[-1]) == "next", "and the one that it went on from is kept"


def test_a_save_over_a_directory_called_latest_keeps_what_is_in_it(tmp_path: Path) -> None:
    SAVES["after `latest` became a directory"].begin(tmp_path)
    save(tmp_path, 8, MARK)
    assert (tmp_path / LATEST).read_text() == "step-8\n"
    assert mark_of(tmp_path / "latest.old") == "someone's own"
    SAVES["after `latest` became a directory"].begin(tmp_path)
    save(tmp_path, 12, MARK)
    assert (tmp_path / LATEST).read_text() == "step-12\n"
    assert [mark_of(tmp_path / name) for name in ("latest.old", "latest.old-2")] == ["someone's own"] * 2


@pytest.mark.parametrize("name", STRANGE)
def test_what_a_start_reads_in_a_strange_directory(name: str, tmp_path: Path) -> None:
    strange, directory = STRANGE[name], tmp_path / "checkpoints"
    directory.mkdir()
    strange.make(directory)
    found = find(directory)
    assert (None if found is None else found.path) == (None if strange.name is None else directory / strange.name)
    assert strange.warning in (found.warning if found else "")
    assert bool(strange.warning) == bool(found and found.warning), "a line where it is not what `latest` says, no other"


@pytest.mark.parametrize("name", [name for name, strange in STRANGE.items() if strange.name])
def test_a_run_goes_on_in_a_strange_directory(name: str, tmp_path: Path) -> None:
    """Two more saves, with two to keep: nothing collides, and no leftover of a save stays."""
    STRANGE[name].make(tmp_path)
    step = step_of(STRANGE[name].name)
    for more in (2, 4):
        save(tmp_path, step + more, f"{more}", keep=2)
    assert [mark_of(path) for path in complete(tmp_path)] == ["2", "4"]
    assert read(tmp_path) == "4"
    assert [path for path in names(tmp_path) if path.startswith("step-") and "." in path] in ([], ["step-6.old"])
    assert not (tmp_path / "step-6.old" / MANIFEST).exists(), "only what was damaged before"


def test_retention_counts_what_can_be_read(tmp_path: Path) -> None:
    write(tmp_path / "step-2", "2")
    write(tmp_path / "step-4", "4")
    (write(tmp_path / "step-6", "6") / MANIFEST).unlink()
    save(tmp_path, 8, "8", keep=2)
    assert [path.name for path in complete(tmp_path)] == ["step-4", "step-8"]
    assert (tmp_path / "step-6").is_dir(), "who damaged it may want to look at it"


@pytest.mark.parametrize("make", [lambda path: path.write_text(""), lambda path: path.symlink_to("/not/mounted")])
def test_a_directory_that_cannot_be_listed_is_an_error_and_not_a_new_run(make: object, tmp_path: Path) -> None:
    make(tmp_path / "checkpoints")  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"PP-E505: .*checkpoints cannot be read: ") as caught:
        find(tmp_path / "checkpoints")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("there", "asked", "found"),
    [
        (["step-6"], "step-6", "step-6"),
        (["step-6.old"], "step-6", "step-6.old"),
        (["step-6.old"], "step-6.old", "step-6.old"),
        (["step-6"], "step-6.old", "step-6"),
        (["step-6!", "step-6.old"], "step-6", "step-6.old"),
        (["step-6!"], "step-6", "step-6"),
        (["step-6.tmp"], "step-6.tmp", None),
        (["step-6.tmp"], "step-6", None),
        (["best"], "best", "best"),
        (["best!"], "best", None),
        (["step-6"], ".", None),
        (["step-6"], "step-6/manifest.json", None),
        (["step-6"], "step-6\0", None),
        ([], "step-6", None),
    ],
)
def test_what_a_path_names(there: list[str], asked: str, found: str | None, tmp_path: Path) -> None:
    for name in there:
        path = write(tmp_path / name.rstrip("!"), name)
        if name.endswith("!"):
            (path / MANIFEST).unlink()
    before = content(tmp_path)
    assert at(tmp_path / asked) == (None if found is None else tmp_path / found)
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-6", 6),
        ("step-6.old", 6),
        ("step-6/", 6),
        ("runs/job/step-4/checkpoints/step-12.old", 12),
        ("step-0", 0),
        ("step-6.tmp", 0),
        ("step-06", 0),
        ("step-six", 0),
        ("best", 0),
        (None, 0),
    ],
)
def test_the_step_that_a_name_says(name: str | None, step: int) -> None:
    assert step_of(name) == step


def test_what_the_run_has_given_up_is_neither_counted_nor_best(tmp_path: Path) -> None:
    """A step back from step 280 to 200 at keep=2: step 237 trained on what is skipped now."""
    for step, position, loss in ((200, 1600, 3.0), (237, 1896, 1.0), (300, 3040, 2.0)):
        state = json.dumps({"consumed_samples": position, "eval_loss": loss})
        write(tmp_path / f"step-{step}", "").joinpath("state.json").write_text(state)
    assert [step_of(path) for path in usable(tmp_path)] == [200, 237, 300]
    (tmp_path / PASSED).write_text("[[280, 200, 1600, 2240]]")
    assert [step_of(path) for path in usable(tmp_path)] == [200, 300]
    for keeping in ((2,), (2, 237), (1, 0, 2), (1, 100)):
        assert [step_of(path) for path in expired(tmp_path, 300, *keeping)] == [237]
    assert [step_of(path) for path in expired(tmp_path, 300, 1)] == [200, 237]
    assert expired(tmp_path, 200, 1) == expired(tmp_path, 300, 0) == []
    assert "step-200" in damaged(tmp_path / "step-300", "").remedy


@pytest.mark.parametrize(
    "text", ["[[36, 32, 144, 128]]", "[[36, 36, 128, 144]]", "[[36, 32, 128]]", "[1]", "{}", "", "\x00"]
)
def test_a_note_of_steps_back_that_no_run_writes_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / PASSED).write_text("[[36, 32, 128, 144]]")
    assert steps_back(tmp_path)[0].end == 144
    (tmp_path / PASSED).write_text(text)
    with pytest.raises(CheckpointError, match="it is damaged"):
        steps_back(tmp_path)
