"""`ppctl train` and `ppctl resume`, whole: processes, files, screens, and the losses of one process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from command import TINY, environment, metrics, only_run, ppctl, start
from oracle.reference import train_reference

from ppctl.config.mapping import from_mapping
from ppctl.data.batches import Batches
from ppctl.data.corpus import load_corpus
from ppctl.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    words = random.Random(0).choices(["the", "of", "stage", "rank", "bubble", "and", "a", "layer"], k=5000)
    path.write_text(" ".join(words))
    return f"data.path={path}"


def reference_losses(run: Path, steps: int) -> list[float]:
    """What one plain-torch process makes of the run's own config."""
    config = from_mapping(yaml.safe_load((run / "config.yaml").read_text()))
    batches = Batches(
        load_corpus(config.data.path, ByteTokenizer()),
        seq_length=config.data.seq_length,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        dp_rank=0,
        dp_size=1,
        seed=config.train.seed,
        vocab_size=config.model.vocab_size,
    )
    data = [list(zip(b.tokens, b.labels, b.loss_mask, strict=True)) for b in map(batches.step, range(steps))]
    return train_reference(config.model, config.optim, config.train.seed, data, config.train.steps)[0]


@pytest.fixture(scope="module")
def whole_run(text, tmp_path_factory):
    """An uninterrupted run of 12 steps in 4 ranks, and where it ran."""
    cwd = tmp_path_factory.mktemp("whole")
    done = ppctl("train", "+recipe=quickstart", *TINY, text, "pp=4", "vpp=1", "steps=12", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done, only_run(cwd)


def losses(run: Path) -> list[object]:
    return [record["loss"] for record in metrics(run)]


def test_the_losses_are_those_of_one_process(whole_run):
    _, run = whole_run
    assert losses(run) == reference_losses(run, 12)


def test_the_screen_explains_counts_and_closes(whole_run):
    done, run = whole_run
    assert "E embedding, t layer, L loss" in done.stdout
    assert done.stdout.count("\nstep ") == 12
    assert f"runs/quickstart/{run.name}\n" in done.stdout
    assert f"runs/quickstart/{run.name}/checkpoints/step-12\n" in done.stdout
    assert done.stdout.count("ppctl ") >= 3


def test_the_run_directory_holds_what_the_design_names(whole_run):
    _, run = whole_run
    for name in (
        "config.yaml",
        "command.txt",
        "plan.json",
        "schedule.csv",
        "env.json",
        "metrics.jsonl",
        "profile.json",
    ):
        assert (run / name).is_file(), name
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    result = json.loads((run / "result.json").read_text())
    assert (result["state"], result["step"], result["loss"]) == ("finished", 12, losses(run)[-1])
    assert len(result["sample"]["text"].encode()) >= 200
    assert (run / "checkpoints" / "latest").read_text().strip() == "step-12"
    assert {p.name for p in (run / "logs").iterdir()} == {f"rank-{rank:04d}.log" for rank in range(4)}
    assert not list((run / "errors").iterdir())


def test_a_record_has_the_documented_keys(whole_run):
    _, run = whole_run
    assert list(metrics(run)[0]) == [
        *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "tokens_per_s_per_device", "step_time_s"),
        *("bubble_fraction", "slowest_stage", "tflops_per_device", "mfu", "max_memory_bytes", "consumed_samples"),
    ]
    last = metrics(run)[-1]
    assert (last["step"], last["tokens"], last["consumed_samples"]) == (11, 8 * 16, 12 * 8)
    assert 0 < last["bubble_fraction"] < 1


def test_every_parameter_of_every_stage_moves(whole_run):
    import torch
    import torch.distributed.checkpoint as dcp

    from ppctl.model.initialize import initial_value

    _, run = whole_run
    config = from_mapping(yaml.safe_load((run / "config.yaml").read_text()))
    path = run / "checkpoints" / "step-12"
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size) for name, entry in entries.items() if name.startswith("model.")}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert len(tensors) == 6 * 9 + 3
    for name, tensor in tensors.items():
        start = initial_value(name.removeprefix("model."), tensor.shape, config.model, config.train.seed)
        assert not torch.equal(tensor, torch.as_tensor(start)), name


@pytest.mark.parametrize("cut", [(), ("pp=2", "vpp=2")], ids=["same cut", "pp=4 to pp=2 vpp=2"])
def test_a_killed_run_goes_on_bitwise(whole_run, text, tmp_path, cut):
    """The launcher and all ranks die by SIGKILL at some step; resume does the rest as if nothing had happened."""
    command = ("+recipe=quickstart", *TINY, text, "pp=4", "vpp=1", "steps=12", "checkpoint.interval=2")
    process = start("train", *command, cwd=tmp_path)
    victim = random.Random(len(cut)).randrange(4, 9)
    for line in process.stdout:
        if line.split()[:2] == ["step", f"{victim}/12"] or line.startswith(f"step {victim:>2}/12"):
            break
    process.kill()
    process.communicate()
    run = only_run(tmp_path)
    done = ppctl("resume", str(run), *cut, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(run) == losses(whole_run[1])
    assert [record["step"] for record in metrics(run)] == list(range(12))


def test_ranks_that_torchrun_starts_make_one_run_with_the_same_losses(whole_run, text, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = ["-m", "ppctl", "train", "+recipe=quickstart", *TINY, text, "pp=4", "vpp=1", "steps=12"]
    done = subprocess.run(
        [*torchrun, *command], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert losses(only_run(tmp_path)) == losses(whole_run[1])


def test_a_config_error_under_torchrun_is_printed_once_and_every_rank_leaves(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "ppctl", "train", "+recipe=quickstart", "model.hiden_size=3"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert done.stderr.count("model.hiden_size") == 1 + done.stderr.count("model.hiden_size=3")
    assert "exitcode  : 2" in done.stderr
    assert not (tmp_path / "runs").exists()


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    for line in process.stdout:
        if line.startswith("step") and int(line.split()[1].split("/")[0]) >= step:
            return
    pytest.fail(f"the run ended before step {step}: {process.stderr.read()}")


def ranks_of(where: Path) -> list[int]:
    """The pids of the workers whose command line names a path under `where`."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().decode() if entry.name.isdigit() else ""
            if "ppctl.worker" in line and str(where) in line:
                found.append(int(entry.name))
    return sorted(found)


@pytest.mark.parametrize(
    ("number", "code", "state"),
    [(signal.SIGTERM, 75, "stopped"), (signal.SIGUSR1, 75, "stopped"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_ends_the_job_within_ten_seconds(text, tmp_path, number, code, state):
    process = start("train", "+recipe=quickstart", *TINY, text, "pp=2", "vpp=1", "steps=100000", cwd=tmp_path)
    wait_for_step(process, 3)
    begin = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    run = only_run(tmp_path)
    assert (process.returncode, json.loads((run / "status.json").read_text())["state"]) == (code, state)
    assert ranks_of(run) == []
    if code == 75:
        done = json.loads((run / "result.json").read_text())["step"]
        assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{done}"
        assert len(metrics(run)) == done


def test_one_rank_that_others_signal_stops_all(text, tmp_path):
    process = start("train", "+recipe=quickstart", *TINY, text, "pp=2", "vpp=1", "steps=100000", cwd=tmp_path)
    wait_for_step(process, 3)
    os.kill(ranks_of(tmp_path)[-1], signal.SIGUSR1)
    process.communicate(timeout=30)
    assert json.loads((only_run(tmp_path) / "status.json").read_text())["state"] == "stopped"


@pytest.mark.parametrize(
    ("fault", "first_line"),
    [
        ("raise 2 1 2B1", "rank 2 (stage 2) failed in 2B1: ValueError: struck by a test"),
        ("kill 1 1 1F3", "rank 1 (stage 1) failed in 1F3: "),
        ("nan 3 2 -", "not finite"),
    ],
)
def test_the_first_line_names_the_culprit(text, tmp_path, fault, first_line):
    command = ("+recipe=quickstart", *TINY, text, "pp=4", "vpp=1", "steps=100000")
    begin = time.monotonic()
    done = ppctl("train", *command, cwd=tmp_path, PPCTL_FAULT=fault, timeout=60)
    assert done.returncode == 1
    first = next(line for line in done.stderr.splitlines() if line.startswith("error"))
    assert first.startswith("error PP-E7")
    assert first_line in first
    run = only_run(tmp_path)
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    assert ranks_of(run) == []
    assert time.monotonic() - begin < 40


def test_the_steady_state_writes_one_metrics_line_a_step_and_a_heartbeat(text, tmp_path):
    watch = tmp_path / "writes"
    done = ppctl(
        *("train", "+recipe=quickstart", *TINY, text, "pp=2", "vpp=1", "steps=40"), cwd=tmp_path, PPCTL_WATCH=str(watch)
    )
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    logs = {path.name: path.stat().st_size for path in (run / "logs").iterdir()}
    assert set(logs.values()) == {0}, logs
    # The last step saves and concludes.
    steady = [line.split()[1] for line in watch.read_text().splitlines() if int(line.split()[0]) < 40]
    assert steady.count(str(run / "metrics.jsonl")) == 38
    others = {path for path in steady if not path.endswith("metrics.jsonl")}
    assert all("heartbeats" in path for path in others), others


def test_trackers_get_the_keys_of_metrics(text, tmp_path):
    pytest.importorskip("wandb", reason="the wandb extra is for those who use it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = ppctl(
        *("train", "+recipe=quickstart", *TINY, text, "pp=2", "vpp=1", "steps=3"),
        *("log.tensorboard=true", "log.wandb=true"),
        cwd=tmp_path,
        WANDB_MODE="offline",
    )
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    keys = {key for key, value in metrics(run)[0].items() if value is not None and key != "step"}
    events = EventAccumulator(str(run / "trace"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == keys
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses(run))
    assert list((run / "trace").glob("wandb/offline-run-*"))


def test_a_run_whose_stages_exchange_noise_misses_the_quickstarts_line(tmp_path):
    """The quickstart ends far below 2.9 nats a byte; a model that learns nothing but the bytes' own frequencies stays
    at 3.24, and so does one whose second rank gets noise instead of activations."""
    command = ("+recipe=quickstart", "steps=40", "gbs=16", "seq=128", "launch.device=cpu")
    healthy, broken = tmp_path / "healthy", tmp_path / "broken"
    for cwd, fault in ((healthy, {}), (broken, {"PPCTL_FAULT": "noise 1 0 -"})):
        cwd.mkdir()
        done = ppctl("train", *command, cwd=cwd, timeout=120, **fault)
        assert done.returncode == 0, done.stderr
    last = {cwd.name: sum(losses(only_run(cwd))[-5:]) / 5 for cwd in (healthy, broken)}
    assert last["healthy"] < 2.9 < last["broken"], last
