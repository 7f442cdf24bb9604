"""No value becomes a line of a job's script: bash takes the script, and runs nothing that a value says."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from ppctl.cli.jobs import job_of
from ppctl.cli.main import main
from ppctl.config.keys import text_keys
from ppctl.runs.rundir import RunDir

QUICK = ("+recipe=quickstart", "launch.device=cpu")
TEXTS = [key.name for key in text_keys().values() if (key.is_text or key.is_container) and not key.facts.lines]
OURS = {"job", "set", "run", "python", "code", "most", "limit", "life", "mark", "export", "container", "agents"}
"""What begins a line of the script before it does anything."""
TRICKS = ["a b", "a;touch x", "$(touch x)", "`touch x`", "a'b", 'a"b', "a|touch x", "a&touch x", "a#b", "\\", "*", "~", 
          "!x", "-x", "%j"]  # fmt: skip


def script(words: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """The script of `submit --dry-run`; None where it refuses by code."""
    code = main(["submit", *QUICK, *words, "--dry-run"])
    out, told = capsys.readouterr()
    assert (code == 0) == bool(out), told
    assert code == 0 or "error PP-E" in told
    return out or None


def values(text: str, here: Path) -> None:
    """Run what the script sets before it does anything; nothing may come of it."""
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    ahead = text.partition("# TERM reaches this shell")[0]
    assert ahead != text
    lines = [line for line in ahead.splitlines() if line and line[0] != "#"]
    assert {re.split("[ =]", line)[0] for line in lines} <= OURS
    there = {*here.rglob("*")}
    subprocess.run(["bash", "-c", ahead], check=True, cwd=here, env={"SLURM_JOB_ID": "1", "PATH": "/usr/bin:/bin"})
    assert {*here.rglob("*")} == there


@pytest.mark.parametrize("payload", ["\n", "\u2028"], ids=ascii)
def test_no_text_with_a_control_character_reaches_a_script(
    payload: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (name for name in TEXTS if name.startswith(("launch.", "log.", "checkpoint.load"))):
        bad = f"a{payload}touch x"
        for value in (bad, f'["{bad}"]', f'{{A: "{bad}"}}'):
            assert script([f"{name}={value}"], capsys) is None, (name, value)


@pytest.mark.parametrize("trick", TRICKS)
def test_a_text_stays_one_word_of_the_script(
    trick: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / trick.replace("/", "_")
    here.mkdir()
    monkeypatch.chdir(here)
    words = [f"launch.{name}={trick}" for name in ("python", "account", "container_image", "container_workdir")]
    words += [f'launch.{name}=["{trick}"]' for name in ("srun_args", "sbatch_args", "container_mounts")]
    text = script([f"log.dir={trick}", f"log.name={trick}", f"launch.env={{A: '{trick}'}}", *words], capsys)
    text = text or script([f"log.dir={trick}", f"launch.account={trick}"], capsys)
    assert text is not None
    values(text, here)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2Jb", "a\u2028b", "\udce9"], ids=ascii)
@pytest.mark.parametrize("command", [["submit", "--dry-run"], ["train", "steps=1"]], ids=lambda words: words[0])
def test_a_working_directory_with_such_a_name_is_refused(
    name: str, command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    assert main([command[0], *QUICK, *command[1:]]) == 2
    out, told = capsys.readouterr()
    assert out == "" and "PP-E610" in told and name not in told
    assert [*Path().iterdir()] == []


@pytest.mark.parametrize(
    "job", ["41\n#SBATCH --uid=0", "--user=me", "41,42", "", ["41"], {"a": 1}, "\u0664"], ids=ascii
)
def test_a_record_of_a_job_is_no_option_and_no_line(job: object, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (tmp_path / "job.json").write_text(json.dumps({"job": job, "cluster": ""}))
    assert job_of(run) is None
    (tmp_path / "job.json").write_text(json.dumps({"job": "41", "cluster": f"{job} "}))
    assert job_of(run) is None
