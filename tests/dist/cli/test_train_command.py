"""`ppctl train` and `ppctl resume`, whole: processes, files, screens, and the losses of one process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from command import TINY, environment, free_port, losses, metrics, only_run, ppctl, start
from oracle.reference import reference_losses

from ppctl.cli import main as front
from ppctl.cli import train
from ppctl.config.mapping import from_mapping
from ppctl.launch.environment import Started
from ppctl.launch.run_directory import new_run

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    words = random.Random(0).choices(["the", "of", "stage", "rank", "bubble", "and", "a", "layer"], k=5000)
    path.write_text(" ".join(words))
    return f"data.path={path}"


TWELVE = ("+recipe=quickstart", *TINY, "steps=12")


@pytest.fixture(scope="module")
def whole_run(text, tmp_path_factory):
    """An uninterrupted run of 12 steps in two ranks with two stages each, and where it ran."""
    cwd = tmp_path_factory.mktemp("whole")
    trackers = ("log.tensorboard=true", "log.tensorboard_dir=boards", "log.wandb=true", "log.wandb_project=projected",
                "log.wandb_tags=[tagged]", "log.wandb_entity=owned", "log.trace=4:6")  # fmt: skip
    done = ppctl(
        "train", *TWELVE, "pp=2", "vpp=2", text, *trackers, cwd=cwd, WANDB_MODE="offline", PYTHONPROFILEIMPORTTIME="1"
    )
    assert done.returncode == 0, done.stderr
    return done, only_run(cwd)


def test_the_losses_are_those_of_one_process(whole_run):
    _, run = whole_run
    assert losses(run) == reference_losses(run, 12)


def test_ranks_train_without_torchs_compiler_or_sympy(whole_run):
    """More than a second of every rank's start."""
    log = (whole_run[1] / "logs" / "rank-0001.log").read_text()
    imported = re.findall(r"^import time: .*\| +(\S+)$", log, re.MULTILINE)
    assert "ppctl.checkpoint.rank_agreement" in imported
    assert not {"torch._dynamo", "sympy"} & set(imported)


def test_a_longer_warmup_is_in_the_schedule_that_a_run_executes(tmp_path):
    """That it changes no bit: test_bitwise_law.py."""
    for warmup, counts in ((1, [5, 4, 3, 1]), (0, [4, 3, 2, 1])):
        run = planned_run(tmp_path / str(warmup), "pp=4", "vpp=1", f"pipeline.extra_warmup={warmup}")
        assert [row.count("F") - row.count("_F") for row in _before_first_backward(run)] == counts


def _before_first_backward(run: Path) -> list[str]:
    return [re.split(r",[0-9]B", row)[0] for row in (run / "schedule.csv").read_text().splitlines()]


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
    profile = json.loads((run / "profile.json").read_text())
    assert [row["stage"] for row in profile["stages"]] == [0, 1, 2, 3]
    assert profile["messages"] and all(0 < row["seconds"] < 10 for row in profile["messages"])
    assert json.loads((run / "env.json").read_text())["kernels"]["attention"] == "torch's choice"
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    result = json.loads((run / "result.json").read_text())
    assert (result["state"], result["step"], result["loss"]) == ("finished", 12, losses(run)[-1])
    assert len(result["sample"]["text"].encode()) >= 200
    assert (run / "checkpoints" / "latest").read_text().strip() == "step-12"
    assert {p.name for p in (run / "logs").iterdir()} == {f"rank-{rank:04d}.log" for rank in range(2)}
    assert not list((run / "errors").iterdir())


@pytest.mark.whole
def test_the_weights_of_a_cut_run_continue_a_prompt_as_transformers_does(whole_run, tmp_path):
    from transformers import AutoModelForCausalLM

    _, run = whole_run
    done = ppctl("generate", str(run), "the stage of ", "--tokens", "40", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert ppctl("ckpt", "export", "--hf", str(run), "out", cwd=tmp_path).returncode == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    given = torch.tensor([[*b"the stage of "]])
    found = model.generate(given, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert answer["tokens"] == found[0, given.shape[1] :].tolist()
    assert bytes(answer["tokens"]).decode() == answer["text"]


def test_torchs_profiler_leaves_a_trace_of_every_rank_where_torchtitan_does(text, tmp_path):
    sizes = ("pp=1", "vpp=1", "steps=2", "log.torch_profile=2:3")
    done = ppctl("train", "+recipe=quickstart", *TINY, text, *sizes, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    (file,) = (run / "profile_traces").rglob("*.json")
    assert str(file.relative_to(run)) == "profile_traces/iteration_2/rank0_trace.json"
    names = {str(event.get("name")) for event in json.loads(file.read_text())["traceEvents"]}
    assert "aten::mm" in names
    assert "memory snapshots are of GPUs" in done.stdout
    assert not (run / "memory_snapshot").exists()


def test_a_record_has_the_documented_keys(whole_run):
    _, run = whole_run
    assert list(metrics(run)[0]) == [
        *(
            "step",
            "loss",
            "grad_norm",
            "lr",
            "tokens",
            "loss_tokens",
            "tokens_per_s",
            "tokens_per_s_per_device",
            "step_time_s",
        ),
        *(
            "bubble_fraction",
            "slowest_stage",
            "slowest_rank",
            "tflops_per_device",
            "mfu",
            "max_memory_bytes",
            "unused_memory_bytes",
            "alloc_retries",
            "driver_allocations",
            "consumed_samples",
        ),
    ]
    last = metrics(run)[-1]
    assert (last["step"], last["tokens"], last["loss_tokens"], last["consumed_samples"]) == (12, 8 * 16, 8 * 16, 12 * 8)
    assert 0 < last["bubble_fraction"] < 1


def test_every_parameter_of_every_stage_moves(whole_run):
    import torch

    from ppctl.checkpoint.manifest import read_manifest
    from ppctl.checkpoint.reading import CheckpointReader
    from ppctl.model.initialize import initial_value

    _, run = whole_run
    config = from_mapping(yaml.safe_load((run / "config.yaml").read_text()))
    path = run / "checkpoints" / "step-12"
    reader = CheckpointReader(path, read_manifest(path))
    tensors = {name: reader.tensor(name) for name in reader.manifest.tensors if name.startswith("model.")}
    assert len(tensors) == 6 * 9 + 3
    for name, tensor in tensors.items():
        start = initial_value(name.removeprefix("model."), config.model, config.train.seed)
        assert not torch.equal(tensor, torch.as_tensor(start)), name


def test_a_killed_run_goes_on_bitwise_in_another_cut(whole_run, text, tmp_path):
    """Resume does the rest as if nothing had happened, at whatever step the kill came; test_faults.py: in the same cut.

    SIGKILL of the launcher takes the ranks along.
    """
    process = start("train", *TWELVE, "pp=2", "vpp=1", text, "checkpoint.interval=2", cwd=tmp_path)
    wait_for_step(process, random.randrange(4, 10))
    process.kill()
    process.communicate()
    run = only_run(tmp_path)
    assert len(metrics(run)) < 12
    done = ppctl("resume", str(run), "pp=1", "vpp=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(run) == losses(whole_run[1])
    assert [record["step"] for record in metrics(run)] == list(range(1, 13))


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def torchrun(ranks: int, *arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """`torchrun -m ppctl train arguments`."""
    command = [*TORCHRUN, str(ranks), "-m", "ppctl", "train", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=120)


AGENT = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=7")


@pytest.mark.parametrize("starter", [pytest.param("torchrun", marks=pytest.mark.whole), "plain variables"])
def test_ranks_that_others_start_make_one_run_with_the_same_losses(whole_run, text, tmp_path, starter):
    """As on two nodes, each with its own working directory: two agents of torchrun, or a scheduler's variables."""
    told, port = tmp_path / "told", free_port()
    train = ["-m", "ppctl", "train", *TWELVE, "pp=2", "vpp=2", text, f"launch.env.PPCTL_TELL={told}"]
    plain = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    nodes = []
    for node in range(2):
        agent, more = [*AGENT, f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", *train], {}
        if starter == "plain variables":
            agent, more = [*train, "launch=env", "--json"], plain | {"RANK": str(node)}
        for path in (told, tmp_path / str(node)):
            path.mkdir(exist_ok=True)
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        nodes.append(
            subprocess.Popen([sys.executable, *agent], cwd=tmp_path / str(node), env=environment(**more), **quiet)
        )
    said = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    if starter == "plain variables":
        answer = json.loads(said[0][0])
        assert (answer["state"], answer["step"], answer["exit_code"]) == ("finished", 12, 0)
        assert said[1][0] == "" and "step 12/12" in said[0][1], "--json leaves nothing else on stdout"
        (host,) = (tmp_path / "0").glob("runs/*/*/heartbeats/*.json")
        ranks = [rank["rank"] for rank in json.loads(host.read_text())["ranks"]]
        assert ranks == [0, 1], "a node's first rank publishes what all its ranks do"
    else:
        assert "step 12/12" in "".join(out for out, _ in said)
    (config,) = tmp_path.glob("*/runs/*/*/config.yaml")
    assert losses(config.parent) == losses(whole_run[1])
    assert json.loads((config.parent / "status.json").read_text())["state"] == "finished"
    assert sorted(path.name for path in told.iterdir()) == ["0", "1"], "launch.env is there from the start"


def test_a_config_error_under_torchrun_is_printed_once_and_every_rank_leaves(tmp_path):
    done = torchrun(2, "+recipe=quickstart", "model.hiden_size=3", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("error PP-E101") == 1
    assert done.stderr.count("exitcode  : 2") == 2, "every rank's own code"
    assert not (tmp_path / "runs").exists()


def test_a_rank_that_holds_another_plan_is_refused_before_the_first_message(tmp_path):
    cut = ("pp=2", "vpp=1")
    runs = [planned_run(tmp_path / "mine", *cut), planned_run(tmp_path / "other", *cut, "pipeline.p2p_capacity=2")]
    (runs[1] / "secret").write_text((runs[0] / "secret").read_text())  # one start, whose ranks see different files
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "ppctl.rank.worker", "--run", str(run)],
            env=environment(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank, run in enumerate(runs)
    ]
    assert [rank.wait(timeout=110) for rank in ranks] == [2, 2]
    for rank, run in enumerate(runs):
        record = json.loads((run / "errors" / f"rank-{rank:04d}.json").read_text())
        assert (record["code"], record["exit_code"], record["action"]) == ("PP-E742", 2, None)
        assert record["message"] == "ranks 1 have another config or plan than rank 0"
        assert not (run / "metrics.jsonl").exists()


def arguments(*typed: str):
    return front.parse("train", train, ["+recipe=quickstart", *typed])


def planned_run(root: Path, *overrides: str) -> Path:
    """A run directory that is ready to start."""
    launch = train.prepare(arguments(*TINY, f"log.dir={root}", *overrides), Started("person"))
    return new_run(launch, Started("person")).path


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
            if "ppctl.rank.worker" in line and str(where) in line:
                found.append(int(entry.name))
    return sorted(found)


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGTERM, 2), (signal.SIGINT, 1)])
def test_a_signal_ends_the_job_after_saving_within_ten_seconds(text, tmp_path, number, ranks):
    process = start("train", "+recipe=quickstart", *TINY, text, f"pp={ranks}", "vpp=1", "steps=100000", cwd=tmp_path)
    wait_for_step(process, 3)
    begin = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    run = only_run(tmp_path)
    status = json.loads((run / "status.json").read_text())
    done = json.loads((run / "result.json").read_text())["step"]
    assert (process.returncode, status["state"], status["step"]) == (75, "stopped", done)
    assert ranks_of(run) == []
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{done}"
    assert len(metrics(run)) == done
    assert "stopped after saving; go on with:\n  " in out
    if number == signal.SIGINT:
        assert re.fullmatch(
            r"saving after step \d+, then stopping; Ctrl-C once more ends immediately\nstopped by Ctrl-C\n",
            err[err.index("saving") :],
        )


def test_one_rank_that_others_signal_stops_all(text, tmp_path):
    process = start("train", "+recipe=quickstart", *TINY, text, "pp=2", "vpp=1", "steps=100000", cwd=tmp_path)
    wait_for_step(process, 3)
    os.kill(ranks_of(tmp_path)[-1], signal.SIGUSR1)
    process.communicate(timeout=30)
    status = json.loads((only_run(tmp_path) / "status.json").read_text())
    assert (status["state"], status["message"][:12]) == ("stopped", "USR1 on rank")


def test_a_run_leaves_by_itself_when_its_time_is_over(text, tmp_path):
    limit = "train.exit_after=1s"  # a rank is older than that before its first step
    done = ppctl("train", "+recipe=quickstart", *TINY, text, "pp=1", "vpp=1", "steps=50", limit, cwd=tmp_path)
    run = only_run(tmp_path)
    assert (done.returncode, json.loads((run / "status.json").read_text())["state"]) == (75, "stopped")
    assert len(metrics(run)) == 1
    assert "start-up " in done.stdout
    assert "kernels: attention torch's choice, " in done.stdout


def test_two_replicas_of_two_stages_write_one_metrics_line_a_step_and_nothing_else(text, tmp_path):
    watch, steps = tmp_path / "writes", 19  # a rank that a busy machine slows is named from step 20 on
    sizes = ("pp=2", "vpp=1", "dp=2", f"steps={steps}", "optim.eps=1e-4")  # test_bitwise_law says why this eps
    sizes += ("parallel.data_parallel_sharding=optimizer_gradients", f"log.trace={steps}:{steps + 1}")
    watched = {"PPCTL_WATCH": str(watch), "PYTHONDONTWRITEBYTECODE": "1"}
    done = ppctl("train", "+recipe=quickstart", *TINY, text, *sizes, cwd=tmp_path, **watched)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert losses(run) == pytest.approx(reference_losses(run, steps), rel=1e-6)
    logs = {path.name: path.stat().st_size for path in (run / "logs").iterdir()}
    assert logs == {f"rank-{rank:04d}.log": 0 for rank in range(4)}
    # The last step saves and concludes.
    steady = [line.split()[1] for line in watch.read_text().splitlines() if int(line.split()[0]) < steps]
    assert steady.count(str(run / "metrics.jsonl")) == steps - 2
    others = {path for path in steady if not path.endswith("metrics.jsonl")}
    assert all("heartbeats" in path for path in others), others
    times = [ledgers_of(run, tmp_path, "--pipeline", rank) for rank in "0123"]
    assert times[0] == times[2] != times[1] == times[3], "ranks 0 and 2 are one pipeline, 1 and 3 the other"
    assert {rank["rank"] for row in times for rank in row["ranks"]} == {0, 1, 2, 3}


def test_a_traced_step_has_every_action_and_its_ledger_adds_up(whole_run, tmp_path):
    _, run = whole_run
    plan = json.loads((run / "plan.json").read_text())
    assert sorted(path.name for path in (run / "trace").glob("step-*")) == ["step-4.json", "step-5.json"]
    shown = ledgers_of(run, tmp_path, "--step", "5")
    record = next(record for record in metrics(run) if record["step"] == 5)
    assert shown["bubble_fraction"] == pytest.approx(record["bubble_fraction"], abs=1e-3)  # stamps in microseconds
    assert shown["step_time_s"] == pytest.approx(record["step_time_s"], rel=0.5)
    drawn = ppctl("trace", str(run), "--timeline", "step.json", cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    named = {event["name"] for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"]}
    computed = {
        word for row in plan["schedule"]["actions"] for word in row.split() if "SEND" not in word and "RECV" not in word
    }
    assert computed <= named
    refused = ppctl("trace", str(run), "--step", "9", cwd=tmp_path)
    assert (refused.returncode, refused.stderr[:13]) == (2, "error PP-E643")


def ledgers_of(run, cwd, *which):
    """What `ppctl trace` says of a step, after a look at its ledgers: their rows add up to it."""
    shown = json.loads(ppctl("trace", str(run), *which, "--json", cwd=cwd).stdout)
    for row in shown["ranks"]:
        assert sum(row["seconds"].values()) == pytest.approx(shown["step_time_s"], abs=1e-6)
        assert min(row["seconds"].values()) >= 0
    return shown


def test_trackers_get_the_keys_of_metrics(whole_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, run = whole_run
    keys = {key for key, value in metrics(run)[0].items() if value is not None and key != "step"}
    events = EventAccumulator(str(run.parents[2] / "boards" / "quickstart" / run.name))
    events.Reload()
    assert set(events.Tags()["scalars"]) == keys
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses(run))
    (log,) = run.glob("trace/wandb/offline-run-*/run-*.wandb")
    logged = log.read_bytes()
    assert [key for key in keys if key.encode() not in logged] == []
    assert all(repr(loss).encode() in logged for loss in losses(run))
    assert [word for word in (b"projected", b"tagged", b"owned", run.name.encode()) if word not in logged] == []


def test_the_quickstart_begins_with_the_bits_of_one_process(tmp_path):
    """The recipe as it is, for its first 4 steps."""
    process = start("train", "+recipe=quickstart", "launch.device=cpu", cwd=tmp_path)
    wait_for_step(process, 4)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 75
    run = only_run(tmp_path)
    assert losses(run)[:4] == reference_losses(run, 4)


@pytest.mark.whole
def test_a_run_whose_stages_exchange_noise_misses_the_quickstarts_line(tmp_path):
    """The quickstart ends far below 2.9 nats a byte; a model that learns nothing but the bytes' own frequencies stays
    at 3.24, and so does one whose second rank gets noise instead of activations. What a healthy run computes is known
    from one process (the test above).
    """
    command = ("+recipe=quickstart", "steps=80", "gbs=8", "seq=64", "launch.device=cpu")
    done = ppctl("train", *command, cwd=tmp_path, timeout=120, PPCTL_FAULT="noise 1 0 -")
    assert done.returncode == 0, done.stderr
    broken = only_run(tmp_path)
    healthy, spoilt = (sum(each[-20:]) / 20 for each in (reference_losses(broken, 80), losses(broken)))
    assert healthy < 2.9 < spoilt
