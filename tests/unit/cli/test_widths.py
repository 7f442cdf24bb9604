"""No line of any cheap command is wider than a terminal of 80 columns, but for paths and what is to be pasted."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from helpers.unit_plan import plan

from ppctl.cli import parity
from ppctl.cli.main import COMMANDS, main
from ppctl.config.schema import RunConfig
from ppctl.plan import Plan
from ppctl.records.step_lines import step_line
from ppctl.runs.rundir import RunDir
from ppctl.schedule.action import MESSAGES
from ppctl.schedule.simulate import Costs, simulate

COLUMNS = 80
PASTED = re.compile(r"\s*(try: |next: |command +)?((\S*/)?ppctl|[\w.]+=|--)|\s*\S+$")
"""Commands, overrides and flags, and a line of one word: a path, a layout."""

ALONE = [
    "", "--help", "nosuch",
    *(f"{name} --help" for name in COMMANDS),
    *(f"data {name} --help" for name in ("tokenize", "show")),
    *(f"ckpt {name} --help" for name in ("inspect", "verify", "diff", "average", "prune", "import", "export")),
    "plan", "plan +recipe=quickstart", "plan +recipe=llama3_8b --why", "plan +recipe=gpt_175b tp=8 sp=true",
    "plan +recipe=llama3_8b pp=7 optim.lrr=1 sequence=3", "plan +recipe=nope", "plan +recipe=quickstart pp=99 tp=3",
    "plan +recipe=llama3_8b parallel.pipeline_model_parallel_layout=Ett|tL pp=4 tp=2",
    "plan --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --profile "
    "--global-batch-size 4 --use-flash-attn",
    "recipes", "recipes show nosuch",
    "explain", "explain pp_schedule_csv", "explain nosuch", "explain PP-E220", "explain model", "explain parallel",
    "layout Ett|tt|tt|ttL", "layout Et*3|(tt|)*29,m|L --pp 16",
    "simulate", "simulate --compare --tf 1 --tb 1", "simulate --schedule 1f1bb --pp 2 --microbatches 3 --tf 1 --tb 1",
    "simulate --schedule zb_h1 --pp 4 --microbatches 8 --tf 1 --tb 1 --tw 1",
    "simulate --schedule auto --pp 3 --microbatches 4 --tf 1 --tb 1 --tw 1",
    "simulate --compare --pp 4 --microbatches 4 --tf 1 --tb 1 --tw 1",
    "status", "runs", "logs", "trace", "resume", "cancel", "requeue", "parity", "parity +recipe=quickstart pp=1 vpp=1",
    "data tokenize text.txt corpus --tokenizer nowhere", "ckpt inspect nothing", "train +recipe=llama3_8b tp=3",
    "submit +recipe=llama3_8b", "rehearse +recipe=llama3_8b --rank 99",
]  # fmt: skip

OF_RUNS = [
    "status A", "runs", "runs show A", "runs --compare A B", "runs compare A B", "runs delete A", "trace A",
    "trace A B", "trace B --step 1", "logs A",
    "parity A B", "resume A train.seed=7", "ckpt inspect A",
    "data show corpus", "data show corpus --tokenizer byte --tokens 99", "simulate --schedule bad.csv --tf 1 --tb 1",
]  # fmt: skip


def shown(monkeypatch: pytest.MonkeyPatch, typed: str, columns: int = COLUMNS) -> list[str]:
    """The lines of both streams on a terminal."""
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    with monkeypatch.context() as patched:
        patched.setenv("COLUMNS", str(columns))
        patched.setattr(sys, "stdout", screen)
        patched.setattr(sys, "stderr", screen)
        main(typed.split())
    assert "Traceback" not in screen.getvalue()
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rpartition("\r")[2] for line in screen.getvalue().split("\n")]


def wide(lines: list[str], columns: int = COLUMNS) -> list[str]:
    """Lines that are too wide, unless one word of them is: a path."""
    return [
        line for line in lines if len(line) > columns and not PASTED.match(line) and max(map(len, line.split())) < 60
    ]


@pytest.mark.parametrize("typed", ALONE)
def test_a_command_fits(typed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    lines = shown(monkeypatch, typed)
    assert any(lines)
    assert wide(lines) == []


def made(name: str, model: Plan, root: Path) -> RunDir:
    def fill(draft: RunDir) -> None:
        draft.write_plan(model)
        draft.write_config(RunConfig())
        draft.add_command("ppctl train +recipe=quickstart " + " ".join(f"model.some_key_{n}=1" for n in range(9)))

    run = RunDir.create(root, "job", fill, f"20261123-14544{name}-0{name}51")
    phases = ("compose", "import", "groups", "build", "warm-up", "load")
    run.write_status("stopped", message="error PP-E701: " + "rank 0 failed " * 9, start_up=dict.fromkeys(phases, 12.3))
    trace = simulate(model.schedule, Costs.uniform(len(model.stages), 0.02, 0.05, 0.001))
    ranks = []
    for pp_rank in range(trace.pp):
        row = model.schedule.actions[pp_rank]
        spans = {span.action: span for span in trace.spans if span.pp_rank == pp_rank}
        stamps = [
            [index, round(1e6 * spans[action].start), round(1e6 * spans[action].end)]
            for index, action in enumerate(row)
            if action in spans and action.op not in MESSAGES
        ]
        ranks.append([0, max(stamp[2] for stamp in stamps), 2_000_000, 2_100_000, stamps])
    run.write_measured_step(1, {"version": 1, "step": 1, "unit": "us", "ranks": ranks})
    for step in (1, 2):
        figures = {"loss": 5.5, "grad_norm": 1.25, "tokens": 2048, "tokens_per_s": 1024.0, "step_time_s": 2.0}
        more = {"lr": 1e-3, "bubble_fraction": 0.1, "slowest_stage": 0, "slowest_rank": 0}
        run.add_metrics({"step": step, **figures, **more})
    return run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("long-" + "x" * 40)
    for name, ranks in (("1", 8), ("2", 4)):
        made(name, plan(pp=ranks, gbs=16, mbs=1), root / "runs")
    rows = (",".join(f"{stage}B{mb},{stage}F{mb}" for mb in range(9)) for stage in range(9))
    (root / "bad.csv").write_text("\n".join(rows))
    (root / "a.txt").write_text("of all the stages of a pipeline " * 20)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(root)
        assert main(["data", "tokenize", "a.txt", "corpus"]) == 0
    return root


@pytest.mark.parametrize("typed", OF_RUNS)
def test_a_command_on_runs_fits(typed: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    names = {"A": "20261123-145441-0151", "B": "20261123-145442-0251"}
    lines = shown(monkeypatch, " ".join(names.get(word, word) for word in typed.split()))
    assert any(lines)
    assert [line for line in wide(lines) if not line.startswith(("directory /", "checkpoint /", "path "))] == []


def test_what_parity_finds_fits() -> None:
    gradients = {
        "equal": 291, "largest": 1.2e-3, "missing": ["layers.0.attention.wk.weight"], "unlike": [],
        "action": {"action": "12F113", "stage": 12, "ranks": list(range(12)), "relative": 1e-7},
        "different": [
            {"name": f"model.layers.{n}.self_attention.linear_qkv.weight", "stage": 12, "ranks": list(range(12)),
             "of": "each", "relative": 1e-4, "at": [100, 200], "values": [0.123456789, None]}
            for n in range(9)
        ],
    }  # fmt: skip
    step = {"step": 1, "loss": [5.5, 5.25], "grad_norm": [1.0, 2.0], "tolerance": 1e-6, "same": False}
    report = {
        "runs": [None, None],
        "cuts": ["1 rank, 1f1b", "pp 4 x vpp 2 x tp 2 x cp 2 x ep 2 x dp 4, 64 ranks, interleaved_zero_bubble"],
        "axes": ["tp", "cp", "ep"],
        "same": False,
        "failures": ["", "rank 3 (stage 5) failed in 5B2: " + "a long reason " * 9],
        "steps": [{**step, "gradients": gradients}],
    }
    assert wide(parity._text(report, COLUMNS).splitlines()) == []


@pytest.mark.parametrize("steps", [12, 400, 1_200_000])
def test_a_steps_line_fits_however_long_the_run_is(steps: int) -> None:
    record = {"step": 1, "loss": 11.7, "grad_norm": 1234.5, "lr": 1e-4, "tokens_per_s": 12345678.0}
    record |= {"bubble_fraction": 1.0, "slowest_stage": 127}
    line = step_line(record, steps, 400 * 3600.0, COLUMNS)
    assert len(line) <= COLUMNS and "loss 11.700" in line
