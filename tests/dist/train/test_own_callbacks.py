"""Callbacks of a person's own: the page's script in a run, who imports them, and what happens when one fails."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command import TINY, environment, metrics, only_run, ppctl
from dense_runs import config_of, session_of
from ranks import RanksFailed, run_ranks

from ppctl.config.mapping import to_mapping
from ppctl.errors import TrainingError
from ppctl.runs.checkpoint_folder import AUTO, candidates
from ppctl.runs.rundir import RunDir
from ppctl.train.callback import Callback, Callbacks, StepResult, TrainingRun
from ppctl.train.loop import train
from ppctl.train.own_callbacks import OwnCallback
from ppctl.train.saving import Saves

ROOT = Path(__file__).parents[3]
EVALUATED = ("data.validation_split=0.05", "train.eval_interval=1", "train.eval_steps=1")
SMALL = ("train", "+recipe=quickstart", *TINY, "pp=1", "vpp=1", "layout=null", "log.interval=1")

FROZEN = """
import gc

class Frozen(ppctl.Callback):
    def log_metrics(self, record):
        record["frozen"] = gc.get_freeze_count()
"""


def path_of(directory: Path) -> str:
    """PYTHONPATH with the directory of a person's modules in front."""
    return f"{directory}:{environment()['PYTHONPATH']}"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The page's module, which notes that it was imported."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/callbacks.md").read_text(), re.DOTALL)
    (home := tmp_path / "own").mkdir()
    noted = "\nimport pathlib\npathlib.Path(__file__).with_name('imported').touch()\n"
    (home / "own_callbacks.py").write_text(code + noted + FROZEN)
    return home


def test_the_pages_callbacks_follow_and_stop_a_run_and_nothing_but_ranks_imports_them(
    page: Path, tmp_path: Path
) -> None:
    names = "train.callbacks=[own_callbacks:Patience,own_callbacks:LargestWeight,own_callbacks:Frozen]"
    # A rate so small that no evaluation after the first improves.
    words = (*SMALL[:4], *TINY, "pp=2", "vpp=1", "layout=null", "log.interval=1", *EVALUATED, "optim.lr=1e-30")
    run = ppctl(*words, names, "optim.min_lr=0", "train.steps=50", cwd=tmp_path, PYTHONPATH=path_of(page))
    assert run.returncode == 75, run.stdout + run.stderr
    records = metrics(only_run(tmp_path))
    assert [record["evals_without_gain"] for record in records if "eval_loss" in record] == [0, 1, 2, 3]
    assert len(records) == 5  # it is asked in the step after the one that it has seen
    assert all(0.01 < record["largest_weight"] < 10 for record in records)
    assert all(record["frozen"] > 50_000 for record in records), "no step searches all of torch for cycles"
    assert (page / "imported").exists()

    (page / "imported").unlink()
    where = str(only_run(tmp_path))
    for looks in (
        ["plan", *words[1:], names, "optim.min_lr=0"],
        ["status", where],
        ["runs"],
        ["runs", "show", where],
        ["ckpt", "inspect", where],
    ):
        shown = ppctl(*looks, cwd=tmp_path, PYTHONPATH=path_of(page))
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert not (page / "imported").exists(), looks
        if looks[0] == "status":
            assert "a callback of train.callbacks asked for it" in shown.stdout

    again = ppctl("resume", where, "pp=1", cwd=tmp_path, PYTHONPATH=path_of(page))
    assert again.returncode == 75, again.stdout + again.stderr
    assert metrics(Path(where))[-1]["step"] == 6, "it knows what it has seen before, and asks at once"


class Counts(Callback):
    """Counts steps that are over, and keeps its rank; spoils the gradients of one step, once, or fails behind one."""

    def __init__(self, bad: int = 0, fails: int = 0) -> None:
        self.bad, self.fails, self.steps, self.rank, self.began_with = bad, fails, 0, dist.get_rank(), None

    def pre_train(self, run: TrainingRun) -> None:
        self.began_with, self.masters = self.steps, run.session.replica.weights.master.values()

    def pre_update(self, step: int) -> None:
        if step == self.bad:
            self.bad = 0
            for master in self.masters:
                master.grad.fill_(math.nan)

    def post_step(self, result: StepResult) -> None:
        self.steps += 1
        if result.step == self.fails:
            raise RuntimeError("as asked")

    def state_dict(self) -> dict:
        return {"steps": self.steps, "of": [self.rank, math.inf]}

    def load_state_dict(self, state: dict) -> None:
        self.steps, (self.rank, infinite) = state["steps"], state["of"]
        assert infinite == math.inf


def counted(
    mapping: dict, directory: str, resume: str | None = None, name: str = "own:Counts", bad: int = 0, fails: int = 0
) -> tuple:
    """(steps counted before the first, steps at the end, whose state a rank has, lines) of one life of a run."""
    session, lines, checkpoints = session_of(mapping), [], Path(directory) / "checkpoints"
    counts = Counts(bad, fails)
    saves = Saves(session, checkpoints, followers=[own := OwnCallback(name, counts)], say=lines.append)
    train(session, saves.start(partial(candidates, resume, checkpoints)), Callbacks(saves, own))
    return counts.began_with, counts.steps, counts.rank, lines


def small(text: Path, pp: int, steps: int, **checkpoint: object) -> dict:
    config = config_of(text, pp=pp, vpp=1, m=4)
    config.train.steps, config.train.on_bad_step = steps, "rollback:2"
    config.checkpoint.interval = 2
    for key, value in checkpoint.items():
        setattr(config.checkpoint, key, value)
    return to_mapping(config)


def test_rank_0s_state_is_in_every_checkpoint_and_given_to_all_when_the_run_goes_on_from_one(
    text: Path, tmp_path: Path
) -> None:
    """The fifth step is bad: behind it the run, and the count with it, goes back to the second."""
    answers = run_ranks(counted, 2, small(text, 2, 6), str(tmp_path), None, "own:Counts", 5)
    assert [answer[:3] for answer in answers] == [(0, 6, 0)] * 2
    kept = json.loads((tmp_path / "checkpoints/step-4/state.json").read_text())["callbacks"]
    assert json.loads(kept["own:Counts"]) == {"steps": 4, "of": [0, math.inf]}, "with the step that it belongs to"
    ((began_with, steps, _, lines),) = run_ranks(counted, 1, small(text, 1, 8), str(tmp_path), AUTO)
    assert (began_with, steps) == (6, 8) and not any("train.callbacks" in line for line in lines)


@pytest.mark.whole
def test_a_state_in_memory_is_rank_0s_too_and_one_that_nobody_asks_for_is_named(text: Path, tmp_path: Path) -> None:
    mapping = small(text, 2, 6, interval=100, local=str(tmp_path / "memory"), local_every=1)
    with pytest.raises(RanksFailed, match="as asked"):
        run_ranks(counted, 2, mapping, str(tmp_path), None, "own:Counts", 0, 4)
    answers = run_ranks(counted, 2, mapping, str(tmp_path), AUTO)
    assert [answer[:3] for answer in answers] == [(3, 6, 0)] * 2
    answers = run_ranks(counted, 2, small(text, 2, 7), str(tmp_path), AUTO, "own:Other")
    assert [answer[:3] for answer in answers] == [(0, 1, 0), (0, 1, 1)]
    note = "note: train.callbacks does not name own:Counts, whose saved state is not used"
    assert note in answers[0][3] and answers[1][3] == []


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (
            {"mean": {"of": (1, 2)}},
            "TypeError: state['mean'] is not made of numbers, text, lists and dicts: {'of': (1,",
        ),
        ({"steps": 3, "when": Path("x")}, "state['when'] is not made of"),
        ({"by": {3: "three"}}, "state['by'] is not made of"),
        ({"seen": [0] * 100_000}, "the state has more than 256 KiB as JSON"),
        (None, "failed in state_dict"),
    ],
)
def test_a_state_that_json_would_not_give_back_is_refused_by_name(state: dict, says: str) -> None:
    callback = Callback()
    callback.state_dict = lambda: state
    with pytest.raises(TrainingError, match=r"PP-E735: own:One of train\.callbacks failed in state_dict") as caught:
        OwnCallback("own:One", callback).state_dict()
    assert says in caught.value.problems[0].message


@pytest.mark.whole
def test_names_that_cannot_be_imported_are_refused_with_a_remedy_that_works(page: Path) -> None:
    words = (*SMALL, "train.steps=1")
    refused = ppctl(*words, "train.callbacks=[own_callbacks:Patience]", cwd=page, PYTHONSAFEPATH="1")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "PP-E778" in refused.stderr and "No module named 'own_callbacks'" in refused.stderr
    (remedy,) = re.findall(r"try: (launch\.env\.PYTHONPATH=\S+)", refused.stderr)
    assert not (only_run(page) / "metrics.jsonl").exists()
    words = (*words, "train.callbacks=[own_callbacks:Patience]", remedy, "log.dir=again")
    again = ppctl(*words, cwd=page, PYTHONSAFEPATH="1")
    assert again.returncode == 0, again.stdout + again.stderr


FAILING = """
import sys
import ppctl, torch

class Raises(ppctl.Callback):
    def post_step(self, result):
        if result.step == 3:
            self.helper()

    def helper(self):
        return 1 / 0

class Leaves(ppctl.Callback):
    def pre_update(self, step):
        sys.exit(0)

class AddsATensor(ppctl.Callback):
    def log_metrics(self, record):
        record["loss_again"] = torch.zeros(2)

class NoCallback:
    pass

class NeedsWords(ppctl.Callback):
    def __init__(self, word):
        self.word = word

class Closes(Raises):
    def close(self, error):
        raise RuntimeError("in close")
"""


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    (tmp_path / "failing.py").write_text(FAILING)
    return tmp_path


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Raises", ["failed in post_step: ZeroDivisionError: division by zero", "in helper", "return 1 / 0"]),
        ("Closes", ["failed in post_step: ZeroDivisionError"]),
        ("Leaves", ["failed in pre_update: SystemExit: 0", "sys.exit(0)"]),
        ("AddsATensor", ["log_metrics: TypeError: record['loss_again'] is no number or text, but Tensor"]),
    ],
)
def test_an_error_is_told_with_class_method_and_frames_and_checkpoints_stay(
    failing: Path, name: str, says: list[str]
) -> None:
    words = (*SMALL, f"train.callbacks=[failing:{name}]", "train.steps=6", "checkpoint.interval=2")
    run = ppctl(*words, cwd=failing, PYTHONPATH=path_of(failing))
    assert run.returncode == 1, run.stdout + run.stderr
    assert "PP-E735" in run.stderr and f"failing:{name} of train.callbacks" in run.stderr
    for part in says:
        assert part in run.stderr, run.stderr
    if name == "Raises":
        assert (only_run(failing) / "checkpoints/step-2").is_dir()
        on = ppctl("resume", str(only_run(failing)), "train.callbacks=null", cwd=failing)
        assert on.returncode == 0, on.stdout + on.stderr
        assert metrics(only_run(failing))[-1]["step"] == 6


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["failing:NoCallback"], "makes no ppctl.Callback, but NoCallback"),
        (["failing:NeedsWords"], "missing 1 required positional argument"),
        (["failing:Nobody"], "has no attribute 'Nobody'"),
        (["nowhere_at_all:Class"], "No module named 'nowhere_at_all'"),
    ],
)
def test_each_name_that_leads_to_no_callback_is_named(
    failing: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], says: str
) -> None:
    from ppctl.errors import ConfigError
    from ppctl.train.own_callbacks import load_callbacks

    monkeypatch.syspath_prepend(str(failing))
    with pytest.raises(ConfigError, match="PP-E778") as caught:
        load_callbacks([*names, "failing:Raises"])
    (problem,) = caught.value.problems
    assert says in problem.message
    assert problem.remedy == "'train.callbacks=[failing:Raises]'"


@pytest.mark.parametrize(
    ("added", "says"),
    [
        ({"expert_load": [[0.123456789] * 256] * 60}, "ValueError: the record has more than 64 KiB as JSON"),
        ({"losses": [torch.zeros(2)]}, "TypeError: Object of type Tensor is not JSON serializable"),
        ({"loss": "high"}, "Fault: loss takes"),
        ({"loss": float("nan"), "notes": ["x" * 60_000]}, ""),
    ],
)
def test_a_record_that_readers_would_leave_out_is_refused(tmp_path: Path, added: dict, says: str) -> None:
    class Adds(Callback):
        def log_metrics(self, record: dict) -> None:
            record |= added

    record = {"step": 3, "loss": 1.0}
    own, run = OwnCallback("mine:Adds", Adds()), RunDir(tmp_path)
    if says:
        with pytest.raises(TrainingError, match=f"PP-E735: mine:Adds .* failed in log_metrics: {says}"):
            own.log_metrics(record)
    else:
        own.log_metrics(record)
        run.add_metrics(record)
        assert run.metrics() == [{"step": 3, "loss": None, "notes": added["notes"]}]


def test_an_error_has_class_method_and_frames_and_does_not_hide_the_one_that_ends_the_run(
    failing: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ppctl.train.callback import ASKED
    from ppctl.train.own_callbacks import load_callbacks

    monkeypatch.syspath_prepend(str(failing))
    (one,) = load_callbacks(["failing:Closes"])
    with pytest.raises(
        TrainingError, match=r"PP-E735: failing:Closes of train\.callbacks failed in post_step"
    ) as caught:
        one.post_step(StepResult(3, {}, None, False, (0.0, 0.0, 0.0, 0.0)))
    assert "in helper" in caught.value.problems[0].place and "own_callbacks" not in caught.value.problems[0].place
    one.close(caught.value)
    assert "RuntimeError: in close" in capsys.readouterr().err
    with pytest.raises(TrainingError, match="failed in close"):
        one.close(None)
    assert one.stop_requested() == 0
    one._callback.stop_requested = lambda: "yes"
    assert one.stop_requested() == ASKED
