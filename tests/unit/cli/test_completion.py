"""`ppctl completion`: what may stand in place of the last word, and the scripts in the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ppctl
from ppctl.cli.completion import SHELLS, candidates
from ppctl.cli.explain import pages
from ppctl.cli.main import COMMANDS, main
from ppctl.config.keys import text_keys
from ppctl.config.resources import recipes
from ppctl.schedule.policies import POLICIES


def words(*typed: str) -> list[str]:
    return [word for word, _ in candidates(typed)]


RUNS = ["20300102-010101-bbbb", "20300101-010101-aaaa"]
"""The newest first."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two runs, and with a `ppctl` on the path that is this interpreter's."""
    for age, name in enumerate(RUNS):
        config = tmp_path / "runs" / "mine" / name / "config.yaml"
        config.parent.mkdir(parents=True)
        config.write_text("")
        os.utime(config, (1e9 - age, 1e9 - age))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ppctl").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ppctl "$@"\n')
    (tmp_path / "bin" / "ppctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands_keys_recipes_codes_and_values() -> None:
    assert words("") == list(COMMANDS)
    assert words("su") == ["submit"]
    assert {f"{name}=" for name in text_keys()} < set(words("train", ""))
    assert words("train", "train.st") == ["train.steps="]
    assert {"pp=", "+recipe=", "+scale="} < set(words("plan", "+recipe=quickstart", ""))
    assert words("plan", "+recipe=") == [f"+recipe={name}" for name in sorted(recipes())]
    assert words("plan", "+scale=s") == ["+scale=smoke"]
    assert words("plan", "bf16=") == words("nothing", "") == words("plan", "--timeline", "") == []
    assert words("plan", "parallel.bf16=") == ["parallel.bf16=true", "parallel.bf16=false"]
    assert words("plan", "launch.device=c") == ["launch.device=cuda", "launch.device=cpu"]
    assert words("plan", "pipeline.pp_schedule=zb_") == ["pipeline.pp_schedule=zb_h1", "pipeline.pp_schedule=zb_h2"]
    assert set(words("simulate", "--schedule", "")) <= set(POLICIES)
    assert words("explain", "PP-E") == list(pages())
    assert words("explain", "train.st") == ["train.steps"]
    assert words("recipes", "") == ["list", "show", "copy"]
    assert words("recipes", "show", "quick") == ["quickstart"]
    assert words("ckpt", "e") == ["export"] and words("ckpt", "v") == ["verify"]
    assert "--quick" in words("ckpt", "verify", "-") and "--keep-every" in words("ckpt", "prune", "--k")
    assert words("ckpt", "verify", "x", "--for", "train.st") == ["train.steps="]
    assert words("completion", "") == ["bash", "zsh", "fish"]


def test_runs_are_found_where_a_command_takes_one(home: Path) -> None:
    for typed in (
        ["status"],
        ["logs"],
        ["resume"],
        ["cancel"],
        ["requeue"],
        ["runs", "show"],
        ["ckpt", "export", "--hf"],
        ["ckpt", "export", "--torch-dist"],
        ["ckpt", "inspect"],
        ["ckpt", "diff", "runs/mine/x"],
    ):
        assert words(*typed, "") == RUNS, typed
    assert words("status", "--dir", "elsewhere", "") == words("runs", "list", "") == []
    assert "pp=" in words("resume", RUNS[0], "p")


def test_flags_are_those_of_the_command_and_megatrons() -> None:
    assert "--timeline" in words("plan", "--ti")
    assert "--num-layers" in words("train", "--num-l")
    assert words("ckpt", "export", "--dt") == ["--dtype"]
    assert words("simulate", "--num-l") == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_can_be_completed(command: str) -> None:
    assert "--help" in words(command, "--h")
    assert all("\t" not in word and "\n" not in word + text for word, text in candidates([command, ""]))


def test_an_answer_imports_nothing_that_is_slow(home: Path) -> None:
    program = (
        "import sys; from ppctl.cli.main import main; main(sys.argv[1:]); "
        "print(*sorted({'torch', 'hydra', 'omegaconf', 'rich', 'yaml', 'numpy'} & set(sys.modules)))"
    )
    for typed in ("train tr", "train +recipe=", "resume ", "explain PP"):
        command = [sys.executable, "-c", program, "completion", "words", "--", *typed.split(" ")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "", typed
        assert len(done.stdout.splitlines()) > 1, typed


BASH = """
source <(ppctl completion bash)
complete -p ppctl
COMP_LINE=$1 COMP_POINT=${#1}
_ppctl 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ppctl su", ["submit"]),
        ("ppctl train +recipe=llama3_4", ["llama3_405b"]),
        ("ppctl train +recipe=quickstart train.ste", ["train.steps="]),
        ("ppctl status ", RUNS),
        ("ppctl explain PP-E101", ["PP-E101"]),
        ("ppctl plan --timel", ["--timeline"]),
        ("ppctl train nothing.like", [""]),
    ],
)
def test_bash_offers_them(home: Path, typed: str, offered: list[str]) -> None:
    """Behind `=`, where bash breaks words, only what follows it is offered."""
    done = subprocess.run(["bash", "-c", BASH, "bash", typed], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["complete -o default -F _ppctl ppctl", *offered]


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish on this machine")
def test_fish_offers_them(home: Path) -> None:
    script = "ppctl completion fish | source; complete -C 'ppctl train +recipe=llama3_4'"
    environment = os.environ | {"HOME": str(home)}
    done = subprocess.run(["fish", "-N", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("+recipe=llama3_405b\t")


ZSH = """
autoload -Uz compinit && compinit -u -d $HOME/dump
source <(ppctl completion zsh)
_describe() { print -r -- "$2 $4: ${(P@)4}"; }
words=(ppctl train +recipe=llama3_4) CURRENT=3
_ppctl
words=(ppctl train train.ste) CURRENT=3
_ppctl
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh on this machine")
def test_zsh_offers_them(home: Path) -> None:
    environment = os.environ | {"HOME": str(home)}
    done = subprocess.run(["zsh", "-f", "-c", ZSH], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first.startswith("words ended: +recipe=llama3_405b:")
    assert second.startswith("keys open: train.steps=:")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_printed_whole(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert printed == (Path(ppctl.__file__).parent / "cli" / f"completion.{shell}").read_text()
    assert "completion words -- " in printed


def test_what_scripts_ask_for_is_not_shown_to_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "--help"]) == 0
    assert "{bash,zsh,fish}" in (out := capsys.readouterr().out) and "WORD" not in out
