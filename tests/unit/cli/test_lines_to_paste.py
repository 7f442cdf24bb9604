"""Lines that are to be pasted are the words they mean in a shell, whatever is in a value, a path or a name."""

import io
import re
import shlex
import shutil
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from ppctl.cli.main import main
from ppctl.errors import pasted

GOLDEN = Path(__file__).parents[2] / "golden" / "run"
HOSTILE = ["qz b", "qz'\"|touch x;b&c$(d)`e`", pytest.param("(qz)*#~", marks=pytest.mark.whole)]
RUN = "20261122-084400-0000"
TYPED = """
    plan +recipe={}.yaml
    plan +recipe={}
    plan {}
    plan log.dir={} log.dir=b
    plan steps=1,2 log.dir={}
    plan --pipeline-model-parallel-layout {} --train-iters 5 --bf16 --recompute-activations --lr-decay-style {}
    plan --spec {} --train-iters {} --lr 3
    plan --data-path {} {} --disable-bias-linear
    plan layout={} pp=2
    plan model.from={}
    plan parallelism.pipeline_parallel_schedule_csv={}
    plan training.seq_len={}
    plan lora.rank={}
    plan model.hf_overrides.a.b={}
    plan launch.env.A-B={}
    plan data.path=[{},3]
    plan pp={}
    train +recipe=quickstart launch.device=cpu log.dir={} launch.account={}
    train +recipe=quickstart launch.device=cpu launch.target=env log.dir={}
    train +recipe=quickstart launch.device=cuda log.dir={}
    train launch.device=cpu data.path={}
    train launch.device=cpu data.tokenizer={}
    train launch.device=cpu checkpoint.resume={}
    submit +recipe=quickstart launch.device=cpu log.dir={}
    submit launch.device=cpu launch.after={}
    data show {}
    data tokenize {}.txt {}-out
    data show {}-out --document 9
    ckpt inspect {}
    ckpt verify {r}
    ckpt prune {r} --keep 1 --dry-run
    runs show {}
    status {r}
    logs {r}
    trace {r}
    logs {r} --rank 3
    resume {r}
    parity {r} {r} c
    parity {}
    cancel {r}
    requeue {r}
    status --dir {}
    recipes show {}
    recipes copy quickstart {}.yaml
    recipes copy quickstart {}.yaml
    layout {}
    explain {}
    plan --timeline step.{}
    plan --dump-schedule {}/no/{}
""".strip().splitlines()
"""Command lines; {} is the hostile value, {r} a run below a directory of this name."""


def lines(words: list[str]) -> list[str]:
    """The lines of a command's output that are to be pasted: remedies, and what follows `next:` and the like."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        main(words)
    text = out.getvalue()
    assert "usage:" not in text, words
    found = []
    for tried in re.findall(r"^  try: .*(?:\n   or: .*)*", text, re.MULTILINE):
        found += [line[7:] for line in tried.splitlines()]
    found += [line for line in re.findall(r"(?:next|use it with): (.*)", text)]
    return found + [
        line.strip() for line in re.findall(r"(?:with|next|see it):\n((?:  .*\n)+)", text) for line in line.splitlines()
    ]


def argv(line: str, here: Path) -> list[str]:
    """The words that bash makes of `line`, which it must not run."""
    done = subprocess.run(["bash", "-c", f"t() {{ printf '%s\\0' \"$@\"; }}; t {line}"], capture_output=True, cwd=here)
    assert done.returncode == 0 and not done.stderr, (line, done.stderr)
    return done.stdout.decode(errors="surrogateescape").split("\0")[:-1]


@pytest.mark.parametrize("value", HOSTILE)
def test_every_line_to_paste_is_the_words_that_it_means(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, empty = tmp_path / "here", tmp_path / "empty"
    empty.mkdir()
    shutil.copytree(GOLDEN, here / value / "r" / RUN)
    monkeypatch.chdir(here)
    Path(f"{value}.txt").write_text("some text\n" * 9)
    count = 0
    for typed in TYPED:
        for line in lines([word.replace("{r}", f"{value}/r/{RUN}").replace("{}", value) for word in typed.split()]):
            if line.startswith("for "):  # a loop, whose words are told by its last command
                line = line.partition("; do ")[2].removesuffix("; done").replace('"$value1"', "1")
            words = argv(line, empty) if "df -h" not in line else []
            assert words == shlex.split(line) or not words, (typed, line)
            assert "qz" not in line or any(value in word for word in words), (typed, line)
            count += 1
    assert count > 30
    assert [*empty.iterdir()] == [], "nothing ran"


@pytest.mark.parametrize("word", [*HOSTILE[:2], "", "~", "-x", "a\nb", "a\x1bb", "\udce9", "a\\'\tb", "!x"], ids=ascii)
def test_a_quoted_word_is_one_line_and_the_same_word(word: str, tmp_path: Path) -> None:
    assert pasted(word).isprintable()
    assert argv(pasted("a", word), tmp_path) == ["a", word]
