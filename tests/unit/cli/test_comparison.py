"""Several runs side by side: named by what differs, as a table, as curves on the screen, and as one page."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, reported

from ppctl.cli.comparison import differing, labels, letters
from ppctl.cli.main import main
from ppctl.config.schema import RunConfig
from ppctl.runs.rundir import RunDir

POINTS = [(1e-3, 1, 400), (1e-3, 2, 400), (3e-3, 1, 400), (3e-3, 2, 100)]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunDir]:
    """Two learning rates with two seeds each; the last run has done a quarter of its steps."""
    monkeypatch.chdir(tmp_path)
    made = []
    for number, (lr, seed, steps) in enumerate(POINTS):

        def fill(draft: RunDir, lr: float = lr, seed: int = seed) -> None:
            config = RunConfig()
            config.optim.lr, config.train.seed = lr, seed
            config.launch.env = {"A": "1", "B": "2"}
            draft.write_config(config)

        run = RunDir.create(Path("runs"), "tiny", fill, f"2026-{number}")
        for step in range(1, steps + 1):
            figures = {"loss": 5 * math.exp(-step * lr * 2), "grad_norm": 1.5, "tokens_per_s": 1000.0 + number}
            held = {"eval_loss": 9.0} if step % 10 == 0 else {}
            run.add_metrics({"step": step, "tokens": 100, "step_time_s": 0.5, **figures, **held})
        os.utime(run.path / "config.yaml", (1000.0 + number, 1000.0 + number))
        made.append(run)
    return made


@pytest.mark.usefixtures("runs")
def test_runs_of_a_name_are_listed_with_what_differs_between_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][-1] == "differs"
    assert [line[-2:] for line in lines[1:]] == [
        ["lr=0.003", "seed=2"], ["lr=0.003", "seed=1"], ["lr=0.001", "seed=2"], ["lr=0.001", "seed=1"]
    ]  # fmt: skip


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("named", [["tiny"], ["tiny/2026-*"], ["2026-?"], ["2026-0", "2026-1", "tiny/2026-[23]"]])
def test_names_and_patterns_mean_all_their_runs_oldest_first(
    named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "compare", *named, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ids"] == ["2026-0", "2026-1", "2026-2", "2026-3"]
    assert found["keys"] == {"optim.lr": [1e-3, 1e-3, 3e-3, 3e-3], "train.seed": [1, 2, 1, 2]}
    assert found["labels"] == ["lr=0.001 seed=1", "lr=0.001 seed=2", "lr=0.003 seed=1", "lr=0.003 seed=2"]
    assert (found["done"], found["tokens_per_s"]) == ([400, 400, 400, 100], [1000, 1001, 1002, 1003])
    assert [step["step"] for step in found["steps"]] == [*range(1, 101)], "what all have done"


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("columns", [80, 140])
def test_the_table_and_the_curves_fit_and_have_one_scale(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["runs", "compare", "tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == columns, "the curves use the width"
    table = [line.split() for line in lines if line[:1] in "ABCD" and len(line.split()) > 4]
    assert table[3] == ["D", "0.003", "2", "100", "2.7441", "9.0000", "1,003"]
    assert [line.split()[0] for line in lines if line.endswith("last")] == ["loss", "grad", "tokens/s"]
    loss = next(n for n, line in enumerate(lines) if line.startswith("loss "))
    drawn = [line.split() for line in lines[loss + 1 : loss + 5]]
    assert [(row[1], row[2]) for row in drawn] == [("4.9900", "2.2466")] * 2 + [
        ("4.9701", "0.4536"),
        ("4.9701", "2.7441"),
    ]
    assert [row[3][-1] for row in drawn] == ["▄", "▄", "▁", "▅"]
    assert len(drawn[3][3]) == len(drawn[0][3]) // 4, "as many columns as it has done steps"


def test_a_models_description_is_no_difference_between_runs() -> None:
    configs = [{"model.from": name, "model.transformers": f'{{"config": "{name}"}}'} for name in ("a", "b")]
    assert differing(configs) == {"model.from": ["a", "b"]} and labels(configs) == ["from=a", "from=b"]


def test_no_command_is_offered_that_has_just_failed(runs: list[RunDir], capsys: pytest.CaptureFixture[str]) -> None:
    for run in runs[1:]:
        shutil.rmtree(run.path)
    for typed in (["*"], [], [runs[0].id]):
        assert main(["runs", "compare", *typed]) == 2
        assert capsys.readouterr().err.endswith(f"  try: ppctl runs show {runs[0].id}\n")


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("compare 2026-0", "PP-E105: two or more runs are compared, but 1 is named"),
        ("compare 2026-0", "or: ppctl runs show 2026-0"),
        ("compare", "PP-E105: two or more runs are compared, but 0 are named"),
        ("compare 2026-0 2026", "PP-E612: 2026 means 4 runs"),
        ("compare 2026-0 2026 --html x.html", "try: ppctl runs compare 2026-0 2026-3 --html x.html"),
        ("compare tiny --html none/x.html", "PP-E129: the page cannot be written to none/x.html"),
        ("show 2026-0 2026-1", "try: ppctl runs compare 2026-0 2026-1"),
        ("list --html x.html", "PP-E105: --html belongs to `ppctl runs compare`"),
        ("compare tiny --yes", "PP-E105: --yes belongs to `ppctl runs delete`"),
    ],
)
@pytest.mark.usefixtures("runs")
def test_mistakes_are_told_with_the_command_that_was_typed(
    typed: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", *typed.split()]) == 2
    assert says in capsys.readouterr().err


def test_runs_without_a_step_and_with_figures_that_are_not_finite_are_compared(
    runs: list[RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    runs[0].metrics_path.unlink()
    runs[1].metrics_path.write_text('{"step": 1, "loss": null}\n')
    assert main(["runs", "compare", "2026-0", "2026-1", "--html", "x.html"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[-3:] == [["step", "0", "1"], ["loss", "-", "-"], ["tokens/s", "-", "-"]], "and no curves"
    data = json.loads(re.search(r"const data = (.*);", Path("x.html").read_text())[1])  # type: ignore[index]
    assert [run["points"] for run in data["runs"]] == [[], [[1, 0, 0, None, None, None]]]


def test_after_z_letters_go_on() -> None:
    assert letters(54)[24:28] == ["Y", "Z", "AA", "AB"] and len(set(letters(54))) == 54


def paged(runs: list[RunDir]) -> str:
    assert main(["runs", "compare", *(run.id for run in runs), "--html", "x.html"]) == 0
    return Path("x.html").read_text()


def test_the_page_stands_alone_and_texts_of_files_are_data(runs: list[RunDir]) -> None:
    config = runs[0].read_config()
    config.model.from_ = "</script><script>alert(1)\x1b"
    runs[0].write_config(config)
    page = paged(runs)
    assert page.count("</script>") == 1 and "\x1b" not in page and "\\u001b" not in page
    assert not re.search(r"(src|href)\s*=|https?://|@import|fetch\(", page)
    assert not re.search("@(DATA|TITLE|STYLE)@", page)


def test_a_long_run_is_drawn_with_its_extreme_losses(runs: list[RunDir]) -> None:
    records = [{"step": step, "loss": 9.0 if step == 7777 else 1.0} for step in range(1, 20001)]
    runs[0].metrics_path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    data = json.loads(re.search(r"const data = (.*);", paged(runs[:2]))[1])  # type: ignore[index]
    points = data["runs"][0]["points"]
    assert len(points) == 4000 and [7777, 0, 0, 9.0, None, None] in points
    assert [point[0] for point in points] == sorted(point[0] for point in points)


PROBE = """
const errors = []; window.addEventListener("error", event => errors.push(event.message));
const pick = (id, value, kind) => { $(id).value = value; $(id).dispatchEvent(new Event(kind)); };
const said = () => document.getElementById("said3").textContent;
const report = {whole: [from, to], said: said()};
pick("by", "1", "change"); report.tokens = [to, said()];
pick("by", "2", "change"); report.time = [to, said()];
$("in").click(); report.zoomed = to - from;
$("all").click(); report.all = [from, to];
$("log").click(); pick("smooth", "0.9", "input");
document.querySelector("#runs input").click(); report.shown = shown().length;
plots[0].canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: 64, bubbles: true})); report.at_start = said();
const bytes = canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
report.drawn = plots.map(plot => new Set(bytes(plot.canvas)).size);
report.wide = document.documentElement.scrollWidth; report.window = window.innerWidth;
report.fetched = performance.getEntriesByType("resource").length; report.errors = errors;
report.rows = [...$("table").rows].map(row => row.cells.length);
const out = document.createElement("pre");
out.id = "report"; out.textContent = JSON.stringify(report); document.body.append(out);
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (.ci/run installs it)")
@pytest.mark.parametrize("size", ["1200,800", "400,900"])
def test_a_browser_draws_by_step_tokens_and_time_zooms_and_smooths(
    runs: list[RunDir], tmp_path: Path, size: str
) -> None:
    report: dict[str, Any] = reported(paged(runs), PROBE, tmp_path, size)
    assert (report["errors"], report["fetched"]) == ([], 0)
    assert report["whole"] == [0, 400]
    assert report["said"] == "step 100: loss 2.7441, grad norm 1.5, tokens/s 1003"
    assert report["tokens"] == [40000, "10K tokens: loss 2.7441, grad norm 1.5, tokens/s 1003"]
    assert report["time"] == [200, "0:00:50: loss 2.7441, grad norm 1.5, tokens/s 1003"]
    assert report["zoomed"] == pytest.approx(120) and report["all"] == [0, 200]
    assert report["shown"] == 3
    assert report["at_start"].startswith("0:00:01: loss 4.9701")
    assert min(report["drawn"]) > 20, "curves and letters in many colours"
    assert report["wide"] <= report["window"], "nothing is cut off"
    assert report["rows"] == [7] * 5
