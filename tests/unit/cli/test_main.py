"""`ppctl` itself: commands, exit codes, and imports that stay light."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from ppctl import __version__
from ppctl.cli.main import COMMANDS, main


def run(capsys, *argv):
    code = main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


HEAVY = ("torch", "hydra", "omegaconf", "rich", "yaml", "numpy")
LIGHT = (
    ["--help"],
    ["--version"],
    ["explain", "PP-E101"],
    ["explain", "train.steps"],
    ["recipes"],
    ["layout", "EtL", "--pp", "1"],
)


@pytest.mark.parametrize("argv", LIGHT, ids=" ".join)
def test_light_commands_import_nothing_heavy(argv):
    program = (
        "import sys, json; from ppctl.cli.main import main; code = main(sys.argv[1:]); "
        f"print(json.dumps([code, [m for m in {HEAVY} if m in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]


def test_a_command_line_problem_is_told_without_torch_or_rich():
    program = (
        "import sys; from ppctl.cli.main import main; code = main(['plan', 'stepz=3']); "
        "sys.exit(9 if {'torch', 'rich'} & set(sys.modules) else code)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 2


def test_help_lists_every_command_once(capsys):
    code, out, err = run(capsys, "--help")
    assert code == 0 and err == ""
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ") and not line.startswith("  ppctl")]
    assert listed == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_has_its_own_help(capsys, name):
    code, out, _ = run(capsys, name, "--help")
    assert code == 0
    assert out.startswith(f"usage: ppctl {name}")


def test_without_a_command_the_help_is_shown_and_the_code_is_2(capsys):
    code, out, _ = run(capsys)
    assert code == 2
    assert "usage: ppctl COMMAND" in out


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"ppctl {__version__}\n", "")


@pytest.mark.parametrize(
    ("typed", "meant"), [("trian", "train"), ("plans", "plan"), ("recipe", "recipes"), ("xyzzy", "")]
)
def test_an_unknown_command_is_exit_2_with_the_nearest(capsys, typed, meant):
    code, out, err = run(capsys, typed)
    assert (code, out) == (2, "")
    assert err.startswith("error PP-E116: ")
    assert f"did you mean {meant}?" in err if meant else "did you mean" not in err


@pytest.mark.parametrize(
    ("argv", "codes"),
    [
        (["plan", "stepz=3"], ["PP-E101"]),
        (["plan", "+stepz=3", "++a.b=1"], ["PP-E101", "PP-E101"]),
        (["train", "quickstart"], ["PP-E105"]),
        (
            ["train", "steps=1,2", "stepz=3", "--foo", "--use-flash-attn"],
            ["PP-E107", "PP-E109", "PP-E106", "PP-E101"],
        ),
        (
            ["train", "-m", "steps=1,2", "stepz=3", "--foo", "--use-flash-attn"],
            ["PP-E107", "PP-E109", "PP-E101"],
        ),
        (["plan", "recipe=quickstrt", "mbs=x"], ["PP-E104", "PP-E102"]),
        (["train", "+recipe=deepseek_v3"], ["PP-E601"]),
        (["explain", "nothing.like.it"], ["PP-E125"]),
        (["recipes", "show", "nope"], ["PP-E104"]),
    ],
)
def test_all_problems_are_told_once_on_stderr_with_exit_2(capsys, argv, codes):
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert [line.split()[1].rstrip(":") for line in err.splitlines() if line.startswith("error ")] == codes


def test_a_word_that_is_no_override_may_be_a_recipe(capsys):
    _, _, err = run(capsys, "plan", "quickstrt")
    assert "try: +recipe=quickstart" in err


def test_own_recipes_reach_every_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PPCTL_RECIPES_PATH", "/nowhere")
    (tmp_path / "mine.yaml").write_text("train: {steps: 0}\n")
    code, _, err = run(capsys, "plan", "--recipes-dir", str(tmp_path), "+recipe=mine")
    assert code == 2
    assert f"{tmp_path}/mine.yaml:1" in err
    assert os.environ["PPCTL_RECIPES_PATH"] == os.pathsep.join([str(tmp_path), "/nowhere"])


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [(">&-", 0, ""), ("2>&-", 0, ""), (">/dev/full", 1, "PP-E127"), ("<&-", 0, "")],
)
def test_closed_and_full_outputs_are_no_tracebacks(how, code, told):
    command = f"{shlex.quote(sys.executable)} -m ppctl layout EtL --pp 1 {how}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == code
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def _stub(monkeypatch, raised):
    import ppctl.cli.explain as module

    def fail(args):
        raise raised

    monkeypatch.setattr(module, "run", fail)


def test_an_interrupt_is_130_and_silent(capsys, monkeypatch):
    _stub(monkeypatch, KeyboardInterrupt())
    assert run(capsys, "explain") == (130, "", "")


def test_a_bug_is_not_dressed_up(monkeypatch):
    _stub(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["explain"])


def test_a_reader_that_leaves_early_is_no_error():
    script = f"{sys.executable} -m ppctl explain | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "Error codes:"
    assert done.stdout.splitlines()[1] in ("0", "141")
